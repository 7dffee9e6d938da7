package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// callTimeout is far beyond the duration of any call: a call that takes as long has failed.
const callTimeout = 20 * time.Second

// load keeps clients busy until the file named by until exists: each puts a counter to its own key and reads it back,
// and one watch checks that every put arrives once and in order. It prints failures and, in the last line, a summary.
func load(urls []string, clients int, until string, out io.Writer) error {
	var calls, failures atomic.Int64
	var lines sync.Mutex
	fail := func(format string, args ...any) {
		failures.Add(1)
		lines.Lock()
		defer lines.Unlock()
		fmt.Fprintf(out, format+"\n", args...)
	}

	watching, err := newClient(urls, "", "")
	if err != nil {
		return err
	}
	defer watching.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	start, err := watching.Get(ctx, "/load/")
	if err != nil {
		return err
	}
	seen := make([]atomic.Int64, clients)
	events := watching.Watch(ctx, "/load/", clientv3.WithPrefix(), clientv3.WithRev(start.Header.Revision+1))
	go func() {
		for response := range events {
			if err := response.Err(); err != nil {
				fail("watch: %v", err)
			}
			for _, event := range response.Events {
				n, _ := strconv.Atoi(strings.TrimPrefix(string(event.Kv.Key), "/load/"))
				value, _ := strconv.ParseInt(string(event.Kv.Value), 10, 64)
				if before := seen[n].Swap(value); value != before+1 {
					fail("watch: %d came after %d of client %d", value, before, n)
				}
			}
		}
		if ctx.Err() == nil {
			fail("watch: it has ended")
		}
	}()

	written := make([]int64, clients)
	var running sync.WaitGroup
	for n := range clients {
		client, err := newClient(urls, "", "")
		if err != nil {
			return err
		}
		defer client.Close()
		running.Add(1)
		go func() {
			defer running.Done()
			key := fmt.Sprintf("/load/%d", n)
			for value := int64(1); !exists(until); value++ {
				put, cancel := context.WithTimeout(ctx, callTimeout)
				if _, err := client.Put(put, key, strconv.FormatInt(value, 10)); err != nil {
					fail("put: %v", err)
				}
				cancel()
				written[n] = value
				get, cancel := context.WithTimeout(ctx, callTimeout)
				answer, err := client.Get(get, key)
				cancel()
				switch {
				case err != nil:
					fail("get: %v", err)
				case len(answer.Kvs) != 1 || string(answer.Kvs[0].Value) != strconv.FormatInt(value, 10):
					fail("get: %v after %d was put", answer.Kvs, value)
				}
				calls.Add(2)
			}
		}()
	}
	running.Wait()

	deadline := time.Now().Add(callTimeout)
	for n := range clients {
		for seen[n].Load() < written[n] {
			if time.Now().After(deadline) {
				fail("watch: %d of %d puts of client %d came", seen[n].Load(), written[n], n)
				break
			}
			time.Sleep(time.Millisecond)
		}
	}
	lines.Lock()
	defer lines.Unlock()
	fmt.Fprintf(out, "calls=%d failures=%d\n", calls.Load(), failures.Load())
	return nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
