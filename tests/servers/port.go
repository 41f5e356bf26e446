package servers

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
)

const (
	// Ports come from below the range from which the kernel takes those of
	// outgoing connections; from there, one could be taken before the server
	// binds it, or while the server is down.
	firstPort = 10000
	lastPort  = 30000
)

// ports are those in use by servers of this process, dead ones included.
var ports struct {
	sync.Mutex
	taken map[int]bool
}

// takePort returns a port that nobody listens on. Another process may take the
// same one at the same time: a server that finds it in use needs another one.
func takePort() (int, error) {
	ports.Lock()
	defer ports.Unlock()
	for range 1000 {
		port := firstPort + rand.IntN(lastPort-firstPort)
		if ports.taken[port] || !bindable(port) {
			continue
		}
		if ports.taken == nil {
			ports.taken = map[int]bool{}
		}
		ports.taken[port] = true
		return port, nil
	}
	return 0, errors.New("no free port found")
}

// givePort says that a port is not needed any more.
func givePort(port int) {
	ports.Lock()
	defer ports.Unlock()
	delete(ports.taken, port)
}

func bindable(port int) bool {
	l, err := listen(address(port))
	if err != nil {
		return false
	}
	return l.Close() == nil
}

func listen(addr string) (net.Listener, error) {
	var c net.ListenConfig
	return c.Listen(context.Background(), "tcp", addr)
}

// address returns the address of a port of a server.
func address(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
