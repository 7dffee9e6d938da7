package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const (
	refusedObject = "object"
	refusedPath   = "/api/v1/namespaces/default/configmaps"
)

// TestRefusedCalls has rangecache refuse the calls of an apiserver at its bounds. The apiserver's clients get a 500, which
// client-go does not repeat, and a 429, which it does, of a watch cache that the apiserver could not load.
func TestRefusedCalls(t *testing.T) {
	files := newCertificates(t)
	etcd := startEtcd(t, files, "etcd-3.7")
	flagsFile := filepath.Join(t.TempDir(), "flags")
	must(t, flagsFile, os.WriteFile(flagsFile, nil, 0o600))
	front := startFront(t, files, rangecache, etcd, "--flags-file", flagsFile)
	server := startAPIServer(t, files, 1, front.url)
	server.awaitReady(t)
	_, err := server.client.CoreV1().ConfigMaps("default").Create(t.Context(), object(refusedObject), metav1.CreateOptions{})
	must(t, "creating", err)

	// The apiserver's watches alone are more.
	front.reload(t, flagsFile, "RANGECACHE_MAX_CALLS=1")
	server.expectRefused(t, "Unavailable", "too many calls are in flight")

	front.reload(t, flagsFile, "RANGECACHE_WHEN_BEHIND=fail")
	etcd.kill()
	server.expectRefused(t, "Unavailable", "the mirror is behind etcd")
	server.restart(t, true)
	server.expectNotInitialized(t)
	etcd.start(t)
	front.awaitWarm(t)
	awaitServing(t, server)

	front.stop()
	front.args = append(front.args, "--buffer-max-bytes", "16KiB") // room for no call
	front.start(t)
	front.awaitWarm(t)
	server.expectRefused(t, "ResourceExhausted", "requests and responses in flight take too much memory")
}

// reload has a rangecache read its file of flags with this line in it.
func (f *front) reload(t *testing.T, flagsFile, line string) {
	t.Helper()
	must(t, flagsFile, os.WriteFile(flagsFile, []byte(line+"\n"), 0o600))
	response, err := http.Post(f.metrics+"/reload", "", nil)
	must(t, "reloading", err)
	defer response.Body.Close()
	if body, _ := io.ReadAll(response.Body); response.StatusCode != http.StatusOK {
		t.Fatalf("reloading %s: %d: %s", line, response.StatusCode, body)
	}
}

// expectRefused expects a 500 without a hint for each request that is not answered from the watch cache alone; for reads,
// because of this text.
func (a *apiserver) expectRefused(t *testing.T, code, text string) {
	t.Helper()
	const changed = `{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "` + refusedObject + `"}}`
	// A write goes past memory, and is refused for another reason while etcd is down.
	refusal := "code = " + code + " desc = rangecache: "
	for _, request := range []struct{ method, path, body, message string }{
		{http.MethodGet, "/" + refusedObject, "", refusal + text},
		{http.MethodGet, "", "", refusal + text},
		{http.MethodPut, "/" + refusedObject, changed, refusal},
	} {
		status, header, err := a.ask(t.Context(), request.method, request.path, request.body)
		must(t, request.method+" "+request.path, err)
		if status.Code != http.StatusInternalServerError || status.Reason != metav1.StatusReasonUnknown || status.Details != nil ||
			len(header.Values("Retry-After")) > 0 || !strings.Contains(status.Message, request.message) {
			t.Errorf("%+v: got %+v with %v", request, status, header)
		}
	}
	if status, _, err := a.ask(t.Context(), http.MethodGet, "?resourceVersion=0", ""); err != nil || status.Code != 0 {
		t.Errorf("the watch cache alone does not answer: %+v, %v", status, err)
	}
	requests := a.requestsFor(t, func(client *kubernetes.Clientset) error {
		_, err := client.CoreV1().ConfigMaps("default").Get(t.Context(), refusedObject, metav1.GetOptions{})
		return err
	})
	if requests != 1 {
		t.Errorf("client-go has sent %d requests for one that is refused with a 500", requests)
	}
}

// expectNotInitialized expects that requests which only the watch cache answers are refused by the apiserver itself.
func (a *apiserver) expectNotInitialized(t *testing.T) {
	t.Helper()
	for _, query := range []string{"?resourceVersion=0", "?watch=1&timeoutSeconds=1"} {
		await(t, a.name+" serves", func() error {
			status, header, err := a.ask(t.Context(), http.MethodGet, query, "")
			if err == nil && (status.Code != http.StatusTooManyRequests || status.Reason != metav1.StatusReasonTooManyRequests ||
				status.Details == nil || status.Details.RetryAfterSeconds < 1 ||
				!slices.Equal(header.Values("Retry-After"), []string{fmt.Sprint(status.Details.RetryAfterSeconds)})) {
				err = fmt.Errorf("%q: expected a 429, got %+v with %v", query, status, header)
			}
			return err
		})
	}
	requests := a.requestsFor(t, func(client *kubernetes.Clientset) error {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_, err := client.CoreV1().ConfigMaps("default").List(ctx, metav1.ListOptions{ResourceVersion: "0"})
		return err
	})
	if requests < 2 {
		t.Errorf("client-go has sent %d requests for one that is refused with a 429", requests)
	}
}

// ask returns the answer to a request for ConfigMaps as far as it is a Status. It does not use the client library, which
// would retry.
func (a *apiserver) ask(ctx context.Context, method, path, body string) (status metav1.Status, header http.Header, err error) {
	request, err := http.NewRequestWithContext(ctx, method, a.url+refusedPath+path, strings.NewReader(body))
	if err != nil {
		return status, nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := a.http.Do(request)
	if err != nil {
		return status, nil, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return status, nil, err
	}
	if response.StatusCode == http.StatusOK {
		return status, response.Header, nil
	}
	if err := json.Unmarshal(text, &status); err != nil {
		return status, nil, fmt.Errorf("%d: %q: %w", response.StatusCode, text, err)
	}
	if int(status.Code) != response.StatusCode {
		return status, nil, fmt.Errorf("%d: %s", response.StatusCode, text)
	}
	return status, response.Header, nil
}

// requestsFor returns how many requests client-go sends for a call, which must fail.
func (a *apiserver) requestsFor(t *testing.T, call func(*kubernetes.Clientset) error) int {
	t.Helper()
	var sent atomic.Int32
	config := rest.CopyConfig(a.config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(request *http.Request) (*http.Response, error) {
			sent.Add(1)
			return next.RoundTrip(request)
		})
	})
	client, err := kubernetes.NewForConfig(config)
	must(t, "a client", err)
	if err := call(client); err == nil {
		must(t, "a refused call", errors.New("it is answered"))
	}
	return int(sent.Load())
}

// roundTripper is a function that sends a request.
type roundTripper func(*http.Request) (*http.Response, error)

func (r roundTripper) RoundTrip(request *http.Request) (*http.Response, error) { return r(request) }
