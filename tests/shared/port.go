// Package shared is what the tests in Go have in common.
package shared

import (
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"testing"
)

// nextPort is the number of ports that FreePort has tried.
var nextPort atomic.Int32

// FreePort returns a port that is free now and stays free until its server listens: below the range from which the
// system assigns port 0 and the ports of outgoing connections.
func FreePort(t *testing.T) int {
	t.Helper()
	for range 20_000 {
		port := 12_000 + (os.Getpid()%180*100+int(nextPort.Add(1)))%20_000
		listener, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		if err := listener.Close(); err != nil {
			t.Fatalf("a free port: %v", err)
		}
		return port
	}
	t.Fatal("no free port between 12000 and 32000")
	return 0
}
