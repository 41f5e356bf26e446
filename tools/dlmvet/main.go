// Command dlmvet adds analyzers to those of go vet. It is run as
//
//	go vet -vettool=FILE PACKAGES
package main

import (
	"codeberg.org/polyfloyd/go-errorlint/errorlint"
	"github.com/ldez/usetesting"
	"github.com/maratori/testableexamples/pkg/testableexamples"
	"github.com/sonatard/noctx"
	fatcontext "go.augendre.info/fatcontext/pkg/analyzer"
	"golang.org/x/tools/go/analysis/passes/nilness"
	"golang.org/x/tools/go/analysis/passes/unusedwrite"
	"golang.org/x/tools/go/analysis/unitchecker"
)

func main() {
	unitchecker.Main(
		errorlint.NewAnalyzer(),
		fatcontext.NewAnalyzer(),
		nilness.Analyzer,
		noctx.Analyzer,
		testableexamples.NewAnalyzer(),
		unusedwrite.Analyzer,
		usetesting.NewAnalyzer(),
	)
}
