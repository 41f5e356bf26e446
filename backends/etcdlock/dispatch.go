package etcdlock

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// dispatcher sends transactions.
type dispatcher struct {
	client *clientv3.Client
}

func newDispatcher(client *clientv3.Client) *dispatcher { return &dispatcher{client: client} }

// txn runs a transaction about one key, and returns the answer with the revision
// at which it was given.
func (d *dispatcher) txn(
	ctx context.Context, _ string, conds []clientv3.Cmp, then, otherwise []clientv3.Op,
) (*pb.TxnResponse, int64, error) {
	resp, err := d.client.Txn(ctx).If(conds...).Then(then...).Else(otherwise...).Commit()
	if err != nil {
		return nil, 0, err
	}
	return (*pb.TxnResponse)(resp), resp.Header.Revision, nil
}
