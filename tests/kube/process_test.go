package kube

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"
)

const (
	root  = "../.."
	tools = root + "/target/tools"
)

// rangecacheBinary returns the program under test: RANGECACHE, or the debug build.
func rangecacheBinary() string {
	if path := os.Getenv("RANGECACHE"); path != "" {
		return path
	}
	return root + "/target/debug/rangecache"
}

// process is a server that runs until it is stopped, the test ends, or the test's process dies.
type process struct {
	name    string
	program string
	args    []string
	logFile string
	command *exec.Cmd
	gone    chan struct{} // closed once the command has ended
}

// starts runs on one thread for the lifetime of the program: the kernel kills a child when the thread that started it
// ends, which stops the servers of a test that panics or is killed.
var starts = make(chan func())

func init() {
	go func() {
		runtime.LockOSThread()
		for start := range starts {
			start()
		}
	}()
}

// newProcess starts a server, whose output goes to a file that is printed if the test fails.
func newProcess(t *testing.T, name, program string, args ...string) *process {
	t.Helper()
	p := &process{name: name, program: program, args: args, logFile: filepath.Join(t.TempDir(), name+".log")}
	t.Cleanup(func() {
		p.stop()
		if t.Failed() {
			t.Logf("the end of %s's log:\n%s", p.name, tail(p.log(), 15))
		}
	})
	p.start(t)
	return p
}

func (p *process) start(t *testing.T) {
	t.Helper()
	file, err := os.OpenFile(p.logFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	must(t, p.logFile, err)
	defer file.Close()
	command := exec.Command(p.program, p.args...)
	command.Stdout, command.Stderr = file, file
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	starts <- func() { started <- command.Start() }
	must(t, p.program, <-started)
	gone := make(chan struct{})
	p.command, p.gone = command, gone
	go func() {
		_ = command.Wait()
		close(gone)
	}()
}

// stop sends SIGTERM, and SIGKILL if the process does not end.
func (p *process) stop() {
	_ = p.command.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.gone:
	case <-time.After(20 * time.Second):
		p.kill()
	}
}

func (p *process) kill() {
	_ = p.command.Process.Kill()
	<-p.gone
}

func (p *process) running() bool {
	select {
	case <-p.gone:
		return false
	default:
		return true
	}
}

func (p *process) pid() int { return p.command.Process.Pid }

func (p *process) log() string {
	text, _ := os.ReadFile(p.logFile)
	return string(text)
}

// awaitStatus waits until the URL returns 200.
func (p *process) awaitStatus(t *testing.T, client *http.Client, url string) {
	t.Helper()
	await(t, p.name+" at "+url, func() error {
		if !p.running() {
			t.Fatalf("%s has ended:\n%s", p.name, tail(p.log(), 40))
		}
		body, status, err := fetch(client, url)
		if err == nil && status != http.StatusOK {
			err = fmt.Errorf("%d: %s", status, body)
		}
		return err
	})
}

// waitTimeout bounds every wait for a condition; no test asserts how long one takes.
const waitTimeout = 2 * time.Minute

// await waits until the condition holds.
func await(t *testing.T, what string, condition func() error) {
	t.Helper()
	for deadline := time.Now().Add(waitTimeout); ; time.Sleep(20 * time.Millisecond) {
		err := condition()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v", what, err)
		}
	}
}

func fetch(client *http.Client, url string) (string, int, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", 0, err
	}
	response, err := client.Do(request)
	if err != nil {
		return "", 0, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	return string(body), response.StatusCode, err
}

// run runs a command to its end and returns its output.
func run(t *testing.T, program string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), waitTimeout)
	defer cancel()
	command := exec.CommandContext(ctx, program, args...)
	var stdout, stderr bytes.Buffer
	command.Stdout, command.Stderr = &stdout, &stderr
	if err := command.Run(); err != nil {
		t.Fatalf("%s %q: %v\n%s", program, args, err, stderr.String())
	}
	return stdout.String()
}

func must(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// tail returns the last lines of a text.
func tail(text string, lines int) string {
	all := bytes.Split([]byte(text), []byte("\n"))
	return string(bytes.Join(all[max(0, len(all)-lines):], []byte("\n")))
}
