module rangecache.test/shared

go 1.26.0
