"""Which cluster the suite uses: the given one, and kind's branch with imitations of kind and docker on the PATH."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from e2e.cluster import images, providers
from e2e.cluster.providers import Given, Kind
from e2e.cluster.shell import CommandFailed

FAKE = """#!{python}
import json, sys
from pathlib import Path
here = Path({folder!r})
words = sys.argv[1:]
with (here / "calls").open("a") as calls:
    calls.write(json.dumps([{name!r}, *words]) + "\\n")
if "--config" in words:
    (here / "config").write_text(Path(words[words.index("--config") + 1]).read_text())
    Path(words[words.index("--kubeconfig") + 1]).write_text("kind: Config")
fails = here / "fails"
if fails.exists() and fails.read_text() in " ".join([{name!r}, *words]):
    sys.exit("planted")
"""


class Machine:
    """Imitations on the PATH, and what they were asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()

    def has(self, *programs: str) -> None:
        for name in programs:
            file = self.bin / name
            file.write_text(FAKE.format(python=sys.executable, folder=str(self.folder), name=name))
            file.chmod(0o755)

    def fails(self, command: str) -> None:
        """From now on, every command that has these words."""
        (self.folder / "fails").write_text(command)

    @property
    def calls(self) -> list[list[str]]:
        file = self.folder / "calls"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Has nothing: no Docker, no kind, no programs built earlier."""
    made = Machine(tmp_path)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("PATH", str(made.bin))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    for name in (providers.KUBECONFIG, providers.IMAGE_PREFIX, providers.KEEP):
        monkeypatch.delenv(name, raising=False)
    return made


def test_what_kind_lacks_is_said(machine: Machine) -> None:
    assert Kind().unfit() == "kind is not installed"
    machine.has("kind")
    assert Kind().unfit() == "no Docker engine answers"
    machine.has("docker", "kubectl")
    assert Kind().unfit() == "no helm, and no Go to build it from"
    machine.has("helm")
    assert Kind().unfit() is None
    machine.fails("docker info")
    assert Kind().unfit() == "no Docker engine answers"


def test_kind_makes_three_nodes_with_the_products_images(machine: Machine) -> None:
    machine.has("kind", "docker", "kubectl", "helm")
    kind = Kind()
    cluster = kind.start()
    assert not cluster.built_here
    assert not cluster.lent, "it goes with all that is on it"
    roles = [node["role"] for node in yaml.safe_load((machine.folder / "config").read_text())["nodes"]]
    assert roles == ["control-plane", "worker", "worker"]
    calls = machine.calls
    create = next(call for call in calls if call[:3] == ["kind", "create", "cluster"])
    assert create[create.index("--kubeconfig") + 1] == str(cluster.kubeconfig)
    assert cluster.kubeconfig.read_text() == "kind: Config", "not the user's own"
    for image in images.PRODUCT:
        build = next(call for call in calls if call[:2] == ["docker", "build"] and image.reference in call)
        assert Path(build[build.index("-f") + 1]) == images.REPOSITORY / image.dockerfile
        load = ["kind", "load", "docker-image", image.reference, "--name", providers.KIND_NAME]
        assert calls.index(build) < calls.index(load)
        assert cluster.images[image.name] == image.reference
    kind.stop()
    assert machine.calls[-1] == ["kind", "delete", "cluster", "--name", providers.KIND_NAME]
    assert not cluster.kubeconfig.exists()
    assert {call[0] for call in machine.calls} == {"kind", "docker"}


@pytest.mark.parametrize("step", ["kind create", "docker build", "kind load"])
def test_what_fails_at_kind_is_told(machine: Machine, step: str) -> None:
    machine.has("kind", "docker", "kubectl", "helm")
    machine.fails(step)
    with pytest.raises(CommandFailed, match=rf"{step}[^\n]*ended with 1:\nplanted"):
        Kind().start()


def run_suite(machine: Machine, **variables: str) -> subprocess.CompletedProcess[str]:
    """The whole command, its tests named and not run."""
    words = [sys.executable, "-m", "e2e", "e2e/on_kubernetes/test_law.py", "--collect-only", "-q"]
    environment = {**os.environ, **variables}
    return subprocess.run(
        words, cwd=images.REPOSITORY, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.parametrize("step", ["", "kind load"], ids=["up", "not up"])
def test_the_command_takes_kind_down_again(machine: Machine, step: str) -> None:
    machine.has("kind", "docker", "kubectl", "helm")
    if step:
        machine.fails(step)
    done = run_suite(machine)
    assert "Left out, a cluster of given: FOREBAY_E2E_KUBECONFIG is not set." in done.stdout
    assert ("The cluster (kind) is up" in done.stdout) is not bool(step), done.stdout + done.stderr
    assert ("a cluster of kind: it did not come up: `kind load" in done.stdout) is bool(step)
    kinds = [call[1] for call in machine.calls if call[0] == "kind"]
    assert kinds[0] == "delete", "what an earlier run left"
    assert kinds[-1] == "delete"


def test_a_given_cluster_is_taken_before_others(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.has("kind", "docker", "kubectl", "helm")
    config = machine.folder / "theirs"
    config.write_text("kind: Config")
    monkeypatch.setenv(providers.KUBECONFIG, str(config))
    monkeypatch.setenv(providers.IMAGE_PREFIX, "registry.example.com/team/")
    given = Given()
    assert given.unfit() is None
    assert str(config) in given.changes()
    assert "registry.example.com/team/forebay-*:e2e" in given.changes()
    cluster = given.start()
    assert cluster.lent
    assert not cluster.built_here, "its nodes' processes are not ours to kill"
    assert cluster.images["forebay-router"] == "registry.example.com/team/forebay-router:e2e"
    given.stop()
    assert config.read_text() == "kind: Config"
    done = run_suite(machine)
    assert "The cluster (given) is up" in done.stdout, done.stdout + done.stderr
    assert "test_law.py" in done.stdout
    assert machine.calls == [], "nothing is asked of kind or of Docker"
