package kube

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	watchedPrefix = "/watched/"
	watchedKeys   = 500
	watchedWrites = 100 // a second
	watchClients  = 10
	// Watches of the churn; each ends after some seconds, and begins again at an older revision than its last.
	churnWatches  = 100
	churnLifetime = 5 * time.Second
	churnBack     = 500 // revisions
	// The history that a lagging watch reads is at most so long.
	lagRevisions = 100_000
)

// watches measures etcd 3.6 under watches of its own clients: many that begin again and again a little in the past, and one
// that is far behind.
func (m *modern) watches(t *testing.T, d deployment) {
	files := newCertificates(t)
	run := d.start(t, files, startEtcd(t, files, "etcd-3.6"))
	w := &watched{clients: newEtcdClients(t, files, run.fronts[0].url, watchClients)}
	must(t, "the first write", w.put(t.Context(), 0))
	w.oldest = w.latest.Load()
	w.measure(t, m, run, fmt.Sprintf("etcd 3.6, %d watches with churn, %d writes/s of 1 KB", churnWatches, watchedWrites), func(ctx context.Context, watches *sync.WaitGroup) {
		for number := range churnWatches {
			watches.Go(func() { w.churn(ctx, number) })
		}
	})

	history := min(m.objects, lagRevisions)
	w.writeHistory(t.Context(), history)
	begin := w.latest.Load() - int64(history) + 1
	w.measure(t, m, run, fmt.Sprintf("etcd 3.6, one watch that begins %d revisions behind, %d writes/s of 1 KB", history, watchedWrites), func(ctx context.Context, watches *sync.WaitGroup) {
		watches.Go(func() { w.lag(ctx, begin) })
	})
}

// watched is keys of which every revision of etcd changes one, so that a watch sees each revision once.
type watched struct {
	clients []*clientv3.Client
	oldest  int64        // revision of the first write
	latest  atomic.Int64 // revision of a write that was acknowledged
	events  atomic.Int64
	wrong   atomic.Int64
	first   atomic.Value // text of the first wrong event or error
}

func (w *watched) put(ctx context.Context, number int) error {
	put, err := w.clients[number%len(w.clients)].Put(ctx, fmt.Sprintf("%s%04d", watchedPrefix, number%watchedKeys), strings.Repeat("x", 1000))
	if err != nil {
		return err
	}
	for {
		latest := w.latest.Load()
		if put.Header.Revision <= latest || w.latest.CompareAndSwap(latest, put.Header.Revision) {
			return nil
		}
	}
}

func (w *watched) writeHistory(ctx context.Context, count int) {
	const workers = 32
	together(workers, func(worker int) {
		for number := worker; number < count; number += workers {
			if err := w.put(ctx, number); err != nil {
				w.fault(fmt.Sprintf("writing the history: %v", err))
				return
			}
		}
	})
}

// measure writes on a schedule while watches run, and adds the rows of the part.
func (w *watched) measure(t *testing.T, m *modern, run *deployed, part string, start func(ctx context.Context, watches *sync.WaitGroup)) {
	t.Helper()
	w.events.Store(0)
	load := newLoad([]*apiserver{nil}, []string{""}, []operation{{modernWrites, watchedWrites, func(ctx context.Context, _ *apiserver, _ string, turn int) error {
		return w.put(ctx, turn)
	}}})
	var watches sync.WaitGroup
	spent := run.spend(t, part, func() {
		ctx, stop := context.WithCancel(t.Context())
		start(ctx, &watches)
		load.run(t, m.short())
		stop()
		watches.Wait()
	})
	t.Logf("%s, %s: %d events", run.name, part, w.events.Load())
	m.table.addSpending(part, run.name, spent, "a second", spent.took.Seconds())
	m.table.addLatencies(part, run.name, load, modernWrites)
	if wrong := w.wrong.Swap(0); wrong > 0 {
		m.table.fault(part, run.name, "%d times wrong, first: %v", wrong, w.first.Load())
	}
	if w.events.Load() == 0 {
		m.table.fault(part, run.name, "no event")
	}
}

// churn watches all keys, one watch after another, until the context ends.
func (w *watched) churn(ctx context.Context, number int) {
	begin := w.latest.Load()
	// The watches do not end together.
	lifetime := churnLifetime * time.Duration(number+1) / churnWatches
	for ctx.Err() == nil {
		one, end := context.WithTimeout(ctx, lifetime)
		last := w.follow(one, number, max(w.oldest, begin-churnBack), 0)
		end()
		begin, lifetime = max(begin, last), churnLifetime
	}
}

// lag reads the history again and again, each time up to the present.
func (w *watched) lag(ctx context.Context, begin int64) {
	for ctx.Err() == nil {
		w.follow(ctx, 0, begin, w.latest.Load())
	}
}

// follow watches all keys from a revision on until the context ends or the watch has reached the end, if there is one. It
// returns the last revision that it has seen.
func (w *watched) follow(ctx context.Context, number int, begin, end int64) (last int64) {
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	last = begin - 1
	for response := range w.clients[number%len(w.clients)].Watch(ctx, watchedPrefix, clientv3.WithPrefix(), clientv3.WithPrevKV(), clientv3.WithRev(begin)) {
		if err := response.Err(); err != nil {
			if ctx.Err() == nil && !errors.Is(err, context.Canceled) {
				w.fault(fmt.Sprintf("a watch from %d on ended: %v", begin, err))
			}
			return last
		}
		for _, event := range response.Events {
			if event.Kv.ModRevision != last+1 {
				w.fault(fmt.Sprintf("%d comes after %d", event.Kv.ModRevision, last))
			}
			last = event.Kv.ModRevision
			w.events.Add(1)
		}
		if end > 0 && last >= end {
			return last
		}
	}
	return last
}

func (w *watched) fault(text string) {
	w.first.CompareAndSwap(nil, text)
	w.wrong.Add(1)
}
