module rangecache.test/etcd

go 1.26.0

require go.etcd.io/etcd/tests/v3 v3.7.3

require rangecache.test/shared v0.0.0

replace rangecache.test/shared => ../shared
