package kube

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// noObject is a selector that takes no object: an apiserver without the objects in its watch cache reads all of them from
// its etcd to return none.
const noObject = "takes=none"

// kepLoad is one call a second, as in the benchmark of KEP-2340. The number counts the calls, which alternate between the
// apiservers.
type kepLoad struct {
	name string
	call func(ctx context.Context, run *kepRun, number int) error
}

var kepLoads = []kepLoad{
	{"none", nil},
	// KEP-2340.
	{"LIST, its selector takes none", func(ctx context.Context, run *kepRun, number int) error {
		return takesNone(ctx, run.server(number), metav1.ListOptions{LabelSelector: noObject})
	}},
	// KEP-4988: the page after a continue token, at the apiserver that has not served the first.
	{"page, and the next one at the other apiserver", func(ctx context.Context, run *kepRun, number int) error {
		// Of 500 objects, as kubectl's, or a tenth of them.
		options := metav1.ListOptions{Limit: int64(min(500, run.objects.count/10))}
		for turn := range 2 {
			page, err := run.server(number+turn).client.CoreV1().ConfigMaps(storedNamespace).List(ctx, options)
			if err != nil {
				return err
			}
			if turn == 0 && page.Continue == "" {
				return fmt.Errorf("%d objects and no more", len(page.Items))
			}
			options.Continue = page.Continue
		}
		return nil
	}},
	// KEP-4988: a revision from before the apiservers' start, of which they have no snapshot.
	{"LIST at an old revision, its selector takes none", func(ctx context.Context, run *kepRun, number int) error {
		return takesNone(ctx, run.server(number), metav1.ListOptions{LabelSelector: noObject,
			ResourceVersion: strconv.FormatInt(run.revision, 10), ResourceVersionMatch: metav1.ResourceVersionMatchExact})
	}},
}

func takesNone(ctx context.Context, server *apiserver, options metav1.ListOptions) error {
	list, err := server.client.CoreV1().ConfigMaps(storedNamespace).List(ctx, options)
	if err == nil && len(list.Items) > 0 {
		err = fmt.Errorf("%d objects", len(list.Items))
	}
	return err
}

// TestKEPs is the benchmark of KEP-2340 (consistent reads from cache), with the reads of KEP-4988 (pages and old revisions
// from cache) beside: two apiservers with many small or few large objects, one call a second. It runs only if KUBE_KEPS is
// set, and prints a table; it fails on errors, and if rangecache forwards a read.
func TestKEPs(t *testing.T) {
	if setting(t, "KUBE_KEPS", 0) == 0 {
		t.Skip("a measurement: make bench-keps")
	}
	seconds := setting(t, "KUBE_SECONDS", 4)
	kinds := []string{direct, rangecache}
	if setting(t, "KUBE_GRPC_PROXY", 0) > 0 {
		kinds = []string{direct, grpcProxy, rangecache}
	}
	rows := []string{}
	for _, objects := range []storedObjects{
		{count: setting(t, "KUBE_OBJECTS", 3000), dataBytes: 1000},
		{count: setting(t, "KUBE_LARGE_OBJECTS", 30), dataBytes: 1_000_000},
	} {
		t.Run(fmt.Sprintf("%d bytes", objects.dataBytes), func(t *testing.T) {
			for _, kind := range kinds {
				t.Run(kind, func(t *testing.T) {
					files := newCertificates(t)
					etcd := startEtcd(t, files, "etcd-3.7")
					objects.fill(t, files, etcd)
					front := startFront(t, files, kind, etcd)
					revision := objects.touch(t, files, etcd)
					// The apiservers start at a later revision.
					objects.touch(t, files, etcd)
					for _, flag := range []string{"--watch-cache=true", "--watch-cache=false"} {
						// A test of its own, so that its apiservers stop with it.
						t.Run(flag, func(t *testing.T) {
							run := kepRun{objects: &objects, files: files, etcd: etcd, front: front, flag: flag, revision: revision, seconds: seconds}
							rows = append(rows, run.measure(t)...)
						})
					}
				})
			}
		})
	}
	fmt.Printf("\n| objects | apiservers | etcd is | one call a second | calls/s | CPU of apiservers, etcd, proxy (cores) | p50 / p90 / p99 | sent by etcd |\n"+
		"|---|---|---|---|---|---|---|---|\n%s\n", strings.Join(rows, ""))
}

// kepRun is the measurement of two apiservers with one setting.
type kepRun struct {
	objects  *storedObjects
	files    *certificates
	etcd     *etcdServer
	front    *front
	flag     string
	revision int64
	seconds  int
	servers  []*apiserver
}

// server is the apiserver of a call.
func (r *kepRun) server(number int) *apiserver { return r.servers[number%len(r.servers)] }

func (r *kepRun) measure(t *testing.T) (rows []string) {
	t.Helper()
	for number := range 2 {
		r.servers = append(r.servers, startAPIServer(t, r.files, number+1, r.front.url, r.flag))
	}
	for _, server := range r.servers {
		server.awaitReady(t)
		must(t, "the copies", r.objects.check(t.Context(), server))
	}
	for _, load := range kepLoads {
		rows = append(rows, r.row(t, load))
	}
	processes := []*process{r.etcd.process, r.servers[0].process, r.servers[1].process}
	if r.front.process != nil {
		processes = append(processes, r.front.process)
	}
	for _, p := range processes {
		t.Logf("%s: %d MB resident", p.name, p.residentBytes(t)/1e6)
	}
	return rows
}

func (r *kepRun) row(t *testing.T, load kepLoad) string {
	t.Helper()
	report := openCostReport(t, r.etcd, r.front, r.servers)
	before, begin := r.apiserversCPU(t), time.Now()
	latencies := r.callEverySecond(t, load)
	took := time.Since(begin).Seconds()
	cpu := r.apiserversCPU(t) - before
	report.close(t, r.flag+", "+load.name)
	if r.front.kind == rangecache && load.call != nil {
		report.nothingForwarded(t, 1)
	}
	cores := func(cpu time.Duration) string { return fmt.Sprintf("%.2f", cpu.Seconds()/took) }
	proxy := "–"
	if r.front.process != nil {
		proxy = cores(report.spent.frontCPU)
	}
	quantiles := "–"
	if len(latencies) > 0 {
		slices.Sort(latencies)
		at := func(share float64) string {
			return fmt.Sprintf("%.0f", float64(latencies[int(share*float64(len(latencies)-1)+0.5)].Microseconds())/1000)
		}
		quantiles = fmt.Sprintf("%s / %s / %s ms", at(0.5), at(0.9), at(0.99))
	}
	return fmt.Sprintf("| %d × %d B | %s | %s | %s | %.2f | %s, %s, %s | %s | %.1f MB/s |\n", r.objects.count, r.objects.dataBytes,
		r.flag, r.front.kind, load.name, float64(len(latencies))/took, cores(cpu), cores(report.spent.etcdCPU), proxy, quantiles,
		report.spent.sentBytes/1e6/took)
}

func (r *kepRun) apiserversCPU(t *testing.T) (total time.Duration) {
	t.Helper()
	for _, server := range r.servers {
		total += server.cpuTime(t)
	}
	return total
}

// callEverySecond makes the calls of a load, each when it is due, if one of two callers is free. It returns their latencies
// once all have returned.
func (r *kepRun) callEverySecond(t *testing.T, load kepLoad) (latencies []time.Duration) {
	t.Helper()
	if load.call == nil {
		time.Sleep(time.Duration(r.seconds) * time.Second)
		return nil
	}
	due := make(chan int)
	var mutex sync.Mutex
	var callers sync.WaitGroup
	for range len(r.servers) {
		callers.Go(func() {
			for number := range due {
				begin := time.Now()
				ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
				err := load.call(ctx, r, number)
				cancel()
				mutex.Lock()
				latencies = append(latencies, time.Since(begin))
				mutex.Unlock()
				if err != nil {
					t.Errorf("%s: %v", load.name, err)
				}
			}
		})
	}
	begin := time.Now()
	for number := range r.seconds {
		time.Sleep(time.Until(begin.Add(time.Duration(number) * time.Second)))
		select {
		case due <- number:
		case <-time.After(time.Until(begin.Add(time.Duration(number+1) * time.Second))):
			// Both callers wait for an earlier call: this one is not made.
		}
	}
	time.Sleep(time.Until(begin.Add(time.Duration(r.seconds) * time.Second)))
	close(due)
	callers.Wait()
	return latencies
}
