package kube

import (
	"context"
	"crypto/tls"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// Load beside a rangecache that is killed, starts again and loads its mirror, in which time its readers are many and it
// has nothing in memory.
const (
	behindKeys    = 200_000
	behindClients = 1_000
	behindCallers = 100
	// A caller waits so long before its next read.
	behindPause  = 100 * time.Millisecond
	behindCalm   = 5 * time.Second
	behindWindow = 15 * time.Second
	behindCall   = 10 * time.Second
	// A caller that fails at once, as the apiserver's do, waits before it tries again.
	behindRetry = 25 * time.Millisecond
)

// TestBehind measures what `--when-behind=forward` and `fail` mean for etcd and for readers while rangecache loads, with
// a thousand clients of etcd's own library and with a kube-apiserver without watch cache. It runs only if KUBE_BEHIND is
// set, prints a table and asserts nothing but that readers are answered in the end.
func TestBehind(t *testing.T) {
	if setting(t, "KUBE_BEHIND", 0) == 0 {
		t.Skip("a measurement: make bench-behind")
	}
	files := newCertificates(t)
	etcd := startEtcd(t, files, "etcd-3.7")
	namespaces := fillCluster(t, files, etcd, objectsPerNamespace)
	fillKeys(t, files, etcd.url)
	rows := map[string][]string{}
	for _, policy := range []string{"forward", "fail"} {
		t.Run(policy, func(t *testing.T) {
			front := startFront(t, files, rangecache, etcd, "--when-behind", policy)
			clients := newEtcdClients(t, files, front.url, behindClients)
			rows[policy] = append(rows[policy], disturb(t, etcd, front, len(clients), func(n int) error {
				ctx, cancel := context.WithTimeout(t.Context(), behindCall)
				defer cancel()
				_, err := clients[n].Get(ctx, keyOf(rand.IntN(behindKeys)))
				return err
			})...)
			server := startAPIServer(t, files, 1, front.url, "--watch-cache=false")
			server.awaitReady(t)
			client := &http.Client{Transport: server.http.Transport, Timeout: behindCall}
			list := server.url + "/api/v1/namespaces/" + namespaces[0] + "/configmaps?limit=50"
			rows[policy] = append(rows[policy], disturb(t, etcd, front, behindCallers, func(int) error {
				body, status, err := fetch(client, list)
				if err == nil && status != http.StatusOK {
					err = fmt.Errorf("%d: %s", status, body)
				}
				return err
			})...)
		})
	}
	if t.Failed() {
		return
	}
	names := []string{"p99 before", "p99 after the restart", "99 % of the readers answered again after",
		"reads answered in the 15 s", "reads failed", "etcd's CPU in the 15 s", "calls that etcd has handled"}
	fmt.Printf("\n%d keys; rangecache is killed and starts again\n\n| | | forward | fail |\n|---|---|---|---|\n", behindKeys)
	for row := range rows["forward"] {
		who := []string{fmt.Sprintf("%d clients of clientv3", behindClients), fmt.Sprintf("%d callers of one kube-apiserver", behindCallers)}
		cells := []string{"", names[row%len(names)], rows["forward"][row], rows["fail"][row]}
		if row%len(names) == 0 {
			cells[0] = who[row/len(names)]
		}
		fmt.Printf("| %s |\n", strings.Join(cells, " | "))
	}
}

func keyOf(n int) string { return fmt.Sprintf("/behind/%07d", n) }

func tlsOf(t *testing.T, files *certificates) *tls.Config {
	t.Helper()
	config, err := transport.TLSInfo{CertFile: files.clientCert, KeyFile: files.clientKey, TrustedCAFile: files.ca}.ClientConfig()
	must(t, "TLS", err)
	return config
}

// etcdClient returns a client of etcd's own library, which is closed with the test.
func etcdClient(t *testing.T, files *certificates, url string) *clientv3.Client {
	t.Helper()
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{url}, TLS: tlsOf(t, files), Logger: zap.NewNop()})
	must(t, "a client", err)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

func newEtcdClients(t *testing.T, files *certificates, url string, count int) (clients []*clientv3.Client) {
	t.Helper()
	for range count {
		clients = append(clients, etcdClient(t, files, url))
	}
	return clients
}

func fillKeys(t *testing.T, files *certificates, url string) {
	t.Helper()
	value := strings.Repeat("x", 1000)
	putAll(t, etcdClient(t, files, url), 0, behindKeys, fillTxnOps, func(n int) clientv3.Op { return clientv3.OpPut(keyOf(n), value) })
}

// call is one read: when it ended, how long it took, and whether it was answered.
type call struct {
	reader   int
	ended    time.Time
	took     time.Duration
	answered bool
}

// disturb lets readers read all the time, and restarts the front. It returns the figures of the table's rows.
func disturb(t *testing.T, etcd *etcdServer, front *front, readers int, read func(reader int) error) []string {
	t.Helper()
	var mutex sync.Mutex
	var calls []call
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var running sync.WaitGroup
	for reader := range readers {
		running.Go(func() {
			time.Sleep(rand.N(behindPause))
			for ctx.Err() == nil {
				began := time.Now()
				err := read(reader)
				ended := time.Now()
				mutex.Lock()
				calls = append(calls, call{reader, ended, ended.Sub(began), err == nil})
				mutex.Unlock()
				if err != nil {
					time.Sleep(behindRetry)
					continue
				}
				time.Sleep(behindPause)
			}
		})
	}
	time.Sleep(2 * behindCalm)
	restarted, handled, cpu := time.Now(), handledBy(t, etcd), etcd.cpuTime(t)
	front.kill()
	front.start(t)
	time.Sleep(behindWindow)
	cpu, handled = etcd.cpuTime(t)-cpu, handledBy(t, etcd)-handled
	stop()
	running.Wait()
	front.awaitWarm(t)

	var before, after []time.Duration
	answered, failed := 0, 0
	first := map[int]time.Duration{}
	for _, one := range calls {
		since := one.ended.Sub(restarted)
		switch {
		case one.answered && since < 0 && since > -behindCalm:
			before = append(before, one.took)
		case one.answered && since >= 0:
			answered++
			after = append(after, one.took)
			if _, known := first[one.reader]; !known && one.ended.Add(-one.took).After(restarted) {
				first[one.reader] = since
			}
		case since >= 0:
			failed++
		}
	}
	if len(first) != readers {
		t.Errorf("%d of %d readers were never answered again", readers-len(first), readers)
	}
	var again []time.Duration
	for _, since := range first {
		again = append(again, since)
	}
	return []string{p99(before), p99(after), p99(again), fmt.Sprint(answered), fmt.Sprint(failed),
		cpu.Round(10 * time.Millisecond).String(), fmt.Sprintf("%.0f", handled)}
}

// handledBy is the number of calls that etcd has handled.
func handledBy(t *testing.T, etcd *etcdServer) float64 {
	return etcd.scrape(t).sum("grpc_server_handled_total")
}

func p99(durations []time.Duration) string {
	if len(durations) == 0 {
		return "none"
	}
	slices.Sort(durations)
	return durations[len(durations)*99/100].Round(100 * time.Microsecond).String()
}
