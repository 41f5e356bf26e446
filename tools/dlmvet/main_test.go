package main

import (
	"testing"

	"codeberg.org/polyfloyd/go-errorlint/errorlint"
	"github.com/sonatard/noctx"
	"golang.org/x/tools/go/analysis/analysistest"
)

func TestFiltered(t *testing.T) {
	t.Parallel()
	analysistest.Run(t, analysistest.TestData(), filtered(errorlint.NewAnalyzer()), "a")
	analysistest.Run(t, analysistest.TestData(), filtered(noctx.Analyzer), "b")
}
