package fence_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/fence"
)

// needFlock skips the test where there are no file locks.
func needFlock(t *testing.T) {
	t.Helper()
	err := fence.WriteFile(t.Context(), filepath.Join(t.TempDir(), "f"), nil, 0o600, 1)
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skipf("%s: %v", runtime.GOOS, err)
	}
}

func write(t *testing.T, path, data string, token int64) {
	t.Helper()
	if err := fence.WriteFile(t.Context(), path, []byte(data), 0o644, token); err != nil {
		t.Fatal(err)
	}
}

func isFile(t *testing.T, path, want string) {
	t.Helper()
	if data, err := os.ReadFile(path); err != nil || string(data) != want {
		t.Errorf("%s is %q, %v, want %q", path, data, err, want)
	}
}

func TestWriteFile(t *testing.T) {
	t.Parallel()
	needFlock(t)
	path := filepath.Join(t.TempDir(), "state.json")
	write(t, path, "one", 5)
	write(t, path, "two", 5)
	isStale(t, fence.WriteFile(t.Context(), path, []byte("x"), 0o644, 4), fence.StaleError{Resource: path, Token: 4, Highest: 5})
	isFile(t, path, "two")
	write(t, path, "", fence.MaxToken)
	isStale(t, fence.WriteFile(t.Context(), path, []byte("x"), 0o644, 5), fence.StaleError{Resource: path, Token: 5, Highest: fence.MaxToken})
	isFile(t, path, "")
	isFile(t, path+".fence", fmt.Sprintln(fence.MaxToken))
	list, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(list) != 3 {
		t.Errorf("%v, %v", list, err)
	}
}

// A file that was there before it was guarded keeps its permissions.
func TestWriteFilePermissions(t *testing.T) {
	t.Parallel()
	needFlock(t)
	path := filepath.Join(t.TempDir(), "state")
	if err := os.WriteFile(path, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
	write(t, path, "new", 1)
	isFile(t, path, "new")
	for _, name := range []string{path, path + ".fence"} {
		if info, err := os.Stat(name); err != nil || info.Mode().Perm() != 0o640 {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
}

func TestWriteFileRefused(t *testing.T) {
	t.Parallel()
	needFlock(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "state")
	write(t, path, "here", 5)
	link := filepath.Join(dir, "link")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for _, c := range []struct {
		name  string
		ctx   context.Context
		path  string
		perm  fs.FileMode
		token int64
		want  error
	}{
		{"token 0", t.Context(), path, 0o600, 0, dlm.ErrInvalid},
		{"a negative token", t.Context(), path, 0o600, -1, dlm.ErrInvalid},
		{"a token that is too high", t.Context(), path, 0o600, fence.MaxToken + 1, dlm.ErrInvalid},
		{"no path", t.Context(), "", 0o600, 9, dlm.ErrInvalid},
		{"no context", nil, path, 0o600, 9, dlm.ErrInvalid},
		{"a type as permissions", t.Context(), path, 0o600 | fs.ModeDir, 9, dlm.ErrInvalid},
		{"a context that has ended", ended, path, 0o600, 9, context.Canceled},
		{"a symbolic link", t.Context(), link, 0o600, 9, dlm.ErrInvalid},
		{"the record of a file", t.Context(), path + ".fence", 0o600, 9, dlm.ErrInvalid},
		{"the lock of a file", t.Context(), path + ".fence.lock", 0o600, 9, dlm.ErrInvalid},
		{"a temporary file", t.Context(), path + ".fence.tmp", 0o600, 9, dlm.ErrInvalid},
		{"a folder", t.Context(), dir, 0o600, 9, dlm.ErrInvalid},
		{"a folder that is not there", t.Context(), filepath.Join(dir, "no", "state"), 0o600, 9, fs.ErrNotExist},
	} {
		if err := fence.WriteFile(c.ctx, c.path, []byte("x"), c.perm, c.token); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
	isFile(t, path, "here")
	isFile(t, path+".fence", "5\n")
}

// A record that nobody has written is not taken for none.
func TestWriteFileDamagedRecord(t *testing.T) {
	t.Parallel()
	needFlock(t)
	for _, record := range []string{"", "5", "\n", "0\n", "-5\n", "05\n", "x\n", "5\n5\n", "9007199254740992\n"} {
		path := filepath.Join(t.TempDir(), "state")
		write(t, path, "here", 5)
		if err := os.WriteFile(path+".fence", []byte(record), 0o600); err != nil {
			t.Fatal(err)
		}
		err := fence.WriteFile(t.Context(), path, []byte("x"), 0o600, 9)
		if err == nil || !strings.Contains(err.Error(), "damaged") {
			t.Errorf("%q: %v", record, err)
		}
		isFile(t, path, "here")
	}
}

// Wherever a writer dies, the contents are old or new; if they are new the older
// holder is refused; and a later one goes on.
func TestWriteFileDies(t *testing.T) {
	t.Parallel()
	needFlock(t)
	died := errors.New("died")
	for _, c := range []struct {
		name  string
		token int64
	}{{"the first of a new holder", 6}, {"the second of a holder", 5}} {
		for stop := 1; ; stop++ {
			path := filepath.Join(t.TempDir(), "state")
			write(t, path, "old", 5)
			n := 0
			err := fence.WriteFileUntil(t.Context(), path, []byte("new"), 0o644, c.token, func(string) error {
				if n++; n == stop {
					return died
				}
				return nil
			})
			if err == nil {
				if want := map[int64]int{6: 7, 5: 4}[c.token]; stop != want {
					t.Errorf("%s: %d points, want %d", c.name, stop-1, want-1)
				}
				break
			}
			if !errors.Is(err, died) {
				t.Fatal(err)
			}
			data, err := os.ReadFile(path)
			if err != nil || string(data) != "old" && string(data) != "new" {
				t.Errorf("%s, %d: %q, %v", c.name, stop, data, err)
			}
			record, err := os.ReadFile(path + ".fence")
			if err != nil {
				t.Fatal(err)
			}
			if string(data) == "new" && string(record) != fmt.Sprintln(c.token) {
				t.Errorf("%s, %d: new contents, but the record is %q", c.name, stop, record)
			}
			if strings.TrimSpace(string(record)) == "6" {
				isStale(t, fence.WriteFile(t.Context(), path, []byte("late"), 0o644, 5), fence.StaleError{Resource: path, Token: 5, Highest: 6})
			}
			write(t, path, "again", c.token)
			isFile(t, path, "again")
			write(t, path, "next", 7)
			isFile(t, path, "next")
		}
	}
}

// Who waits for another writer gives up with its context.
func TestWriteFileWaits(t *testing.T) {
	t.Parallel()
	needFlock(t)
	path := filepath.Join(t.TempDir(), "state")
	held, release := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		var once sync.Once
		err := fence.WriteFileUntil(t.Context(), path, []byte("first"), 0o644, 5, func(string) error {
			once.Do(func() { close(held) })
			<-release
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
	<-held
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := fence.WriteFile(ctx, path, []byte("x"), 0o644, 6); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want %v", err, context.DeadlineExceeded)
	}
	wg.Go(func() {
		if err := fence.WriteFile(t.Context(), path, []byte("second"), 0o644, 6); err != nil {
			t.Error(err)
		}
	})
	close(release)
	wg.Wait()
	isFile(t, path, "second")
}

// Many goroutines with random tokens: what a reader sees is whole, and the
// tokens in it never fall.
func TestWriteFileConcurrent(t *testing.T) {
	t.Parallel()
	needFlock(t)
	path := filepath.Join(t.TempDir(), "state")
	write(t, path, contents(1), 1)
	stop := make(chan struct{})
	var reader, writers sync.WaitGroup
	reader.Go(func() { watch(t, path, stop) })
	for range 8 {
		writers.Go(func() {
			for range 25 {
				token := 1 + rand.Int64N(1000)
				err := fence.WriteFile(t.Context(), path, []byte(contents(token)), 0o644, token)
				if err != nil && !errors.Is(err, fence.ErrStale) {
					t.Error(err)
				}
			}
		})
	}
	writers.Wait()
	close(stop)
	reader.Wait()
}

// contents is what is written with a token: it shows whether it is whole.
func contents(token int64) string { return strings.Repeat(strconv.FormatInt(token, 10)+"\n", 2000) }

// watch reads the file until it is told to stop, and once more.
func watch(t *testing.T, path string, stop <-chan struct{}) {
	last := int64(0)
	for done := false; !done; {
		select {
		case <-stop:
			done = true
		default:
		}
		data, err := os.ReadFile(path)
		if err != nil {
			t.Error(err)
			return
		}
		line, _, _ := bytes.Cut(data, []byte("\n"))
		token, err := strconv.ParseInt(string(line), 10, 64)
		if err != nil || string(data) != contents(token) || token < last {
			t.Errorf("after %d: %.20q… of %d bytes", last, data, len(data))
			return
		}
		last = token
	}
}

// writerEnv makes the test program a process that writes to a file until it is
// killed.
const writerEnv = "FENCE_TEST_FILE"

func writeForever(path string) {
	for {
		token := time.Now().UnixMicro()
		err := fence.WriteFile(context.Background(), path, []byte(contents(token)), 0o644, token)
		if err != nil && !errors.Is(err, fence.ErrStale) {
			fmt.Println(err)
			os.Exit(1)
		}
		if err == nil {
			fmt.Println("written")
		}
	}
}

// Processes that write are killed at any moment, and others go on where they
// were.
func TestWriteFileKilled(t *testing.T) {
	t.Parallel()
	needFlock(t)
	path := filepath.Join(t.TempDir(), "state")
	write(t, path, contents(1), 1)
	stop := make(chan struct{})
	var reader sync.WaitGroup
	reader.Go(func() { watch(t, path, stop) })
	defer reader.Wait()
	defer close(stop)
	var procs [3]*exec.Cmd
	var outs [3]*bytes.Buffer
	start := func(i int) {
		outs[i] = new(bytes.Buffer)
		procs[i] = exec.Command(os.Args[0])
		procs[i].Env = append(os.Environ(), writerEnv+"="+path)
		procs[i].Stdout = outs[i]
		if err := procs[i].Start(); err != nil {
			t.Fatal(err)
		}
	}
	end := func(i int) {
		if err := procs[i].Process.Kill(); err != nil {
			t.Error(err)
		}
		_ = procs[i].Wait() // it was killed
		if out := strings.ReplaceAll(outs[i].String(), "written\n", ""); out != "" {
			t.Errorf("a writer failed: %s", out)
		}
	}
	t.Cleanup(func() {
		for _, p := range procs {
			if p != nil && p.ProcessState == nil { // the test has failed
				_ = p.Process.Kill()
				_ = p.Wait()
			}
		}
	})
	for i := range procs {
		start(i)
	}
	writes := func() string {
		record, err := os.ReadFile(path + ".fence")
		if err != nil {
			t.Fatal(err)
		}
		return string(record)
	}
	for n := range 20 {
		// After some writes, at a moment that is left to chance.
		for range 3 {
			before := writes()
			for end := time.Now().Add(time.Minute); writes() == before; time.Sleep(time.Millisecond) {
				if time.Now().After(end) {
					t.Fatal("nobody writes any more")
				}
			}
		}
		end(n % len(procs))
		start(n % len(procs))
	}
	for i := range procs {
		end(i)
	}
	token, err := strconv.ParseInt(strings.TrimSpace(writes()), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	isStale(t, fence.WriteFile(t.Context(), path, nil, 0o644, token-1), fence.StaleError{Resource: path, Token: token - 1, Highest: token})
	write(t, path, contents(token+1), token+1)
}
