package kube

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"rangecache.test/shared"
)

// Servers between the apiservers and etcd.
const (
	direct     = "etcd itself"
	grpcProxy  = "grpc-proxy"
	rangecache = "rangecache"
)

// etcdServer is one member that requires client certificates.
type etcdServer struct {
	*process
	url, metrics string
}

func startEtcd(t *testing.T, files *certificates, version string) *etcdServer {
	t.Helper()
	clients, peers, metrics := shared.FreePort(t), shared.FreePort(t), shared.FreePort(t)
	peer := fmt.Sprintf("http://127.0.0.1:%d", peers)
	e := &etcdServer{
		url:     fmt.Sprintf("https://127.0.0.1:%d", clients),
		metrics: fmt.Sprintf("http://127.0.0.1:%d", metrics),
	}
	e.process = newProcess(t, "etcd", tools+"/"+version, "--data-dir", t.TempDir(), "--log-level", "error",
		"--listen-client-urls", e.url, "--advertise-client-urls", e.url, "--listen-metrics-urls", e.metrics,
		"--cert-file", files.serverCert, "--key-file", files.serverKey, "--trusted-ca-file", files.ca, "--client-cert-auth",
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default="+peer)
	e.awaitStatus(t, http.DefaultClient, e.metrics+"/health")
	return e
}

func (e *etcdServer) scrape(t *testing.T) samples {
	return scrape(t, http.DefaultClient, e.metrics+"/metrics")
}

// front is the server that the apiservers use as etcd: etcd itself, or a proxy in front of it.
type front struct {
	*process // nil where it is etcd itself
	kind     string
	url      string
	metrics  string // rangecache's
}

// startFront starts it. With KUBE_TIERS=2 another rangecache is between rangecache and etcd, its hub.
func startFront(t *testing.T, files *certificates, kind string, etcd *etcdServer, flags ...string) *front {
	t.Helper()
	if kind == direct {
		return &front{kind: kind, url: etcd.url}
	}
	behind := etcd.url
	if kind == rangecache && os.Getenv("KUBE_TIERS") == "2" {
		hub := startProxy(t, files, kind, etcd.url, flags...)
		behind = hub.url
	}
	return startProxy(t, files, kind, behind, flags...)
}

// startProxy starts a proxy in front of an endpoint.
func startProxy(t *testing.T, files *certificates, kind, behind string, flags ...string) *front {
	t.Helper()
	listener, metrics := shared.FreePort(t), shared.FreePort(t)
	f := &front{kind: kind, url: fmt.Sprintf("https://127.0.0.1:%d", listener), metrics: fmt.Sprintf("http://127.0.0.1:%d", metrics)}
	both := []string{"--endpoints", behind, "--cacert", files.ca, "--cert", files.clientCert, "--key", files.clientKey,
		"--cert-file", files.serverCert, "--key-file", files.serverKey, "--trusted-ca-file", files.ca}
	if kind == grpcProxy {
		f.process = newProcess(t, kind, tools+"/etcd-3.7", append([]string{"grpc-proxy", "start",
			"--listen-addr", strings.TrimPrefix(f.url, "https://"), "--advertise-client-url", strings.TrimPrefix(f.url, "https://"),
			"--metrics-addr", f.metrics, "--data-dir", t.TempDir()}, both...)...)
		f.awaitStatus(t, http.DefaultClient, f.metrics+"/health")
		return f
	}
	f.process = newProcess(t, kind, rangecacheBinary(), append([]string{"--listen-client-urls", f.url, "--client-cert-auth",
		"--listen-metrics-urls", f.metrics, "--log-format", "text",
		// Long enough for a machine that stalls for seconds: reads then wait for their quorum check.
		"--freshness-timeout", "1m"}, append(both, flags...)...)...)
	f.awaitWarm(t)
	return f
}

// awaitWarm waits until every mirror of a rangecache is in service.
func (f *front) awaitWarm(t *testing.T) {
	t.Helper()
	f.awaitStatus(t, http.DefaultClient, f.metrics+"/readyz")
}

func (f *front) scrape(t *testing.T) samples {
	return scrape(t, http.DefaultClient, f.metrics+"/metrics")
}

// apiserver is a real kube-apiserver with a client.
type apiserver struct {
	*process
	url    string
	config *rest.Config
	client *kubernetes.Clientset
	http   *http.Client
}

// startAPIServer starts one without waiting until it serves. Two of them need different numbers.
func startAPIServer(t *testing.T, files *certificates, number int, etcdURL string, flags ...string) *apiserver {
	t.Helper()
	port := shared.FreePort(t)
	a := &apiserver{url: fmt.Sprintf("https://127.0.0.1:%d", port)}
	a.config = &rest.Config{
		Host:            a.url,
		BearerToken:     token,
		TLSClientConfig: rest.TLSClientConfig{CAFile: files.ca},
		QPS:             -1, // no limit of the client's own
		ContentConfig:   rest.ContentConfig{ContentType: "application/vnd.kubernetes.protobuf", AcceptContentTypes: "application/vnd.kubernetes.protobuf,application/json"},
	}
	var err error
	a.client, err = kubernetes.NewForConfig(a.config)
	must(t, "a client", err)
	pem, err := os.ReadFile(files.ca)
	must(t, files.ca, err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	a.http = &http.Client{Transport: bearer{&http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}}}
	a.process = newProcess(t, fmt.Sprintf("kube-apiserver-%d", number), tools+"/kube-apiserver", append([]string{
		"--etcd-servers", etcdURL, "--etcd-cafile", files.ca, "--etcd-certfile", files.clientCert, "--etcd-keyfile", files.clientKey,
		"--bind-address", "127.0.0.1", "--secure-port", fmt.Sprint(port),
		// An address that is not called; without it the apiserver searches the machine's interfaces.
		"--advertise-address", fmt.Sprintf("192.0.2.%d", number),
		"--tls-cert-file", files.serverCert, "--tls-private-key-file", files.serverKey, "--cert-dir", t.TempDir(),
		"--service-account-issuer", "https://kubernetes.default.svc", "--service-account-key-file", files.serviceAccountKey,
		"--service-account-signing-key-file", files.serviceAccountKey, "--service-cluster-ip-range", "10.0.0.0/24",
		"--token-auth-file", files.tokens, "--authorization-mode", "RBAC",
		// Logs the loss of RangeStream.
		"--vmodule", "store=4,watcher=4"}, flags...)...)
	return a
}

func (a *apiserver) awaitReady(t *testing.T) {
	t.Helper()
	a.awaitStatus(t, a.http, a.url+"/readyz")
}

func (a *apiserver) scrape(t *testing.T) samples { return scrape(t, a.http, a.url+"/metrics") }

// gaveUpStreams returns whether the apiserver has switched RangeStream off, which it does for ten minutes after any
// Unimplemented.
func (a *apiserver) gaveUpStreams() bool {
	return strings.Contains(a.log(), "does not support RangeStream")
}

// bearer adds the user's token to requests.
type bearer struct{ next http.RoundTripper }

func (b bearer) RoundTrip(request *http.Request) (*http.Response, error) {
	request = request.Clone(request.Context())
	request.Header.Set("Authorization", "Bearer "+token)
	return b.next.RoundTrip(request)
}

// restart stops the apiserver and starts it again at once.
func (a *apiserver) restart(t *testing.T, violently bool, flags ...string) {
	t.Helper()
	if violently {
		a.kill()
	} else {
		a.stop()
	}
	a.args = append(a.args, flags...)
	a.start(t)
}
