package main

import (
	"cmp"
	"fmt"
	"slices"
)

// resolved is a history in which every write that took effect has its revision.
type resolved struct {
	*segment
	states  map[int64]state
	last    int64
	writers map[int64]*operation
	// linearizable holds all operations whose response shows the store's revision at some time during the call: writes
	// that took effect or have a response, reads that are not serializable, at a past revision too, and Compacts.
	linearizable []*operation
	// snapshots holds the reads of the state at some revision that have a response.
	snapshots []*operation
	// compactions holds the operations that show that a revision is compacted: Compacts, and reads that were refused.
	compactions []*operation
}

// split assigns each operation to its history. A write in flight at a cut belongs to the history in which the
// recorder saw it; a read in flight may belong to either. Values show that, so a delete without a response belongs to the
// history in which it was sent: no process of that history, and so no call, outlives the cut.
func (h *history) split() {
	values := make([]map[string]bool, len(h.segments))
	for n, s := range h.segments {
		values[n] = map[string]bool{}
		for _, e := range s.events {
			for _, c := range e.Changes {
				values[n][c.Value] = true
			}
		}
	}
	for _, op := range h.ops {
		first, last := 0, 0
		for n, s := range h.segments {
			if n > 0 && op.Call >= s.began {
				first = n
			}
			if n > 0 && (op.Return == unanswered || op.Return >= s.began) {
				last = n
			}
		}
		if first < last && op.Write == nil {
			continue
		}
		if op.Return == unanswered && op.Write != nil && !slices.ContainsFunc(op.Write.Then, func(c change) bool { return !c.Delete }) {
			last = first
		}
		for n := first; n <= last; n++ {
			if first == last || slices.ContainsFunc(op.Write.Then, func(c change) bool { return !c.Delete && values[n][c.Value] }) {
				h.segments[n].ops = append(h.segments[n].ops, op)
				break
			}
		}
	}
}

// resolve finds the revision at which each write took effect, with or without a response: values are unique, and the
// recorder has seen every revision.
func resolve(s *segment) (*resolved, []string) {
	r := &resolved{segment: s, states: map[int64]state{s.start: s.first}, last: s.start, writers: map[int64]*operation{}}
	var wrong []string
	complain := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }

	at := map[string][]int64{}
	for rev := s.start + 1; ; rev++ {
		e, there := s.events[rev]
		if !there {
			break
		}
		next, done := r.states[rev-1].apply(e.Changes, rev)
		if len(done) != len(e.Changes) {
			complain("revision %d: an event deletes what is not there: %v", rev, e.Changes)
		}
		for _, c := range e.Changes {
			if revs := at[c.Value]; !c.Delete && (len(revs) == 0 || revs[len(revs)-1] != rev) {
				at[c.Value] = append(revs, rev)
			}
		}
		r.states[rev], r.last = next, rev
	}
	if len(s.events) != int(r.last-s.start) {
		complain("the recorder has %d events, but not one for each revision from %d on", len(s.events), s.start+1)
	}

	own := func(op *operation, rev int64) {
		if other := r.writers[rev]; other != nil {
			complain("revision %d was written by %s and by %s", rev, describe(op), describe(other))
		}
		if _, there := s.events[rev]; !there {
			complain("no event for %s", describe(op))
			return
		}
		_, done := r.states[rev-1].apply(op.Write.Then, rev)
		if !slices.Equal(byKey(done), byKey(s.events[rev].Changes)) {
			complain("%s, but the event is %v", describe(op), s.events[rev].Changes)
		}
		r.writers[rev] = op
	}
	var deletes []*operation
	for _, op := range s.ops {
		if op.Write == nil {
			continue
		}
		put := slices.IndexFunc(op.Write.Then, func(c change) bool { return !c.Delete })
		var revs []int64
		if put >= 0 {
			revs = at[op.Write.Then[put].Value]
		}
		if len(revs) > 1 {
			complain("%s took effect %d times, at %v", describe(op), len(revs), revs)
		}
		switch {
		case op.Return != unanswered:
			if op.Write.Applied {
				own(op, op.Rev)
			} else if len(revs) > 0 {
				complain("%s took effect at %v", describe(op), revs)
			}
			r.linearizable = append(r.linearizable, op)
		case put < 0:
			deletes = append(deletes, op)
		case len(revs) > 0:
			r.applied(op, revs[0])
			own(op, revs[0])
		}
	}
	r.resolveDeletes(deletes, own)
	for rev := s.start + 1; rev <= r.last; rev++ {
		if r.writers[rev] == nil {
			complain("no client wrote revision %d: %v", rev, s.events[rev].Changes)
		}
	}
	for _, op := range s.ops {
		if op.Return == unanswered || op.Write != nil {
			continue
		}
		if op.Error == "compacted" || op.Compact > 0 && op.Error == "" {
			r.compactions = append(r.compactions, op)
		}
		if op.Read != nil && (op.Read.Serializable || op.Read.Rev > 0) {
			r.snapshots = append(r.snapshots, op)
		}
		if op.Error == "" && (op.Read == nil || !op.Read.Serializable) {
			r.linearizable = append(r.linearizable, op)
		}
	}
	return r, wrong
}

// resolveDeletes assigns revisions without a known writer to deletes without a response, the earliest to the
// earliest: only the start of a delete matters.
func (r *resolved) resolveDeletes(deletes []*operation, own func(*operation, int64)) {
	slices.SortFunc(deletes, func(a, b *operation) int { return cmp.Compare(a.Call, b.Call) })
	for rev := r.start + 1; rev <= r.last; rev++ {
		changes := r.events[rev].Changes
		if r.writers[rev] != nil || len(changes) != 1 || !changes[0].Delete {
			continue
		}
		for n, op := range deletes {
			if op.Write.Then[0].Key == changes[0].Key && op.Call <= r.events[rev].Seen {
				r.applied(op, rev)
				own(op, rev)
				deletes = slices.Delete(deletes, n, n+1)
				break
			}
		}
	}
}

// applied turns op into a write that took effect at rev, no later than the recorder saw it.
func (r *resolved) applied(op *operation, rev int64) {
	op.Rev, op.Return, op.Write.Applied = rev, max(op.Call, r.events[rev].Seen), true
	r.linearizable = append(r.linearizable, op)
}

// byKey returns changes in the order of keys, those of one key in their own: a nested transaction makes several.
func byKey(changes []change) []change {
	sorted := slices.Clone(changes)
	slices.SortStableFunc(sorted, func(a, b change) int { return cmp.Compare(a.Key, b.Key) })
	return sorted
}
