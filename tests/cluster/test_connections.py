"""What the suite reads in a pod and how it judges it."""

from __future__ import annotations

import socket
from pathlib import Path

from e2e.on_kubernetes.connections import Connection, Judge, connections, parse

from support.network_policies import Host

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1
   1: 0501580A:1F40 0A02580A:9C40 01 00000000:00000000 00:00000000 00000000     0        0 2 1
   2: 0501580A:A410 0100600A:01BB 01 00000000:00000000 00:00000000 00000000     0        0 3 1
   3: 0501580A:A411 0602580A:1F40 06 00000000:00000000 00:00000000 00000000     0        0 4 1
   4: 0100007F:1F40 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 5 1
   5: 0000000000000000FFFF00000501580A:1F40 0000000000000000FFFF00000B02580A:9C41 01 0:0 0:0 0 0 0 6 1
"""


def test_who_called_whom() -> None:
    """Time-waits and loopback are left out; IPv4 in IPv6 is IPv4."""
    assert connections(parse(TABLE)) == {
        Connection("10.88.2.10", "10.88.1.5", 8000),
        Connection("10.88.2.11", "10.88.1.5", 8000),
        Connection("10.88.1.5", "10.96.0.1", 443),
    }


def test_this_process_is_read_as_the_kernel_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = [each for each in parse(Path("/proc/self/net/tcp").read_text()) if each.port == port]
    assert [(each.address, each.listens) for each in found] == [("127.0.0.1", True)]


def test_a_service_is_as_allowed_as_the_pods_behind_it() -> None:
    client, router, worker = (Host("llm", {"app": name}) for name in ("client", "router", "worker"))
    policy = {
        "metadata": {"namespace": "llm"},
        "spec": {
            "podSelector": {"matchLabels": {"app": "worker"}},
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": {"app": "router"}}}],
                 "ports": [{"protocol": "TCP", "port": 8000}]},
            ],
            "egress": [],
        },
    }  # fmt: skip
    pods = {"10.0.0.1": client, "10.0.0.2": router, "10.0.0.3": worker}
    judge = Judge((policy,), pods, {"10.96.0.9": (worker,), "10.96.0.1": ()}, frozenset({"10.0.0.254"}))
    allowed = {
        ("10.0.0.2", "10.0.0.3", 8000): True,
        ("10.0.0.2", "10.0.0.3", 8001): False,
        ("10.0.0.1", "10.0.0.3", 8000): False,
        ("10.0.0.1", "10.96.0.9", 8000): False,
        ("10.0.0.2", "10.96.0.9", 8000): True,
        ("10.0.0.254", "10.0.0.3", 8000): True,
        ("10.0.0.1", "10.96.0.1", 443): True,
        ("10.0.0.3", "10.96.0.1", 443): False,
    }
    assert {key: judge.allowed(Connection(*key)) for key in allowed} == allowed
