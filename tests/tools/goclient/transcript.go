package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// stepTimeout ends a step that hangs; no step of a healthy server takes a tenth of it.
const stepTimeout = 20 * time.Second

// tour is the argument of every section: the connections, and the state for printing without differing details.
type tour struct {
	sink    io.Writer
	failed  error // the first failure to write the transcript
	section string
	urls    []string
	client  *clientv3.Client
	conn    *grpc.ClientConn
	version string // as Maintenance.Status says
	base    int64  // store revision at the start of the section; printed revisions are relative to it
	cluster uint64
	members map[uint64]bool
	leases  map[int64]string // id → the name it is printed as
}

// identify learns the server's version and ids, against which every later header is checked.
func (t *tour) identify() error {
	ctx, cancel := context.WithTimeout(context.Background(), stepTimeout)
	defer cancel()
	members, err := t.client.MemberList(ctx)
	if err != nil {
		return err
	}
	t.cluster = members.Header.GetClusterId() // a nil header is seen as a foreign one later
	t.members = map[uint64]bool{}
	for _, m := range members.Members {
		t.members[m.ID] = true
	}
	st, err := pb.NewMaintenanceClient(t.conn).Status(ctx, &pb.StatusRequest{})
	if err != nil {
		return err
	}
	t.version = st.Version
	return nil
}

// rebase makes the store's present revision the zero of the section.
func (t *tour) rebase() {
	ctx, cancel := context.WithTimeout(context.Background(), stepTimeout)
	defer cancel()
	if r, err := t.client.Get(ctx, "tour/base"); err == nil {
		t.base = r.Header.Revision
	}
}

// step runs one step with a deadline of its own and writes its line: what body returns, or the error.
func (t *tour) step(name string, body func(ctx context.Context) (string, error)) {
	ctx, cancel := context.WithTimeout(context.Background(), stepTimeout)
	defer cancel()
	text, err := guarded(ctx, body)
	if err != nil {
		if text != "" {
			text += " "
		}
		text += describe(err)
	}
	_, err = fmt.Fprintf(t.sink, "[%s] %s: %s\n", t.section, printable(name), text)
	if err != nil && t.failed == nil {
		t.failed = err
	}
}

// guarded turns a panic into the step's error: one broken answer must not cost the rest of the tour.
func guarded(ctx context.Context, body func(ctx context.Context) (string, error)) (text string, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return body(ctx)
}

var address = regexp.MustCompile(`\b(127\.0\.0\.1|localhost|\[::1\]):\d+\b`)

// describe prints an error as its gRPC code and text, whichever way the client library wrapped it.
func describe(err error) string {
	if err == nil {
		return "ok"
	}
	var etcdErr rpctypes.EtcdError
	if errors.As(err, &etcdErr) {
		return fmt.Sprintf("error %s %q", etcdErr.Code(), etcdErr.Error())
	}
	if errors.Is(err, io.EOF) {
		return "end of stream"
	}
	st, ok := status.FromError(err)
	if !ok && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)) {
		st, ok = status.FromContextError(err), true
	}
	if !ok {
		return fmt.Sprintf("error %q", address.ReplaceAllString(err.Error(), "ADDRESS"))
	}
	if st.Code() == codes.DeadlineExceeded {
		// Client and server watch the same deadline: which of them words the error is a race, the code is not.
		return "error " + st.Code().String()
	}
	text := fmt.Sprintf("error %s %q", st.Code(), address.ReplaceAllString(st.Message(), "ADDRESS"))
	if n := len(st.Details()); n > 0 {
		text += fmt.Sprintf(" details=%d", n)
	}
	return text
}

// rel prints a revision relative to the start of the section.
func (t *tour) rel(revision int64) string {
	if revision == 0 {
		return "0"
	}
	return fmt.Sprintf("%+d", revision-t.base)
}

// header prints the revision and names whatever in the rest of the header is not as it should be.
func (t *tour) header(h *pb.ResponseHeader) string {
	if h == nil {
		return "no-header"
	}
	text := "rev" + t.rel(h.Revision)
	if h.ClusterId != t.cluster {
		text += " FOREIGN-CLUSTER"
	}
	if !t.members[h.MemberId] {
		text += " FOREIGN-MEMBER"
	}
	if h.RaftTerm == 0 {
		text += " NO-TERM"
	}
	return text
}

func (t *tour) lease(id int64) string {
	if id == 0 {
		return ""
	}
	if name, ok := t.leases[id]; ok {
		return " lease=" + name
	}
	return " lease=unknown"
}

func (t *tour) kv(kv *mvccpb.KeyValue) string {
	if kv == nil {
		return "none"
	}
	return fmt.Sprintf("%s=%s c%s m%s v%d%s", printable(string(kv.Key)), value(kv.Value), t.rel(kv.CreateRevision), t.rel(kv.ModRevision), kv.Version, t.lease(kv.Lease))
}

func (t *tour) kvs(kvs []*mvccpb.KeyValue) string {
	if len(kvs) > 12 {
		hash := sha256.New()
		for _, kv := range kvs {
			fmt.Fprintln(hash, t.kv(kv))
		}
		return fmt.Sprintf("%d kvs, first %s, last %s, sha256 %x", len(kvs), kvs[0].Key, kvs[len(kvs)-1].Key, hash.Sum(nil)[:8])
	}
	parts := make([]string, len(kvs))
	for i, kv := range kvs {
		parts[i] = t.kv(kv)
	}
	return "[" + strings.Join(parts, " | ") + "]"
}

// printable escapes what would not show, without the quotes around it.
func printable(s string) string {
	quoted := strconv.Quote(s)
	return quoted[1 : len(quoted)-1]
}

// value prints short values as they are, and of long ones the length and a hash.
func value(v []byte) string {
	if len(v) > 40 {
		sum := sha256.Sum256(v)
		return fmt.Sprintf("<%d bytes, sha256 %x>", len(v), sum[:8])
	}
	return fmt.Sprintf("%q", v)
}

func (t *tour) rangeResponse(r *pb.RangeResponse, err error) (string, error) {
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%s count=%d more=%t %s", t.header(r.Header), r.Count, r.More, t.kvs(r.Kvs)), nil
}

func (t *tour) event(e *mvccpb.Event) string {
	text := fmt.Sprintf("%s %s", e.Type, t.kv(e.Kv))
	if e.PrevKv != nil {
		text += " prev(" + t.kv(e.PrevKv) + ")"
	}
	return text
}
