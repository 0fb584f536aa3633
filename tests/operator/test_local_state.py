"""The state folder of `forebay up`, names in it, and ports: what another run or user left must do no harm."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
from pathlib import Path

import pytest

from forebay_operator.local.errors import InputError, LocalError
from forebay_operator.local.ports import Ports
from forebay_operator.local.state import StateFolder, running_names, state_root
from forebay_wire.discovery import WorkerEntry, WorkersFile


def test_state_folder_is_private_and_cleared(tmp_path: Path) -> None:
    folder = StateFolder("m", tmp_path / "deep" / "state")
    folder.acquire()
    token = folder.make_token()
    assert folder.token_file.read_text() == token
    assert stat.S_IMODE(folder.token_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    entry = WorkerEntry(name="a", host="h", port=1, pool="decode", role="prefill")
    folder.write_workers(WorkersFile([entry]))
    assert json.loads(folder.workers_file.read_bytes())["workers"][0]["role"] == "prefill"
    assert running_names(tmp_path / "deep" / "state") == ["m"]
    with pytest.raises(LocalError, match=f"process {os.getpid()}"):
        StateFolder("m", tmp_path / "deep" / "state").acquire()
    folder.release()
    assert running_names(tmp_path / "deep" / "state") == []
    assert sorted(path.name for path in folder.path.iterdir()) == ["lock", "logs"]


def test_the_folder_of_what_never_ran_goes_unless_it_holds_something(tmp_path: Path) -> None:
    folder = StateFolder("m", tmp_path)
    folder.acquire()
    folder.make_token()
    folder.discard()
    folder.release()
    assert list(tmp_path.iterdir()) == []
    folder.acquire()
    (folder.logs / "prefill-0.log").write_text("why")
    folder.discard()
    folder.release()
    folder.discard()
    assert (folder.logs / "prefill-0.log").read_text() == "why"


def test_a_running_ups_folder_is_not_discarded_by_another(tmp_path: Path) -> None:
    folder = StateFolder("m", tmp_path)
    folder.acquire()
    StateFolder("m", tmp_path).discard()
    assert (folder.path / "lock").exists()
    folder.release()


def test_a_process_number_used_again_is_left_alone(tmp_path: Path) -> None:
    """processes.json of a dead `up` may name a number that is ours by now; the start time differs."""
    folder = StateFolder("m", tmp_path)
    folder.create()
    folder.record_processes({os.getpid(): 1.0})
    folder.acquire()
    folder.release()


@pytest.mark.parametrize(
    "content",
    [b"", b"[1, 2]", b'{"x": 1}', b'{"-1": 1}', b'{"99999999999": 1}', b'{"1": "x"}', b'{"1": null}', b"\xff"],
)
def test_a_list_of_processes_that_cannot_be_read_is_no_list(tmp_path: Path, content: bytes) -> None:
    folder = StateFolder("m", tmp_path)
    folder.create()
    (folder.path / "processes.json").write_bytes(content)
    folder.acquire()
    assert not (folder.path / "processes.json").exists()
    folder.release()


@pytest.mark.parametrize("name", ["lock", "workers.json"])
def test_a_folder_in_the_place_of_a_file_is_told(tmp_path: Path, name: str) -> None:
    folder = StateFolder("m", tmp_path)
    folder.create()
    (folder.path / name).mkdir()
    with pytest.raises(LocalError, match=r"state folder .*: Is a directory; .*XDG_STATE_HOME"):
        folder.acquire()
    folder.release()


def test_a_full_disk_is_told_and_spoils_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = StateFolder("m", tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        folder.acquire()
    folder.write_workers(WorkersFile([]))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        entry = WorkerEntry(name="a", host="h", port=1, pool="decode")
        with pytest.raises(LocalError, match=r"cannot write workers.json in the state folder .*: No space left"):
            folder.write_workers(WorkersFile([entry]))
    assert json.loads(folder.workers_file.read_bytes()) == {"workers": []}
    folder.release()


@pytest.mark.parametrize("name", ["", "A", "a/b", "../a", "a" * 64, "1a", "a-"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(InputError):
        StateFolder(name)


def test_state_root_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_root() == tmp_path / "forebay"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/u")
    assert state_root() == Path("/home/u/.local/state/forebay")


def test_a_reserved_port_can_be_listened_on_but_not_found_again() -> None:
    first, second = Ports("127.0.0.1"), Ports("127.0.0.1")
    try:
        port = first.find(21000, 1)[0]
        assert second.find(port, 1)[0] > port
        # What asyncio's and http.server's listeners do.
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen()
            with pytest.raises(LocalError, match=f"port {port} on 127.0.0.1 can't be used"):
                second.take(port, "choose another")
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
    finally:
        first.close()
        second.close()
