package main

import (
	"context"
	"fmt"
	"sort"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func leaseSection(t *tour) {
	c := t.client
	var first clientv3.LeaseID
	t.step("grant 60 s", func(ctx context.Context) (string, error) {
		r, err := c.Grant(ctx, 60)
		if err != nil {
			return "", err
		}
		first = r.ID
		t.leases[int64(first)] = "first"
		return fmt.Sprintf("ttl=%d id given=%t error=%q", r.TTL, r.ID != 0, r.Error), nil
	})
	const chosen = 0x7001
	t.leases[chosen] = "chosen"
	for _, g := range []struct {
		name    string
		ttl, id int64
	}{
		{"grant with a chosen id", 60, chosen}, {"grant the same id again", 60, chosen},
		{"grant ttl 0", 0, 0x7002}, {"grant negative ttl", -1, 0x7003}, {"grant too large a ttl", 9_000_000_001, 0x7004},
	} {
		t.step(g.name, func(ctx context.Context) (string, error) {
			r, err := pb.NewLeaseClient(t.conn).LeaseGrant(ctx, &pb.LeaseGrantRequest{TTL: g.ttl, ID: g.id})
			if err != nil {
				return "", err
			}
			return fmt.Sprintf("%s ttl=%d id as asked=%t error=%q", t.header(r.Header), r.TTL, r.ID == g.id, r.Error), nil
		})
	}
	for _, key := range []string{"b", "a"} {
		t.step("put under the lease "+key, func(ctx context.Context) (string, error) {
			r, err := c.Put(ctx, "tour/lease/"+key, "v"+key, clientv3.WithLease(first))
			if err != nil {
				return "", err
			}
			return t.header(r.Header), nil
		})
	}
	t.step("put under an unknown lease", func(ctx context.Context) (string, error) {
		_, err := c.Put(ctx, "tour/lease/x", "v", clientv3.WithLease(0x7fff))
		return "", err
	})
	get := func(name string, opts ...clientv3.OpOption) {
		t.step(name, func(ctx context.Context) (string, error) {
			r, err := c.Get(ctx, "tour/lease/", append(opts, clientv3.WithPrefix())...)
			return t.rangeResponse((*pb.RangeResponse)(r), err)
		})
	}
	get("keys show their lease")
	get("keys only", clientv3.WithKeysOnly())
	t.step("put keeping the lease", func(ctx context.Context) (string, error) {
		r, err := c.Put(ctx, "tour/lease/a", "new", clientv3.WithIgnoreLease())
		if err != nil {
			return "", err
		}
		return t.header(r.Header), nil
	})
	get("lease kept")
	ttl := func(name string, id clientv3.LeaseID) {
		t.step(name, func(ctx context.Context) (string, error) {
			r, err := c.TimeToLive(ctx, id, clientv3.WithAttachedKeys())
			if err != nil {
				return "", err
			}
			keys := []string{}
			for _, key := range r.Keys {
				keys = append(keys, string(key))
			}
			sort.Strings(keys)
			left := "left=in range"
			if r.TTL <= 0 || r.TTL > r.GrantedTTL {
				left = fmt.Sprintf("left=%d", r.TTL)
			}
			return fmt.Sprintf("granted=%d %s keys=%s", r.GrantedTTL, left, strings.Join(keys, ",")), nil
		})
	}
	ttl("time to live", first)
	ttl("time to live, unknown lease", 0x7fff)
	t.step("keepalive once", func(ctx context.Context) (string, error) {
		r, err := c.KeepAliveOnce(ctx, first)
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("ttl=%d", r.TTL), nil
	})
	t.step("keepalive once, unknown lease", func(ctx context.Context) (string, error) {
		_, err := c.KeepAliveOnce(ctx, 0x7fff)
		return "", err
	})
	t.step("keepalive stream", func(ctx context.Context) (string, error) { return t.keepAliveStream(ctx, int64(first)) })
	t.step("list leases", func(ctx context.Context) (string, error) {
		r, err := c.Leases(ctx)
		if err != nil {
			return "", err
		}
		found := []string{}
		for _, l := range r.Leases {
			found = append(found, strings.TrimSpace(t.lease(int64(l.ID))))
		}
		sort.Strings(found)
		return strings.Join(found, " "), nil
	})
	t.step("revoke deletes the keys", func(ctx context.Context) (string, error) {
		_, err := c.Revoke(ctx, first)
		return "ok", err
	})
	get("after the revoke")
	t.step("revoke again", func(ctx context.Context) (string, error) {
		_, err := c.Revoke(ctx, first)
		return "", err
	})
	ttl("time to live after the revoke", first)
	t.step("expiry seen by a watch", t.expiry)
	get("after the expiry")
}

// keepAliveStream sends three requests on one stream, the last for an unknown lease.
func (t *tour) keepAliveStream(ctx context.Context, id int64) (string, error) {
	stream, err := pb.NewLeaseClient(t.conn).LeaseKeepAlive(ctx)
	if err != nil {
		return "", err
	}
	parts := []string{}
	for _, id := range []int64{id, id, 0x7fff} {
		if err := stream.Send(&pb.LeaseKeepAliveRequest{ID: id}); err != nil {
			return strings.Join(parts, " "), err
		}
		r, err := stream.Recv()
		if err != nil {
			return strings.Join(parts, " "), err
		}
		parts = append(parts, fmt.Sprintf("ttl=%d same id=%t", r.TTL, r.ID == id))
	}
	if err := stream.CloseSend(); err != nil {
		return "", err
	}
	_, err = stream.Recv()
	return strings.Join(parts, ", ") + ", then", err
}

// expiry waits for etcd itself to delete the key: the client's clock does not matter.
func (t *tour) expiry(ctx context.Context) (string, error) {
	lease, err := t.client.Grant(ctx, 1)
	if err != nil {
		return "", err
	}
	t.leases[int64(lease.ID)] = "short"
	put, err := t.client.Put(ctx, "tour/lease/short", "v", clientv3.WithLease(lease.ID))
	if err != nil {
		return "", err
	}
	watched := t.client.Watch(ctx, "tour/lease/short", clientv3.WithRev(put.Header.Revision+1), clientv3.WithPrevKV())
	for r := range watched {
		if err := r.Err(); err != nil {
			return "", err
		}
		if len(r.Events) > 0 {
			return fmt.Sprintf("granted=%d %s", lease.TTL, t.event(r.Events[0])), nil
		}
	}
	return "", ctx.Err()
}
