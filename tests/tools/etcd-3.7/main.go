// Command etcd-3.7 is the etcd 3.7 server that rangecache is tested against, built from etcd's own module.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() {
	etcdmain.Main(os.Args)
}
