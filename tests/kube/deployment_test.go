package kube

import (
	"testing"
	"time"
)

// deployment is how many rangecaches are between apiservers and etcd, and where.
type deployment struct {
	name   string
	fronts int // 0: the apiservers call etcd itself
	hub    bool
}

const deployedServers = 3

var (
	noRangecache   = deployment{name: "none"}
	sidecars       = deployment{name: "a sidecar each", fronts: deployedServers}
	oneShared      = deployment{name: "one shared", fronts: 1}
	leavesAndHub   = deployment{name: "leaves behind a hub", fronts: deployedServers, hub: true}
	allDeployments = []deployment{noRangecache, sidecars, oneShared, leavesAndHub}
)

// deployed is a deployment that runs. Its costs are those of etcd and of all rangecaches together.
type deployed struct {
	name    string
	files   *certificates
	etcd    *etcdServer
	fronts  []*front // what the apiservers call
	hubs    []*front
	servers []*apiserver
}

func (d deployment) start(t *testing.T, files *certificates, etcd *etcdServer) *deployed {
	t.Helper()
	run := &deployed{name: d.name, files: files, etcd: etcd}
	behind := etcd.url
	if d.hub {
		run.hubs = append(run.hubs, startProxy(t, files, rangecache, behind))
		behind = run.hubs[0].url
	}
	for range d.fronts {
		run.fronts = append(run.fronts, startProxy(t, files, rangecache, behind))
	}
	if d.fronts == 0 {
		run.fronts = append(run.fronts, startFront(t, files, direct, etcd))
	}
	return run
}

// startServers starts the apiservers at once and waits until all serve.
func (d *deployed) startServers(t *testing.T, flags ...string) {
	t.Helper()
	for number := range deployedServers {
		d.servers = append(d.servers, startAPIServer(t, d.files, number+1, d.fronts[number%len(d.fronts)].url, flags...))
	}
	for _, server := range d.servers {
		server.awaitReady(t)
	}
}

func (d *deployed) stopServers() {
	together(len(d.servers), func(number int) { d.servers[number].stop() })
	d.servers = nil
}

// processes returns etcd and the rangecaches.
func (d *deployed) processes() []*process {
	all := []*process{d.etcd.process}
	for _, front := range append(d.fronts, d.hubs...) {
		if front.process != nil {
			all = append(all, front.process)
		}
	}
	return all
}

// spending is what etcd and the rangecaches used in a period.
type spending struct {
	took   time.Duration
	cpu    time.Duration
	peak   float64 // of their resident memory together, in MB
	sentMB float64 // by etcd
}

// spend measures what a piece of work costs.
func (d *deployed) spend(t *testing.T, what string, work func()) spending {
	t.Helper()
	report := openCostReport(t, d.etcd, d.fronts[0], nil, append(d.fronts[1:len(d.fronts):len(d.fronts)], d.hubs...)...)
	peak := watchMemory(t, d.processes())
	work()
	took := time.Since(report.before.at)
	report.close(t, d.name+", "+what)
	return spending{took: took, cpu: report.spent.etcdCPU + report.spent.frontCPU, peak: peak(), sentMB: report.spent.sentBytes / 1e6}
}

// watchMemory looks at the resident memory of processes until the function that it returns is called, which returns the
// highest sum, in MB.
func watchMemory(t *testing.T, processes []*process) func() float64 {
	stop, result := make(chan struct{}), make(chan float64)
	go func() {
		peak := 0.0
		for {
			sum := 0
			for _, p := range processes {
				sum += p.residentBytes(t)
			}
			peak = max(peak, float64(sum)/1e6)
			select {
			case <-stop:
				result <- peak
				return
			case <-time.After(50 * time.Millisecond):
			}
		}
	}()
	return func() float64 {
		close(stop)
		return <-result
	}
}

// residentMB returns the resident memory of the apiservers.
func (d *deployed) residentMB(t *testing.T) (sum float64) {
	t.Helper()
	for _, server := range d.servers {
		sum += float64(server.residentBytes(t)) / 1e6
	}
	return sum
}
