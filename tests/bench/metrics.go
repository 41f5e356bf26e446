package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// readMetrics returns a counter that reads what a server exports for Prometheus
// under some names.
func readMetrics(url string, names ...string) counter {
	return func(ctx context.Context) (calls map[string]int64, err error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return nil, err
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, resp.Body.Close()) }()
		if resp.StatusCode != http.StatusOK {
			return nil, fmt.Errorf("the server's metrics: %s", resp.Status)
		}
		return parseMetrics(resp.Body, names...)
	}
}

// parseMetrics finds counters with labels in the text of metrics, which has lines
// such as
//
//	grpc_server_msg_sent_total{grpc_method="Txn",grpc_service="etcdserverpb.KV",grpc_type="unary"} 12
func parseMetrics(text io.Reader, names ...string) (map[string]int64, error) {
	calls := map[string]int64{}
	lines := bufio.NewScanner(text)
	for lines.Scan() {
		label, value, ok := strings.Cut(lines.Text(), " ")
		if !slices.ContainsFunc(names, func(name string) bool { return strings.HasPrefix(label, name+"{") }) {
			continue
		}
		n, err := strconv.ParseFloat(value, 64)
		if !ok || err != nil {
			return nil, fmt.Errorf("metrics: no number in %q", lines.Text())
		}
		calls[label] += int64(n)
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if len(calls) == 0 {
		return nil, fmt.Errorf("metrics: nothing of %s", strings.Join(names, " and "))
	}
	return calls, nil
}
