package main

import (
	"slices"
	"strings"
)

// state is the store at one revision: its keys in order. It is immutable.
type state []kv

func (s state) find(key string) (int, bool) {
	return slices.BinarySearchFunc(s, key, func(have kv, key string) int { return strings.Compare(have.Key, key) })
}

func (s state) mod(key string) int64 {
	if at, there := s.find(key); there {
		return s[at].Mod
	}
	return 0
}

// apply returns the state after all of changes at rev, and which of them had an effect.
func (s state) apply(changes []change, rev int64) (state, []change) {
	next, done := slices.Clone(s), []change{}
	for _, c := range changes {
		at, there := next.find(c.Key)
		switch {
		case c.Delete && there:
			next = slices.Delete(next, at, at+1)
		case c.Delete:
			continue
		case there:
			next[at] = kv{c.Key, c.Value, rev, next[at].Create, next[at].Version + 1}
		default:
			next = slices.Insert(next, at, kv{c.Key, c.Value, rev, rev, 1})
		}
		done = append(done, c)
	}
	return next, done
}

// answer returns etcd's response to r.
func (s state) answer(r *read) answer {
	from, there := s.find(r.Key)
	to := from
	switch {
	case r.End == "" && there:
		to++
	case r.End == "\x00":
		to = len(s)
	case r.End != "":
		to, _ = s.find(r.End)
	}
	found := s[from:max(from, to)]
	a := answer{Count: int64(len(found))}
	if r.CountOnly {
		return a
	}
	if r.Limit > 0 && len(found) > r.Limit {
		found, a.More = found[:r.Limit], true
	}
	a.KVs = slices.Clone(found)
	if r.KeysOnly {
		for n := range a.KVs {
			a.KVs[n].Value = ""
		}
	}
	return a
}

func (a answer) equal(other answer) bool {
	return a.Count == other.Count && a.More == other.More && slices.Equal(a.KVs, other.KVs)
}
