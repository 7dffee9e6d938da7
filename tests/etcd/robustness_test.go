package etcd

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/tests/v3/robustness/client"
	"go.etcd.io/etcd/tests/v3/robustness/identity"
	"go.etcd.io/etcd/tests/v3/robustness/report"
	"go.etcd.io/etcd/tests/v3/robustness/traffic"
	"go.etcd.io/etcd/tests/v3/robustness/validate"
	"go.uber.org/zap"
	"golang.org/x/time/rate"

	"rangecache.test/shared"
)

const (
	// Traffic before, between and after the faults.
	calm = 5 * time.Second
	// down is how long a killed member stays away.
	down    = 2 * time.Second
	members = 3
	// startTimeout bounds the start of a server, and validateTimeout that of the linearizability check.
	startTimeout    = time.Minute
	validateTimeout = 5 * time.Minute
)

// TestRobustness lets etcd's robustness traffic run through three rangecaches, while a member and a rangecache are
// killed, and has etcd's own validation judge what its clients saw, by what the members wrote to their logs.
func TestRobustness(t *testing.T) {
	for name, load := range map[string]traffic.Traffic{
		"etcd":       traffic.EtcdPutDeleteLease,
		"kubernetes": traffic.Kubernetes,
	} {
		t.Run(name, func(t *testing.T) { robust(t, load) })
	}
}

func robust(t *testing.T, load traffic.Traffic) {
	etcds, proxies := startCluster(t)
	var endpoints []string
	for _, proxy := range proxies {
		endpoints = append(endpoints, proxy.url)
	}
	ids, began := identity.NewIDProvider(), time.Now()
	clients, watchers := client.NewSet(ids, began), client.NewSet(ids, began)
	defer clients.Close()
	defer watchers.Close()
	lg := zap.NewNop()
	must(t, traffic.CheckEmptyDatabaseAtStart(t.Context(), lg, endpoints, clients))

	newest := make(chan int64, 1)
	watched := make(chan error, 1)
	go func() {
		watched <- client.CollectClusterWatchEvents(t.Context(), client.CollectClusterWatchEventsParam{
			Lg: lg, Endpoints: endpoints, MaxRevisionChan: newest, ClientSet: watchers,
		})
	}()
	drive(t, load, endpoints, clients, func() {
		time.Sleep(calm)
		etcds[1].kill(t)
		time.Sleep(down)
		etcds[1].start(t)
		time.Sleep(calm)
		proxies[0].kill(t)
		proxies[0].start(t)
		time.Sleep(calm)
	})
	newest <- report.OperationsMaxRevision(clients.Reports())
	must(t, <-watched)

	reports := slices.Concat(clients.Reports(), watchers.Reports())
	var folders []string
	for _, etcd := range etcds {
		etcd.kill(t)
		folders = append(folders, etcd.folder)
	}
	written, err := report.PersistedRequests(lg, folders)
	must(t, err)
	result := validate.ValidateAndReturnVisualize(lg,
		validate.Config{ExpectRevisionUnique: load.ExpectUniqueRevision()}, reports, written, validateTimeout)
	if err := result.Error(); err != nil {
		t.Errorf("etcd's validation: %v", err)
	}
	for what, judged := range map[string]validate.Result{
		"linearization": result.Linearization.Result, "watches": result.Watch, "serializable reads": result.Serializable,
	} {
		if judged.Status != validate.Success {
			t.Errorf("%s were not judged: %v", what, judged)
		}
	}
	calls, events := 0, 0
	for _, one := range reports {
		calls += len(one.KeyValue)
		for _, watch := range one.Watch {
			for _, response := range watch.Responses {
				events += len(response.Events)
			}
		}
	}
	memory := 0
	for _, proxy := range proxies {
		memory += proxy.fromMemory(t)
	}
	if calls < 1000 || events < 1000 || memory == 0 {
		t.Errorf("%d calls, %d events and %d watches from memory are too few to judge by", calls, events, memory)
	}
	t.Logf("%d calls, %d requests in the logs, %d events; %d watches from memory", calls, len(written), events, memory)
}

// drive runs the traffic until faults returns, and one write after it.
func drive(t *testing.T, load traffic.Traffic, endpoints []string, clients *client.ClientSet, faults func()) {
	t.Helper()
	profile, watch, finish := traffic.KeyValueMedium, traffic.WatchDefault, make(chan struct{})
	limiter := rate.NewLimiter(rate.Limit(profile.MaximalQPS), profile.BurstableQPS)
	keys, storage := traffic.NewKeyStore(10, "key"), traffic.NewKubernetesStorage()
	var running sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	must(t, traffic.SimulateKeyValueTraffic(ctx, &running, &profile, endpoints, clients, load, traffic.RunTrafficLoopParam{
		QPSLimiter:                         limiter,
		IDs:                                clients.IdentityProvider(),
		LeaseIDStorage:                     identity.NewLeaseIDStorage(),
		NonUniqueRequestConcurrencyLimiter: traffic.NewConcurrencyLimiter(profile.MaxNonUniqueRequestConcurrency),
		KeyStore:                           keys,
		Storage:                            storage,
		Finish:                             finish,
	}))
	must(t, traffic.SimulateWatchTraffic(ctx, &running, &watch, endpoints, clients, load, traffic.RunWatchLoopParam{
		Config: watch, QPSLimiter: limiter, KeyStore: keys, Storage: storage, Finish: finish, Logger: zap.NewNop(),
	}))
	must(t, traffic.SimulateCompactionTraffic(ctx, &running, &traffic.CompactionDefault, endpoints, clients, load,
		traffic.RunCompactLoopParam{Period: traffic.CompactionDefault.Period, Finish: finish}))
	faults()
	close(finish)
	running.Wait()
	last, err := clients.NewClient(endpoints)
	must(t, err)
	defer last.Close()
	put, stop := context.WithTimeout(t.Context(), startTimeout)
	defer stop()
	_, err = last.Put(put, "tombstone", "true")
	must(t, err)
}

// server is a member of etcd or a rangecache, which can be killed and started again.
type server struct {
	program      string
	args         []string
	url, metrics string
	// folder is a member's data directory.
	folder  string
	running *exec.Cmd
}

func startCluster(t *testing.T) (etcds, proxies []*server) {
	t.Helper()
	root, err := filepath.Abs("../..")
	must(t, err)
	url := func() string { return fmt.Sprintf("http://127.0.0.1:%d", shared.FreePort(t)) }
	var peers, cluster, urls []string
	for n := range members {
		peers = append(peers, url())
		cluster = append(cluster, fmt.Sprintf("m%d=%s", n, peers[n]))
	}
	for n := range members {
		e := &server{program: filepath.Join(root, "target/tools/etcd-3.7"), url: url(), folder: t.TempDir()}
		e.metrics = e.url + "/health"
		e.args = []string{"--name", fmt.Sprintf("m%d", n), "--data-dir", e.folder, "--log-level", "error",
			"--listen-client-urls", e.url, "--advertise-client-urls", e.url, "--listen-peer-urls", peers[n],
			"--initial-advertise-peer-urls", peers[n], "--initial-cluster", strings.Join(cluster, ",")}
		etcds, urls = append(etcds, e), append(urls, e.url)
		e.begin(t)
	}
	for _, e := range etcds {
		e.awaits(t)
	}
	program := os.Getenv("RANGECACHE")
	if program == "" {
		program = filepath.Join(root, "target/debug/rangecache")
	}
	for range members {
		p := &server{program: program, url: url()}
		metrics := url()
		p.metrics = metrics + "/readyz"
		p.args = []string{"--endpoints", strings.Join(urls, ","), "--listen-client-urls", p.url, "--listen-metrics-urls", metrics}
		proxies = append(proxies, p)
		p.start(t)
	}
	return etcds, proxies
}

func (s *server) begin(t *testing.T) {
	t.Helper()
	command := exec.Command(s.program, s.args...)
	must(t, command.Start())
	s.running = command
	t.Cleanup(func() {
		_ = command.Process.Kill()
		_ = command.Wait()
	})
}

func (s *server) start(t *testing.T) {
	t.Helper()
	s.begin(t)
	s.awaits(t)
}

func (s *server) kill(t *testing.T) {
	t.Helper()
	must(t, s.running.Process.Kill())
	_ = s.running.Wait()
}

// awaits waits until the server serves.
func (s *server) awaits(t *testing.T) {
	t.Helper()
	for end := time.Now().Add(startTimeout); ; time.Sleep(20 * time.Millisecond) {
		response, err := http.Get(s.metrics)
		if err == nil {
			_ = response.Body.Close()
			if response.StatusCode == http.StatusOK {
				return
			}
		}
		if time.Now().After(end) {
			t.Fatalf("%s does not serve: %v", s.program, err)
		}
	}
}

// fromMemory is the number of watches that this rangecache has served from memory since its start.
func (s *server) fromMemory(t *testing.T) (watches int) {
	t.Helper()
	response, err := http.Get(strings.Replace(s.metrics, "/readyz", "/metrics", 1))
	must(t, err)
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		if sample, number, _ := strings.Cut(lines.Text(), "} "); strings.HasPrefix(sample, `rangecache_watch_created_total{outcome="memory"`) {
			count, err := strconv.Atoi(number)
			must(t, err)
			watches += count
		}
	}
	return watches
}
