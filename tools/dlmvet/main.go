// Command dlmvet adds analyzers to those of go vet. It is run as
//
//	go vet -vettool=FILE PACKAGES
//
// A finding is silenced as one of staticcheck is, by a comment on the line
// before that names the analyzer and the reason:
//
//	//lint:ignore errorlint it must be this very error
package main

import (
	"go/token"
	"slices"
	"strings"

	"codeberg.org/polyfloyd/go-errorlint/errorlint"
	"github.com/ldez/usetesting"
	"github.com/maratori/testableexamples/pkg/testableexamples"
	"github.com/sonatard/noctx"
	fatcontext "go.augendre.info/fatcontext/pkg/analyzer"
	"golang.org/x/tools/go/analysis"
	"golang.org/x/tools/go/analysis/passes/nilness"
	"golang.org/x/tools/go/analysis/passes/unusedwrite"
	"golang.org/x/tools/go/analysis/unitchecker"
)

func main() {
	var analyzers []*analysis.Analyzer
	for _, a := range []*analysis.Analyzer{
		errorlint.NewAnalyzer(),
		fatcontext.NewAnalyzer(),
		nilness.Analyzer,
		noctx.Analyzer,
		testableexamples.NewAnalyzer(),
		unusedwrite.Analyzer,
		usetesting.NewAnalyzer(),
	} {
		analyzers = append(analyzers, filtered(a))
	}
	unitchecker.Main(analyzers...)
}

// filtered leaves out the findings that a comment silences, and those about
// exec.Command: our processes end by signals that are chosen with care, where
// a context would kill them.
func filtered(a *analysis.Analyzer) *analysis.Analyzer {
	f := *a
	f.Run = func(pass *analysis.Pass) (any, error) {
		silent := silenced(pass, a.Name)
		p := *pass
		p.Report = func(d analysis.Diagnostic) {
			if !silent[position(pass.Fset, d.Pos)] && !strings.HasPrefix(d.Message, "os/exec.Command ") {
				pass.Report(d)
			}
		}
		return a.Run(&p)
	}
	return &f
}

type line struct {
	file string
	n    int
}

// silenced returns the lines on which comments silence an analyzer.
func silenced(pass *analysis.Pass, name string) map[line]bool {
	lines := make(map[line]bool)
	for _, f := range pass.Files {
		for _, group := range f.Comments {
			for _, c := range group.List {
				if ignores(c.Text, name) {
					pos := position(pass.Fset, c.Pos())
					lines[line{pos.file, pos.n + 1}] = true
				}
			}
		}
	}
	return lines
}

func position(fset *token.FileSet, p token.Pos) line {
	pos := fset.Position(p)
	return line{pos.Filename, pos.Line}
}

// ignores says whether a comment silences an analyzer; without a reason it
// does not.
func ignores(comment, name string) bool {
	rest, ok := strings.CutPrefix(comment, "//lint:ignore ")
	if !ok {
		return false
	}
	names, reason, _ := strings.Cut(rest, " ")
	return strings.TrimSpace(reason) != "" && slices.Contains(strings.Split(names, ","), name)
}
