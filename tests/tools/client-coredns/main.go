// Command client-coredns answers DNS queries with CoreDNS's etcd plugin and prints the answers.
//
// The lines are equal for two fresh etcds: run it against etcd and against a proxy in front of another one, and compare.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"slices"
	"strings"
	"time"

	coredns "github.com/coredns/coredns/plugin/etcd"
	"github.com/coredns/coredns/plugin/pkg/dnstest"
	"github.com/coredns/coredns/plugin/pkg/upstream"
	"github.com/coredns/coredns/plugin/test"
	"github.com/miekg/dns"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// records are DNS records as CoreDNS's users store them: the key is the name, reversed.
var records = []struct{ key, value string }{
	{"/skydns/test/example/web/a", `{"host":"192.0.2.1","ttl":60}`},
	{"/skydns/test/example/web/b", `{"host":"192.0.2.2","ttl":60}`},
	{"/skydns/test/example/web6", `{"host":"2001:db8::1"}`},
	{"/skydns/test/example/db", `{"host":"web.example.test.","port":5432,"priority":20}`},
	{"/skydns/test/example/note", `{"text":"a text"}`},
	{"/skydns/test/example/mail", `{"host":"192.0.2.9","mail":true,"priority":10}`},
	{"/skydns/arpa/in-addr/192/0/2/1", `{"host":"web.example.test."}`},
}

var queries = []struct {
	name string
	kind uint16
}{
	{"web.example.test.", dns.TypeA},
	{"a.web.example.test.", dns.TypeA},
	{"web6.example.test.", dns.TypeAAAA},
	{"web6.example.test.", dns.TypeA},
	{"db.example.test.", dns.TypeSRV},
	{"*.web.example.test.", dns.TypeA},
	{"note.example.test.", dns.TypeTXT},
	{"mail.example.test.", dns.TypeMX},
	{"1.2.0.192.in-addr.arpa.", dns.TypePTR},
	{"none.example.test.", dns.TypeA},
	{"example.test.", dns.TypeSOA},
}

func main() {
	endpoint := flag.String("endpoint", "http://127.0.0.1:2379", "client URL")
	flag.Parse()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{*endpoint}})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	plugin := coredns.Etcd{
		Client:     client,
		PathPrefix: "skydns",
		Zones:      []string{"example.test.", "in-addr.arpa."},
		Upstream:   upstream.New(),
		Next:       test.NextHandler(dns.RcodeRefused, nil),
	}
	answerAll(ctx, &plugin, "empty")
	for _, record := range records {
		put(ctx, client, record.key, record.value)
	}
	answerAll(ctx, &plugin, "stored")
	// Each change is seen by the next query.
	put(ctx, client, "/skydns/test/example/web/a", `{"host":"192.0.2.3","ttl":60}`)
	answerAll(ctx, &plugin, "changed")
	if _, err := client.Delete(ctx, "/skydns/test/example/web/", clientv3.WithPrefix()); err != nil {
		log.Fatal(err)
	}
	answerAll(ctx, &plugin, "deleted")
}

func put(ctx context.Context, client *clientv3.Client, key, value string) {
	if _, err := client.Put(ctx, key, value); err != nil {
		log.Fatalf("put %s: %v", key, err)
	}
}

func answerAll(ctx context.Context, plugin *coredns.Etcd, when string) {
	for _, query := range queries {
		request := new(dns.Msg)
		request.SetQuestion(query.name, query.kind)
		recorder := dnstest.NewRecorder(&test.ResponseWriter{})
		code, err := plugin.ServeDNS(ctx, recorder, request)
		fmt.Printf("%s %s %s: code %d, error %v\n", when, query.name, dns.TypeToString[query.kind], code, err)
		if recorder.Msg == nil {
			continue
		}
		fmt.Printf("  %s\n", dns.RcodeToString[recorder.Msg.Rcode])
		var lines []string
		for _, answers := range [][]dns.RR{recorder.Msg.Answer, recorder.Msg.Ns, recorder.Msg.Extra} {
			for _, answer := range answers {
				if _, ok := answer.(*dns.SOA); ok {
					continue // its serial number is the time
				}
				lines = append(lines, "  "+strings.ReplaceAll(answer.String(), "\t", " "))
			}
		}
		slices.Sort(lines) // CoreDNS shuffles them
		for _, line := range lines {
			fmt.Println(line)
		}
	}
}
