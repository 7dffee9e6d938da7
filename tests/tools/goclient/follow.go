package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/namespace"
)

// spec describes one watch of follow.
type spec struct {
	Namespace string `json:"namespace"`
	Key       string `json:"key"`
	End       string `json:"end"`
	Revision  int64  `json:"revision"`
	PrevKV    bool   `json:"prev_kv"`
	Fragment  bool   `json:"fragment"`
	Notify    bool   `json:"notify"`
	Leader    bool   `json:"leader"`
	Filters   []int  `json:"filters"`
}

func (s spec) options() []clientv3.OpOption {
	options := []clientv3.OpOption{clientv3.WithRev(s.Revision), clientv3.WithCreatedNotify()}
	if s.End != "" {
		options = append(options, clientv3.WithRange(s.End))
	}
	if s.PrevKV {
		options = append(options, clientv3.WithPrevKV())
	}
	if s.Fragment {
		options = append(options, clientv3.WithFragment())
	}
	if s.Notify {
		options = append(options, clientv3.WithProgressNotify())
	}
	for _, filter := range s.Filters {
		options = append(options, []func() clientv3.OpOption{clientv3.WithFilterPut, clientv3.WithFilterDelete}[filter]())
	}
	return options
}

// follow opens a watch for each line of in, on as few streams as the client library uses, and prints what each delivers,
// through reconnects, until all have ended. It requests progress meanwhile.
func follow(urls []string, in io.Reader, out io.Writer) error {
	client, err := newClient(urls, "", "")
	if err != nil {
		return err
	}
	defer client.Close()
	plain, cancel := context.WithCancel(context.Background())
	defer cancel()
	leader := clientv3.WithRequireLeader(plain)
	var lines sync.Mutex
	print := func(format string, args ...any) {
		lines.Lock()
		defer lines.Unlock()
		fmt.Fprintf(out, format+"\n", args...)
	}
	var open sync.WaitGroup
	scanner := bufio.NewScanner(in)
	for number := 0; scanner.Scan(); number++ {
		var s spec
		if err := json.Unmarshal(scanner.Bytes(), &s); err != nil {
			return err
		}
		ctx, watcher := plain, clientv3.Watcher(client)
		if s.Leader {
			ctx = leader
		}
		if s.Namespace != "" {
			watcher = namespace.NewWatcher(client.Watcher, s.Namespace)
		}
		events := watcher.Watch(ctx, s.Key, s.options()...)
		open.Go(func() { deliver(number, events, print) })
	}
	go func() {
		for range time.Tick(20 * time.Millisecond) {
			_ = client.RequestProgress(plain)
			_ = client.RequestProgress(leader)
		}
	}()
	open.Wait()
	return scanner.Err()
}

// deliver prints one watch's events, and that it was created and has ended.
func deliver(number int, events clientv3.WatchChan, print func(string, ...any)) {
	var last, progress int64
	for response := range events {
		switch {
		case response.Err() != nil:
			print("%d ended: %v", number, response.Err())
		case response.Created:
			print("%d created", number)
		case response.IsProgressNotify():
			if response.Header.Revision < max(last, progress) {
				print("%d progress %d after %d", number, response.Header.Revision, max(last, progress))
			}
			progress = response.Header.Revision
		}
		for _, e := range response.Events {
			previous := ""
			if e.PrevKv != nil {
				previous = fmt.Sprintf(" after %d", e.PrevKv.ModRevision)
			}
			if e.Kv.ModRevision <= progress {
				print("%d progress %d before event %d", number, progress, e.Kv.ModRevision)
			}
			last = e.Kv.ModRevision
			print("%d %d %v %s%s", number, last, e.Type, e.Kv.Key, previous)
		}
	}
	print("%d closed", number)
}
