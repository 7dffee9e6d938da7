module rangecache.test/clients

go 1.26.0
