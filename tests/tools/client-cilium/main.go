// Command client-cilium uses etcd as Cilium's agents and its clustermesh do, by Cilium's own kvstore package, and prints
// what they see.
//
// The lines are equal for two fresh etcds: run it against etcd and against a proxy in front of another one, and compare.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"maps"
	"slices"
	"time"

	"github.com/cilium/cilium/pkg/kvstore"
)

// Keys as Cilium's nodes, identities and addresses have them.
const (
	nodes      = "cilium/state/nodes/v1/"
	identities = "cilium/state/identities/v1/id/"
	addresses  = "cilium/state/ip/v1/default/"
)

func main() {
	endpoint := flag.String("endpoint", "http://127.0.0.1:2379", "client URL")
	flag.Parse()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	options := map[string]string{
		kvstore.EtcdAddrOption:      *endpoint,
		kvstore.EtcdListLimitOption: "4", // lists have several pages
	}
	client, connected := kvstore.NewClient(ctx, kvstore.EtcdBackendName, options, nil)
	if err := <-connected; err != nil {
		log.Fatal(err)
	}
	defer client.Close(ctx)

	run := session{ctx, client}
	run.identities()
	run.watches()
	run.locks()
}

type session struct {
	context.Context
	client kvstore.BackendOperations
}

// identities reads and writes as the allocator of identities does.
func (s session) identities() {
	for n := range 10 {
		created, err := s.client.CreateOnly(s, fmt.Sprintf("%s%03d", identities, n), []byte("labels"), false)
		fmt.Println("create", n, created, err)
	}
	created, err := s.client.CreateOnly(s, identities+"003", []byte("others"), false)
	fmt.Println("create one that exists", created, err)
	s.get(identities + "003")
	for _, value := range []string{"labels", "changed", "changed"} {
		changed, err := s.client.UpdateIfDifferent(s, identities+"004", []byte(value), true)
		fmt.Println("update if different", changed, err)
		s.get(identities + "004")
	}
	s.list(identities)
	fmt.Println("delete", s.client.Delete(s, identities+"005"))
	s.get(identities + "005")
	s.list(identities)
}

// watches follows a prefix, as agents follow nodes and addresses: a list of several pages, then each change.
func (s session) watches() {
	for n := range 11 {
		fmt.Println("update", s.client.Update(s, fmt.Sprintf("%snode-%02d", nodes, n), fmt.Append(nil, "node ", n), true))
	}
	ctx, stop := context.WithCancel(s)
	events := s.client.ListAndWatch(ctx, nodes, 0).Events
	for listed := false; !listed; {
		listed = s.event(events) == kvstore.EventTypeListDone
	}
	for n := range 20 {
		key := fmt.Sprintf("%snode-%02d", nodes, n%13)
		if n%4 == 3 {
			fmt.Println("delete", s.client.Delete(s, key))
		} else {
			fmt.Println("update", s.client.Update(s, key, fmt.Append(nil, "change ", n), n%2 == 0))
		}
		// Of another prefix: no event may follow from it.
		fmt.Println("update", s.client.Update(s, addresses+"192.0.2.1", fmt.Append(nil, n), true))
		if n != 7 { // deletes node-07 again, of which etcd tells nothing
			s.event(events)
		}
		s.get(key)
	}
	stop()
	fmt.Println("delete prefix", s.client.DeletePrefix(s, nodes))
	s.list(nodes)
	s.list(addresses)
}

func (s session) locks() {
	lock, err := s.client.LockPath(s, "cilium/lock")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("update if locked", s.client.UpdateIfLocked(s, "cilium/locked", []byte("value"), false, lock))
	value, err := s.client.GetIfLocked(s, "cilium/locked", lock)
	fmt.Printf("get if locked %q %v\n", value, err)
	fmt.Println("unlock", lock.Unlock(s))
	fmt.Println("update after the lock", s.client.UpdateIfLocked(s, "cilium/locked", []byte("late"), false, lock))
	s.get("cilium/locked")
}

func (s session) get(key string) {
	value, err := s.client.Get(s, key)
	fmt.Printf("get %s: %q %v\n", key, value, err)
}

func (s session) list(prefix string) {
	pairs, err := s.client.ListPrefix(s, prefix)
	fmt.Printf("list %s: %d keys, %v\n", prefix, len(pairs), err)
	for _, key := range slices.Sorted(maps.Keys(pairs)) {
		fmt.Printf("  %s %q\n", key, pairs[key].Data)
	}
}

// event prints the next event.
func (s session) event(events kvstore.EventChan) kvstore.EventType {
	select {
	case event := <-events:
		fmt.Printf("  event %v %s %q\n", event.Typ, event.Key, event.Value)
		return event.Typ
	case <-s.Done():
		log.Fatal("no event within a minute")
		panic("unreachable")
	}
}
