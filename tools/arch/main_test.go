package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestFaults(t *testing.T) {
	t.Parallel()
	modules := []string{
		core, core + "/backends/xlock", core + "/backends/ylock", core + "/fence/redisfence", core + "/observe/prom", core + "/tests",
	}
	for _, tt := range []struct {
		name string
		pkg  pkg
		want string // a part of the only fault, or "" for none
	}{
		{"core imports std", pkg{ImportPath: core, Imports: []string{"context", "encoding/json"}}, ""},
		{"core imports itself", pkg{ImportPath: core, Imports: []string{core + "/driver", core + "/internal/clock"}}, ""},
		{"core imports another module", pkg{ImportPath: core + "/memlock", Imports: []string{"golang.org/x/sys/unix"}}, "only the standard library"},
		{"core imports a nested module", pkg{ImportPath: core, Imports: []string{core + "/observe/prom"}}, "only the standard library"},
		{"core's tests import another module", pkg{ImportPath: core, TestImports: []string{"example.com/assert"}}, "only the standard library"},
		{"core's external tests import another module", pkg{ImportPath: core, XTestImports: []string{"example.com/assert"}}, "only the standard library"},
		{"a backend imports its client", pkg{ImportPath: core + "/backends/xlock", Imports: []string{"example.com/x", core + "/driver"}}, ""},
		{"a backend imports itself", pkg{ImportPath: core + "/backends/xlock", Imports: []string{core + "/backends/xlock/internal/sql"}}, ""},
		{"a backend imports another", pkg{ImportPath: core + "/backends/xlock", Imports: []string{core + "/backends/ylock"}}, "no backend may import another"},
		{"a backend's tests import another", pkg{ImportPath: core + "/backends/xlock", XTestImports: []string{core + "/backends/ylock"}}, "no backend may import another"},
		{"a backend imports the model", pkg{ImportPath: core + "/backends/xlock", Imports: []string{core + "/memlock"}}, "no backend may import another"},
		{"a backend's tests import the model", pkg{ImportPath: core + "/backends/xlock", XTestImports: []string{core + "/memlock"}}, ""},
		{"an internal package of core", pkg{ImportPath: core + "/observe/prom", Imports: []string{core + "/internal/clock"}}, "internal to another module"},
		{"an internal package of its own", pkg{ImportPath: core + "/observe/prom", Imports: []string{core + "/observe/prom/internal"}}, ""},
		{"an internal package of a dependency", pkg{ImportPath: core + "/observe/prom", Imports: []string{"example.com/x/internal"}}, ""},
		{"fence imports core", pkg{ImportPath: core + "/fence", Imports: []string{core, "net/http"}}, ""},
		{"fence imports another package of core", pkg{ImportPath: core + "/fence", Imports: []string{core + "/driver"}}, "may import only"},
		{"fence's tests import the model", pkg{ImportPath: core + "/fence", XTestImports: []string{core + "/memlock"}}, ""},
		{"a guard imports fence", pkg{ImportPath: core + "/fence/redisfence", Imports: []string{core, core + "/fence"}}, ""},
		{"a guard imports a backend", pkg{ImportPath: core + "/fence/redisfence", Imports: []string{core + "/backends/xlock"}}, "may import only"},
		{"core imports fence", pkg{ImportPath: core, Imports: []string{core + "/fence"}}, "for resources and not for locks"},
		{"a backend's tests import fence", pkg{ImportPath: core + "/backends/xlock", XTestImports: []string{core + "/fence"}}, "for resources and not for locks"},
		{"the tests module imports fence", pkg{ImportPath: core + "/tests/x", Imports: []string{core + "/fence", core + "/fence/redisfence"}}, ""},
		{"links testing", pkg{ImportPath: core + "/observe/prom", Deps: []string{"testing"}}, "links package testing"},
		{"a test package links testing", pkg{ImportPath: core + "/driver/drivertest", Deps: []string{"testing"}}, ""},
		{"the tests module links testing", pkg{ImportPath: core + "/tests/chaos", Deps: []string{"testing"}}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got := tt.pkg.faults(modules)
			if tt.want == "" {
				if len(got) > 0 {
					t.Errorf("faults: %q, want none", got)
				}
				return
			}
			if len(got) != 1 || !strings.Contains(got[0], tt.want) {
				t.Errorf("faults: %q, want one with %q", got, tt.want)
			}
		})
	}
}

func TestGolden(t *testing.T) {
	t.Parallel()
	linked := func(mods ...string) []pkg {
		var pkgs []pkg
		for _, m := range mods {
			p := pkg{ImportPath: m + "/p", DepOnly: true}
			p.Module = &struct{ Path string }{m}
			pkgs = append(pkgs, p)
		}
		return append(pkgs, pkg{ImportPath: "context", DepOnly: true})
	}
	m := module{Dir: t.TempDir()}
	if got, err := m.golden(linked("b", "a"), false); err != nil || len(got) != 1 || !strings.Contains(got[0], "no such file") {
		t.Errorf("without a list: %q, %v", got, err)
	}
	if got, err := m.golden(linked("b", "a", "b"), true); err != nil || len(got) != 0 {
		t.Fatalf("update: %q, %v", got, err)
	}
	data, err := os.ReadFile(filepath.Join(m.Dir, golden))
	if err != nil || string(data) != "a\nb\n" {
		t.Errorf("list %q, %v; want a, b", data, err)
	}
	if got, err := m.golden(linked("a", "b"), false); err != nil || len(got) != 0 {
		t.Errorf("same: %q, %v", got, err)
	}
	got, err := m.golden(linked("a", "c"), false)
	if err != nil || len(got) != 2 || !strings.Contains(got[0], "c is linked") || !strings.Contains(got[1], "b is listed") {
		t.Errorf("changed: %q, %v", got, err)
	}
}

// TestCheckReadsEveryModule makes sure that a tree without faults is not one in which
// nothing was looked at.
func TestCheckReadsEveryModule(t *testing.T) {
	root := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		file := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("go.work", "go 1.26\n\nuse (\n\t.\n\t./backends/xlock\n)\n")
	write("go.mod", "module "+core+"\n\ngo 1.26\n")
	write("dlm.go", "package dlm\n")
	write("internal/clock/clock.go", "package clock\n")
	write("backends/xlock/go.mod", "module "+core+"/backends/xlock\n\ngo 1.26.0\n\nrequire "+core+" v0.0.0\n\nreplace "+core+" => ../..\n")
	write("backends/xlock/x.go", "package xlock\n\nimport (\n\t_ \"testing\"\n\n\t_ \""+core+"/internal/clock\"\n)\n")
	t.Chdir(root)
	faults, err := check(false)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"go 1.26.0, must be go 1.26 ", "internal to another module", "links package testing",
		"backends/xlock/deps.golden: no such file", "deps.golden: no such file",
	} {
		if !slices.ContainsFunc(faults, func(f string) bool { return strings.Contains(f, want) }) {
			t.Errorf("no fault with %q in %q", want, faults)
		}
	}
	if len(faults) != 5 {
		t.Errorf("%d faults, want 5: %q", len(faults), faults)
	}
}
