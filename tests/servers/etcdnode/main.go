// Command etcdnode is an etcd server for tests: one member of a cluster, of the
// newest version that can be had as a Go module. Unlike the program of etcd
// itself it can leave out fsync.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/url"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/server/v3/embed"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "etcdnode:", err)
		os.Exit(1)
	}
}

func run() error {
	cfg := embed.NewConfig()
	flag.StringVar(&cfg.Name, "name", "", "name of the member")
	flag.StringVar(&cfg.Dir, "data-dir", "", "folder for its data")
	client := flag.String("listen-client-urls", "", "where it listens for clients")
	peer := flag.String("listen-peer-urls", "", "where it listens for other members")
	flag.StringVar(&cfg.InitialCluster, "initial-cluster", "", "all members: name=URL,name=URL")
	flag.StringVar(&cfg.InitialClusterToken, "initial-cluster-token", "", "tells clusters from each other")
	flag.UintVar(&cfg.TickMs, "heartbeat-interval", cfg.TickMs, "milliseconds")
	flag.UintVar(&cfg.ElectionMs, "election-timeout", cfg.ElectionMs, "milliseconds")
	flag.Int64Var(&cfg.QuotaBackendBytes, "quota-backend-bytes", 0, "largest size of the database")
	flag.UintVar(&cfg.MaxTxnOps, "max-txn-ops", cfg.MaxTxnOps, "operations in one transaction")
	flag.BoolVar(&cfg.UnsafeNoFsync, "unsafe-no-fsync", false, "do not wait for the disk")
	var tls transport.TLSInfo
	flag.StringVar(&tls.CertFile, "cert-file", "", "certificate for clients")
	flag.StringVar(&tls.KeyFile, "key-file", "", "its key")
	flag.Parse()

	clientURL, err := url.Parse(*client)
	if err != nil {
		return err
	}
	peerURL, err := url.Parse(*peer)
	if err != nil {
		return err
	}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{*clientURL}, []url.URL{*clientURL}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{*peerURL}, []url.URL{*peerURL}
	cfg.ClientTLSInfo = tls
	cfg.LogLevel, cfg.LogOutputs = "warn", []string{"stderr"}
	if strings.HasPrefix(*client, "https://") && tls.CertFile == "" {
		return fmt.Errorf("%s needs -cert-file", *client)
	}

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		return err
	}
	defer e.Close()
	select {
	case <-ctx.Done():
		return nil
	case err := <-e.Err():
		return err
	case <-e.Server.StopNotify():
		return errors.New("the server has stopped")
	}
}
