package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// limitsSection tests large values, oversized requests, deadlines and cancellation.
func limitsSection(t *tour) {
	put := func(name string, bytes int) {
		t.step(name, func(ctx context.Context) (string, error) {
			r, err := t.client.Put(ctx, "tour/limits/large", strings.Repeat("x", bytes))
			if err != nil {
				return "", err
			}
			return t.header(r.Header), nil
		})
	}
	get := func(name, key string, opts ...clientv3.OpOption) {
		t.step(name, func(ctx context.Context) (string, error) {
			r, err := t.client.Get(ctx, key, opts...)
			return t.rangeResponse((*pb.RangeResponse)(r), err)
		})
	}
	put("put 1.4 MiB", 1_468_006)
	get("get 1.4 MiB", "tour/limits/large")
	put("put 1.6 MiB, above etcd's limit", 1_677_721)
	put("put 3 MiB, above the transport's limit", 3<<20)
	get("unharmed", "tour/limits/large")
	t.step("twelve values of 1 MiB", func(ctx context.Context) (string, error) {
		for i := range 12 {
			if _, err := t.client.Put(ctx, fmt.Sprintf("tour/limits/many/%02d", i), strings.Repeat(string(rune('a'+i)), 1<<20)); err != nil {
				return "", err
			}
		}
		return "written", nil
	})
	get("list them, 12 MiB in one answer", "tour/limits/many/", clientv3.WithPrefix())
	get("keys of them", "tour/limits/many/", clientv3.WithPrefix(), clientv3.WithKeysOnly())
	get("long key", strings.Repeat("k", 4096))

	kv := pb.NewKVClient(t.conn)
	t.step("deadline already past", func(ctx context.Context) (string, error) {
		ctx, cancel := context.WithDeadline(ctx, time.Now().Add(-time.Second))
		defer cancel()
		return t.rangeResponse(kv.Range(ctx, prefixRequest("tour/limits/")))
	})
	t.step("deadline of a microsecond", func(ctx context.Context) (string, error) {
		ctx, cancel := context.WithTimeout(ctx, time.Microsecond)
		defer cancel()
		return t.rangeResponse(kv.Range(ctx, prefixRequest("tour/limits/")))
	})
	t.step("cancelled before the call", func(ctx context.Context) (string, error) {
		ctx, cancel := context.WithCancel(ctx)
		cancel()
		return t.rangeResponse(kv.Range(ctx, prefixRequest("tour/limits/")))
	})
	t.step("cancelled while the answer comes", func(ctx context.Context) (string, error) {
		// The outcome of the cancellation is a race; but the connection must serve the next call.
		short, cancel := context.WithCancel(ctx)
		time.AfterFunc(2*time.Millisecond, cancel)
		_, _ = kv.Range(short, prefixRequest("tour/limits/many/"))
		cancel()
		return t.rangeResponse(kv.Range(ctx, with(prefixRequest("tour/limits/"), func(r *pb.RangeRequest) { r.CountOnly = true })))
	})
}
