package election_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/etcdlock"
	"github.com/go-dlm/dlm/backends/pglock"
	"github.com/go-dlm/dlm/backends/redislock"
)

// nodeEnv has the spec of a node in the environment of a process that is one.
const nodeEnv = "DLM_TEST_ELECTION_NODE"

// ttl is that of the leader's lease.
const ttl = 2 * time.Second

// spec is what a node is told.
type spec struct {
	Store  string // "redis", "etcd" or "postgres"
	Addrs  []string
	Master string            // for Redis
	URL    string            // for PostgreSQL
	Routes map[string]string // proxies by the addresses of servers
	Node   string
}

// What a node says, one line each, with times in nanoseconds:
//
//	alive TERM TIME      the context of the term had not ended at that time
//	stepping TERM TIME   a leader of the term was about to step down
type report struct {
	what string
	term int64
	time int64
}

// now is comparable across the processes of a machine, unless somebody sets its
// clock.
func now() int64 { return time.Now().UnixNano() }

// runNode is the life of a node. It ends when its input does, and steps down for
// every line of it.
func runNode(text string) int {
	if err := serve(text); err != nil {
		fmt.Fprintln(os.Stderr, "node:", err)
		return 1
	}
	return 0
}

func serve(text string) error {
	var s spec
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		return err
	}
	m, err := s.open()
	if err != nil {
		return err
	}
	e, err := dlm.NewLeaderElection(m, "leader", s.Node, &dlm.ElectionConfig{TTL: ttl, MaxRetryInterval: 500 * time.Millisecond})
	if err != nil {
		return err
	}
	var out sync.Mutex
	say := func(what string, term, at int64) {
		out.Lock()
		defer out.Unlock()
		fmt.Println(what, term, at)
	}
	err = e.Start(context.Background(), &dlm.ElectionCallbacks{OnElected: func(ctx context.Context, term int64) {
		ticker := time.NewTicker(time.Millisecond)
		defer ticker.Stop()
		var last, said int64
		for {
			t := now()
			if ctx.Err() != nil { // asked after the time, so that t is in doubt
				break
			}
			if last = t; t-said > int64(20*time.Millisecond) {
				say("alive", term, t)
				said = t
			}
			select {
			case <-ticker.C:
			case <-ctx.Done():
			}
		}
		if last != said {
			say("alive", term, last)
		}
	}})
	if err != nil {
		return err
	}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		if term := e.Term(); term != 0 {
			say("stepping", term, now())
			ctx, cancel := context.WithTimeout(context.Background(), ttl)
			_ = e.StepDown(ctx) // the store may be away
			cancel()
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*ttl)
	defer cancel()
	_ = e.Stop(ctx)
	_ = m.Close(ctx)
	return nil
}

// open makes the manager of a node. What it opens lasts as long as the process.
func (s *spec) open() (*dlm.Manager, error) {
	dial := func(ctx context.Context, network, addr string) (net.Conn, error) {
		if to, ok := s.Routes[addr]; ok {
			addr = to
		}
		var d net.Dialer
		return d.DialContext(ctx, network, addr)
	}
	cfg := &dlm.LockConfig{CallTimeout: time.Second, Label: s.Node}
	switch s.Store {
	case "redis":
		redis.SetLogger(quiet{})
		client := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: s.Master, SentinelAddrs: s.Addrs, Dialer: dial})
		return redislock.NewLockManager(client, cfg, &redislock.Options{Replicas: 1})
	case "etcd":
		client, err := clientv3.New(clientv3.Config{
			Endpoints: s.Addrs, Logger: zap.NewNop(), DialTimeout: 5 * time.Second,
			DialOptions: []grpc.DialOption{grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
				return dial(ctx, "tcp", addr)
			})},
		})
		if err != nil {
			return nil, err
		}
		return etcdlock.NewLockManager(client, cfg, nil)
	case "postgres":
		config, err := pgxpool.ParseConfig(s.URL)
		if err != nil {
			return nil, err
		}
		config.ConnConfig.DialFunc = dial
		pool, err := pgxpool.NewWithConfig(context.Background(), config)
		if err != nil {
			return nil, err
		}
		return pglock.NewLockManager(pool, cfg, nil)
	}
	return nil, fmt.Errorf("unknown store %q", s.Store)
}

// quiet logs nothing.
type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}
