// Command etcdutl restores snapshots as etcd's own tool does, built from etcd's own module. Tests need nothing else of it.
package main

import (
	"os"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/etcdutl/v3/etcdutl"
)

func main() {
	root := &cobra.Command{Use: "etcdutl", Short: "restore etcd snapshots"}
	// The snapshot command prints by a package-wide printer that it chooses from this flag.
	root.PersistentFlags().StringVar(&etcdutl.OutputFormat, "write-out", "simple", "fields, json, protobuf, simple or table")
	root.AddCommand(etcdutl.NewSnapshotCommand())
	if err := root.Execute(); err != nil {
		os.Exit(1)
	}
}
