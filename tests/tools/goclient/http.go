package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
)

// httpSection calls the HTTP/1 endpoints on the same port: health, version, metrics and the JSON gateway.
func httpSection(t *tour) {
	transport := &http.Transport{DisableCompression: true}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}

	do := func(ctx context.Context, verb, path string, body any) (*http.Response, []byte, error) {
		var data []byte
		switch b := body.(type) {
		case nil:
		case string:
			data = []byte(b)
		default:
			var err error
			if data, err = json.Marshal(b); err != nil {
				return nil, nil, err
			}
		}
		req, err := http.NewRequestWithContext(ctx, verb, t.urls[0]+path, bytes.NewReader(data))
		if err != nil {
			return nil, nil, err
		}
		r, err := client.Do(req)
		if err != nil {
			return nil, nil, err
		}
		defer r.Body.Close()
		answer, err := io.ReadAll(r.Body)
		return r, answer, err
	}
	plain := func(verb, path string, body any) {
		t.step(verb+" "+path, func(ctx context.Context) (string, error) {
			r, answer, err := do(ctx, verb, path, body)
			if err != nil {
				return "", err
			}
			return fmt.Sprintf("HTTP %d %s %q", r.StatusCode, r.Header.Get("content-type"), answer), nil
		})
	}
	plain("GET", "/health", nil)
	plain("GET", "/health?serializable=true", nil)
	plain("HEAD", "/health", nil)
	plain("POST", "/health", "x")
	plain("GET", "/version", nil)
	plain("GET", "/livez", nil)
	plain("GET", "/readyz?exclude=data_corruption", nil)
	plain("GET", "/nothing/here", nil)
	t.step("GET /metrics", func(ctx context.Context) (string, error) {
		r, answer, err := do(ctx, "GET", "/metrics", nil)
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("HTTP %d has_leader=%t", r.StatusCode, bytes.Contains(answer, []byte("etcd_server_has_leader 1"))), nil
	})

	base64Of := func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }
	gateway := func(name, path string, body any) {
		t.step(name, func(ctx context.Context) (string, error) {
			r, answer, err := do(ctx, "POST", path, body)
			if err != nil {
				return "", err
			}
			var parsed map[string]any
			if err := json.Unmarshal(answer, &parsed); err != nil {
				return fmt.Sprintf("HTTP %d %q", r.StatusCode, answer), nil
			}
			t.normalise(parsed)
			text, err := json.Marshal(parsed)
			return fmt.Sprintf("HTTP %d %s %s", r.StatusCode, r.Header.Get("content-type"), text), err
		})
	}
	gateway("gateway put", "/v3/kv/put", map[string]any{"key": base64Of("tour/http"), "value": base64Of("by json"), "prev_kv": true})
	gateway("gateway range", "/v3/kv/range", map[string]any{"key": base64Of("tour/http")})
	gateway("gateway range, empty key", "/v3/kv/range", map[string]any{})
	gateway("gateway range, not JSON", "/v3/kv/range", "{")
	gateway("gateway txn", "/v3/kv/txn", map[string]any{"success": []any{
		map[string]any{"requestDeleteRange": map[string]any{"key": base64Of("tour/http")}},
	}})
	gateway("gateway lease", "/v3/lease/grant", map[string]any{"TTL": 60, "ID": 0x7777})
	gateway("gateway unknown path", "/v3/nothing", map[string]any{})
	t.step("gateway watch, first line", func(ctx context.Context) (string, error) {
		body := fmt.Sprintf(`{"create_request":{"key":%q}}`, base64Of("tour/http"))
		req, err := http.NewRequestWithContext(ctx, "POST", t.urls[0]+"/v3/watch", strings.NewReader(body))
		if err != nil {
			return "", err
		}
		r, err := client.Do(req)
		if err != nil {
			return "", err
		}
		defer r.Body.Close()
		var first map[string]any
		if err := json.NewDecoder(r.Body).Decode(&first); err != nil {
			return "", err
		}
		t.normalise(first)
		text, err := json.Marshal(first)
		return fmt.Sprintf("HTTP %d %s", r.StatusCode, text), err
	})
}

// normalise replaces values that differ between two servers: revisions and ids.
func (t *tour) normalise(v any) {
	switch v := v.(type) {
	case []any:
		for _, each := range v {
			t.normalise(each)
		}
	case map[string]any:
		for key, each := range v {
			text, isText := each.(string)
			switch {
			case isText && (key == "revision" || strings.HasSuffix(key, "_revision")):
				var revision int64
				if _, err := fmt.Sscan(text, &revision); err == nil {
					v[key] = t.rel(revision)
				}
			case key == "cluster_id":
				v[key] = fmt.Sprintf("ours=%t", text == fmt.Sprint(t.cluster))
			case key == "member_id" || key == "raft_term":
				v[key] = fmt.Sprintf("given=%t", text != "" && text != "0")
			default:
				t.normalise(each)
			}
		}
	}
}
