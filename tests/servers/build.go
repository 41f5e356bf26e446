package servers

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
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

func build(name string) (string, error) {
	_, file, _, ok := runtime.Caller(0)
	if !ok || !filepath.IsAbs(file) {
		return "", errors.New("the sources are not known, as this was built with -trimpath")
	}
	dir := filepath.Join(filepath.Dir(file), name)
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
	cache = filepath.Join(cache, "dlm-test-servers")
	path := filepath.Join(cache, fmt.Sprintf("%s-%x", name, hash.Sum(nil)[:12]))
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
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
