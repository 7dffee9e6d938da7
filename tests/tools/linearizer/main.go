// Command linearizer checks a history of calls to etcd, some of them through caches: is there one order of all of
// them, consistent with real time, in which every response is right?
//
// The file has one JSON object per line (see history.go): the operations, and the events that a recorder has watched
// on etcd itself, which show the outcome of writes whose responses were lost. Linearizable operations are checked by
// porcupine; reads at a revision are compared with the state at that revision, and must be refused once it is compacted.
// The headers of all responses but serializable ones are part of the order. It prints the result, and exits 1 on a
// violation.
package main

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
)

// shown is the number of violations of a kind that are printed.
const shown = 5

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: linearizer HISTORY.jsonl")
		os.Exit(64)
	}
	wrong, err := check(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, "linearizer:", err)
		os.Exit(2)
	}
	if wrong > 0 {
		os.Exit(1)
	}
}

// check prints the result, and returns the number of violations.
func check(path string) (int, error) {
	h, err := readHistory(path)
	if err != nil {
		return 0, err
	}
	h.split()
	for _, op := range h.ops {
		if op.Compact > 0 {
			h.compacts = append(h.compacts, line{At: op.Call, Rev: op.Compact})
		}
	}
	fmt.Println("operations:", counts(h.ops))
	total := 0
	for n, s := range h.segments {
		if n > 0 {
			// A restore starts with the content of a snapshot.
			s.first = stateAt(h.segments[n-1], s.start)
		}
		r, wrong := resolve(s)
		total += report("writes and events", wrong)
		total += report("order", r.order())
		pieces, wrong := r.linearize(fmt.Sprintf("%s.%d.html", strings.TrimSuffix(path, ".jsonl"), n))
		total += report("linearizability", wrong)
		total += report("reads at a revision", r.checkSnapshots(h.compacts))
		total += report("compactions", r.checkCompactions())
		fmt.Printf("history %d: revisions %d to %d, %d linearizable operations in %d pieces, %d reads at a revision\n",
			n, s.start, r.last, len(r.linearizable), pieces, len(r.snapshots))
	}
	fmt.Println("violations:", total)
	return total, nil
}

func stateAt(s *segment, rev int64) state {
	at := s.first
	for r := s.start + 1; r <= rev; r++ {
		at, _ = at.apply(s.events[r].Changes, r)
	}
	return at
}

func report(kind string, wrong []string) int {
	for n, says := range wrong {
		if n == shown {
			fmt.Printf("  ... and %d more\n", len(wrong)-shown)
			break
		}
		fmt.Printf("VIOLATION (%s): %s\n", kind, says)
	}
	return len(wrong)
}

// counts lists the operations by kind, and how many had no response.
func counts(ops []*operation) string {
	all, lost := map[string]int{}, map[string]int{}
	for _, op := range ops {
		all[op.Kind]++
		if op.Return == unanswered {
			lost[op.Kind]++
		}
	}
	var parts []string
	for _, kind := range slices.Sorted(maps.Keys(all)) {
		parts = append(parts, fmt.Sprintf("%s %d (%d without a response)", kind, all[kind], lost[kind]))
	}
	return fmt.Sprintf("%d: %s", len(ops), strings.Join(parts, ", "))
}

// describe formats an operation in one line.
func describe(op *operation) string {
	asked := ""
	switch {
	case op.Write != nil && op.Write.Compare != nil:
		asked = fmt.Sprintf("if mod(%s) = %d then %s", op.Write.Compare.Key, op.Write.Compare.Mod, changes(op.Write.Then))
	case op.Write != nil:
		asked = changes(op.Write.Then)
	case op.Compact > 0:
		asked = fmt.Sprintf("revisions below %d", op.Compact)
	case op.Read != nil:
		asked = fmt.Sprintf("%+v", *op.Read)
	}
	said := fmt.Sprintf("at %d", op.Rev)
	switch {
	case op.Return == unanswered:
		said = "no answer"
	case op.Error != "":
		said = op.Error
	case op.Answer != nil:
		said += fmt.Sprintf(": %+v", *op.Answer)
	case op.Write != nil && !op.Write.Applied:
		said += ": no effect"
	}
	return fmt.Sprintf("%s [%s] by client %d through %s -> %s", op.Kind, asked, op.Client, op.Via, said)
}

func changes(all []change) string {
	var parts []string
	for _, c := range all {
		if c.Delete {
			parts = append(parts, "delete "+c.Key)
		} else {
			parts = append(parts, c.Key+" = "+c.Value)
		}
	}
	return strings.Join(parts, ", ")
}
