package redislock_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm/backends/redislock"
	"github.com/go-dlm/dlm/driver"
)

// reply is an error that a server replied.
type reply string

func (r reply) Error() string { return string(r) }
func (reply) RedisError()     {}

const (
	sha   = "21c241a40c87a05fb4abb40db7761445c908b8ba"
	in70  = " script: " + sha + ", on @user_script:1."
	in62  = "ERR Error running script (call to f_" + sha + "): @user_script:12: "
	dash6 = "@user_script: 12: -"
)

// What servers say, in the words of Redis 6.2, 7.0 and later, and what that
// means. A nil sentinel stands for an unknown outcome.
func TestClassifyReply(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		says     string
		sentinel error
		problem  redislock.Problem
	}{
		{"NOSCRIPT No matching script. Please use EVAL.", driver.ErrNotApplied, ""},
		{"LOADING Redis is loading the dataset in memory", driver.ErrNotApplied, ""},
		{"BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.", driver.ErrNotApplied, ""},
		{"CLUSTERDOWN The cluster is down", driver.ErrNotApplied, ""},
		{"CLUSTERDOWN Hash slot not served", driver.ErrNotApplied, ""},
		{"MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", driver.ErrNotApplied, ""},
		{"TRYAGAIN Multiple keys request during rehashing of slot", driver.ErrNotApplied, ""},
		{"MOVED 866 127.0.0.1:16001", driver.ErrNotApplied, ""},
		{"ASK 866 127.0.0.1:16001", driver.ErrNotApplied, ""},
		{"ERR max number of clients reached", driver.ErrNotApplied, ""},
		{"NOREPLICAS Not enough good replicas to write.", driver.ErrNotApplied, ""},
		{"NOREPLICAS Not enough good replicas to write." + in70, driver.ErrNotApplied, ""},
		{in62 + dash6 + "NOREPLICAS Not enough good replicas to write.", driver.ErrNotApplied, ""},
		{"MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk." + in70, driver.ErrNotApplied, ""},
		{"MISCONF Errors writing to the AOF file: No space left on device", driver.ErrNotApplied, ""},
		{in62 + dash6 + "MISCONF Redis is configured to save RDB snapshots", driver.ErrNotApplied, ""},

		{"READONLY You can't write against a read only replica.", driver.ErrNotApplied, redislock.ProblemReplica},
		{"READONLY You can't write against a read only replica." + in70, driver.ErrNotApplied, redislock.ProblemReplica},
		{in62 + dash6 + "READONLY You can't write against a read only replica.", driver.ErrNotApplied, redislock.ProblemReplica},
		{"OOM command not allowed when used memory > 'maxmemory'.", driver.ErrNotApplied, redislock.ProblemMemory},
		{"OOM command not allowed when used memory > 'maxmemory'." + in70, driver.ErrNotApplied, redislock.ProblemMemory},
		{in62 + dash6 + "OOM command not allowed when used memory > 'maxmemory'.", driver.ErrNotApplied, redislock.ProblemMemory},

		{"NOAUTH Authentication required.", driver.ErrInvalid, redislock.ProblemAuth},
		{"WRONGPASS invalid username-password pair or user is disabled.", driver.ErrInvalid, redislock.ProblemAuth},
		{"ERR AUTH <password> called without any password configured for the default user. Are you sure your configuration is correct?", driver.ErrInvalid, redislock.ProblemAuth},
		{"ERR invalid password", driver.ErrInvalid, redislock.ProblemAuth},
		{"ERR Client sent AUTH, but no password is set", driver.ErrInvalid, redislock.ProblemAuth},
		{"NOPERM this user has no permissions to run the 'evalsha' command", driver.ErrInvalid, redislock.ProblemPermission},
		{"NOPERM this user has no permissions to access one of the keys used as arguments", driver.ErrInvalid, redislock.ProblemPermission},
		{"NOPERM this user has no permissions to access one of the channels used as arguments", driver.ErrInvalid, redislock.ProblemPermission},
		{"ERR The user executing the script can't run this command or subcommand" + in70, driver.ErrInvalid, redislock.ProblemPermission},
		{"ERR The user executing the script can't access at least one of the keys mentioned in the command arguments" + in70, driver.ErrInvalid, redislock.ProblemPermission},
		{in62 + "@user_script: 12: The user executing the script can't run this command or subcommand", driver.ErrInvalid, redislock.ProblemPermission},
		{"NOPERM ACL failure in script: User u has no permissions to run the 'pexpire' command" + in70, driver.ErrInvalid, redislock.ProblemPermission},
		{"ERR DB index is out of range", driver.ErrInvalid, redislock.ProblemDatabase},
		{"ERR invalid DB index", driver.ErrInvalid, redislock.ProblemDatabase},
		{"ERR SELECT is not allowed in cluster mode", driver.ErrInvalid, redislock.ProblemDatabase},
		{"CROSSSLOT Keys in request don't hash to the same slot", driver.ErrInvalid, ""},
		{"ERR unknown command 'EVALSHA', with args beginning with: ", driver.ErrInvalid, redislock.ProblemNotRedis},
		{"ERR unknown command `evalsha`, with args beginning with: ", driver.ErrInvalid, redislock.ProblemNotRedis},

		{"WRONGTYPE Operation against a key holding the wrong kind of value", driver.ErrInvalid, redislock.ProblemForeign},
		{"WRONGTYPE Operation against a key holding the wrong kind of value" + in70, driver.ErrInvalid, redislock.ProblemForeign},
		{in62 + "WRONGTYPE Operation against a key holding the wrong kind of value", driver.ErrInvalid, redislock.ProblemForeign},
		{"@user_script: 12: -READONLY You can't write against a read only replica.  ", driver.ErrNotApplied, redislock.ProblemReplica},
		{"user_script:12: attempt to compare nil with number", driver.ErrInvalid, redislock.ProblemForeign},
		{"user_script:12: Bad data format in input.", driver.ErrInvalid, redislock.ProblemForeign},
		{"ERR user_script:1: attempt to compare nil with number" + in70, driver.ErrInvalid, redislock.ProblemForeign},
		{in62 + "user_script:12: attempt to perform arithmetic on a nil value", driver.ErrInvalid, redislock.ProblemForeign},
		{"ERR user_script:1: Bad data format in input." + in70, driver.ErrInvalid, redislock.ProblemForeign},
		{in62 + "user_script:12: Bad data format in input.", driver.ErrInvalid, redislock.ProblemForeign},

		{in62 + "@user_script: 12: Write commands not allowed after non deterministic commands. Call redis.replicate_commands() at the start of your script", driver.ErrInvalid, redislock.ProblemTooOld},

		{"ERR Script killed by user with SCRIPT KILL..." + in70, nil, ""},
		{"UNKILLABLE Sorry the script already executed write commands", nil, ""},
		{"ERR something new", nil, ""},
		{"OUTOFSYNC", nil, ""},
	} {
		for _, wrapped := range []error{reply(tt.says), fmt.Errorf("hook: %w", reply(tt.says))} {
			checkClass(t, wrapped, tt.sentinel, tt.problem)
		}
	}
}

// checkClass compares what an error is classified as.
func checkClass(t *testing.T, err, sentinel error, problem redislock.Problem) {
	t.Helper()
	got := redislock.Classify(err)
	for _, s := range []error{driver.ErrNotApplied, driver.ErrInvalid, driver.ErrClosed, driver.ErrLost, driver.ErrHeld} {
		if errors.Is(got, s) != errors.Is(sentinel, s) {
			t.Errorf("%v\nis classified as %v\nwant a match of %v only", err, got, sentinel)
		}
	}
	e, ok := errors.AsType[*redislock.ServerError](got)
	if ok != (problem != "") || ok && e.Problem != problem {
		t.Errorf("%v\nis classified as %v\nwant problem %q", err, got, problem)
	}
	if !errors.Is(got, err) {
		t.Errorf("%v\nis classified as %v\nwhich lacks the client's error", err, got)
	}
	if ok && !strings.Contains(got.Error(), string(problem)) {
		t.Errorf("%q does not name the problem %q", got, problem)
	}
}

func TestClassifyFailure(t *testing.T) {
	t.Parallel()
	op := func(op string, err error) error { return &net.OpError{Op: op, Net: "tcp", Err: err} }
	for _, tt := range []struct {
		err      error
		sentinel error
		problem  redislock.Problem
	}{
		{op("dial", syscall.ECONNREFUSED), driver.ErrNotApplied, ""},
		{op("dial", os.ErrDeadlineExceeded), driver.ErrNotApplied, ""},
		{op("dial", &net.DNSError{Err: "no such host", Name: "x", IsNotFound: true}), driver.ErrNotApplied, ""},
		{fmt.Errorf("hook: %w", op("dial", syscall.EHOSTUNREACH)), driver.ErrNotApplied, ""},
		{redis.ErrPoolTimeout, driver.ErrNotApplied, ""},
		{redis.ErrPoolExhausted, driver.ErrNotApplied, ""},
		{redis.ErrClosed, driver.ErrClosed, ""},
		{op("read", syscall.ECONNRESET), nil, ""},
		{op("write", syscall.EPIPE), nil, ""},
		{op("read", os.ErrDeadlineExceeded), nil, ""},
		{io.EOF, nil, ""},
		{io.ErrUnexpectedEOF, nil, ""},
		{net.ErrClosed, nil, ""},
		{context.Canceled, nil, ""},
		{context.DeadlineExceeded, nil, ""},
		{redis.Nil, nil, ""},
		{redis.TxFailedErr, nil, ""},
		{tls.RecordHeaderError{Msg: "first record does not look like a TLS handshake"}, driver.ErrInvalid, redislock.ProblemTLS},
		{&tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}, driver.ErrInvalid, redislock.ProblemTLS},
		{tls.AlertError(40), driver.ErrInvalid, redislock.ProblemTLS},
		{errors.New(`redis: can't parse reply="\x15\x03\x01" reading string`), driver.ErrInvalid, redislock.ProblemTLS},
		{errors.New(`redis: can't parse "HTTP/1.1 400 Bad Request"`), driver.ErrInvalid, redislock.ProblemNotRedis},
		{errors.New(`redis: invalid reply: "SSH-2.0-OpenSSH"`), driver.ErrInvalid, redislock.ProblemNotRedis},
	} {
		checkClass(t, tt.err, tt.sentinel, tt.problem)
	}
}
