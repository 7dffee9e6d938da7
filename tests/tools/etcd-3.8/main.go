// Command etcd-3.8 is the etcd 3.8 server, not released yet, that rangecache is tested against, built from etcd's own module.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() {
	etcdmain.Main(os.Args)
}
