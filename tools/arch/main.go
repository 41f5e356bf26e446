// Command arch checks the rules of the module tree: which module may import
// what, and that no dependency comes in unseen. It is run from the root of the
// repository. With -update it writes the lists of dependencies anew.
//
// The rules:
//
//   - The core module imports the standard library and itself, tests included,
//     and requires no module.
//   - No backend imports another; their tests may use the reference model,
//     memlock.
//   - Nobody but programs, tests and packages under fence imports fence, which is
//     for the resources that locks protect, not for locks. Package fence imports
//     only dlm of the core module; its tests may use memlock.
//   - No module imports an internal package of another.
//   - Packages whose name does not end in "test" do not link package testing,
//     not even through others. Modules under tests are exempt.
//   - The go line of every module is that of go.work.
//   - The modules that a module's packages link, tests left out, are those in
//     its deps.golden.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

const core = "github.com/go-dlm/dlm"

// fence is the side of the resources.
const fence = core + "/fence"

// golden names the list of dependencies in a module's directory.
const golden = "deps.golden"

func main() {
	update := flag.Bool("update", false, "write the lists of dependencies anew")
	flag.Parse()
	faults, err := check(*update)
	for _, f := range faults {
		fmt.Fprintln(os.Stderr, f)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "arch:", err)
	}
	if err != nil || len(faults) > 0 {
		os.Exit(1)
	}
}

// module is what go mod edit -json says of a go.mod, and where it is.
type module struct {
	Dir     string `json:"-"`
	Module  struct{ Path string }
	Go      string
	Require []struct{ Path string }
}

// pkg is what go list -json says of a package.
type pkg struct {
	ImportPath                         string
	DepOnly                            bool
	Imports, TestImports, XTestImports []string
	Deps                               []string
	Module                             *struct{ Path string }
}

func check(update bool) ([]string, error) {
	var work struct {
		Go  string
		Use []struct{ DiskPath string }
	}
	if err := goJSON(".", &work, "work", "edit", "-json", "go.work"); err != nil {
		return nil, err
	}
	var modules []module
	var paths []string
	for _, use := range work.Use {
		m := module{Dir: use.DiskPath}
		if err := goJSON(m.Dir, &m, "mod", "edit", "-json"); err != nil {
			return nil, err
		}
		modules = append(modules, m)
		paths = append(paths, m.Module.Path)
	}
	var faults []string
	for _, m := range modules {
		if m.Go != work.Go {
			faults = append(faults, fmt.Sprintf("%s: go %s, must be go %s as in go.work", m.Module.Path, m.Go, work.Go))
		}
		if m.Module.Path == core && len(m.Require) > 0 {
			faults = append(faults, fmt.Sprintf("%s: requires %s, must require nothing", core, m.Require[0].Path))
		}
		pkgs, err := m.packages()
		if err != nil {
			faults = append(faults, err.Error())
			continue
		}
		for _, p := range pkgs {
			if !p.DepOnly {
				faults = append(faults, p.faults(paths)...)
			}
		}
		f, err := m.golden(pkgs, update)
		if err != nil {
			return faults, err
		}
		faults = append(faults, f...)
	}
	return faults, nil
}

// packages lists the packages of a module and all that they link.
func (m *module) packages() ([]pkg, error) {
	out, err := goOutput(m.Dir, "list", "-deps",
		"-json=ImportPath,DepOnly,Imports,TestImports,XTestImports,Deps,Module", "./...")
	if err != nil {
		return nil, err
	}
	var pkgs []pkg
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs, nil
		} else if err != nil {
			return nil, err
		}
		pkgs = append(pkgs, p)
	}
}

// faults says which imports of a package are against the rules, given the
// paths of all modules.
func (p *pkg) faults(modules []string) []string {
	mod := owner(modules, p.ImportPath)
	var faults []string
	report := func(format string, args ...any) {
		faults = append(faults, p.ImportPath+": "+fmt.Sprintf(format, args...))
	}
	tests := slices.Concat(p.TestImports, p.XTestImports)
	for _, imp := range slices.Concat(p.Imports, tests) {
		if mod == core && !standard(imp) && owner(modules, imp) != core {
			report("imports %s, but the core module may import only the standard library and itself", imp)
		}
		if in(imp, core) && internal(imp) && owner(modules, imp) != mod {
			report("imports %s, which is internal to another module", imp)
		}
		own, theirs := backend(p.ImportPath), backend(imp)
		if own != "" && theirs != "" && own != theirs && !(theirs == "memlock" && slices.Contains(tests, imp)) {
			report("imports %s, but no backend may import another", imp)
		}
	}
	for _, imp := range p.Imports {
		if in(p.ImportPath, fence) && in(imp, core) && imp != core && !in(imp, fence) {
			report("imports %s, but the fence may import only %s", imp, core)
		}
	}
	if !in(p.ImportPath, fence) && !program(p.ImportPath) {
		for _, imp := range slices.Concat(p.Imports, tests) {
			if in(imp, fence) {
				report("imports %s, which is for resources and not for locks", imp)
			}
		}
	}
	if slices.Contains(p.Deps, "testing") && !strings.HasSuffix(path.Base(p.ImportPath), "test") && !in(mod, core+"/tests") {
		report("links package testing")
	}
	return faults
}

// golden compares the modules that a module links with its list.
func (m *module) golden(pkgs []pkg, update bool) ([]string, error) {
	var deps []string
	for _, p := range pkgs {
		if p.Module != nil {
			deps = append(deps, p.Module.Path)
		}
	}
	slices.Sort(deps)
	deps = slices.Compact(deps)
	file := filepath.Join(m.Dir, golden)
	if update {
		return nil, os.WriteFile(file, []byte(strings.Join(deps, "\n")+"\n"), 0o644)
	}
	data, err := os.ReadFile(file)
	if errors.Is(err, os.ErrNotExist) {
		return []string{fmt.Sprintf("%s: no such file; make deps writes it", file)}, nil
	} else if err != nil {
		return nil, err
	}
	var faults []string
	want := strings.Fields(string(data))
	for _, d := range deps {
		if !slices.Contains(want, d) {
			faults = append(faults, fmt.Sprintf("%s: %s is linked but not listed; make deps lists it", file, d))
		}
	}
	for _, d := range want {
		if !slices.Contains(deps, d) {
			faults = append(faults, fmt.Sprintf("%s: %s is listed but not linked; make deps drops it", file, d))
		}
	}
	return faults, nil
}

// in says whether an import path is or lies under another.
func in(imp, root string) bool { return imp == root || strings.HasPrefix(imp, root+"/") }

// owner returns the module that an import path belongs to, or "".
func owner(modules []string, imp string) string {
	var best string
	for _, m := range modules {
		if in(imp, m) && len(m) > len(best) {
			best = m
		}
	}
	return best
}

// standard says whether an import path belongs to the standard library: its
// first element has no dot.
func standard(imp string) bool {
	first, _, _ := strings.Cut(imp, "/")
	return !strings.Contains(first, ".")
}

// program says whether an import path is or may be that of a program, or of a test
// of all together.
func program(imp string) bool {
	return in(imp, core+"/cmd") || in(imp, core+"/examples") || in(imp, core+"/tests")
}

func internal(imp string) bool { return strings.Contains(imp+"/", "/internal/") }

// backend returns the name of the backend that an import path belongs to, or
// "".
func backend(imp string) string {
	if in(imp, core+"/memlock") {
		return "memlock"
	}
	if rest, ok := strings.CutPrefix(imp, core+"/backends/"); ok {
		name, _, _ := strings.Cut(rest, "/")
		return name
	}
	return ""
}

func goJSON(dir string, v any, args ...string) error {
	out, err := goOutput(dir, args...)
	if err != nil {
		return err
	}
	return json.Unmarshal(out, v)
}

// goOutput runs the go command in a module, without the workspace and for one
// platform, so that its answer is the same on every machine.
func goOutput(dir string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(context.Background(), "go", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOOS=linux", "GOARCH=amd64", "CGO_ENABLED=0", "GOWORK=off")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go %s in %s: %w\n%s", strings.Join(args, " "), dir, err, &stderr)
	}
	return out, nil
}
