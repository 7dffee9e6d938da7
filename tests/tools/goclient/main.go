// Command goclient runs a scripted tour of etcd's API with etcd's own Go client and writes one line per step.
//
// The lines are equal for two fresh servers of one version: revisions are relative, ids and addresses are replaced.
// Run it against etcd and against a proxy in front of another fresh etcd: the transcripts must be equal. A step that
// fails prints its error, and the run continues.
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// section is one part of the run; its name starts each of its lines and can be given to -only and -skip.
type section struct {
	name string
	run  func(*tour)
}

// sections are in running order: kv first, because it reads the whole keyspace; compaction disturbs no later section.
var sections = []section{
	{"kv", kvSection},
	{"rangestream", rangeStreamSection},
	{"txn", txnSection},
	{"lease", leaseSection},
	{"watch", watchSection},
	{"concurrency", concurrencySection},
	{"services", servicesSection},
	{"maintenance", maintenanceSection},
	{"cluster", clusterSection},
	{"limits", limitsSection},
	{"wire", wireSection},
	{"http", httpSection},
}

func main() {
	endpoints := flag.String("endpoints", "http://127.0.0.1:2379", "client URLs, comma-separated, http:// only")
	out := flag.String("out", "", "file for the transcript (default: standard output)")
	auth := flag.Bool("auth", false, "run the auth section alone: it switches auth on, and off again at its end")
	only := flag.String("only", "", "sections to run, comma-separated (default: all but auth)")
	skip := flag.String("skip", "", "sections to leave out, comma-separated")
	list := flag.Bool("list", false, "list the sections and exit")
	clients := flag.Int("load", 0, "instead of the sections, keep this many clients busy until the file named by -until exists")
	until := flag.String("until", "", "the file that ends -load")
	following := flag.Bool("follow", false, "instead of the sections, open the watches that standard input describes, and print their events")
	flag.Parse()

	if *list {
		for _, s := range sections {
			fmt.Println(s.name)
		}
		return
	}
	if *following {
		if err := follow(strings.Split(*endpoints, ","), os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "goclient:", err)
			os.Exit(1)
		}
		return
	}
	if *clients > 0 {
		if err := load(strings.Split(*endpoints, ","), *clients, *until, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "goclient:", err)
			os.Exit(1)
		}
		return
	}
	if err := run(*endpoints, *out, *auth, names(*only), names(*skip)); err != nil {
		fmt.Fprintln(os.Stderr, "goclient:", err)
		os.Exit(1)
	}
}

func run(endpoints, out string, auth bool, only, skip map[string]bool) error {
	chosen := []section{}
	if auth {
		chosen = append(chosen, section{"auth", authSection})
	} else {
		all := len(only) == 0
		for _, s := range sections {
			if (all || only[s.name]) && !skip[s.name] {
				chosen = append(chosen, s)
			}
			delete(only, s.name)
			delete(skip, s.name)
		}
	}
	for name := range only {
		return fmt.Errorf("no section named %q (see -list)", name)
	}
	for name := range skip {
		return fmt.Errorf("no section named %q (see -list)", name)
	}

	var sink io.Writer = os.Stdout
	if out != "" {
		file, err := os.Create(out)
		if err != nil {
			return err
		}
		defer file.Close()
		sink = file
	}

	urls := strings.Split(endpoints, ",")
	client, err := newClient(urls, "", "")
	if err != nil {
		return err
	}
	defer client.Close()
	t := &tour{sink: sink, urls: urls, client: client, conn: client.ActiveConnection(), leases: map[int64]string{}}
	// The first call decides whether there is anything to tour: a wrong address is no transcript.
	if err := t.identify(); err != nil {
		return fmt.Errorf("nothing answers at %s: %w", endpoints, err)
	}
	for _, s := range chosen {
		t.section = s.name
		t.rebase()
		s.run(t)
	}
	return t.failed
}

// newClient dials without waiting; user is empty for an anonymous client.
func newClient(urls []string, user, password string) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{
		Endpoints:          urls,
		Username:           user,
		Password:           password,
		DialTimeout:        10 * time.Second,
		Logger:             zap.NewNop(),
		MaxCallSendMsgSize: 64 << 20, // the server's limit is what the tour looks at, not the client's
		DialOptions:        []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())},
	})
}

func names(list string) map[string]bool {
	set := map[string]bool{}
	for _, name := range strings.Split(list, ",") {
		if name != "" {
			set[name] = true
		}
	}
	return set
}
