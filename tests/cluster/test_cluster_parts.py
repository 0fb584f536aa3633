"""Parts of the self-built cluster that need neither root nor a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.cluster import archive, locks, processes
from e2e.cluster.shell import CommandFailed, run

from support.local_mode import until

SLEEPER = "import sys, time; print('up', flush=True); time.sleep(60)"


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[int]:
    """A started process that has reached its own code: just after exec it has little memory of its own."""
    pid = processes.start("sleeper", sys.executable, "-c", SLEEPER, pids=tmp_path, logs=tmp_path)
    try:
        until("the sleeper's first line", lambda: "up" in (tmp_path / "sleeper.log").read_text())
        yield pid
    finally:
        processes.kill(tmp_path / "sleeper")


def test_a_process_is_known_by_its_file_until_it_ends(tmp_path: Path, sleeper: int) -> None:
    file = tmp_path / "sleeper"
    assert processes.pid_of(file) == sleeper
    assert processes.resident(sleeper) > 1000
    processes.kill(file)
    assert processes.pid_of(file) is None
    processes.kill(file)


def test_a_later_process_of_the_same_number_is_another(tmp_path: Path, sleeper: int) -> None:
    (tmp_path / "older").write_text(f"{sleeper} 1")
    assert processes.pid_of(tmp_path / "older") is None
    processes.kill(tmp_path / "older")
    assert processes.pid_of(tmp_path / "sleeper") == sleeper


def test_what_no_file_tells_of_is_found_by_its_arguments(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLEEPER, f"{tmp_path}/run/config"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as stray:
        assert stray.stdout is not None
        assert stray.stdout.readline() == b"up\n"
        assert processes.kill_users_of(tmp_path / "ru") == []
        assert processes.kill_users_of(tmp_path / "run") == [stray.pid]
        assert stray.wait(10) != 0


HOLDER = """
import sys
from pathlib import Path
from e2e.cluster import locks
with locks.held(Path(sys.argv[1]), "a build", seconds=0):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_is_held_by_one_and_goes_with_its_process(tmp_path: Path) -> None:
    file = tmp_path / "new" / "lock"
    command = [sys.executable, "-c", HOLDER, str(file)]
    root = Path(locks.__file__).parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        refused = pytest.raises(TimeoutError, match=r"a build is under way elsewhere after 0.3 s")
        with refused, locks.held(file, "a build", seconds=0.3):
            pass
        holder.kill()
        with locks.held(file, "a build", seconds=60):
            pass


def test_an_archive_is_what_a_runtime_imports(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"#!/bin/sh\n")
    archive.write(tmp_path / "made.tar", "localhost/x:1", {"bin/x": program}, entrypoint=["/bin/x"], user="1:1")
    with tarfile.open(tmp_path / "made.tar") as made:
        [manifest] = json.load(made.extractfile("manifest.json"))  # type: ignore[arg-type]
        config = json.load(made.extractfile(manifest["Config"]))  # type: ignore[arg-type]
        [layer] = manifest["Layers"]
        with tarfile.open(fileobj=made.extractfile(layer)) as inner:
            assert [(member.name, member.mode) for member in inner] == [("bin/x", 0o755)]
    assert manifest["RepoTags"] == ["localhost/x:1"]
    assert config["rootfs"]["diff_ids"] == [f"sha256:{layer.removesuffix('.tar')}"]
    assert (config["config"]["Entrypoint"], config["config"]["User"]) == (["/bin/x"], "1:1")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["made.tar", "program"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["sh", "-c", "echo out; echo err >&2; exit 3"], "ended with 3:\nout\nerr"),
        (["sleep", "30"], "did not end within 0.2 s"),
        (["/nowhere/at-all"], "could not be started"),
    ],
)
def test_a_failed_command_says_what_and_why(command: list[str], said: str) -> None:
    with pytest.raises(CommandFailed, match=said) as error:
        run(*command, seconds=0.2 if command[0] == "sleep" else 10)
    assert f"`{command[0]}" in str(error.value)
