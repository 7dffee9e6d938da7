package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// rangeCase is one Range request; its revisions are relative to the start of the section.
type rangeCase struct {
	name string
	req  *pb.RangeRequest
}

func prefixRequest(prefix string) *pb.RangeRequest {
	return &pb.RangeRequest{Key: []byte(prefix), RangeEnd: []byte(clientv3.GetPrefixRangeEnd(prefix))}
}

// with edits a request in place, so that the cases below read as "this range, with that option".
func with(req *pb.RangeRequest, edit func(*pb.RangeRequest)) *pb.RangeRequest {
	edit(req)
	return req
}

func kvSection(t *tour) {
	c, kv := t.client, pb.NewKVClient(t.conn)
	rangeStep := func(name string, req *pb.RangeRequest) {
		t.step(name, func(ctx context.Context) (string, error) { return t.rangeResponse(kv.Range(ctx, req)) })
	}

	rangeStep("whole keyspace of a fresh store", &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}})
	put := func(key, val string, opts ...clientv3.OpOption) {
		t.step("put "+key+"="+val, func(ctx context.Context) (string, error) {
			r, err := c.Put(ctx, key, val, opts...)
			if err != nil {
				return "", err
			}
			return fmt.Sprintf("%s prev %s", t.header(r.Header), t.kv(r.PrevKv)), nil
		})
	}
	get := func(key string, opts ...clientv3.OpOption) {
		t.step("get "+key, func(ctx context.Context) (string, error) {
			r, err := c.Get(ctx, key, opts...)
			return t.rangeResponse((*pb.RangeResponse)(r), err)
		})
	}
	del := func(name, key string, opts ...clientv3.OpOption) {
		t.step(name, func(ctx context.Context) (string, error) {
			r, err := c.Delete(ctx, key, opts...)
			if err != nil {
				return "", err
			}
			return fmt.Sprintf("%s deleted=%d prev %s", t.header(r.Header), r.Deleted, t.kvs(r.PrevKvs)), nil
		})
	}

	get("tour/kv/a")
	put("tour/kv/a", "one")
	get("tour/kv/a")
	put("tour/kv/a", "two", clientv3.WithPrevKV())
	get("tour/kv/a")
	get("tour/kv/a", clientv3.WithSerializable())
	put("tour/kv/a", "", clientv3.WithIgnoreValue())
	put("tour/kv/absent", "", clientv3.WithIgnoreValue())
	put("tour/kv/b", "") // an empty value is not the same as none
	for _, key := range []string{"d", "c", "e", "f"} {
		put("tour/kv/"+key, "z"+key)
	}
	put("tour/kv/c", "aa") // c now has the smallest value, the latest modification and version 2
	put("tour/kv/\x00zero", "binary\x00value\xff")
	put("tour/kw", "just after the prefix")
	del("delete one with prev_kv", "tour/kv/f", clientv3.WithPrevKV())
	del("delete what is not there", "tour/kv/f", clientv3.WithPrevKV())
	get("tour/kv/f")
	put("tour/kv/f", "again") // version 1 again, create revision new

	for _, rc := range rangeCases(t.base) {
		rangeStep(rc.name, rc.req)
	}

	del("delete a range", "tour/kv/d", clientv3.WithRange("tour/kv/f"), clientv3.WithPrevKV())
	rangeStep("after the delete", prefixRequest("tour/kv/"))
	rangeStep("before the delete, pinned", with(prefixRequest("tour/kv/"), func(r *pb.RangeRequest) { r.Revision = t.base + 12 }))
	del("delete with empty key", "")
	put("", "no key")

	compaction(t, kv)
}

// rangeCases returns every option of a Range, and the combinations that etcd treats differently.
func rangeCases(base int64) []rangeCase {
	all := func() *pb.RangeRequest { return prefixRequest("tour/kv/") }
	cases := []rangeCase{
		{"prefix", all()},
		{"prefix serializable", with(all(), func(r *pb.RangeRequest) { r.Serializable = true })},
		{"half-open range", &pb.RangeRequest{Key: []byte("tour/kv/b"), RangeEnd: []byte("tour/kv/d")}},
		{"empty range", &pb.RangeRequest{Key: []byte("tour/kv/x"), RangeEnd: []byte("tour/kv/y")}},
		{"end before start", &pb.RangeRequest{Key: []byte("tour/kv/d"), RangeEnd: []byte("tour/kv/b")}},
		{"end equals start", &pb.RangeRequest{Key: []byte("tour/kv/d"), RangeEnd: []byte("tour/kv/d")}},
		{"from key", &pb.RangeRequest{Key: []byte("tour/kv/e"), RangeEnd: []byte{0}}},
		{"from the zero key", &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}}},
		{"zero key alone", &pb.RangeRequest{Key: []byte{0}}},
		{"limit 1 of a prefix", with(all(), func(r *pb.RangeRequest) { r.Limit = 1 })},
		{"limit 3", with(all(), func(r *pb.RangeRequest) { r.Limit = 3 })},
		{"next page after c", &pb.RangeRequest{Key: []byte("tour/kv/c\x00"), RangeEnd: []byte("tour/kv0"), Limit: 3}},
		{"limit equals the number of keys", with(all(), func(r *pb.RangeRequest) { r.Limit = 7 })},
		{"limit above the number of keys", with(all(), func(r *pb.RangeRequest) { r.Limit = 100 })},
		{"negative limit", with(all(), func(r *pb.RangeRequest) { r.Limit = -1 })},
		{"count only", with(all(), func(r *pb.RangeRequest) { r.CountOnly = true })},
		{"count only with limit", with(all(), func(r *pb.RangeRequest) { r.CountOnly, r.Limit = true, 2 })},
		{"count only of one key", &pb.RangeRequest{Key: []byte("tour/kv/a"), CountOnly: true}},
		{"keys only", with(all(), func(r *pb.RangeRequest) { r.KeysOnly = true })},
		{"keys only with limit", with(all(), func(r *pb.RangeRequest) { r.KeysOnly, r.Limit = true, 2 })},
		{"keys only and count only", with(all(), func(r *pb.RangeRequest) { r.KeysOnly, r.CountOnly = true, true })},
		{"no range end, limit 1", &pb.RangeRequest{Key: []byte("tour/kv/"), Limit: 1}},
		{"pinned at +1", with(all(), func(r *pb.RangeRequest) { r.Revision = base + 1 })},
		{"pinned at +5, count only", with(all(), func(r *pb.RangeRequest) { r.Revision, r.CountOnly = base+5, true })},
		{"pinned at +8, page", with(all(), func(r *pb.RangeRequest) { r.Revision, r.Limit = base+8, 2 })},
		{"pinned at +8, serializable", with(all(), func(r *pb.RangeRequest) { r.Revision, r.Serializable = base+8, true })},
		{"pinned before the store began", with(all(), func(r *pb.RangeRequest) { r.Revision = -5 })},
		{"future revision", with(all(), func(r *pb.RangeRequest) { r.Revision = base + 100000 })},
		{"future revision, serializable", with(all(), func(r *pb.RangeRequest) { r.Revision, r.Serializable = base+100000, true })},
		{"empty key", &pb.RangeRequest{}},
		{"empty key with an end", &pb.RangeRequest{RangeEnd: []byte("tour/kv/z")}},
		{"min mod revision", with(all(), func(r *pb.RangeRequest) { r.MinModRevision = base + 5 })},
		{"max mod revision", with(all(), func(r *pb.RangeRequest) { r.MaxModRevision = base + 5 })},
		{"min create revision", with(all(), func(r *pb.RangeRequest) { r.MinCreateRevision = base + 5 })},
		{"max create revision", with(all(), func(r *pb.RangeRequest) { r.MaxCreateRevision = base + 5 })},
		{"mod window and limit", with(all(), func(r *pb.RangeRequest) {
			r.MinModRevision, r.MaxModRevision, r.Limit = base+4, base+9, 2
		})},
		{"mod filter, keys only", with(all(), func(r *pb.RangeRequest) { r.MinModRevision, r.KeysOnly = base+5, true })},
		{"mod filter, count only", with(all(), func(r *pb.RangeRequest) { r.MinModRevision, r.CountOnly = base+5, true })},
	}
	targets := []pb.RangeRequest_SortTarget{
		pb.RangeRequest_KEY, pb.RangeRequest_VERSION, pb.RangeRequest_CREATE, pb.RangeRequest_MOD, pb.RangeRequest_VALUE,
	}
	orders := []pb.RangeRequest_SortOrder{pb.RangeRequest_NONE, pb.RangeRequest_ASCEND, pb.RangeRequest_DESCEND}
	// VERSION has ties; with so few keys Go's sort keeps them in key order, so that the response is defined.
	for _, target := range targets {
		for _, order := range orders {
			for _, limit := range []int64{0, 3} {
				req := all()
				req.SortTarget, req.SortOrder, req.Limit = target, order, limit
				cases = append(cases, rangeCase{fmt.Sprintf("sort by %s %s limit %d", target, order, limit), req})
			}
		}
		cases = append(cases, rangeCase{
			fmt.Sprintf("keys only, sorted by %s descending", target),
			with(all(), func(r *pb.RangeRequest) {
				r.KeysOnly, r.SortTarget, r.SortOrder, r.Key = true, target, pb.RangeRequest_DESCEND, []byte("tour/kv/e")
			}),
		})
	}
	return cases
}

// compaction compacts up to the current revision, so it comes last in the section.
func compaction(t *tour, kv pb.KVClient) {
	compact := func(name string, revision int64) {
		t.step(name, func(ctx context.Context) (string, error) {
			r, err := kv.Compact(ctx, &pb.CompactionRequest{Revision: revision, Physical: true})
			if err != nil {
				return "", err
			}
			return t.header(r.Header), nil
		})
	}
	at := func(name string, revision int64) {
		t.step(name, func(ctx context.Context) (string, error) {
			req := prefixRequest("tour/kv/")
			req.Revision = revision
			return t.rangeResponse(kv.Range(ctx, req))
		})
	}
	compact("compact at +10", t.base+10)
	at("read at the compacted revision", t.base+10)
	at("read below it", t.base+9)
	at("read above it", t.base+11)
	compact("compact at the same revision", t.base+10)
	compact("compact in the future", t.base+100000)
}

func rangeStreamSection(t *tour) {
	kv := pb.NewKVClient(t.conn)
	for i := range 60 {
		if _, err := t.client.Put(context.Background(), fmt.Sprintf("tour/rs/%03d", i), fmt.Sprintf("value %d", i)); err != nil {
			t.step("fill", func(context.Context) (string, error) { return "", err })
			return
		}
	}
	all := func() *pb.RangeRequest { return prefixRequest("tour/rs/") }
	for _, rc := range []rangeCase{
		{"prefix", all()},
		{"one key", &pb.RangeRequest{Key: []byte("tour/rs/007")}},
		{"no such key", &pb.RangeRequest{Key: []byte("tour/rs/x")}},
		{"limit 25", with(all(), func(r *pb.RangeRequest) { r.Limit = 25 })},
		{"keys only", with(all(), func(r *pb.RangeRequest) { r.KeysOnly = true })},
		{"count only", with(all(), func(r *pb.RangeRequest) { r.CountOnly = true })},
		{"pinned at +10", with(all(), func(r *pb.RangeRequest) { r.Revision = t.base + 10 })},
		{"serializable", with(all(), func(r *pb.RangeRequest) { r.Serializable = true })},
		{"future revision", with(all(), func(r *pb.RangeRequest) { r.Revision = t.base + 100000 })},
		{"compacted revision", with(all(), func(r *pb.RangeRequest) { r.Revision = 1 })},
		{"empty key", &pb.RangeRequest{}},
		{"sorted descending", with(all(), func(r *pb.RangeRequest) { r.SortOrder = pb.RangeRequest_DESCEND })},
		{"revision filter", with(all(), func(r *pb.RangeRequest) { r.MinModRevision = t.base + 30 })},
	} {
		t.step(rc.name, func(ctx context.Context) (string, error) {
			stream, err := kv.RangeStream(ctx, rc.req)
			if err != nil {
				return "", err
			}
			return t.rangeResponse(mergeStream(stream))
		})
	}
	for _, get := range []struct {
		name    string
		key     string
		options []clientv3.OpOption
	}{
		{"GetStream of a prefix", "tour/rs/", []clientv3.OpOption{clientv3.WithPrefix()}},
		{"GetStream of a key", "tour/rs/007", nil},
		{"GetStream with a limit", "tour/rs/", []clientv3.OpOption{clientv3.WithPrefix(), clientv3.WithLimit(25)}},
		{"GetStream of keys only", "tour/rs/", []clientv3.OpOption{clientv3.WithPrefix(), clientv3.WithKeysOnly()}},
		{"GetStream at a compacted revision", "tour/rs/", []clientv3.OpOption{clientv3.WithPrefix(), clientv3.WithRev(1)}},
		{"GetStream sorted", "tour/rs/", []clientv3.OpOption{
			clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByModRevision, clientv3.SortDescend)}},
	} {
		t.step(get.name, func(ctx context.Context) (string, error) {
			stream, err := t.client.GetStream(ctx, get.key, get.options...)
			if err != nil {
				return "", err
			}
			response, err := clientv3.GetStreamToGetResponse(stream)
			return t.rangeResponse((*pb.RangeResponse)(response), err)
		})
	}
}

// mergeStream merges the chunks to the unary response; their layout is no contract and is not printed.
func mergeStream(stream pb.KV_RangeStreamClient) (*pb.RangeResponse, error) {
	whole := &pb.RangeResponse{}
	for {
		chunk, err := stream.Recv()
		if err != nil {
			if errors.Is(err, io.EOF) {
				return whole, nil
			}
			return nil, err
		}
		part := chunk.RangeResponse
		whole.Kvs = append(whole.Kvs, part.GetKvs()...)
		whole.More = whole.More || part.GetMore()
		whole.Count += part.GetCount()
		if part.GetHeader() != nil {
			whole.Header = part.Header
		}
	}
}
