module rangecache.test/clients

go 1.26.0

require rangecache.test/shared v0.0.0

replace rangecache.test/shared => ../shared
