"""Two members of a Patroni cluster, without PostgreSQL: they elect a leader, and print what each of them sees."""

import logging
import sys
import time

from patroni.dcs import get_dcs

TIMEOUT_SECONDS = 60


def member(name, endpoint, control=False):
    config = {
        "scope": "batman",
        "namespace": "/service/",
        "name": name,
        "ttl": 30,
        "loop_wait": 1,
        "retry_timeout": 10,
        # Otherwise Patroni asks for the members of etcd, and calls them instead.
        "etcd3": {"hosts": [endpoint.removeprefix("http://")], "use_proxies": True},
    }
    if control:
        config["patronictl"] = True
    return get_dcs(config)


def shown(cluster):
    leader = cluster.leader
    return {
        "initialize": cluster.initialize,
        "leader": leader.name if leader else None,
        "members": sorted((seen.name, seen.data.get("state")) for seen in cluster.members),
        "lsn": cluster.status.last_lsn,
        "config": cluster.config.data if cluster.config else None,
        "sync": cluster.sync.leader if cluster.sync else None,
        "failover": bool(cluster.failover),
        "history": cluster.history.lines if cluster.history else None,
    }


def until(what, condition):
    """Members follow changes by a watch: what they see is compared once it has arrived."""
    end = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"not within {TIMEOUT_SECONDS} s: {what}")
        time.sleep(0.02)


def main(endpoint):
    logging.disable(logging.INFO)
    first, second = member("node1", endpoint), member("node2", endpoint)
    control = member("ctl", endpoint, control=True)
    members = {"node1": first, "node2": second}

    def step(what, result):
        print(what, bool(result))
        print("  patronictl sees", shown(control.get_cluster()))
        for name, dcs in members.items():
            until(what, lambda: shown(dcs.get_cluster()) == shown(control.get_cluster()))
            print(" ", name, "sees", shown(dcs.get_cluster()))

    step("empty", None)
    step("node1 initializes", first.initialize(sysid="7"))
    step("node2 initializes", second.initialize(sysid="8"))
    for name, dcs in members.items():
        step(name + " registers", dcs.touch_member({"state": "running", "conn_url": "postgres://" + name}))
    step("node1 acquires the leader key", first.attempt_to_acquire_leader())
    step("node2 acquires the leader key", second.attempt_to_acquire_leader())
    step("configuration", first.set_config_value('{"ttl":30}'))
    leader = first.get_cluster().leader
    step("node1 updates the leader key", first.update_leader(first.get_cluster(), 1234))
    step("synchronous state", bool(first.set_sync_state_value('{"leader":"node1","sync_standby":"node2"}')))
    step("history", first.set_history_value('[[1,2,"reason"]]'))
    step("failover is requested", control.manual_failover("node1", "node2"))
    step("node1 releases the leader key", first.delete_leader(leader, 5678))
    step("node2 acquires the leader key", second.attempt_to_acquire_leader())
    step("node1 acquires the leader key", first.attempt_to_acquire_leader())
    step("node2 changes", second.touch_member({"state": "streaming"}))
    step("failover is done", second.manual_failover("", ""))
    step("initialization is cancelled", second.cancel_initialization())
    step("cluster is deleted", control.delete_cluster())


if __name__ == "__main__":
    main(sys.argv[-1])
    sys.stdout.flush()
    # The threads that watch do not end by themselves.
    import os

    os._exit(0)
