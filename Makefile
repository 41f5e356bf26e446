# What there is to run in this repository; CI runs the same targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The workspace is the one beside this file, whatever the caller has set.
export GOWORK :=
# A clone that belongs to another user has no version that can be stamped.
export GOFLAGS := $(strip $(GOFLAGS) -buildvcs=false)

bin := $(CURDIR)/bin
module := github.com/go-dlm/dlm

# Options of the targets below.
B ?=
BENCH ?= .
BENCHTIME ?= 1s
FUZZTIME ?= 30s
COUNT ?=
ARGS ?=

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: check
check: lint arch tidy modules ## everything that can be said without running the product's tests

# The race detector watches our code. In SQLite, which is C turned into Go, it
# would find nothing of ours and make the tests take twice the time. It must be
# that one package: the others around it hold instances of sync.Map and
# atomic.Pointer, which the linker may pick for the whole program; the detector
# then sees races where there are none, and none where there are some.
# Most tests of backends wait for a time to live to run out, so more of them
# than there are cores run side by side. Packages with real servers are tested
# one after another.
race := -race -gcflags=modernc.org/sqlite/lib=-race=false -parallel 6

.PHONY: servers
servers: # install the servers that the tests start, as far as they are missing
	@scripts/install-servers.sh

.PHONY: test
test: servers ## all tests of all modules, with the race detector
	go test $(race) -timeout 10m -parallel 10 $$(go list work | grep -v '^$(module)/tests/')
	go test $(race) -timeout 20m -p 1 ./tests/...

.PHONY: race
race: servers ## all tests again and again in random order; COUNT=5
	go test $(race) -timeout 60m -count $(or $(COUNT),5) -shuffle on work

.PHONY: conformance
conformance: servers ## a backend's conformance suite under the race detector; B=memory|sqlite|redis|… COUNT=1
	@scripts/conformance.sh '$(B)' '$(or $(COUNT),1)' $(race)

.PHONY: bench
bench: servers ## all benchmarks; BENCH=regexp BENCHTIME=1s COUNT=1; or beside the peers: B=redis|etcd|… ARGS='-w 1,2'
ifeq ($(B),)
	go test -run '^$$' -bench '$(BENCH)' -benchtime '$(BENCHTIME)' -benchmem -count $(or $(COUNT),1) -timeout 60m work
else
	go run ./tests/bench -b '$(B)' $(ARGS)
endif

.PHONY: fuzz
fuzz: ## every fuzz test in turn; FUZZTIME=30s
	@scripts/fuzz.sh '$(FUZZTIME)'

.PHONY: demo
demo: ## show the product at work
	go run ./examples/demo

.PHONY: cover
cover: ## the share of statements that the tests reach, package by package
	go test -cover -timeout 10m work

.PHONY: lint
lint: tools
	@unformatted=$$('$(bin)/gofumpt' -l .); \
	if [ -n "$$unformatted" ]; then printf 'not formatted, run make format:\n%s\n' "$$unformatted"; exit 1; fi
	go vet work
	go vet -vettool='$(bin)/dlmvet' work
	'$(bin)/staticcheck' -checks all work
	'$(bin)/revive' -config tools/revive.toml ./...
	go fix -diff work

.PHONY: arch
arch: tools # the rules of the module tree, see tools/arch
	cd tools && GOWORK=off go vet ./... && GOWORK=off go test ./...
	'$(bin)/arch'

.PHONY: tidy
tidy:
	@scripts/each-module.sh go mod tidy -diff
	cd tools && GOWORK=off go mod tidy -diff

.PHONY: modules
modules: # each module by itself, as its users see it
	@scripts/each-module.sh go build ./...
	@scripts/each-module.sh go vet ./...

.PHONY: format
format: tools ## format and modernise the sources
	go fix work
	'$(bin)/gofumpt' -w .

.PHONY: deps
deps: tools ## write the lists of dependencies (deps.golden) anew
	'$(bin)/arch' -update

.PHONY: tools
tools: # the linters, built as they are pinned in tools/go.mod
	@cd tools && GOWORK=off go build -o '$(bin)/' tool ./arch ./dlmvet
