package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
)

// unanswered is the return time of an operation without a response.
const unanswered = -1

// line is one line of a history file; T determines which fields are set.
type line struct {
	T       string    `json:"t"`       // start, cut, event, compact or op
	At      int64     `json:"at"`      // cut, compact: when
	Rev     int64     `json:"rev"`     // start, cut, event, compact: at which revision
	KVs     []kv      `json:"kvs"`     // start: what was there
	Segment int       `json:"segment"` // event: which history, counted by cuts
	Seen    int64     `json:"seen"`    // event: when the recorder saw it
	Changes []change  `json:"changes"` // event
	Op      operation `json:"op"`      // op
}

// kv is a key-value in a response of etcd.
type kv struct {
	Key     string `json:"k"`
	Value   string `json:"v"`
	Mod     int64  `json:"m"`
	Create  int64  `json:"c"`
	Version int64  `json:"n"`
}

// change puts a value, or deletes the key.
type change struct {
	Key    string `json:"k"`
	Value  string `json:"v"`
	Delete bool   `json:"d"`
}

// operation is one call of a client. Times are nanoseconds of one clock.
type operation struct {
	Client int    `json:"client"`
	Via    string `json:"via"` // which server it was sent to
	Kind   string `json:"kind"`
	Call   int64  `json:"call"`
	Return int64  `json:"return"` // or unanswered
	Read   *read  `json:"read"`
	Write  *write `json:"write"`
	// Compact is the revision of a Compact: etcd refuses lower ones afterwards.
	Compact int64   `json:"compact"`
	Rev     int64   `json:"rev"`    // in the answer's header
	Answer  *answer `json:"answer"` // of a read, or of the read in a transaction that did not succeed
	Error   string  `json:"error"`  // with which a read at a revision, or a Compact, was refused: future or compacted
}

type read struct {
	Key          string `json:"key"`
	End          string `json:"end"`
	Limit        int    `json:"limit"`
	Rev          int64  `json:"rev"`
	CountOnly    bool   `json:"count_only"`
	KeysOnly     bool   `json:"keys_only"`
	Serializable bool   `json:"serializable"`
}

type answer struct {
	Count int64 `json:"count"`
	More  bool  `json:"more"`
	KVs   []kv  `json:"kvs"`
}

type write struct {
	Compare *compare `json:"compare"`
	Then    []change `json:"then"`
	Else    *read    `json:"else"`
	// Applied is whether the response shows an effect: a comparison held, or a key was deleted.
	Applied bool `json:"applied"`
}

type compare struct {
	Key string `json:"key"`
	Mod int64  `json:"mod"`
}

// event is etcd's change at one revision.
type event struct {
	Seen    int64
	Changes []change
}

// segment is one history of the store; a restore starts another.
type segment struct {
	start  int64 // the revision that it begins with
	first  state // the keys at that revision
	began  int64 // when
	events map[int64]event
	ops    []*operation
}

type history struct {
	segments []*segment
	compacts []line
	ops      []*operation
}

func readHistory(path string) (*history, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	h := &history{}
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 16<<20)
	for number := 1; lines.Scan(); number++ {
		var l line
		if err := json.Unmarshal(lines.Bytes(), &l); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, number, err)
		}
		if err := h.take(l); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, number, err)
		}
	}
	if len(h.segments) == 0 {
		return nil, fmt.Errorf("%s: no start", path)
	}
	return h, lines.Err()
}

func (h *history) take(l line) error {
	switch l.T {
	case "start", "cut":
		h.segments = append(h.segments, &segment{start: l.Rev, first: l.KVs, began: l.At, events: map[int64]event{}})
	case "event":
		if l.Segment >= len(h.segments) {
			return fmt.Errorf("an event of segment %d before its start", l.Segment)
		}
		h.segments[l.Segment].events[l.Rev] = event{l.Seen, l.Changes}
	case "compact":
		h.compacts = append(h.compacts, l)
	case "op":
		h.ops = append(h.ops, &l.Op)
	default:
		return fmt.Errorf("unknown kind of line %q", l.T)
	}
	return nil
}
