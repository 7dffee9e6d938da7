package main

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/anishathalye/porcupine"
)

const (
	// pieceOps is the number of operations given to porcupine at once: its memory grows with the square of it.
	pieceOps = 1500
	// pieceTimeout bounds porcupine's time per piece. Revisions leave it hardly any choice of orders.
	pieceTimeout = 2 * time.Minute
)

// order finds responses that go back in time: an operation that starts after a response at some revision must be at
// that revision or later, a write later. Since every operation has a revision, this connects the pieces of a history.
func (r *resolved) order() []string {
	byCall := slices.SortedFunc(slices.Values(r.linearizable), func(a, b *operation) int { return cmp.Compare(a.Call, b.Call) })
	byReturn := slices.SortedFunc(slices.Values(r.linearizable), func(a, b *operation) int { return cmp.Compare(a.Return, b.Return) })
	var wrong []string
	var newest *operation
	next := 0
	for _, op := range byCall {
		for ; next < len(byReturn) && byReturn[next].Return < op.Call; next++ {
			if newest == nil || byReturn[next].Rev > newest.Rev {
				newest = byReturn[next]
			}
		}
		if newest == nil {
			continue
		}
		if op.Rev < newest.Rev || op.writes() && op.Rev == newest.Rev {
			wrong = append(wrong, fmt.Sprintf("time runs backwards: %s\n    began %v after the end of %s",
				describe(op), time.Duration(op.Call-newest.Return), describe(newest)))
		}
	}
	return wrong
}

func (op *operation) writes() bool { return op.Write != nil && op.Write.Applied }

// store is porcupine's state.
type store struct {
	rev int64
	kvs state
}

// model is etcd's store with its revision: each operation must find, or create, the revision in its response.
func model(first store) porcupine.Model {
	return porcupine.Model{
		Init: func() any { return first },
		Step: func(before, _, output any) (bool, any) {
			s, op := before.(store), output.(*operation)
			return s.step(op)
		},
		Equal: func(a, b any) bool {
			return a.(store).rev == b.(store).rev && slices.Equal(a.(store).kvs, b.(store).kvs)
		},
		DescribeOperation: func(_, output any) string { return describe(output.(*operation)) },
		DescribeState:     func(s any) string { return fmt.Sprintf("at %d: %v", s.(store).rev, s.(store).kvs) },
	}
}

func (s store) step(op *operation) (bool, store) {
	if op.Compact > 0 || op.Read != nil && op.Read.Rev > 0 {
		// The header alone: checkSnapshots compares the keys, checkCompactions the compacted revision.
		return op.Rev == s.rev, s
	}
	if op.Read != nil {
		return op.Rev == s.rev && s.kvs.answer(op.Read).equal(*op.Answer), s
	}
	w := op.Write
	holds := w.Compare == nil || s.kvs.mod(w.Compare.Key) == w.Compare.Mod
	if !w.Applied {
		// A failed comparison, or a delete of no key.
		if w.Compare == nil {
			_, done := s.kvs.apply(w.Then, s.rev+1)
			return op.Rev == s.rev && len(done) == 0, s
		}
		said := w.Else == nil || op.Answer != nil && s.kvs.answer(w.Else).equal(*op.Answer)
		return op.Rev == s.rev && !holds && said, s
	}
	next, done := s.kvs.apply(w.Then, s.rev+1)
	return holds && len(done) > 0 && op.Rev == s.rev+1, store{s.rev + 1, next}
}

// linearize checks one piece after the other with porcupine, each a range of revisions. The first that is not
// linearizable is written to html.
func (r *resolved) linearize(html string) (pieces int, wrong []string) {
	ops := slices.SortedFunc(slices.Values(r.linearizable), func(a, b *operation) int {
		if a.Rev != b.Rev {
			return cmp.Compare(a.Rev, b.Rev)
		}
		return cmp.Compare(a.Call, b.Call)
	})
	before := r.start
	for len(ops) > 0 {
		end := min(pieceOps, len(ops))
		for end < len(ops) && ops[end].Rev == ops[end-1].Rev {
			end++
		}
		piece := make([]porcupine.Operation, 0, end)
		for _, op := range ops[:end] {
			piece = append(piece, porcupine.Operation{ClientId: op.Client, Input: op, Call: op.Call, Output: op, Return: op.Return})
		}
		first, known := r.states[before]
		if !known {
			return pieces, append(wrong, fmt.Sprintf("revision %d, which an answer names, was never there", before))
		}
		pieces++
		m := model(store{before, first})
		result, info := porcupine.CheckOperationsVerbose(m, piece, pieceTimeout)
		if result != porcupine.Ok {
			says := fmt.Sprintf("%d operations from revision %d to %d are not linearizable (porcupine: %s)", end, before, ops[end-1].Rev, result)
			if err := porcupine.VisualizePath(m, info, html); err != nil {
				says += fmt.Sprintf("; they cannot be drawn: %v", err)
			} else {
				says += "; drawn in " + html
			}
			return pieces, append(wrong, says)
		}
		before, ops = ops[end-1].Rev, ops[end:]
	}
	return pieces, wrong
}

// checkCompactions finds reads at a revision that were answered although it was compacted: after a response that shows
// the compaction, or with a header that is newer than that of the Compact. Serializable reads may be served by a member
// that lags.
func (r *resolved) checkCompactions() []string {
	reads := slices.DeleteFunc(slices.Clone(r.snapshots), func(op *operation) bool {
		return op.Error != "" || op.Read.Serializable || op.Read.Rev <= 0
	})
	slices.SortFunc(reads, func(a, b *operation) int { return cmp.Compare(a.Call, b.Call) })
	byReturn := slices.SortedFunc(slices.Values(r.compactions), func(a, b *operation) int { return cmp.Compare(a.Return, b.Return) })
	byRev := slices.SortedFunc(slices.Values(r.compactions), func(a, b *operation) int { return cmp.Compare(a.Rev, b.Rev) })
	byRev = slices.DeleteFunc(byRev, func(op *operation) bool { return op.Rev == 0 })
	var wrong []string
	var highest *operation
	next := 0
	for _, op := range reads {
		for ; next < len(byReturn) && byReturn[next].Return < op.Call; next++ {
			if highest == nil || byReturn[next].compacted() > highest.compacted() {
				highest = byReturn[next]
			}
		}
		if highest != nil && highest.compacted() > op.Read.Rev {
			wrong = append(wrong, fmt.Sprintf("a compacted revision was read: %s\n    began %v after the end of %s",
				describe(op), time.Duration(op.Call-highest.Return), describe(highest)))
		}
	}
	slices.SortFunc(reads, func(a, b *operation) int { return cmp.Compare(a.Rev, b.Rev) })
	highest, next = nil, 0
	for _, op := range reads {
		for ; next < len(byRev) && byRev[next].Rev < op.Rev; next++ {
			if highest == nil || byRev[next].compacted() > highest.compacted() {
				highest = byRev[next]
			}
		}
		if highest != nil && highest.compacted() > op.Read.Rev {
			wrong = append(wrong, fmt.Sprintf("a compacted revision was read: %s\n    has a newer header than %s",
				describe(op), describe(highest)))
		}
	}
	return wrong
}

// compacted returns the revision below which etcd refuses reads, at least, after this operation.
func (op *operation) compacted() int64 {
	if op.Compact > 0 {
		return op.Compact
	}
	return op.Read.Rev + 1
}

// checkSnapshots compares reads at a revision with the state at that revision. compacts are the Compacts of all
// histories: a restored store keeps its compaction.
func (r *resolved) checkSnapshots(compacts []line) []string {
	var wrong []string
	complain := func(op *operation, format string, args ...any) {
		wrong = append(wrong, fmt.Sprintf("%s: %s", describe(op), fmt.Sprintf(format, args...)))
	}
	byReturn := slices.SortedFunc(slices.Values(r.linearizable), func(a, b *operation) int { return cmp.Compare(a.Return, b.Return) })
	var newest *operation
	next := 0
	for _, op := range slices.SortedFunc(slices.Values(r.snapshots), func(a, b *operation) int { return cmp.Compare(a.Call, b.Call) }) {
		for ; next < len(byReturn) && byReturn[next].Return < op.Call; next++ {
			if newest == nil || byReturn[next].Rev > newest.Rev {
				newest = byReturn[next]
			}
		}
		rev := op.Read.Rev
		if rev == 0 {
			rev = op.Rev
		}
		writer := r.writers[rev]
		switch op.Error {
		case "future":
			// A serializable read may have been served by a member that lags.
			if !op.Read.Serializable && newest != nil && newest.Rev >= rev {
				complain(op, "but %s ended before that", describe(newest))
			}
			continue
		case "compacted":
			if !slices.ContainsFunc(compacts, func(c line) bool { return c.Rev > rev && c.At <= op.Return }) {
				complain(op, "no client had compacted so far")
			}
			continue
		}
		s, there := r.states[rev]
		switch {
		case !there && rev < r.start:
		case !there:
			complain(op, "this revision was never there")
		case op.Rev < rev:
			complain(op, "the header is older than the answer")
		case !s.answer(op.Read).equal(*op.Answer):
			complain(op, "the keys were %+v", s.answer(op.Read))
		case writer != nil && writer.Call > op.Return:
			complain(op, "answered before the write began: %s", describe(writer))
		case r.writers[op.Rev] != nil && r.writers[op.Rev].Call > op.Return:
			complain(op, "the header names a write that had not begun: %s", describe(r.writers[op.Rev]))
		}
	}
	return wrong
}
