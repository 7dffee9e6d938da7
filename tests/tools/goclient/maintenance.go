package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

func maintenanceSection(t *tour) {
	m := pb.NewMaintenanceClient(t.conn)
	t.step("status", func(ctx context.Context) (string, error) {
		r, err := m.Status(ctx, &pb.StatusRequest{})
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("%s version=%s storage=%q leader known=%t learner=%t db>0=%t in use>0=%t index>0=%t applied>0=%t quota=%d errors=%q downgrade=%v",
			t.header(r.Header), r.Version, r.StorageVersion, t.members[r.Leader], r.IsLearner, r.DbSize > 0, r.DbSizeInUse > 0,
			r.RaftIndex > 0, r.RaftAppliedIndex > 0, r.DbSizeQuota, r.Errors, r.DowngradeInfo.GetEnabled()), nil
	})
	t.step("hash of the keyspace, twice", func(ctx context.Context) (string, error) {
		one, err := m.HashKV(ctx, &pb.HashKVRequest{})
		if err != nil {
			return "", err
		}
		two, err := m.HashKV(ctx, &pb.HashKVRequest{})
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("%s equal=%t compacted%s hashed%s", t.header(one.Header), one.Hash == two.Hash, t.rel(one.CompactRevision), t.rel(one.HashRevision)), nil
	})
	t.step("hash at a future revision", func(ctx context.Context) (string, error) {
		_, err := m.HashKV(ctx, &pb.HashKVRequest{Revision: t.base + 100000})
		return "", err
	})
	t.step("hash of the backend", func(ctx context.Context) (string, error) {
		r, err := m.Hash(ctx, &pb.HashRequest{})
		return fmt.Sprintf("%s given=%t", t.header(r.GetHeader()), r.GetHash() != 0), err
	})
	t.step("alarms", func(ctx context.Context) (string, error) {
		r, err := t.client.AlarmList(ctx)
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("%d alarms", len(r.Alarms)), nil
	})
	t.step("alarm raised, seen, disarmed", func(ctx context.Context) (string, error) {
		var member uint64
		for id := range t.members {
			member = id
		}
		alarm := func(action pb.AlarmRequest_AlarmAction) error {
			_, err := m.Alarm(ctx, &pb.AlarmRequest{Action: action, MemberID: member, Alarm: pb.AlarmType_NOSPACE})
			return err
		}
		if err := alarm(pb.AlarmRequest_ACTIVATE); err != nil {
			return "", err
		}
		_, put := t.client.Put(ctx, "tour/alarm", "v")
		_, get := t.client.Get(ctx, "tour/alarm")
		st, err := m.Status(ctx, &pb.StatusRequest{})
		text := fmt.Sprintf("put: %s, get: %s, %d errors in status", describe(put), describe(get), len(st.GetErrors()))
		return text, errors.Join(err, alarm(pb.AlarmRequest_DEACTIVATE))
	})
	t.step("snapshot", func(ctx context.Context) (string, error) { return snapshot(ctx, t, m) })
	t.step("defragment", func(ctx context.Context) (string, error) {
		_, err := m.Defragment(ctx, &pb.DefragmentRequest{})
		return "done", err
	})
	t.step("move leader to an unknown member", func(ctx context.Context) (string, error) {
		_, err := m.MoveLeader(ctx, &pb.MoveLeaderRequest{TargetID: 0x7fff})
		return "", err
	})
	for _, version := range []string{"", "9.9.0"} {
		t.step(fmt.Sprintf("validate a downgrade to %q", version), func(ctx context.Context) (string, error) {
			r, err := m.Downgrade(ctx, &pb.DowngradeRequest{Action: pb.DowngradeRequest_VALIDATE, Version: version})
			return fmt.Sprintf("version=%q", r.GetVersion()), err
		})
	}
}

// snapshot reads the whole stream and checks it by the digest that etcd appends.
func snapshot(ctx context.Context, t *tour, m pb.MaintenanceClient) (string, error) {
	stream, err := m.Snapshot(ctx, &pb.SnapshotRequest{})
	if err != nil {
		return "", err
	}
	var blob bytes.Buffer
	var remaining uint64
	var version string
	inOrder := true
	for first := true; ; first = false {
		r, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return "", err
		}
		// What the first message announced must shrink by exactly what each next one brings; the digest comes on top.
		if !first && remaining != 0 && r.RemainingBytes+uint64(len(r.Blob)) != remaining {
			inOrder = false
		}
		remaining, version = r.RemainingBytes, r.Version
		blob.Write(r.Blob)
	}
	all := blob.Bytes()
	if len(all) < sha256.Size {
		return "", fmt.Errorf("only %d bytes", len(all))
	}
	body, digest := all[:len(all)-sha256.Size], all[len(all)-sha256.Size:]
	sum := sha256.Sum256(body)
	return fmt.Sprintf("whole pages=%t remaining at the end=%d in order=%t digest matches=%t version=%q",
		len(body) > 0 && len(body)%512 == 0, remaining, inOrder, bytes.Equal(sum[:], digest), version), nil
}

func clusterSection(t *tour) {
	cluster := pb.NewClusterClient(t.conn)
	for _, linearizable := range []bool{true, false} {
		t.step(fmt.Sprintf("members, linearizable=%t", linearizable), func(ctx context.Context) (string, error) {
			r, err := cluster.MemberList(ctx, &pb.MemberListRequest{Linearizable: linearizable})
			if err != nil {
				return "", err
			}
			text := fmt.Sprintf("%d members", len(r.Members))
			for _, m := range r.Members {
				text += fmt.Sprintf(" name=%s known=%t peers=%d clients=%d learner=%t", m.Name, t.members[m.ID], len(m.PeerURLs), len(m.ClientURLs), m.IsLearner)
			}
			return text, nil
		})
	}
	t.step("remove an unknown member", func(ctx context.Context) (string, error) {
		_, err := cluster.MemberRemove(ctx, &pb.MemberRemoveRequest{ID: 0x7fff})
		return "", err
	})
	t.step("promote an unknown member", func(ctx context.Context) (string, error) {
		_, err := cluster.MemberPromote(ctx, &pb.MemberPromoteRequest{ID: 0x7fff})
		return "", err
	})
	t.step("add a member with a bad URL", func(ctx context.Context) (string, error) {
		_, err := cluster.MemberAdd(ctx, &pb.MemberAddRequest{PeerURLs: []string{"not a url"}})
		return "", err
	})
}
