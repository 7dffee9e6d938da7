package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"sort"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding/gzip"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
)

// rawCodec passes bytes through under protobuf's name, to send malformed messages.
type rawCodec struct{}

func (rawCodec) Name() string                  { return "proto" }
func (rawCodec) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }
func (rawCodec) Unmarshal(data []byte, v any) error {
	*v.(*[]byte) = bytes.Clone(data)
	return nil
}

// wireSection tests what lies below the API: compression, metadata, unknown methods, malformed messages and frames.
func wireSection(t *tour) {
	kv := pb.NewKVClient(t.conn)
	if _, err := t.client.Put(context.Background(), "tour/wire/a", strings.Repeat("compress me ", 50)); err != nil {
		t.step("fill", func(context.Context) (string, error) { return "", err })
		return
	}
	t.step("compressed range", func(ctx context.Context) (string, error) {
		return t.rangeResponse(kv.Range(ctx, prefixRequest("tour/wire/"), grpc.UseCompressor(gzip.Name)))
	})
	t.step("compressed put", func(ctx context.Context) (string, error) {
		r, err := kv.Put(ctx, &pb.PutRequest{Key: []byte("tour/wire/b"), Value: []byte("v")}, grpc.UseCompressor(gzip.Name))
		return t.header(r.GetHeader()), err
	})
	t.step("health", func(ctx context.Context) (string, error) {
		r, err := healthpb.NewHealthClient(t.conn).Check(ctx, &healthpb.HealthCheckRequest{})
		return r.GetStatus().String(), err
	})
	t.step("health of an unknown service", func(ctx context.Context) (string, error) {
		_, err := healthpb.NewHealthClient(t.conn).Check(ctx, &healthpb.HealthCheckRequest{Service: "none"})
		return "", err
	})
	t.step("health watched", func(ctx context.Context) (string, error) {
		stream, err := healthpb.NewHealthClient(t.conn).Watch(ctx, &healthpb.HealthCheckRequest{})
		if err != nil {
			return "", err
		}
		r, err := stream.Recv()
		return r.GetStatus().String(), err
	})

	raw := func(name, method string, message []byte) {
		t.step(name, func(ctx context.Context) (string, error) {
			var answer []byte
			err := t.conn.Invoke(ctx, method, &message, &answer, grpc.ForceCodec(rawCodec{}))
			return "", err
		})
	}
	const rangeMethod = "/etcdserverpb.KV/Range"
	raw("unknown service", "/etcdserverpb.Nothing/Range", nil)
	raw("unknown method", "/etcdserverpb.KV/Nothing", nil)
	raw("path without a method", "/etcdserverpb.KV", nil)
	raw("range of no bytes", rangeMethod, nil)
	raw("range of noise", rangeMethod, []byte{0xff, 0xff, 0xff})
	raw("range cut short", rangeMethod, []byte{0x0a, 0x05, 'a'})
	raw("range with a wrong wire type", rangeMethod, []byte{0x08, 0x01})
	raw("range with field number 0", rangeMethod, []byte{0x02, 0x00})
	raw("range with an unclosed group", rangeMethod, []byte{0x0b})
	raw("put of noise", "/etcdserverpb.KV/Put", []byte{0xff, 0xff, 0xff})
	raw("watch called with noise", "/etcdserverpb.Watch/Watch", []byte{0xff})
	t.step("range with unknown fields", func(ctx context.Context) (string, error) {
		message, err := proto.Marshal(prefixRequest("tour/wire/"))
		if err != nil {
			return "", err
		}
		message = append(message, 0xf8, 0x07, 0x01) // field 127, varint 1: a later version's option
		var answer []byte
		if err := t.conn.Invoke(ctx, rangeMethod, &message, &answer, grpc.ForceCodec(rawCodec{})); err != nil {
			return "", err
		}
		r := &pb.RangeResponse{}
		err = proto.Unmarshal(answer, r)
		return t.rangeResponse(r, err)
	})
	// An unknown sort target crashes etcd 3.5, so it is not sent there.
	t.step("unknown sort target and order", func(ctx context.Context) (string, error) {
		if strings.HasPrefix(t.version, "3.5.") {
			return "not asked of 3.5", nil
		}
		_, target := kv.Range(ctx, with(prefixRequest("tour/wire/"), func(r *pb.RangeRequest) { r.SortTarget = 99 }))
		_, order := kv.Range(ctx, with(prefixRequest("tour/wire/"), func(r *pb.RangeRequest) { r.SortOrder = 99 }))
		return describe(target) + ", " + describe(order), nil
	})

	t.step("metadata of an answer", func(ctx context.Context) (string, error) {
		var header, trailer metadata.MD
		_, err := kv.Range(ctx, prefixRequest("tour/wire/"), grpc.Header(&header), grpc.Trailer(&trailer))
		return fmt.Sprintf("header %s trailer %s", printed(header), printed(trailer)), err
	})
	t.step("metadata of an error", func(ctx context.Context) (string, error) {
		var header, trailer metadata.MD
		_, err := kv.Range(ctx, &pb.RangeRequest{}, grpc.Header(&header), grpc.Trailer(&trailer))
		return fmt.Sprintf("header %s trailer %s", printed(header), printed(trailer)), err
	})
	framing(t, kv)
}

func printed(md metadata.MD) string {
	parts := []string{}
	for key, values := range md {
		parts = append(parts, fmt.Sprintf("%s=%s", key, strings.Join(values, ",")))
	}
	sort.Strings(parts)
	return "{" + strings.Join(parts, " ") + "}"
}

// frame is one gRPC message: compressed flag, length, bytes.
func frame(flag byte, length int, message []byte) []byte {
	return append([]byte{flag, byte(length >> 24), byte(length >> 16), byte(length >> 8), byte(length)}, message...)
}

// framing sends HTTP/2 without a gRPC library, to break its rules.
func framing(t *tour, kv pb.KVClient) {
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	transport := &http.Transport{Protocols: protocols}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}

	good, err := proto.Marshal(&pb.RangeRequest{Key: []byte("tour/wire/b"), CountOnly: true})
	if err != nil {
		t.step("marshal", func(context.Context) (string, error) { return "", err })
		return
	}
	call := func(name, verb, contentType string, body []byte, headers ...string) {
		t.step(name, func(ctx context.Context) (string, error) {
			req, err := http.NewRequestWithContext(ctx, verb, t.urls[0]+"/etcdserverpb.KV/Range", bytes.NewReader(body))
			if err != nil {
				return "", err
			}
			req.Header.Set("te", "trailers")
			if contentType != "" {
				req.Header.Set("content-type", contentType)
			}
			for i := 0; i+1 < len(headers); i += 2 {
				req.Header.Set(headers[i], headers[i+1])
			}
			r, err := client.Do(req)
			if err != nil {
				return "no answer", nil // how a call is refused below HTTP is the transport's affair
			}
			defer r.Body.Close()
			answer, err := io.ReadAll(r.Body)
			if err != nil {
				return fmt.Sprintf("HTTP %d, stream reset", r.StatusCode), nil
			}
			grpcField := func(name string) string { // in the trailers, or in the header of an answer without a body
				if v := r.Trailer.Get(name); v != "" {
					return v
				}
				return r.Header.Get(name)
			}
			return fmt.Sprintf("HTTP %d %s, %t bytes, grpc-status=%s %q", r.StatusCode, r.Header.Get("content-type"), len(answer) > 0,
				grpcField("grpc-status"), grpcField("grpc-message")), nil
		})
	}
	whole := frame(0, len(good), good)
	call("content type application/grpc", "POST", "application/grpc", whole)
	call("content type application/grpc+proto", "POST", "application/grpc+proto", whole)
	call("content type application/grpc+json", "POST", "application/grpc+json", whole)
	call("content type application/grpc-web", "POST", "application/grpc-web", whole)
	call("GET instead of POST", "GET", "application/grpc", nil)
	// etcd never responds to a call that ends without its message; the next call must be served.
	t.step("no message, then a good call", func(ctx context.Context) (string, error) {
		short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		defer cancel()
		req, err := http.NewRequestWithContext(short, "POST", t.urls[0]+"/etcdserverpb.KV/Range", nil)
		if err != nil {
			return "", err
		}
		req.Header.Set("content-type", "application/grpc")
		if r, err := client.Do(req); err == nil {
			r.Body.Close()
		}
		return t.rangeResponse(kv.Range(ctx, &pb.RangeRequest{Key: []byte("tour/wire/b")}))
	})
	call("half a frame header", "POST", "application/grpc", whole[:3])
	call("message shorter than its length", "POST", "application/grpc", frame(0, len(good)+10, good))
	call("message longer than the limit", "POST", "application/grpc", frame(0, 64<<20, good))
	call("two messages", "POST", "application/grpc", append(bytes.Clone(whole), whole...))
	call("compressed flag without an encoding", "POST", "application/grpc", frame(1, len(good), good))
	call("unknown flag", "POST", "application/grpc", frame(7, len(good), good))
	call("unknown encoding", "POST", "application/grpc", frame(1, len(good), good), "grpc-encoding", "snappy")
	call("identity encoding", "POST", "application/grpc", whole, "grpc-encoding", "identity")
	call("bad timeout", "POST", "application/grpc", whole, "grpc-timeout", "soon")
	call("bad binary metadata", "POST", "application/grpc", whole, "x-bin", "***")
}
