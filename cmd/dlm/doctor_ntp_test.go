package main

import (
	wire "encoding/binary"
	"encoding/json"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

// ntpServer answers as an NTP server whose clock is ahead by shift, until the
// test ends.
func ntpServer(t *testing.T, shift time.Duration) string {
	t.Helper()
	conn, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	now := func() uint64 {
		now := time.Now().Add(shift)
		return uint64(now.Unix()+2_208_988_800)<<32 | uint64(now.Nanosecond())<<32/1e9
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			q := make([]byte, 48)
			_, from, err := conn.ReadFromUDP(q)
			if err != nil {
				return
			}
			p := make([]byte, 48)
			p[0], p[1], p[3] = 4<<3|4, 1, 0xec
			wire.BigEndian.PutUint64(p[16:], now()-1<<32)
			copy(p[24:], q[40:])
			wire.BigEndian.PutUint64(p[32:], now())
			wire.BigEndian.PutUint64(p[40:], now())
			_, _ = conn.WriteToUDP(p, from)
		}
	})
	t.Cleanup(func() {
		_ = conn.Close()
		wg.Wait()
	})
	return conn.LocalAddr().String()
}

func TestDoctorClock(t *testing.T) {
	t.Parallel()
	right, wrong := ntpServer(t, 0), ntpServer(t, time.Hour)
	const nobody = "127.0.0.1:1"
	for _, c := range []struct {
		name   string
		args   []string
		code   int
		output []string // of each line
		errors string
	}{
		{"not asked", nil, 0, nil, "no settings to check"},
		{"fine", []string{"--ntp", right, "--strict"}, 0, []string{"ok  local clock  -  fine: "}, ""},
		{
			"skewed",
			[]string{"--ntp", wrong},
			0,
			[]string{"warning  local clock  -  skewed: 1h0m0s behind, give or take ", "    fix: let a time service"},
			"",
		},
		{"skewed, strict", []string{"--ntp", wrong, "--strict"}, 78, []string{"warning  local clock  -  skewed: ", "    fix: "}, "1 warnings"},
		{
			"a liar",
			[]string{"--ntp", right + "," + wrong, "--ntp", nobody},
			0,
			[]string{"unknown  local clock  -            unknown: 30m0s behind", "unknown  ntp          " + nobody + "  no valid answer: "},
			"",
		},
		{"empty", []string{"--ntp", ""}, 64, nil, "--ntp"},
		{"wrong", []string{"--ntp", "a b"}, 64, nil, `--ntp: dlm: invalid argument: servers[0]: "a b" is not a host`},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			code, out, msg := call(t.Context(), map[string]string{"DLM_BACKEND": newStore(t)}, append([]string{"doctor"}, c.args...)...)
			lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
			if out == "" {
				lines = nil
			}
			ok := code == c.code && len(lines) == len(c.output) && strings.Contains(msg, c.errors)
			for i := range min(len(lines), len(c.output)) {
				ok = ok && strings.HasPrefix(lines[i], c.output[i])
			}
			if !ok {
				t.Errorf("exit code %d, output\n%s, message %s", code, out, msg)
			}
		})
	}
	_, out, _ := call(t.Context(), map[string]string{"DLM_BACKEND": newStore(t)}, "doctor", "--json", "--ntp", wrong)
	var list []findingJSON
	if err := json.Unmarshal([]byte(out), &list); err != nil || len(list) != 1 || list[0].Severity != "warning" || list[0].Check != "local clock" {
		t.Errorf("%v: %s", err, out)
	}
}
