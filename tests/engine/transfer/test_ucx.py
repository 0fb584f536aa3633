"""UCX's protocol table and environment, as pure functions."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from forebay_engine.transfer.ucx import (
    LOOK_SECONDS,
    ProtocolTable,
    RouteParser,
    TransportUnavailable,
    environment,
    has_infiniband,
)

STAMP = "[1795970335.035560] [vm:6972 :0]   "


def table(agent: str, where: str, title: str, *rows: tuple[str, str, str]) -> list[str]:
    body = [f"| {a} | {b} | {c} |" for a, b, c in (("Range", "Description", "Config"), *rows)]
    line = "+----+-----+----+"
    return [STAMP + text for text in (line, f"| {agent} {where} cfg#1 |", f"| {title} |", line, *body, line)]


READ = "remote memory read by ucp_get*(multi) into host memory from host"
CMA = table("pull", "intra-node", READ, ("0..inf", "zero-copy", "cma/memory"))
TCP = table("pull", "inter-node", READ, ("0..inf", "software emulation", "tcp/eth0"))
RDMA = table(
    "pull",
    "inter-node",
    READ,
    ("0", "no data fetch", "rc_mlx5/mlx5_0:1"),
    ("1..8184", "copy-out", "rc_mlx5/mlx5_0:1"),
    ("8185..64K", "zero-copy", "rc_mlx5/mlx5_0:1"),
    ("65537..inf", "zero-copy", "50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1"),
)
MIXED = table("pull", "inter-node", READ, ("0..inf", "zero-copy", "90% on rc_verbs/mlx5_0:1 and 10% on tcp/eth0"))
CUDA = table("pull", "intra-node", READ, ("0..inf", "zero-copy", "cuda_ipc/cuda"))
SELF = table("pull", "self", READ, ("0..inf", "zero-copy", "cma/memory"))
OTHER = table("someone", "intra-node", READ, ("0..inf", "software emulation", "tcp/lo"))
PUT = table("pull", "intra-node", "remote memory write by ucp_put* from host memory", ("0..inf", "zero-copy", "tcp/lo"))


@pytest.mark.parametrize(
    ("lines", "transport", "one_sided"),
    [
        (CMA, "SharedMemory", True),
        (TCP, "TCP", False),
        (RDMA, "RDMA", True),
        (MIXED, "TCP", False),
        (CUDA, "Unknown", False),  # NVLink or PCIe: the table does not say
        (SELF, "Unknown", None),
        (OTHER, "Unknown", None),
        (PUT, "Unknown", None),
        ([], "Unknown", None),
        (["", "|", "| | |", "garbage", STAMP], "Unknown", None),
        (CMA + TCP, "TCP", False),
        (RDMA + CMA, "SharedMemory", True),
        (PUT + OTHER + CMA + SELF, "SharedMemory", True),
    ],
)
def test_in_use(lines: list[str], transport: str, one_sided: bool | None) -> None:
    with tempfile.TemporaryFile() as log_file:
        log_file.write("\n".join(lines).encode())
        log_file.flush()
        found = ProtocolTable(log_file, "pull", 737_280)
        assert found.in_use() == transport
        if one_sided is not None:
            assert all(route.one_sided for route in found.routes()) == one_sided


def test_the_row_of_the_size_counts() -> None:
    rows = RouteParser().feed(RDMA)
    assert [(row.low, row.high) for row in rows] == [(0, 0), (1, 8184), (8185, 65536), (65537, float("inf"))]
    assert [row.one_sided for row in rows] == [False, False, True, True]


def test_the_table_is_read_on_as_it_grows() -> None:
    with tempfile.TemporaryFile() as log_file:
        now = 0.0
        found = ProtocolTable(log_file, "pull", 65536, lambda: now)
        assert found.in_use() == "Unknown"
        os.write(log_file.fileno(), ("\n".join(CMA) + "\n").encode())
        assert found.in_use() == "Unknown", "as last looked at"
        now += LOOK_SECONDS
        assert found.in_use() == "SharedMemory"
        text = ("\n".join(TCP) + "\n").encode()
        for start in range(0, len(text), 7):  # whatever a write ends with
            os.write(log_file.fileno(), text[start : start + 7])
            found.routes()
        assert found.in_use() == "TCP"
        assert len(found.routes()) == 2, "each row is taken once"


def test_new_warnings_are_handed_on_once(caplog: pytest.LogCaptureFixture) -> None:
    with tempfile.TemporaryFile() as log_file:
        found = ProtocolTable(log_file, "pull", 65536)
        for number in range(3):
            os.write(log_file.fileno(), f"[1.0] [vm:1:0] ucp.c:1 UCX  WARN number {number}\n".encode())
            found.routes()
            found.routes()
    assert [record.getMessage().split()[-1] for record in caplog.records] == ["0", "1", "2"]


def test_without_a_log_nothing_is_claimed() -> None:
    assert ProtocolTable(None, "pull", 65536).in_use() == "Unknown"


@pytest.mark.parametrize(
    ("transport", "infiniband", "tls"),
    [
        ("auto", True, None),
        ("auto", False, None),
        ("tcp", True, "tcp"),
        ("shared-memory", False, "tcp,cma"),
        ("rdma", True, "ib"),
    ],
)
def test_environment(transport: str, infiniband: bool, tls: str | None) -> None:
    env = environment(transport, infiniband=infiniband, log_file="/x")
    assert env.get("UCX_TLS") == tls
    assert ("UCX_MODULES" in env) == (not infiniband)
    assert env["UCX_LOG_FILE"] == "/x"


@pytest.mark.parametrize(
    ("transport", "tls"),
    [
        ("auto", None),
        ("tcp", "tcp,cuda_copy"),
        ("shared-memory", "tcp,cma,cuda_copy,cuda_ipc"),
        ("rdma", "ib,cuda_copy"),
        ("nvlink", "cuda_ipc,cuda_copy,tcp"),
    ],
)
def test_environment_of_an_arena_in_a_gpu(transport: str, tls: str | None) -> None:
    assert environment(transport, infiniband=True, log_file="/x", cuda=True).get("UCX_TLS") == tls


@pytest.mark.parametrize(("transport", "words"), [("rdma", "no RDMA device"), ("pigeon", "not one of")])
def test_what_can_not_be_is_refused(transport: str, words: str) -> None:
    with pytest.raises(TransportUnavailable, match=words):
        environment(transport, infiniband=False, log_file="/x")


def test_infiniband_is_a_device_not_a_folder(tmp_path: Path) -> None:
    assert not has_infiniband(tmp_path / "none")
    assert not has_infiniband(tmp_path)
    (tmp_path / "mlx5_0").mkdir()
    assert has_infiniband(tmp_path)
