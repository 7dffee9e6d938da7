package main

import (
	"context"
	"fmt"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"
)

// authSection switches auth on, reads the same keys with several identities, and switches auth off again.
func authSection(t *tour) {
	c := t.client
	ok := func(name string, call func(ctx context.Context) error) {
		t.step(name, func(ctx context.Context) (string, error) {
			if err := call(ctx); err != nil {
				return "", err
			}
			return "ok", nil
		})
	}
	status := func(name string) {
		t.step(name, func(ctx context.Context) (string, error) {
			r, err := pb.NewAuthClient(t.conn).AuthStatus(ctx, &pb.AuthStatusRequest{})
			return fmt.Sprintf("enabled=%t revision=%d", r.GetEnabled(), r.GetAuthRevision()), err
		})
	}
	status("status at first")
	ok("put open/a", func(ctx context.Context) error { _, err := c.Put(ctx, "open/a", "1"); return err })
	ok("put secret/a", func(ctx context.Context) error { _, err := c.Put(ctx, "secret/a", "2"); return err })
	ok("enable without root", func(ctx context.Context) error { _, err := c.AuthEnable(ctx); return err })
	for _, user := range []string{"root", "alice", "bob"} {
		ok("add user "+user, func(ctx context.Context) error { _, err := c.UserAdd(ctx, user, user+"-password"); return err })
	}
	ok("add user alice again", func(ctx context.Context) error { _, err := c.UserAdd(ctx, "alice", "x"); return err })
	ok("add role root", func(ctx context.Context) error { _, err := c.RoleAdd(ctx, "root"); return err })
	ok("add role reader", func(ctx context.Context) error { _, err := c.RoleAdd(ctx, "reader"); return err })
	ok("reader reads open/", func(ctx context.Context) error {
		_, err := c.RoleGrantPermission(ctx, "reader", "open/", "open0", clientv3.PermissionType(clientv3.PermRead))
		return err
	})
	ok("root is root", func(ctx context.Context) error { _, err := c.UserGrantRole(ctx, "root", "root"); return err })
	ok("alice is a reader", func(ctx context.Context) error { _, err := c.UserGrantRole(ctx, "alice", "reader"); return err })
	ok("enable", func(ctx context.Context) error { _, err := c.AuthEnable(ctx); return err })
	status("status when on")

	t.step("wrong password", func(ctx context.Context) (string, error) {
		_, err := pb.NewAuthClient(t.conn).Authenticate(ctx, &pb.AuthenticateRequest{Name: "alice", Password: "wrong"})
		return "", err
	})
	t.step("unknown user", func(ctx context.Context) (string, error) {
		_, err := pb.NewAuthClient(t.conn).Authenticate(ctx, &pb.AuthenticateRequest{Name: "mallory", Password: "x"})
		return "", err
	})
	t.step("made-up token", func(ctx context.Context) (string, error) {
		ctx = metadata.AppendToOutgoingContext(ctx, "token", "nonsense.1")
		return t.rangeResponse(pb.NewKVClient(t.conn).Range(ctx, prefixRequest("open/")))
	})
	t.looks("anonymous", c)
	for _, user := range []string{"root", "alice", "bob"} {
		t.as(user, func(c *clientv3.Client) { t.looks(user, c) })
	}
	// The same read again after others': no identity may get another's response.
	t.looks("anonymous, after the others,", c)
	t.as("bob", func(c *clientv3.Client) { t.looks("bob, after the others,", c) })

	t.as("root", func(root *clientv3.Client) {
		ok("bob becomes a reader", func(ctx context.Context) error { _, err := root.UserGrantRole(ctx, "bob", "reader"); return err })
		ok("alice is one no more", func(ctx context.Context) error { _, err := root.UserRevokeRole(ctx, "alice", "reader"); return err })
	})
	for _, user := range []string{"alice", "bob"} {
		t.as(user, func(c *clientv3.Client) { t.looks(user+", roles changed,", c) })
	}
	t.as("root", func(root *clientv3.Client) {
		t.step("users and roles", func(ctx context.Context) (string, error) {
			users, err := root.UserList(ctx)
			if err != nil {
				return "", err
			}
			role, err := root.RoleGet(ctx, "reader")
			if err != nil {
				return "", err
			}
			return fmt.Sprintf("%q, reader: %d permission, %s [%s, %s)", users.Users, len(role.Perm), role.Perm[0].PermType, role.Perm[0].Key, role.Perm[0].RangeEnd), nil
		})
		ok("disable", func(ctx context.Context) error { _, err := root.AuthDisable(ctx); return err })
	})
	status("status at the end")
	t.looks("anonymous, auth off,", c)
}

// as runs body with a client of that user; the passwords are those set above.
func (t *tour) as(user string, body func(*clientv3.Client)) {
	client, err := newClient(t.urls, user, user+"-password")
	if err != nil {
		t.step(user+" connects", func(context.Context) (string, error) { return "", err })
		return
	}
	defer client.Close()
	body(client)
}

// looks makes every kind of call that depends on permissions, with one identity.
func (t *tour) looks(who string, c *clientv3.Client) {
	get := func(name, key string, opts ...clientv3.OpOption) {
		t.step(who+" "+name, func(ctx context.Context) (string, error) {
			r, err := c.Get(ctx, key, opts...)
			return t.rangeResponse((*pb.RangeResponse)(r), err)
		})
	}
	get("reads open/a", "open/a")
	get("reads open/a serializably", "open/a", clientv3.WithSerializable())
	get("lists open/", "open/", clientv3.WithPrefix())
	get("counts open/", "open/", clientv3.WithPrefix(), clientv3.WithCountOnly())
	get("reads secret/a", "secret/a")
	get("lists from open/ to the end", "open/", clientv3.WithFromKey())
	get("lists everything", "\x00", clientv3.WithFromKey())
	t.step(who+" reads both in a txn", func(ctx context.Context) (string, error) {
		r, err := c.Txn(ctx).Then(clientv3.OpGet("open/a"), clientv3.OpGet("secret/a")).Commit()
		return t.txnResponse((*pb.TxnResponse)(r), err)
	})
	t.step(who+" writes open/a", func(ctx context.Context) (string, error) {
		r, err := c.Put(ctx, "open/a", "by "+who)
		if err != nil {
			return "", err
		}
		return t.header(r.Header), nil
	})
	for _, key := range []string{"open/", "secret/"} {
		t.step(who+" watches "+key, func(ctx context.Context) (string, error) {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			// A stream of its own: on one that the watch before is just leaving, clientv3 waits for ever for a watch
			// that is refused (its run ends without the goroutine of the refused one).
			ctx = metadata.AppendToOutgoingContext(ctx, "tour-watch", key)
			for r := range c.Watch(ctx, key, clientv3.WithPrefix(), clientv3.WithCreatedNotify()) {
				return fmt.Sprintf("created=%t canceled=%t", r.Created, r.Canceled), r.Err()
			}
			return "closed", ctx.Err()
		})
	}
}
