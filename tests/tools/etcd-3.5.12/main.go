// Command etcd-3.5.12 is an etcd server below the gate of progress notifications that rangecache is tested against, built from etcd's own module.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() {
	etcdmain.Main(os.Args)
}
