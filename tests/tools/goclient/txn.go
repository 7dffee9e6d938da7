package main

import (
	"context"
	"fmt"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func txnSection(t *tour) {
	c := t.client
	txn := func(name string, cmps []clientv3.Cmp, then, otherwise []clientv3.Op) {
		t.step(name, func(ctx context.Context) (string, error) {
			r, err := c.Txn(ctx).If(cmps...).Then(then...).Else(otherwise...).Commit()
			return t.txnResponse((*pb.TxnResponse)(r), err)
		})
	}
	cmp := func(cs ...clientv3.Cmp) []clientv3.Cmp { return cs }
	ops := func(os ...clientv3.Op) []clientv3.Op { return os }
	const a, b = "tour/txn/a", "tour/txn/b"

	txn("create when absent", cmp(clientv3.Compare(clientv3.CreateRevision(a), "=", 0)), ops(clientv3.OpPut(a, "1")), ops(clientv3.OpGet(a)))
	txn("create when present", cmp(clientv3.Compare(clientv3.ModRevision(a), "=", 0)), ops(clientv3.OpPut(a, "2")), ops(clientv3.OpGet(a)))
	txn("guarded update", cmp(clientv3.Compare(clientv3.ModRevision(a), "=", t.base+1)), ops(clientv3.OpPut(a, "2", clientv3.WithPrevKV())), nil)
	txn("value, version, create and lease compared",
		cmp(clientv3.Compare(clientv3.Value(a), "=", "2"), clientv3.Compare(clientv3.Version(a), ">", 1),
			clientv3.Compare(clientv3.CreateRevision(a), "<", t.base+2), clientv3.Compare(clientv3.LeaseValue(a), "=", 0)),
		ops(clientv3.OpPut(b, "b"), clientv3.OpGet(a), clientv3.OpDelete(a, clientv3.WithPrevKV()), clientv3.OpGet(a)), nil)
	txn("compare over a prefix", cmp(clientv3.Compare(clientv3.Value("tour/txn/").WithPrefix(), "!=", "x")),
		ops(clientv3.OpGet("tour/txn/", clientv3.WithPrefix(), clientv3.WithKeysOnly())), nil)
	txn("read only, past revision", nil, ops(clientv3.OpGet(a, clientv3.WithRev(t.base+1)), clientv3.OpGet("tour/txn/", clientv3.WithPrefix(), clientv3.WithCountOnly())), nil)
	txn("future revision within", nil, ops(clientv3.OpGet(a, clientv3.WithRev(t.base+100000))), nil)
	txn("nested", nil, ops(clientv3.OpTxn(
		cmp(clientv3.Compare(clientv3.Version(b), "=", 1)),
		ops(clientv3.OpPut(b, "nested"), clientv3.OpTxn(nil, ops(clientv3.OpGet(b)), nil)),
		ops(clientv3.OpPut(b, "wrong branch")))), nil)
	txn("duplicate key", nil, ops(clientv3.OpPut(a, "1"), clientv3.OpPut(a, "2")), nil)
	txn("put under a deleted range", nil, ops(clientv3.OpDelete("tour/txn/", clientv3.WithPrefix()), clientv3.OpPut(a, "2")), nil)
	txn("nothing changed by the refused ones", nil, ops(clientv3.OpGet("tour/txn/", clientv3.WithPrefix())), nil)
	txn("empty", nil, nil, nil)

	many := make([]clientv3.Op, 129)
	for i := range many {
		many[i] = clientv3.OpPut(fmt.Sprintf("tour/txn/many/%03d", i), "v")
	}
	txn("128 operations", nil, many[:128], nil)
	txn("129 operations", nil, many, nil)
	txn("read after 128 operations", nil, ops(clientv3.OpGet("tour/txn/many/", clientv3.WithPrefix())), nil)
	txn("delete them in one", nil, ops(clientv3.OpDelete("tour/txn/many/", clientv3.WithPrefix())), nil)
	t.step("empty key in an operation", func(ctx context.Context) (string, error) {
		r, err := pb.NewKVClient(t.conn).Txn(ctx, &pb.TxnRequest{Success: []*pb.RequestOp{
			{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{}}},
		}})
		return t.txnResponse(r, err)
	})
}

func (t *tour) txnResponse(r *pb.TxnResponse, err error) (string, error) {
	if err != nil {
		return "", err
	}
	parts := []string{}
	for _, op := range r.Responses {
		switch {
		case op.GetResponsePut() != nil:
			parts = append(parts, "put prev "+t.kv(op.GetResponsePut().PrevKv))
		case op.GetResponseRange() != nil:
			rr := op.GetResponseRange()
			parts = append(parts, fmt.Sprintf("range count=%d more=%t %s", rr.Count, rr.More, t.kvs(rr.Kvs)))
		case op.GetResponseDeleteRange() != nil:
			dr := op.GetResponseDeleteRange()
			parts = append(parts, fmt.Sprintf("delete deleted=%d prev %s", dr.Deleted, t.kvs(dr.PrevKvs)))
		case op.GetResponseTxn() != nil:
			inner, _ := t.txnResponse(op.GetResponseTxn(), nil)
			parts = append(parts, "txn("+inner+")")
		}
	}
	if len(parts) > 6 {
		parts = []string{fmt.Sprintf("%d responses, first %s", len(parts), parts[0])}
	}
	header := "inner"
	if r.Header != nil && r.Header.ClusterId != 0 {
		header = t.header(r.Header)
	}
	return fmt.Sprintf("%s succeeded=%t %s", header, r.Succeeded, strings.Join(parts, "; ")), nil
}
