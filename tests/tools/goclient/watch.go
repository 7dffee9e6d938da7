package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// rawWatch is one Watch stream without the client library's resuming and routing: responses are printed as received.
type rawWatch struct {
	t      *tour
	stream pb.Watch_WatchClient
	end    context.CancelFunc
}

func (t *tour) openWatch(ctx context.Context) (*rawWatch, error) {
	ctx, end := context.WithCancel(ctx)
	stream, err := pb.NewWatchClient(t.conn).Watch(ctx)
	if err != nil {
		end()
		return nil, err
	}
	return &rawWatch{t, stream, end}, nil
}

func (w *rawWatch) create(req *pb.WatchCreateRequest) error {
	return w.stream.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: req}})
}

func (w *rawWatch) cancel(id int64) error {
	return w.stream.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CancelRequest{
		CancelRequest: &pb.WatchCancelRequest{WatchId: id},
	}})
}

func (w *rawWatch) askProgress() error {
	return w.stream.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_ProgressRequest{
		ProgressRequest: &pb.WatchProgressRequest{},
	}})
}

// control prints a response without events.
func (t *tour) control(r *pb.WatchResponse) string {
	parts := []string{fmt.Sprintf("id=%d", r.WatchId)}
	if r.Created {
		parts = append(parts, "created")
	}
	if r.Canceled {
		parts = append(parts, fmt.Sprintf("canceled %q", r.CancelReason))
	}
	if r.CompactRevision != 0 {
		parts = append(parts, "compacted"+t.rel(r.CompactRevision))
	}
	return strings.Join(append(parts, t.header(r.Header)), " ")
}

// next returns the next response without events, printed.
func (w *rawWatch) next() (string, error) {
	r, err := w.stream.Recv()
	if err != nil {
		return "", err
	}
	if len(r.Events) > 0 {
		return "", fmt.Errorf("%d events where a control response was due", len(r.Events))
	}
	return w.t.control(r), nil
}

// events collects n events of the stream, however they are split into responses, printed in order per watcher.
func (w *rawWatch) events(n int) (string, error) {
	byWatcher := map[int64][]string{}
	for count := 0; count < n; {
		r, err := w.stream.Recv()
		if err != nil {
			return fmt.Sprint(byWatcher), err
		}
		for _, e := range r.Events {
			byWatcher[r.WatchId] = append(byWatcher[r.WatchId], w.t.event(e))
			count++
		}
	}
	parts := []string{}
	for _, id := range slices.Sorted(maps.Keys(byWatcher)) {
		parts = append(parts, fmt.Sprintf("id=%d [%s]", id, strings.Join(byWatcher[id], " | ")))
	}
	return strings.Join(parts, " "), nil
}

func watchRange(prefix string, edit func(*pb.WatchCreateRequest)) *pb.WatchCreateRequest {
	req := &pb.WatchCreateRequest{Key: []byte(prefix), RangeEnd: []byte(clientv3.GetPrefixRangeEnd(prefix))}
	if edit != nil {
		edit(req)
	}
	return req
}

func watchSection(t *tour) {
	c := t.client
	put := func(ctx context.Context, key, value string) error {
		_, err := c.Put(ctx, key, value)
		return err
	}
	// watching opens a stream, sends the creates and checks that each is confirmed before body runs.
	watching := func(name string, creates []*pb.WatchCreateRequest, body func(context.Context, *rawWatch) (string, error)) {
		t.step(name, func(ctx context.Context) (string, error) {
			w, err := t.openWatch(ctx)
			if err != nil {
				return "", err
			}
			defer w.end()
			for _, create := range creates {
				if err := w.create(create); err != nil {
					return "", err
				}
				if text, err := w.next(); err != nil || !strings.Contains(text, "created") {
					return "not created: " + text, err
				}
			}
			return body(ctx, w)
		})
	}
	one := func(edit func(*pb.WatchCreateRequest)) []*pb.WatchCreateRequest {
		return []*pb.WatchCreateRequest{watchRange("tour/w/", edit)}
	}

	watching("prefix, from now", one(nil), func(ctx context.Context, w *rawWatch) (string, error) {
		err := errors.Join(put(ctx, "tour/w/a", "1"), put(ctx, "tour/other", "x"), put(ctx, "tour/w/b", "2"), put(ctx, "tour/w/a", "3"))
		if err != nil {
			return "", err
		}
		if _, err := c.Delete(ctx, "tour/w/b"); err != nil {
			return "", err
		}
		return w.events(4)
	})
	watching("prefix with prev_kv, from the start", one(func(r *pb.WatchCreateRequest) { r.PrevKv, r.StartRevision = true, t.base+1 }),
		func(ctx context.Context, w *rawWatch) (string, error) { return w.events(4) })
	watching("no puts", one(func(r *pb.WatchCreateRequest) {
		r.Filters, r.StartRevision = []pb.WatchCreateRequest_FilterType{pb.WatchCreateRequest_NOPUT}, t.base+1
	}), func(ctx context.Context, w *rawWatch) (string, error) { return w.events(1) })
	watching("no deletes", one(func(r *pb.WatchCreateRequest) {
		r.Filters, r.StartRevision = []pb.WatchCreateRequest_FilterType{pb.WatchCreateRequest_NODELETE}, t.base+1
	}), func(ctx context.Context, w *rawWatch) (string, error) { return w.events(3) })
	watching("single key", []*pb.WatchCreateRequest{{Key: []byte("tour/w/a"), StartRevision: t.base + 1}},
		func(ctx context.Context, w *rawWatch) (string, error) { return w.events(2) })
	watching("from key", []*pb.WatchCreateRequest{{Key: []byte("tour/w/b"), RangeEnd: []byte{0}, StartRevision: t.base + 1}},
		func(ctx context.Context, w *rawWatch) (string, error) { return w.events(2) })
	watching("everything", []*pb.WatchCreateRequest{{RangeEnd: []byte{0}, StartRevision: t.base + 1}},
		func(ctx context.Context, w *rawWatch) (string, error) { return w.events(5) })
	watching("start revision in the future", one(func(r *pb.WatchCreateRequest) { r.StartRevision = t.base + 7 }),
		func(ctx context.Context, w *rawWatch) (string, error) {
			if err := errors.Join(put(ctx, "tour/w/a", "at 6"), put(ctx, "tour/w/a", "at 7"), put(ctx, "tour/w/a", "at 8")); err != nil {
				return "", err
			}
			return w.events(2)
		})
	watching("a txn is one response", one(nil), func(ctx context.Context, w *rawWatch) (string, error) {
		_, err := c.Txn(ctx).Then(clientv3.OpPut("tour/w/t1", "x"), clientv3.OpPut("tour/w/t2", "y"), clientv3.OpDelete("tour/w/a")).Commit()
		if err != nil {
			return "", err
		}
		r, err := w.stream.Recv()
		if err != nil {
			return "", err
		}
		parts := []string{}
		for _, e := range r.Events {
			parts = append(parts, t.event(e))
		}
		return strings.Join(parts, " | "), nil
	})

	watching("two watchers on one stream", []*pb.WatchCreateRequest{
		watchRange("tour/w/x", func(r *pb.WatchCreateRequest) { r.WatchId = 7 }),
		watchRange("tour/w/", func(r *pb.WatchCreateRequest) { r.WatchId = 3; r.PrevKv = true }),
	}, func(ctx context.Context, w *rawWatch) (string, error) {
		if err := errors.Join(put(ctx, "tour/w/x1", "1"), put(ctx, "tour/w/y", "2"), put(ctx, "tour/w/x1", "3")); err != nil {
			return "", err
		}
		return w.events(5)
	})
	watching("given id twice", []*pb.WatchCreateRequest{watchRange("tour/w/", func(r *pb.WatchCreateRequest) { r.WatchId = 5 })},
		func(ctx context.Context, w *rawWatch) (string, error) {
			if err := w.create(watchRange("tour/w/", func(r *pb.WatchCreateRequest) { r.WatchId = 5 })); err != nil {
				return "", err
			}
			return w.next()
		})
	watching("cancel one, the other lives", []*pb.WatchCreateRequest{watchRange("tour/w/", nil), watchRange("tour/w/", nil)},
		func(ctx context.Context, w *rawWatch) (string, error) {
			if err := w.cancel(0); err != nil {
				return "", err
			}
			cancelled, err := w.next()
			if err != nil {
				return cancelled, err
			}
			if err := put(ctx, "tour/w/z", "after"); err != nil {
				return cancelled, err
			}
			events, err := w.events(1)
			return cancelled + " then " + events, err
		})
	watching("end before start", nil, func(ctx context.Context, w *rawWatch) (string, error) {
		if err := w.create(&pb.WatchCreateRequest{Key: []byte("b"), RangeEnd: []byte("a")}); err != nil {
			return "", err
		}
		return w.next()
	})
	watching("request without content, then a good one", nil, func(ctx context.Context, w *rawWatch) (string, error) {
		if err := errors.Join(w.stream.Send(&pb.WatchRequest{}), w.create(watchRange("tour/w/", nil))); err != nil {
			return "", err
		}
		return w.next()
	})
	watching("progress on request", one(nil), t.progress)
	watching("progress of two watchers", []*pb.WatchCreateRequest{watchRange("tour/w/", nil), watchRange("tour/v/", nil)}, t.progress)
	// etcd keeps serving a stream whose client has closed its sending side.
	watching("client closes its side, events still come", one(nil), func(ctx context.Context, w *rawWatch) (string, error) {
		if err := errors.Join(w.stream.CloseSend(), put(ctx, "tour/w/closed", "x")); err != nil {
			return "", err
		}
		return w.events(1)
	})
	watching("client cancels in mid-watch", one(nil), func(ctx context.Context, w *rawWatch) (string, error) {
		w.end()
		_, err := w.stream.Recv()
		return "", err
	})
	t.step("deadline of a watch", func(ctx context.Context) (string, error) {
		ctx, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		defer cancel()
		w, err := t.openWatch(ctx)
		if err != nil {
			return "", err
		}
		defer w.end()
		if err := w.create(watchRange("tour/w/", nil)); err != nil {
			return "", err
		}
		created, err := w.next()
		if err != nil {
			return created, err
		}
		_, err = w.stream.Recv()
		// The server has the deadline, too. If its clock is first, etcd's says that the context was canceled.
		deadline, _ := ctx.Deadline()
		if code := status.Code(err); code == codes.Canceled && time.Until(deadline) < 50*time.Millisecond {
			<-ctx.Done()
			err = status.FromContextError(ctx.Err()).Err()
		}
		return created, err
	})
	fragmentSteps(t, watching)
	libraryWatch(t)
	compactedWatch(t, watching)
}

// progress requests progress until there is a response: etcd sends none while a watcher of the stream lags.
func (t *tour) progress(ctx context.Context, w *rawWatch) (string, error) {
	if _, err := t.client.Put(ctx, "tour/elsewhere", "x"); err != nil {
		return "", err
	}
	asked := make(chan struct{})
	defer close(asked)
	go func() {
		for {
			if w.askProgress() != nil {
				return
			}
			select {
			case <-asked:
				return
			case <-time.After(100 * time.Millisecond):
			}
		}
	}()
	return w.next()
}

// fragmentSteps watches a transaction whose events and previous values exceed one response of etcd.
func fragmentSteps(t *tour, watching func(string, []*pb.WatchCreateRequest, func(context.Context, *rawWatch) (string, error))) {
	write := func(letter string) (int64, error) {
		ops := make([]clientv3.Op, 100)
		for i := range ops {
			ops[i] = clientv3.OpPut(fmt.Sprintf("tour/wf/%03d", i), strings.Repeat(letter, 14_000))
		}
		r, err := t.client.Txn(context.Background()).Then(ops...).Commit()
		if err != nil {
			return 0, err
		}
		return r.Header.Revision, nil
	}
	var revision int64
	t.step("write 100 keys of 14,000 bytes in one txn, twice", func(context.Context) (string, error) {
		if _, err := write("a"); err != nil {
			return "", err
		}
		var err error
		revision, err = write("b")
		return "rev" + t.rel(revision), err
	})
	for _, fragment := range []bool{false, true} {
		creates := []*pb.WatchCreateRequest{watchRange("tour/wf/", func(r *pb.WatchCreateRequest) {
			r.Fragment, r.PrevKv, r.StartRevision = fragment, true, revision
		})}
		watching(fmt.Sprintf("read it with fragment=%t", fragment), creates, func(ctx context.Context, w *rawWatch) (string, error) {
			responses, events, marked := 0, 0, 0
			last := false
			for events < 100 {
				r, err := w.stream.Recv()
				if err != nil {
					return "", err
				}
				responses++
				events += len(r.Events)
				if last = r.Fragment; last {
					marked++
				}
			}
			return fmt.Sprintf("%d responses, %d marked, the last marked=%t, %d events", responses, marked, last, events), nil
		})
	}
}

// libraryWatch tests the same through clientv3, which resumes by itself, like applications.
func libraryWatch(t *tour) {
	t.step("clientv3 with require-leader, created notice, cancel", func(ctx context.Context) (string, error) {
		ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
		defer cancel()
		watched := t.client.Watch(ctx, "tour/wl/", clientv3.WithPrefix(), clientv3.WithCreatedNotify(), clientv3.WithPrevKV())
		first, open := <-watched
		if !open || first.Err() != nil {
			return "", errors.Join(first.Err(), ctx.Err())
		}
		text := fmt.Sprintf("created=%t", first.Created)
		for _, v := range []string{"1", "2"} {
			if _, err := t.client.Put(ctx, "tour/wl/k", v); err != nil {
				return text, err
			}
		}
		for n := 0; n < 2; {
			r, open := <-watched
			if !open || r.Err() != nil {
				return text, errors.Join(r.Err(), ctx.Err())
			}
			for _, e := range r.Events {
				text += " " + t.event((*clientv3.Event)(e))
				n++
			}
		}
		cancel()
		for r := range watched {
			text += fmt.Sprintf(" after cancel: %d events", len(r.Events))
		}
		return text + " closed", nil
	})
	t.step("require-leader in the raw metadata", func(ctx context.Context) (string, error) {
		w, err := t.openWatch(metadata.AppendToOutgoingContext(ctx, "hasleader", "true"))
		if err != nil {
			return "", err
		}
		defer w.end()
		if err := w.create(watchRange("tour/wl/", nil)); err != nil {
			return "", err
		}
		return w.next()
	})
}

// compactedWatch comes last: it compacts up to the current revision.
func compactedWatch(t *tour, watching func(string, []*pb.WatchCreateRequest, func(context.Context, *rawWatch) (string, error))) {
	t.step("compact", func(ctx context.Context) (string, error) {
		_, err := t.client.Compact(ctx, t.base+5, clientv3.WithCompactPhysical())
		return "ok", err
	})
	watching("start at a compacted revision", []*pb.WatchCreateRequest{
		watchRange("tour/w/", func(r *pb.WatchCreateRequest) { r.StartRevision = t.base + 2 }),
	}, func(ctx context.Context, w *rawWatch) (string, error) { return w.next() })
	t.step("clientv3 from a compacted revision", func(ctx context.Context) (string, error) {
		for r := range t.client.Watch(ctx, "tour/w/", clientv3.WithPrefix(), clientv3.WithRev(t.base+2)) {
			return fmt.Sprintf("canceled=%t compacted%s", r.Canceled, t.rel(r.CompactRevision)), r.Err()
		}
		return "", ctx.Err()
	})
}
