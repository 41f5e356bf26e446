package main

import (
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-dlm/dlm"
)

// defaultBackend is the store that is used if none is named.
const defaultBackend = "sqlite://"

// opener opens the store that a URL has named.
type opener func(cfg *dlm.LockConfig) (*dlm.Manager, error)

// scheme is a kind of store. Each is registered by a file of its own, which a
// build tag leaves out.
type scheme struct {
	// usage describes the URL: a few lines, or none if another scheme's do.
	usage string
	// parse checks the URL completely and opens nothing.
	parse func(u *storeURL, env func(string) (string, bool)) (opener, error)
}

// storeURL is the URL of a store. Its user information is a secret.
type storeURL struct {
	*url.URL
	// hosts are all hosts, each with its port if it has one. URL.Host is the
	// first.
	hosts []string
}

var schemes = map[string]scheme{}

func backendHelp() string {
	var b strings.Builder
	b.WriteString("Stores (--backend, or DLM_BACKEND in the environment):")
	for _, name := range slices.Sorted(maps.Keys(schemes)) {
		if usage := schemes[name].usage; usage != "" {
			b.WriteString("\n" + usage)
		}
	}
	return b.String()
}

// store checks which store the user has named. Nothing is opened yet.
func (a *app) store() (opener, error) {
	text, source := a.backend, "--backend"
	if text == "" {
		if text, _ = a.LookupEnv("DLM_BACKEND"); text != "" {
			source = "DLM_BACKEND"
		} else {
			text, source = defaultBackend, "the default store"
		}
	}
	open, err := parseBackend(text, a.LookupEnv)
	if err != nil {
		return nil, usageError("%s: %w", source, err)
	}
	return func(cfg *dlm.LockConfig) (*dlm.Manager, error) {
		m, err := open(cfg)
		if err != nil {
			return nil, exitWith(exitStore, "the store cannot be used: %w; another one can be named with --backend", err)
		}
		return m, nil
	}, nil
}

// parseBackend checks a URL.
func parseBackend(text string, env func(string) (string, bool)) (opener, error) {
	u, err := parseURL(text)
	if err != nil {
		return nil, err
	}
	s, ok := schemes[u.Scheme]
	if !ok {
		known := slices.Sorted(maps.Keys(schemes))
		if len(known) == 0 {
			return nil, errors.New("no kind of store was built in")
		}
		return nil, fmt.Errorf("unknown kind of store %q, must be one of: %s", u.Scheme, strings.Join(known, ", "))
	}
	return s.parse(u, env)
}

// parseURL takes a URL apart. Other than url.Parse it takes several hosts,
// separated by commas.
func parseURL(text string) (*storeURL, error) {
	scheme, rest, ok := strings.Cut(text, "://")
	if !ok {
		u, err := parseOneHost(text)
		return &storeURL{URL: u}, err
	}
	authority, path := rest, ""
	if i := strings.IndexAny(rest, "/?#"); i >= 0 {
		authority, path = rest[:i], rest[i:]
	}
	at := strings.LastIndex(authority, "@") + 1
	u := &storeURL{}
	for host := range strings.SplitSeq(authority[at:], ",") {
		one, err := parseOneHost(scheme + "://" + authority[:at] + host + path)
		if err != nil {
			return nil, err
		}
		if u.URL == nil {
			u.URL = one
		}
		u.hosts = append(u.hosts, one.Host)
	}
	return u, nil
}

// parseOneHost is url.Parse, but for its errors: they show parts of the text,
// which may be those of a password.
func parseOneHost(text string) (*url.URL, error) {
	u, err := url.Parse(text)
	if err != nil {
		return nil, errors.New("not a URL; write % and two hexadecimal digits for every special character of " +
			"user and password, such as %2F for /, %40 for @ and %25 for %")
	}
	return u, nil
}

// params are the parameters of a URL. Each is to be asked for once; finish
// refuses those that nobody has asked for.
type params struct {
	values url.Values
	err    error
}

func parseParams(u *storeURL) *params {
	values, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		err = errors.New("malformed parameters; write %25 for %, %26 for &, and %3B for ;")
	}
	return &params{values: values, err: err}
}

// fail keeps the first error.
func (p *params) fail(format string, args ...any) {
	if p.err == nil {
		p.err = fmt.Errorf(format, args...)
	}
}

// take returns a parameter, or false if it is not there.
func (p *params) take(name string) (string, bool) {
	list, ok := p.values[name]
	if !ok {
		return "", false
	}
	delete(p.values, name)
	if len(list) > 1 {
		p.fail("parameter %s is given %d times", name, len(list))
	}
	return list[0], true
}

// duration returns a parameter that lies between two bounds, or 0 if it is not
// there.
func (p *params) duration(name string, least, most time.Duration) time.Duration {
	text, ok := p.take(name)
	if !ok {
		return 0
	}
	d, err := time.ParseDuration(text)
	switch {
	case err != nil:
		p.fail("parameter %s is %q, must be a duration such as 10s", name, text)
	case d < least || d > most:
		p.fail("parameter %s is %v, must be between %v and %v", name, d, least, most)
	}
	return d
}

// number returns a parameter that lies between two bounds, or 0 if it is not
// there.
func (p *params) number(name string, least, most int) int {
	text, ok := p.take(name)
	if !ok {
		return 0
	}
	n, err := strconv.Atoi(text)
	switch {
	case err != nil:
		p.fail("parameter %s is %q, must be a number", name, text)
	case n < least || n > most:
		p.fail("parameter %s is %d, must be between %d and %d", name, n, least, most)
	}
	return n
}

// finish returns the first error.
func (p *params) finish() error {
	for _, name := range slices.Sorted(maps.Keys(p.values)) {
		p.fail("unknown parameter %q", name)
	}
	return p.err
}
