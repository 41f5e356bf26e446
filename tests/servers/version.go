package servers

import (
	"context"
	"os/exec"
	"regexp"
	"strconv"
	"sync"
	"time"
)

var versionNumber = regexp.MustCompile(`\bv=(\d+)\.`)

var versions struct {
	sync.Mutex
	major map[string]int // by path of the program
}

// redisVersion returns the first number of the version of a server's program, 0
// if it cannot be found out.
func redisVersion(bin string) int {
	versions.Lock()
	defer versions.Unlock()
	if n, ok := versions.major[bin]; ok {
		return n
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, bin, "--version").Output()
	n := 0
	if m := versionNumber.FindSubmatch(out); err == nil && m != nil {
		n, _ = strconv.Atoi(string(m[1])) // digits
	}
	if versions.major == nil {
		versions.major = map[string]int{}
	}
	versions.major[bin] = n
	return n
}
