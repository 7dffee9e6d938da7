package kube

import (
	"strings"
	"testing"
	"time"
)

// costReport is the cost of a period: calls by caller, outcomes of rangecache, CPU time.
type costReport struct {
	etcd     *etcdServer
	front    *front
	others   []*front // other rangecaches between the apiservers and etcd, whose cost counts as the front's
	servers  []*apiserver
	before   reading
	spent    reading
	calls    map[string]float64 // etcd's, by method
	failures map[string]float64 // etcd's, by method and code, but for those that callers ended
	asked    map[string]float64 // the apiservers', by operation
	outcomes map[string]float64 // rangecache's, by call, outcome and reason
}

type reading struct {
	etcd, front, apiserver samples
	etcdCPU, frontCPU      time.Duration
	sentBytes              float64
	at                     time.Time
}

func openCostReport(t *testing.T, etcd *etcdServer, front *front, servers []*apiserver, others ...*front) *costReport {
	t.Helper()
	l := &costReport{etcd: etcd, front: front, others: others, servers: servers}
	l.before = l.read(t)
	return l
}

func (l *costReport) read(t *testing.T) reading {
	t.Helper()
	r := reading{at: time.Now(), etcdCPU: l.etcd.cpuTime(t), etcd: l.etcd.scrape(t)}
	for _, front := range append(l.others, l.front) {
		if front.process != nil {
			r.frontCPU += front.cpuTime(t)
			r.front = append(r.front, front.scrape(t)...)
		}
	}
	for _, server := range l.servers {
		r.apiserver = append(r.apiserver, server.scrape(t)...)
	}
	r.sentBytes = r.etcd.sum("etcd_network_client_grpc_sent_bytes_total")
	return r
}

// outcomes returns rangecache's counts of Range calls by call, outcome and reason.
func (r reading) outcomes() map[string]float64 {
	all := r.front.by("rangecache_range_total", "outcome", "reason")
	for key, value := range r.front.by("rangecache_range_stream_total", "outcome", "reason") {
		all["stream "+key] = value
	}
	return all
}

func (r reading) failures() map[string]float64 {
	all := r.etcd.by("grpc_server_handled_total", "grpc_method", "grpc_code")
	for key := range all {
		if strings.HasSuffix(key, " OK") || strings.HasSuffix(key, " Canceled") {
			delete(all, key)
		}
	}
	return all
}

func (l *costReport) close(t *testing.T, what string) {
	t.Helper()
	now := l.read(t)
	l.spent = reading{
		etcdCPU:   now.etcdCPU - l.before.etcdCPU,
		frontCPU:  now.frontCPU - l.before.frontCPU,
		sentBytes: now.sentBytes - l.before.sentBytes,
	}
	l.calls = grown(l.before.etcd.by("grpc_server_started_total", "grpc_method"), now.etcd.by("grpc_server_started_total", "grpc_method"))
	l.calls["messages on watches"] = now.etcd.sum("grpc_server_msg_received_total", "grpc_method", "Watch") - l.before.etcd.sum("grpc_server_msg_received_total", "grpc_method", "Watch")
	l.failures = grown(l.before.failures(), now.failures())
	l.asked = grown(l.before.apiserver.by("etcd_requests_total", "operation"), now.apiserver.by("etcd_requests_total", "operation"))
	l.outcomes = grown(l.before.outcomes(), now.outcomes())
	t.Logf("%s, %s, %.1f s:\n  the apiservers called: %s\n  etcd was called: %s\n  failed calls: %s\n  etcd used %v of CPU and sent %.1f MB; the server in front of it used %v\n  rangecache: %s",
		l.front.kind, what, now.at.Sub(l.before.at).Seconds(), listed(l.asked), listed(l.calls), listed(l.failures),
		l.spent.etcdCPU, l.spent.sentBytes/1e6, l.spent.frontCPU, listed(l.outcomes))
}

// fromMemory returns the share of Range calls that rangecache answered from memory, and the number of all.
func (l *costReport) fromMemory() (share, all float64) {
	memory := 0.0
	for key, count := range l.outcomes {
		all += count
		if key = strings.TrimPrefix(key, "stream "); strings.HasPrefix(key, "hit ") || strings.HasPrefix(key, "waited ") {
			memory += count
		}
	}
	return memory / all, all
}

// nothingForwarded checks that a warm rangecache answered every Range from memory, and that there were at least as
// many as expected.
func (l *costReport) nothingForwarded(t *testing.T, atLeast float64) {
	t.Helper()
	share, all := l.fromMemory()
	if share < 1 || all < atLeast {
		t.Errorf("of %.0f Ranges the share from memory is %.4f: %s", all, share, listed(l.outcomes))
	}
}
