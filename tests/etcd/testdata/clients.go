//go:build !cluster_proxy

// Package integration: the clients of etcd's integration tests, each behind a rangecache of its own. TestSuite puts
// this file in the place of the one that connects them to etcd.
package integration

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3election/v3electionpb"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3lock/v3lockpb"
)

// ThroughProxy skips what etcd's own proxy cannot do; rangecache has to.
const ThroughProxy = false

// warmWithin bounds the wait for the mirrors: in some tests the cluster has no leader yet, or never.
const warmWithin = 10 * time.Second

// ToGRPC returns the services on the client's connection.
func ToGRPC(c *clientv3.Client) GRPCAPI {
	conn := c.ActiveConnection()
	return GRPCAPI{
		Cluster: pb.NewClusterClient(conn), KV: pb.NewKVClient(conn), Lease: pb.NewLeaseClient(conn),
		Watch: pb.NewWatchClient(conn), Maintenance: pb.NewMaintenanceClient(conn), Auth: pb.NewAuthClient(conn),
		Lock: v3lockpb.NewLockClient(conn), Election: v3electionpb.NewElectionClient(conn),
	}
}

// newClientV3 connects a client to a rangecache in front of its endpoints. TLS is left to the tests of rangecache.
func newClientV3(cfg clientv3.Config) (*clientv3.Client, error) {
	if cfg.TLS != nil {
		return clientv3.New(cfg)
	}
	url, stop, err := startRangecache(cfg.Endpoints)
	if err != nil {
		return nil, err
	}
	cfg.Endpoints = []string{url}
	client, err := clientv3.New(cfg)
	if err != nil {
		stop()
		return nil, err
	}
	client.Watcher = stopping{client.Watcher, stop}
	return client, nil
}

// stopping stops the rangecache of a client that is closed.
type stopping struct {
	clientv3.Watcher
	stop func()
}

func (w stopping) Close() error {
	defer w.stop()
	return w.Watcher.Close()
}

// startRangecache starts one, and returns its URL and what stops it.
func startRangecache(endpoints []string) (string, func(), error) {
	folder, err := os.Getwd()
	if err != nil {
		return "", nil, err
	}
	urls := []string{}
	for _, endpoint := range endpoints {
		if socket, ok := strings.CutPrefix(endpoint, "unix://"); ok {
			endpoint = "unix://" + filepath.Join(folder, socket)
		}
		urls = append(urls, endpoint)
	}
	flags := append(strings.Fields(os.Getenv("UNDER_TEST_FLAGS")),
		"--endpoints", strings.Join(urls, ","), "--log-format", "json",
		"--listen-client-urls", "http://127.0.0.1:0", "--listen-metrics-urls", "http://127.0.0.1:0")
	// A file, because a pipe needs a goroutine, and some tests leave their client open.
	log, err := os.CreateTemp("", "rangecache-log-")
	if err != nil {
		return "", nil, err
	}
	command := exec.Command(os.Getenv("RANGECACHE"), flags...)
	command.Stdout, command.Stderr = log, log
	if err := command.Start(); err != nil {
		return "", nil, err
	}
	serving := map[string]string{}
	for end := time.Now().Add(warmWithin); len(serving) < 2 && time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		text, err := os.ReadFile(log.Name())
		if err != nil {
			return "", nil, err
		}
		for line := range bytes.Lines(text) {
			var logged struct{ Message, URL string }
			if json.Unmarshal(line, &logged) == nil && strings.HasPrefix(logged.Message, "serving ") {
				serving[logged.Message] = logged.URL
			}
		}
	}
	admin := serving["serving metrics"]
	stop := sync.OnceFunc(func() {
		report(admin)
		command.Process.Kill()
		command.Wait()
		log.Close()
		os.Remove(log.Name())
	})
	if len(serving) < 2 {
		stop()
		return "", nil, fmt.Errorf("rangecache before %s does not serve", urls)
	}
	isWarm := func() bool { return isReady(admin) && readsFromMemory(serving["serving clients"], admin) }
	for end := time.Now().Add(warmWithin); time.Now().Before(end) && !isWarm(); {
		time.Sleep(10 * time.Millisecond)
	}
	return serving["serving clients"], stop, nil
}

// client has no connections that stay open: etcd's tests look for leaks.
var client = http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Second}

func isReady(admin string) bool {
	response, err := client.Get(admin + "/readyz")
	if err != nil {
		return false
	}
	response.Body.Close()
	return response.StatusCode == http.StatusOK
}

// readsFromMemory reads, and returns whether memory has answered: the first check of a new cluster fails when its leader is
// elected, and what waits for that check is served by etcd.
func readsFromMemory(url, admin string) bool {
	response, err := client.Post(url+"/v3/kv/range", "application/json", strings.NewReader(`{"key":"YQ=="}`))
	if err != nil {
		return false
	}
	response.Body.Close()
	fromMemory := false
	eachSample(admin, `rangecache_range_total{outcome="`, func(sample string) {
		isAnswer := strings.HasPrefix(sample, `hit"`) || strings.HasPrefix(sample, `waited"`)
		fromMemory = fromMemory || (isAnswer && !strings.HasSuffix(sample, " 0"))
	})
	return fromMemory
}

// report appends the watches that rangecache has created to the file that run names.
func report(admin string) {
	file, err := os.OpenFile(os.Getenv("UNDER_TEST_REPORT"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return
	}
	defer file.Close()
	const name = "rangecache_watch_created_total{"
	eachSample(admin, name, func(sample string) { fmt.Fprintln(file, name+sample) })
}

// eachSample calls use with what follows prefix in each of the metrics that begin with it.
func eachSample(admin, prefix string, use func(string)) {
	response, err := client.Get(admin + "/metrics")
	if err != nil {
		return
	}
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		if sample, ok := strings.CutPrefix(lines.Text(), prefix); ok {
			use(sample)
		}
	}
}
