package chart

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"rangecache.test/shared"
)

// pki is a folder with certificates under kubeadm's file names for etcd.
type pki struct {
	folder string
	ca     *x509.Certificate
	key    *ecdsa.PrivateKey
	serial int64
}

func newPki(t *testing.T) *pki {
	p := &pki{folder: t.TempDir()}
	p.issue(t, "ca", "etcd-ca")
	return p
}

// issue creates a certificate for 127.0.0.1; the first one signs the others.
func (p *pki) issue(t *testing.T, name, commonName string, usage ...x509.ExtKeyUsage) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, name, err)
	p.serial++
	certificate := &x509.Certificate{
		SerialNumber: big.NewInt(p.serial),
		Subject:      pkix.Name{CommonName: commonName},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(90 * 24 * time.Hour),
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
		DNSNames:     []string{"localhost"},
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  usage,
	}
	if p.ca == nil {
		certificate.IsCA, certificate.BasicConstraintsValid = true, true
		certificate.KeyUsage, certificate.ExtKeyUsage, certificate.IPAddresses = x509.KeyUsageCertSign, nil, nil
		p.ca, p.key = certificate, key
	}
	der, err := x509.CreateCertificate(rand.Reader, certificate, p.ca, &key.PublicKey, p.key)
	must(t, name, err)
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	must(t, name, err)
	for file, block := range map[string]*pem.Block{".crt": {Type: "CERTIFICATE", Bytes: der}, ".key": {Type: "PRIVATE KEY", Bytes: secret}} {
		must(t, name, os.WriteFile(filepath.Join(p.folder, name+file), pem.EncodeToMemory(block), 0o600))
	}
}

func (p *pki) file(name string) string { return filepath.Join(p.folder, name) }

// TestStaticPodServesBesideKubeadm installs the static pod on certificates like kubeadm's by the installer's own arguments, with
// updates that must fail and one that must not: an apiserver's certificate is accepted, and no other client.
func TestStaticPodServesBesideKubeadm(t *testing.T) {
	certificates := newPki(t)
	certificates.issue(t, "server", "node", x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth)
	certificates.issue(t, "healthcheck-client", "kube-etcd-healthcheck-client", x509.ExtKeyUsageClientAuth)
	certificates.issue(t, "apiserver-etcd-client", "kube-apiserver-etcd-client", x509.ExtKeyUsageClientAuth)

	etcd, peer, clients, metrics := shared.FreePort(t), shared.FreePort(t), shared.FreePort(t), shared.FreePort(t)
	etcdURL, peerURL := fmt.Sprintf("https://127.0.0.1:%d", etcd), fmt.Sprintf("http://127.0.0.1:%d", peer)
	start(t, tools+"/etcd-3.7", "--data-dir", t.TempDir(), "--log-level", "error",
		"--listen-client-urls", etcdURL, "--advertise-client-urls", etcdURL,
		"--listen-peer-urls", peerURL, "--initial-advertise-peer-urls", peerURL, "--initial-cluster", "default="+peerURL,
		"--cert-file", certificates.file("server.crt"), "--key-file", certificates.file("server.key"),
		"--trusted-ca-file", certificates.file("ca.crt"), "--client-cert-auth")

	values := []string{"--set", "mode=static-pod", "--set", "etcd.endpoints={" + etcdURL + "}",
		"--set", fmt.Sprintf("listener.port=%d,metrics.port=%d", clients, metrics)}
	node := newNode(t, certificates)
	if out, err := node.install(t, values, "1"); err != nil || !strings.Contains(out, "the pod is ready") {
		t.Fatalf("%v: %s", err, out)
	}
	if out, err := node.install(t, values, "2"); err != nil || !strings.Contains(out, "there already") {
		t.Errorf("an equal manifest: %v: %s", err, out)
	}
	before := node.manifest(t)
	// etcd refuses these flags, so that the running pod stays.
	wrong := append(slices.Clone(values), "--set", fmt.Sprintf("etcd.endpoints={https://127.0.0.1:%d}", shared.FreePort(t)))
	if out, err := node.install(t, wrong, "3"); err == nil || !strings.Contains(out, "the check of the flags failed") || node.manifest(t) != before {
		t.Errorf("no etcd: %v: %s", err, out)
	}
	// The check does not see that the image is missing, so that its pod never becomes ready.
	missing := append(slices.Clone(values), "--set", "image.tag=missing")
	if out, err := node.install(t, missing, "4", "--ready-timeout=4s"); err == nil || !strings.Contains(out, "the one before it is in use") || node.manifest(t) != before {
		t.Errorf("no image: %v: %s", err, out)
	}
	if out, err := node.install(t, missing, "4"); err == nil || !strings.Contains(out, "before; change it") || node.manifest(t) != before {
		t.Errorf("the same attempt: %v: %s", err, out)
	}
	changed := append(slices.Clone(values), "--set", "log.level=warn")
	if out, err := node.install(t, changed, "5"); err != nil || !strings.Contains(node.manifest(t), "--log-level=warn") {
		t.Errorf("a change: %v: %s", err, out)
	}
	if names := node.names(t); len(names) != 1 {
		t.Errorf("the folder has %q", names)
	}
	node.awaitAlone(t)
	awaitReady(t, fmt.Sprintf("http://127.0.0.1:%d", metrics))

	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	etcdctl := func(words ...string) (string, error) {
		words = append([]string{"--endpoints", fmt.Sprintf("https://127.0.0.1:%d", clients), "--cacert", certificates.file("ca.crt"), "--command-timeout", "5s"}, words...)
		out, err := exec.CommandContext(ctx, tools+"/etcdctl", words...).CombinedOutput()
		return string(out), err
	}
	apiserver := []string{"--cert", certificates.file("apiserver-etcd-client.crt"), "--key", certificates.file("apiserver-etcd-client.key")}
	for _, words := range [][]string{{"put", "/registry/a", "b"}, {"get", "/registry/a"}} {
		out, err := etcdctl(append(apiserver, words...)...)
		must(t, out, err)
	}
	if out, err := etcdctl("get", "/registry/a"); err == nil {
		t.Errorf("a client without a certificate can read %q", out)
	}
	manifest := filepath.Join(node.folder, "kube-apiserver.yaml")
	must(t, manifest, os.WriteFile(manifest, fmt.Appendf(nil, "kind: List # --etcd-servers=https://127.0.0.1:%d\n", clients), 0o600))
	for _, going := range [][]string{
		append(slices.Clone(values), "--set", "staticPod.state=absent"),
		append(slices.Clone(changed), "--set", fmt.Sprintf("listener.port=%d", shared.FreePort(t))),
	} {
		if out, err := node.install(t, going, "6"); err == nil || !strings.Contains(out, "would lose its etcd") {
			t.Errorf("%q while an apiserver uses it: %v: %s", going, err, out)
		}
	}
	text, status, err := get(fmt.Sprintf("http://127.0.0.1:%d/metrics", metrics))
	must(t, "metrics", err)
	// It may have waited for the event of the put.
	fromMemory := regexp.MustCompile(`rangecache_range_total\{outcome="(hit|waited)",reason="linearizable"\} 1`)
	if status != http.StatusOK || !fromMemory.MatchString(text) {
		t.Errorf("the read did not come from memory:\n%s", text)
	}
	must(t, manifest, os.Remove(manifest))
	if out, err := node.install(t, append(values, "--set", "staticPod.state=absent"), "7"); err != nil || len(node.names(t)) != 0 {
		t.Errorf("%v: %s, and the folder has %q", err, out, node.names(t))
	}
}
