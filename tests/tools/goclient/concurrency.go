package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3election/v3electionpb"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3lock/v3lockpb"
)

// twoSessions opens two sessions, each with its own lease; the returned function closes both.
func (t *tour) twoSessions() (first, second *concurrency.Session, end func(), err error) {
	if first, err = concurrency.NewSession(t.client, concurrency.WithTTL(30)); err != nil {
		return nil, nil, nil, err
	}
	if second, err = concurrency.NewSession(t.client, concurrency.WithTTL(30)); err != nil {
		return nil, nil, nil, errors.Join(err, first.Close())
	}
	t.leases[int64(first.Lease())], t.leases[int64(second.Lease())] = "one", "two"
	return first, second, func() { _ = errors.Join(first.Close(), second.Close()) }, nil
}

// waiters polls until n keys exist under prefix: then contenders are in etcd's queue, or have left it.
func (t *tour) waiters(ctx context.Context, prefix string, n int64) error {
	for {
		r, err := t.client.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithCountOnly())
		if err != nil {
			return err
		}
		if r.Count == n {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d keys under %s where %d were due: %w", r.Count, prefix, n, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func concurrencySection(t *tour) {
	t.step("mutex: the second waits for the first", func(ctx context.Context) (string, error) {
		one, two, end, err := t.twoSessions()
		if err != nil {
			return "", err
		}
		defer end()
		first, second := concurrency.NewMutex(one, "tour/mutex"), concurrency.NewMutex(two, "tour/mutex")
		if err := first.Lock(ctx); err != nil {
			return "", err
		}
		log := []string{"first locked", "second tries: " + describe(second.TryLock(ctx))}
		got := make(chan error, 1)
		go func() { got <- second.Lock(ctx) }()
		if err := t.waiters(ctx, "tour/mutex/", 2); err != nil {
			return strings.Join(log, ", "), err
		}
		select {
		case err := <-got:
			log = append(log, "SECOND LOCKED TOO: "+describe(err))
		default:
			log = append(log, "second waits")
		}
		if err := first.Unlock(ctx); err != nil {
			return strings.Join(log, ", "), err
		}
		log = append(log, "second locked: "+describe(<-got), "unlock: "+describe(second.Unlock(ctx)))
		return strings.Join(log, ", "), nil
	})
	t.step("session: closing it frees the mutex", func(ctx context.Context) (string, error) {
		one, two, end, err := t.twoSessions()
		if err != nil {
			return "", err
		}
		defer end()
		if err := concurrency.NewMutex(one, "tour/mutex2").Lock(ctx); err != nil {
			return "", err
		}
		if err := one.Close(); err != nil {
			return "", err
		}
		return "second locked: " + describe(concurrency.NewMutex(two, "tour/mutex2").Lock(ctx)), nil
	})
	t.step("election: two candidates, observed", func(ctx context.Context) (string, error) {
		one, two, end, err := t.twoSessions()
		if err != nil {
			return "", err
		}
		defer end()
		first, second := concurrency.NewElection(one, "tour/election"), concurrency.NewElection(two, "tour/election")
		watcher := concurrency.NewElection(two, "tour/election")
		_, err = watcher.Leader(ctx)
		log := []string{"no leader: " + fmt.Sprintf("%q", err)}
		if err := first.Campaign(ctx, "A"); err != nil {
			return "", err
		}
		observe, stop := context.WithCancel(ctx)
		defer stop()
		seen := watcher.Observe(observe)
		leader := func() string {
			r, open := <-seen
			if !open || len(r.Kvs) == 0 {
				return "observe ended"
			}
			return string(r.Kvs[0].Value)
		}
		log = append(log, "leader "+leader())
		won := make(chan error, 1)
		go func() { won <- second.Campaign(ctx, "B") }()
		if err := t.waiters(ctx, "tour/election/", 2); err != nil {
			return strings.Join(log, ", "), err
		}
		if err := first.Proclaim(ctx, "A2"); err != nil {
			return strings.Join(log, ", "), err
		}
		log = append(log, "leader "+leader())
		if err := first.Resign(ctx); err != nil {
			return strings.Join(log, ", "), err
		}
		log = append(log, "second won: "+describe(<-won), "leader "+leader())
		log = append(log, "resign: "+describe(second.Resign(ctx)))
		return strings.Join(log, ", "), nil
	})
	t.step("software transactional memory", func(ctx context.Context) (string, error) {
		for i := range 3 {
			_, err := concurrency.NewSTM(t.client, func(s concurrency.STM) error {
				s.Put("tour/stm", s.Get("tour/stm")+fmt.Sprint(i))
				return nil
			}, concurrency.WithAbortContext(ctx))
			if err != nil {
				return "", err
			}
		}
		r, err := t.client.Get(ctx, "tour/stm")
		return t.rangeResponse((*pb.RangeResponse)(r), err)
	})
}

// servicesSection calls etcd's own Lock and Election services, which block on the server.
func servicesSection(t *tour) {
	lock, election := v3lockpb.NewLockClient(t.conn), v3electionpb.NewElectionClient(t.conn)
	lease := func(ctx context.Context, name string) (int64, error) {
		r, err := t.client.Grant(ctx, 60)
		if err != nil {
			return 0, err
		}
		t.leases[int64(r.ID)] = name
		return int64(r.ID), nil
	}
	// relKey hides the lease's id, which is part of the key.
	relKey := func(key []byte, id int64, name string) string {
		return strings.ReplaceAll(string(key), fmt.Sprintf("%x", id), "<"+name+">")
	}

	t.step("lock, second waits past its deadline, then gets it", func(ctx context.Context) (string, error) {
		one, err := lease(ctx, "one")
		if err != nil {
			return "", err
		}
		two, err := lease(ctx, "two")
		if err != nil {
			return "", err
		}
		first, err := lock.Lock(ctx, &v3lockpb.LockRequest{Name: []byte("tour/lock"), Lease: one})
		if err != nil {
			return "", err
		}
		log := []string{relKey(first.Key, one, "one")}
		short, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
		defer cancel()
		_, err = lock.Lock(short, &v3lockpb.LockRequest{Name: []byte("tour/lock"), Lease: two})
		log = append(log, describe(err))
		// Wait until the server has processed the cancellation: it removes the waiter from the queue.
		if err := t.waiters(ctx, "tour/lock/", 1); err != nil {
			return strings.Join(log, ", "), err
		}
		got := make(chan string, 1)
		go func() {
			r, err := lock.Lock(ctx, &v3lockpb.LockRequest{Name: []byte("tour/lock"), Lease: two})
			got <- describe(err) + " " + relKey(r.GetKey(), two, "two")
		}()
		if err := t.waiters(ctx, "tour/lock/", 2); err != nil {
			return strings.Join(log, ", "), err
		}
		_, err = lock.Unlock(ctx, &v3lockpb.UnlockRequest{Key: first.Key})
		log = append(log, "unlock "+describe(err), "second "+<-got)
		return strings.Join(log, ", "), nil
	})
	t.step("lock with an unknown lease", func(ctx context.Context) (string, error) {
		_, err := lock.Lock(ctx, &v3lockpb.LockRequest{Name: []byte("tour/lock2"), Lease: 0x7fff})
		return "", err
	})
	t.step("election without a leader", func(ctx context.Context) (string, error) {
		_, err := election.Leader(ctx, &v3electionpb.LeaderRequest{Name: []byte("tour/e")})
		return "", err
	})
	t.step("campaign, observe, proclaim, resign", func(ctx context.Context) (string, error) {
		one, err := lease(ctx, "one")
		if err != nil {
			return "", err
		}
		won, err := election.Campaign(ctx, &v3electionpb.CampaignRequest{Name: []byte("tour/e"), Lease: one, Value: []byte("A")})
		if err != nil {
			return "", err
		}
		log := []string{relKey(won.Leader.Key, one, "one")}
		observe, stop := context.WithCancel(ctx)
		defer stop()
		stream, err := election.Observe(observe, &v3electionpb.LeaderRequest{Name: []byte("tour/e")})
		if err != nil {
			return "", err
		}
		for _, next := range []func() error{
			func() error {
				_, err := election.Proclaim(ctx, &v3electionpb.ProclaimRequest{Leader: won.Leader, Value: []byte("A2")})
				return err
			},
			func() error {
				_, err := election.Resign(ctx, &v3electionpb.ResignRequest{Leader: won.Leader})
				return err
			},
		} {
			seen, err := stream.Recv()
			if err != nil {
				return strings.Join(log, ", "), err
			}
			log = append(log, "leader "+string(seen.Kv.Value), describe(next()))
		}
		return strings.Join(log, ", "), nil
	})
	t.step("proclaim without being leader", func(ctx context.Context) (string, error) {
		_, err := election.Proclaim(ctx, &v3electionpb.ProclaimRequest{
			Leader: &v3electionpb.LeaderKey{Name: []byte("tour/e"), Key: []byte("tour/e/none"), Rev: 1}, Value: []byte("B"),
		})
		return "", err
	})
	t.step("campaign without a leader key in resign", func(ctx context.Context) (string, error) {
		_, err := election.Resign(ctx, &v3electionpb.ResignRequest{})
		return "", err
	})
}
