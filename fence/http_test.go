package fence_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/fence"
	"github.com/go-dlm/dlm/memlock"
)

func header(fields ...string) http.Header {
	h := make(http.Header)
	for i := 0; i < len(fields); i += 2 {
		h.Add(fields[i], fields[i+1])
	}
	return h
}

func TestReadHeader(t *testing.T) {
	t.Parallel()
	const key, token = fence.HeaderKey, fence.HeaderToken
	for _, c := range []struct {
		name     string
		header   http.Header
		resource string
		token    int64
		err      error
	}{
		{"plain", header(key, "payment:42", token, "17"), "payment:42", 17, nil},
		{"escaped", header(key, "a%2Fb%20%E4%B8%96%0A%00", token, "1"), "a/b 世\n\x00", 1, nil},
		{"a plus is a plus", header(key, "a+b", token, "1"), "a+b", 1, nil},
		{"the highest token", header(key, "r", token, "9007199254740991"), "r", fence.MaxToken, nil},
		{"neither", header("Accept", "*/*"), "", 0, fence.ErrNoToken},
		{"no header at all", nil, "", 0, fence.ErrNoToken},
		{"only a key", header(key, "r"), "", 0, dlm.ErrInvalid},
		{"only a token", header(token, "1"), "", 0, dlm.ErrInvalid},
		{"two keys", header(key, "r", key, "s", token, "1"), "", 0, dlm.ErrInvalid},
		{"two tokens", header(key, "r", token, "1", token, "1"), "", 0, dlm.ErrInvalid},
		{"two tokens in one field", header(key, "r", token, "1, 2"), "", 0, dlm.ErrInvalid},
		{"an empty key", header(key, "", token, "1"), "", 0, dlm.ErrInvalid},
		{"a key that is badly escaped", header(key, "a%2", token, "1"), "", 0, dlm.ErrInvalid},
		{"a key that is not UTF-8", header(key, "a%ff", token, "1"), "", 0, dlm.ErrInvalid},
		{"a key that is too long", header(key, strings.Repeat("x", 513), token, "1"), "", 0, dlm.ErrInvalid},
		{"an empty token", header(key, "r", token, ""), "", 0, dlm.ErrInvalid},
		{"token 0", header(key, "r", token, "0"), "", 0, dlm.ErrInvalid},
		{"a negative token", header(key, "r", token, "-1"), "", 0, dlm.ErrInvalid},
		{"a sign", header(key, "r", token, "+1"), "", 0, dlm.ErrInvalid},
		{"a leading zero", header(key, "r", token, "01"), "", 0, dlm.ErrInvalid},
		{"a space", header(key, "r", token, " 1"), "", 0, dlm.ErrInvalid},
		{"hexadecimal", header(key, "r", token, "0x1"), "", 0, dlm.ErrInvalid},
		{"a fraction", header(key, "r", token, "1.0"), "", 0, dlm.ErrInvalid},
		{"a token that is too high", header(key, "r", token, "9007199254740992"), "", 0, dlm.ErrInvalid},
		{"a token that is far too high", header(key, "r", token, "99999999999999999999"), "", 0, dlm.ErrInvalid},
	} {
		resource, n, err := fence.ReadHeader(c.header)
		if resource != c.resource || n != c.token || !errors.Is(err, c.err) {
			t.Errorf("%s: %q %d %v", c.name, resource, n, err)
		}
		if errors.Is(err, fence.ErrNoToken) != errors.Is(c.err, fence.ErrNoToken) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestSetHeader(t *testing.T) {
	t.Parallel()
	h := make(http.Header)
	for _, c := range invalids {
		if err := fence.SetHeader(h, c.resource, c.token); !errors.Is(err, dlm.ErrInvalid) || len(h) > 0 {
			t.Errorf("%s: %v, %v", c.name, err, h)
		}
	}
	// The second call replaces what the first one has set.
	for _, want := range []string{"a/b 世\n\x00", "payment:42"} {
		if err := fence.SetHeader(h, want, 17); err != nil {
			t.Fatal(err)
		}
		if resource, token, err := fence.ReadHeader(h); resource != want || token != 17 || err != nil {
			t.Errorf("%q %d %v", resource, token, err)
		}
	}
}

// What is read is valid, and is written and read again as the same.
func FuzzReadHeader(f *testing.F) {
	for _, s := range [][2]string{
		{"payment:42", "17"}, {"a%2Fb", "9007199254740991"}, {"", "0"}, {"%", "+1"}, {"%ff", "01"}, {"a b", "1e3"},
	} {
		f.Add(s[0], s[1])
	}
	f.Fuzz(func(t *testing.T, key, token string) {
		resource, n, err := fence.ReadHeader(header(fence.HeaderKey, key, fence.HeaderToken, token))
		if err != nil {
			if !errors.Is(err, dlm.ErrInvalid) || resource != "" || n != 0 {
				t.Errorf("%q %d %v", resource, n, err)
			}
			return
		}
		if err := fence.Validate(resource, n); err != nil {
			t.Error(err)
		}
		h := make(http.Header)
		if err := fence.SetHeader(h, resource, n); err != nil {
			t.Fatal(err)
		}
		if strings.ContainsAny(h.Get(fence.HeaderKey), "\r\n\x00") || h.Get(fence.HeaderToken) != token {
			t.Errorf("%q", h)
		}
		if r, m, err := fence.ReadHeader(h); r != resource || m != n || err != nil {
			t.Errorf("%q %d %v, want %q %d", r, m, err, resource, n)
		}
	})
}

// serve sends one request with a header to a handler.
func serve(t *testing.T, h http.Handler, fields http.Header) *http.Response {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPut, "/accounts/42", nil)
	r.Header = fields
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Result()
}

// guardFunc is a guard that is a function.
type guardFunc func(ctx context.Context, resource string, token int64, fn func(context.Context) error) error

func (g guardFunc) Do(ctx context.Context, resource string, token int64, fn func(context.Context) error) error {
	return g(ctx, resource, token, fn)
}

func TestHandler(t *testing.T) {
	t.Parallel()
	const key, token = fence.HeaderKey, fence.HeaderToken
	for _, c := range []struct {
		name   string
		header http.Header
		opts   *fence.HandlerOptions
		guard  fence.Guard
		want   int
		served bool
	}{
		{name: "accepted", header: header(key, "r", token, "5"), want: http.StatusTeapot, served: true},
		{name: "stale", header: header(key, "r", token, "4"), want: http.StatusPreconditionFailed},
		{name: "none", header: header(), want: http.StatusPreconditionRequired},
		{name: "half", header: header(token, "4"), want: http.StatusBadRequest},
		{name: "malformed", header: header(key, "r", token, "x"), want: http.StatusBadRequest},
		{
			name: "what the path says", header: header(key, "/accounts/42", token, "1"),
			opts: &fence.HandlerOptions{Resource: func(r *http.Request) string { return r.URL.Path }},
			want: http.StatusTeapot, served: true,
		},
		{
			name: "another one than the path says", header: header(key, "r", token, "9"),
			opts: &fence.HandlerOptions{Resource: func(r *http.Request) string { return r.URL.Path }},
			want: http.StatusBadRequest,
		},
		{
			name: "a guard that fails", header: header(key, "r", token, "9"),
			guard: guardFunc(func(context.Context, string, int64, func(context.Context) error) error {
				return errors.New("secret")
			}),
			want: http.StatusServiceUnavailable,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			m := newMemory(t, nil)
			if err := m.Do(t.Context(), "r", 5, nothing); err != nil {
				t.Fatal(err)
			}
			guard := c.guard
			if guard == nil {
				guard = m
			}
			served := false
			resp := serve(t, fence.Handler(guard, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				served = true
				w.WriteHeader(http.StatusTeapot)
			}), c.opts), c.header)
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			if err != nil {
				t.Fatal(err)
			}
			if resp.StatusCode != c.want || served != c.served || strings.Contains(string(body), "secret") {
				t.Errorf("%d, served %v: %s", resp.StatusCode, served, body)
			}
			err = fence.ResponseError(resp)
			if c.want == http.StatusPreconditionFailed {
				isStale(t, err, fence.StaleError{Resource: "r", Token: 4, Highest: 5})
			} else if err != nil {
				t.Error(err)
			}
		})
	}
}

// A guard that fails after the handler has answered must not let the answer out.
func TestHandlerGuardFailsLate(t *testing.T) {
	t.Parallel()
	guard := guardFunc(func(ctx context.Context, _ string, _ int64, fn func(context.Context) error) error {
		return errors.Join(fn(ctx), errors.New("not committed"))
	})
	server := httptest.NewServer(fence.Handler(guard, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "done") // nobody will read it
	}), nil))
	defer server.Close()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPut, server.URL, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := fence.SetHeader(r.Header, "r", 1); err != nil {
		t.Fatal(err)
	}
	resp, err := server.Client().Do(r)
	if err == nil {
		resp.Body.Close()
		t.Errorf("%s, want no answer", resp.Status)
	}
}

func TestHandlerNil(t *testing.T) {
	t.Parallel()
	for _, call := range []func(){
		func() { fence.Handler(nil, http.NotFoundHandler(), nil) },
		func() { fence.Handler(newMemory(t, nil), nil, nil) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			call()
		}()
	}
}

func TestResponseError(t *testing.T) {
	t.Parallel()
	full := header(fence.HeaderKey, "r", fence.HeaderToken, "4", fence.HeaderHighest, "5")
	for _, c := range []struct {
		name string
		resp *http.Response
		want *fence.StaleError
	}{
		{"none", nil, nil},
		{"stale", &http.Response{StatusCode: 412, Header: full}, &fence.StaleError{Resource: "r", Token: 4, Highest: 5}},
		{
			"stale, by an unknown token",
			&http.Response{StatusCode: 412, Header: header(fence.HeaderKey, "r", fence.HeaderToken, "4", fence.HeaderHighest, "0")},
			&fence.StaleError{Resource: "r", Token: 4},
		},
		{"another status", &http.Response{StatusCode: 409, Header: full}, nil},
		{"somebody else's condition", &http.Response{StatusCode: 412, Header: header("Etag", "x")}, nil},
		{"malformed", &http.Response{StatusCode: 412, Header: header(fence.HeaderHighest, "5")}, nil},
	} {
		err := fence.ResponseError(c.resp)
		if c.want != nil {
			isStale(t, err, *c.want)
		} else if err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func newManager(t *testing.T, store *memlock.Store) *dlm.Manager {
	t.Helper()
	m, err := memlock.NewLockManager(store, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return m
}

func acquire(t *testing.T, m *dlm.Manager, key string, opts *dlm.AcquireOptions) *dlm.Lock {
	t.Helper()
	l, err := m.Acquire(t.Context(), key, time.Minute, opts)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// body says whether it was closed.
type body struct {
	io.Reader
	closed bool
}

func (b *body) Close() error {
	b.closed = true
	return nil
}

// A client that lost its lock without noticing is refused by the server.
func TestTransport(t *testing.T) {
	t.Parallel()
	m := newManager(t, memlock.NewStore())
	state := "" // guarded by the guard
	server := httptest.NewServer(fence.Handler(newMemory(t, nil), http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		state = r.URL.Query().Get("state")
	}), nil))
	defer server.Close()
	transport := &fence.Transport{Base: server.Client().Transport}
	client := &http.Client{Transport: transport}
	defer client.CloseIdleConnections()
	// put is what a program does.
	put := func(ctx context.Context, state string, change func(http.Header)) (int, error) {
		r, err := http.NewRequestWithContext(ctx, http.MethodPut, server.URL+"/?state="+url.QueryEscape(state), http.NoBody)
		if err != nil {
			return 0, err
		}
		if change != nil {
			change(r.Header)
		}
		before := r.Header.Clone()
		resp, err := client.Do(r)
		if err != nil {
			return 0, err
		}
		defer resp.Body.Close()
		if len(r.Header) != len(before) {
			t.Errorf("the caller's header was changed: %v", r.Header)
		}
		return resp.StatusCode, fence.ResponseError(resp)
	}

	first := acquire(t, m, "the key/世", nil)
	if code, err := put(first.Context(t.Context()), "first", nil); code != 200 || err != nil {
		t.Fatal(code, err)
	}
	if err := first.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	second := acquire(t, m, "the key/世", nil)
	if code, err := put(second.Context(t.Context()), "second", nil); code != 200 || err != nil {
		t.Fatal(code, err)
	}
	// The first one was stopped, its request still in its hands.
	late := func(h http.Header) {
		if err := fence.SetHeader(h, first.Key, first.Token); err != nil {
			t.Fatal(err)
		}
	}
	for _, ctx := range []context.Context{t.Context(), second.Context(t.Context())} {
		code, err := put(ctx, "late", late)
		if code != http.StatusPreconditionFailed {
			t.Errorf("status %d", code)
		}
		isStale(t, err, fence.StaleError{Resource: "the key/世", Token: first.Token, Highest: second.Token})
	}
	// Without a lock, or with one that others share, nothing is added.
	shared := acquire(t, m, "shared", &dlm.AcquireOptions{Shared: true})
	for _, ctx := range []context.Context{t.Context(), shared.Context(t.Context())} {
		if code, err := put(ctx, "none", nil); code != http.StatusPreconditionRequired || err != nil {
			t.Error(code, err)
		}
	}
	// After a release nothing is sent.
	ctx := context.WithoutCancel(second.Context(t.Context()))
	if err := second.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	b := &body{Reader: strings.NewReader("x")}
	r, err := http.NewRequestWithContext(ctx, http.MethodPut, server.URL, b)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := transport.RoundTrip(r)
	if err == nil {
		resp.Body.Close()
	}
	if !errors.Is(err, dlm.ErrReleased) || !b.closed {
		t.Errorf("%v, body closed: %v", err, b.closed)
	}
	if state != "second" {
		t.Errorf("the state is %q", state)
	}
}
