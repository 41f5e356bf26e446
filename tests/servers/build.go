package servers

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
)

// built are the programs that this process has asked for, by name.
var built struct {
	sync.Mutex
	paths map[string]string
}

// Build builds all servers that are built from modules of their own. It says what
// it begins to build, if anything.
func Build(w io.Writer) error {
	for _, name := range []string{"etcdnode", "consulnode"} {
		path, err := builtPath(name)
		if err != nil {
			return err
		}
		if _, err := os.Stat(path); err == nil {
			continue
		}
		fmt.Fprintf(w, "building %s\n", name)
		if _, err := builtProgram(name); err != nil {
			return err
		}
	}
	return nil
}

// builtProgram returns the path of a server that is built from a module of its
// own, in a folder beside this file. It is built once, into the user's cache, for
// each state of that module and version of Go.
func builtProgram(name string) (string, error) {
	built.Lock()
	defer built.Unlock()
	if path := built.paths[name]; path != "" {
		return path, nil
	}
	path, err := build(name)
	if err != nil {
		return "", err
	}
	if built.paths == nil {
		built.paths = map[string]string{}
	}
	built.paths[name] = path
	return path, nil
}

// builtPath is where a server is once it has been built.
func builtPath(name string) (string, error) {
	dir, err := sourcesOf(name)
	if err != nil {
		return "", err
	}
	hash := sha256.New()
	for _, source := range []string{"main.go", "go.mod", "go.sum"} {
		data, err := os.ReadFile(filepath.Join(dir, source))
		if err != nil {
			return "", err
		}
		fmt.Fprintf(hash, "%s %d\n%s", source, len(data), data)
	}
	fmt.Fprint(hash, runtime.Version())
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	return filepath.Join(cache, "dlm-test-servers", fmt.Sprintf("%s-%x", name, hash.Sum(nil)[:12])), nil
}

func sourcesOf(name string) (string, error) {
	_, file, _, ok := runtime.Caller(0)
	if !ok || !filepath.IsAbs(file) {
		return "", errors.New("the sources are not known, as this was built with -trimpath")
	}
	return filepath.Join(filepath.Dir(file), name), nil
}

func build(name string) (string, error) {
	dir, err := sourcesOf(name)
	if err != nil {
		return "", err
	}
	path, err := builtPath(name)
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	cache := filepath.Dir(path)
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	// Several test processes may build it at the same time: the last one wins.
	temp, err := os.MkdirTemp(cache, "build-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(temp)
	ctx, cancel := context.WithTimeout(context.Background(), buildPatience)
	defer cancel()
	out := filepath.Join(temp, name)
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", out, ".")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOWORK=off", "CGO_ENABLED=0", "GOFLAGS=-mod=readonly")
	if said, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, said)
	}
	return path, os.Rename(out, path)
}
