package main

import (
	"maps"
	"strings"
	"testing"
)

func TestEtcdMessages(t *testing.T) {
	t.Parallel()
	const (
		received = etcdReceived + `{grpc_method="Txn",grpc_service="etcdserverpb.KV",grpc_type="unary"}`
		sent     = etcdSent + `{grpc_method="Watch",grpc_service="etcdserverpb.Watch",grpc_type="bidi_stream"}`
	)
	got, err := parseMetrics(strings.NewReader("# HELP "+etcdReceived+" Total number\n"+
		received+" 1.2e+06\n"+sent+" 7\n"+`grpc_server_started_total{grpc_method="Txn"} 9`+"\n"), etcdReceived, etcdSent)
	if want := map[string]int64{received: 1_200_000, sent: 7}; err != nil || !maps.Equal(got, want) {
		t.Errorf("got %v and %v, want %v", got, err, want)
	}
	if !sentToEtcd(received) || sentToEtcd(sent) {
		t.Error("it is not told who sends what")
	}
	for _, text := range []string{"", "up 1\n", received + "\n", received + " many\n"} {
		if got, err := parseMetrics(strings.NewReader(text), etcdReceived, etcdSent); err == nil {
			t.Errorf("%q: got %v and no error", text, got)
		}
	}
}
