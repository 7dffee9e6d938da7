module rangecache.test/kubestorage

go 1.26.0
