package kube

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes/scheme"
)

// Bounds of a transaction of the filling: below etcd's limits of 128 operations and 1.5 MiB.
const (
	fillTxnOps   = 100
	fillTxnBytes = 1 << 20
)

// storedObjects is a namespace full of ConfigMaps. An apiserver writes the first one, the others are copies of what it has
// stored, written into etcd itself: through apiservers 300,000 objects take many minutes.
type storedObjects struct {
	count     int
	dataBytes int
	first     []byte // the first object as it is stored
}

const storedNamespace = "stored"

func storedName(number int) string { return fmt.Sprintf("object-%06d", number) }

func storedKey(number int) string {
	return "/registry/configmaps/" + storedNamespace + "/" + storedName(number)
}

// fill writes the objects, and stops the apiserver that it has used.
func (s *storedObjects) fill(t *testing.T, files *certificates, etcd *etcdServer) {
	t.Helper()
	server := startAPIServer(t, files, 1, etcd.url)
	server.awaitReady(t)
	core := server.client.CoreV1()
	_, err := core.Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: storedNamespace}}, metav1.CreateOptions{})
	must(t, storedNamespace, err)
	_, err = core.ConfigMaps(storedNamespace).Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: storedName(0)},
		Data:       map[string]string{"filling": strings.Repeat("x", s.dataBytes)},
	}, metav1.CreateOptions{})
	must(t, storedName(0), err)
	server.stop()

	client := etcdClient(t, files, etcd.url)
	got, err := client.Get(t.Context(), storedKey(0))
	must(t, storedKey(0), err)
	if len(got.Kvs) != 1 {
		t.Fatalf("%d keys %s", len(got.Kvs), storedKey(0))
	}
	s.first = got.Kvs[0].Value
	serializer := protobuf.NewSerializer(scheme.Scheme, scheme.Scheme)
	decoded, _, err := serializer.Decode(s.first, nil, nil)
	must(t, storedKey(0), err)
	encoded := func(name string, object *corev1.ConfigMap) []byte {
		object = object.DeepCopy()
		if name != object.Name {
			object.Name, object.UID = name, uuid.NewUUID()
		}
		var buffer bytes.Buffer
		must(t, name, serializer.Encode(object, &buffer))
		return buffer.Bytes()
	}
	object := decoded.(*corev1.ConfigMap)
	if !bytes.Equal(encoded(object.Name, object), s.first) {
		t.Fatal("an object is encoded in another way than the apiserver's")
	}

	perTxn := min(fillTxnOps, max(1, fillTxnBytes/len(s.first)))
	putAll(t, client, 1, s.count, perTxn, func(number int) clientv3.Op {
		return clientv3.OpPut(storedKey(number), string(encoded(storedName(number), object)))
	})
}

// putAll makes the puts of these numbers, several in a transaction.
func putAll(t *testing.T, client *clientv3.Client, first, end, perTxn int, put func(number int) clientv3.Op) {
	t.Helper()
	const workers = 8
	var all sync.WaitGroup
	for worker := range workers {
		all.Go(func() {
			for begin := first + worker*perTxn; begin < end; begin += workers * perTxn {
				var puts []clientv3.Op
				for number := begin; number < min(begin+perTxn, end); number++ {
					puts = append(puts, put(number))
				}
				if _, err := client.Txn(t.Context()).Then(puts...).Commit(); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
}

// touch writes the first object again, and returns the revision.
func (s *storedObjects) touch(t *testing.T, files *certificates, etcd *etcdServer) int64 {
	t.Helper()
	put, err := etcdClient(t, files, etcd.url).Put(t.Context(), storedKey(0), string(s.first))
	must(t, storedKey(0), err)
	return put.Header.Revision
}

// check compares what an apiserver makes of the copies with what was written.
func (s *storedObjects) check(ctx context.Context, server *apiserver) error {
	maps := server.client.CoreV1().ConfigMaps(storedNamespace)
	page, err := maps.List(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		return err
	}
	if page.RemainingItemCount == nil || int(*page.RemainingItemCount) != s.count-1 {
		return fmt.Errorf("after the first of %d objects remain %v", s.count, page.RemainingItemCount)
	}
	last, err := maps.Get(ctx, storedName(s.count-1), metav1.GetOptions{})
	if err != nil {
		return err
	}
	if last.Name != storedName(s.count-1) || len(last.Data["filling"]) != s.dataBytes {
		return fmt.Errorf("%s has %d bytes", last.Name, len(last.Data["filling"]))
	}
	return nil
}
