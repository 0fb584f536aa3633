"""Which cluster the suite uses: a given one, kind where Docker runs, or the two nodes built here."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from e2e.cluster import binaries, host, images, two_nodes
from e2e.cluster.shell import CommandFailed, run
from e2e.cluster.state import State, state

KUBECONFIG: Final = "FOREBAY_E2E_KUBECONFIG"
IMAGE_PREFIX: Final = "FOREBAY_E2E_IMAGE_PREFIX"
CLUSTER_VARIABLE: Final = "FOREBAY_E2E_CLUSTER"
"""Tells the suite of the cluster that was started for it, as JSON."""

KEEP: Final = "FOREBAY_E2E_KEEP"
"""Leave the cluster up at the end, and use one that is up."""

GIVEN: Final = "given"
KIND_NAME: Final = "forebay-e2e"
TWO_NODES: Final = "two nodes built here"
_KIND_CONFIG: Final = """\
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
nodes: [{role: control-plane}, {role: worker}, {role: worker}]
"""


@dataclass(frozen=True, slots=True)
class Cluster:
    provider: str
    kubeconfig: Path
    images: Mapping[str, str]
    """References of `forebay-operator`, `forebay-router` and `forebay-engine-simulated` that its nodes can run."""

    @property
    def built_here(self) -> bool:
        """Its processes are this machine's, for a test to stop or kill."""
        return self.provider == TWO_NODES

    @property
    def lent(self) -> bool:
        """It was there before, and is to be left as it was."""
        return self.provider == GIVEN


class Provider(Protocol):
    name: str

    def unfit(self) -> str | None:
        """Why it can't be used here and what would help, or None."""
        ...

    def changes(self) -> str:
        """What `start` does to the machine or the cluster, for a person to read before."""
        ...

    def start(self) -> Cluster:
        """Raises NotUp, CommandFailed, Unbuildable."""
        ...

    def stop(self) -> None: ...


def tool(name: str) -> str:
    """kubectl or helm: built here, else the machine's. Raises FileNotFoundError."""
    built = binaries.bin_dir() / name
    found = str(built) if built.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"no {name}: install it, or install Go and run `python -m e2e.cluster.binaries {name}`")
    return found


def _tools() -> str | None:
    for name in ("kubectl", "helm"):
        if not (binaries.bin_dir() / name).exists() and not shutil.which(name) and not shutil.which("go"):
            return f"no {name}, and no Go to build it from"
    return None


def _make_tools() -> None:
    if absent := [name for name in ("kubectl", "helm") if not shutil.which(name)]:
        binaries.build(*absent)


@dataclass
class Given:
    name: str = GIVEN

    def unfit(self) -> str | None:
        if not os.environ.get(KUBECONFIG):
            return f"{KUBECONFIG} is not set"
        return _tools()

    def changes(self) -> str:
        return (
            f"The cluster of {os.environ[KUBECONFIG]} gets the namespaces forebay-system and forebay-e2e, the CRD, the "
            f"chart, and labels and nvidia.com/gpu on two nodes, one of which is cordoned for a minute; all of it "
            f"goes at the end. It must have two schedulable nodes without GPUs, no Forebay, and reach the "
            f"images {os.environ.get(IMAGE_PREFIX, '')}forebay-*:e2e ({IMAGE_PREFIX} is put before the name)."
        )

    def start(self) -> Cluster:
        _make_tools()
        prefix = os.environ.get(IMAGE_PREFIX, "")
        references = {image.name: f"{prefix}{image.name}:e2e" for image in images.PRODUCT}
        return Cluster(self.name, Path(os.environ[KUBECONFIG]), references)

    def stop(self) -> None:
        return


@dataclass
class Kind:
    name: str = "kind"
    _folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()) / f"{KIND_NAME}-{os.getuid()}")

    def unfit(self) -> str | None:
        if shutil.which("kind") is None:
            return "kind is not installed"
        docker = shutil.which("docker")
        if docker is None or run(docker, "info", check=False, seconds=20).returncode:
            return "no Docker engine answers"
        return _tools()

    def changes(self) -> str:
        return (
            f"Docker gets a kind cluster {KIND_NAME} of three containers, gone at the end, and images of the product."
        )

    def start(self) -> Cluster:
        _make_tools()
        self.stop()
        self._folder.mkdir(exist_ok=True)
        kubeconfig = self._folder / "kubeconfig"
        config = self._folder / "kind.yaml"
        config.write_text(_KIND_CONFIG)
        run("kind", "create", "cluster", "--name", KIND_NAME, "--config", config, "--kubeconfig", kubeconfig,
            "--wait", "120s", seconds=600)  # fmt: skip
        references = {}
        for image in images.PRODUCT:
            run("docker", "build", "-f", images.REPOSITORY / image.dockerfile, "-t", image.reference,
                images.REPOSITORY, seconds=900)  # fmt: skip
            run("kind", "load", "docker-image", image.reference, "--name", KIND_NAME, seconds=300)
            references[image.name] = image.reference
        return Cluster(self.name, kubeconfig, references)

    def stop(self) -> None:
        run("kind", "delete", "cluster", "--name", KIND_NAME, check=False, seconds=120)
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass
class TwoNodes:
    name: str = TWO_NODES
    _state: State = field(default_factory=state)

    def unfit(self) -> str | None:
        return host.unfit()

    def changes(self) -> str:
        return host.changes(self._state)

    def start(self) -> Cluster:
        host.install()
        # Before the cluster is up: both want the processors.
        archives = [images.build(self._state, image) for image in images.PRODUCT]
        # One that nobody asked to keep was left by a run that was killed, with whatever it was about.
        if not (os.environ.get(KEEP) and two_nodes.is_up(self._state)):
            two_nodes.up(self._state)
        two_nodes.load(self._state, *archives)
        return Cluster(self.name, self._state.kubeconfig, {image.name: image.reference for image in images.PRODUCT})

    def stop(self) -> None:
        two_nodes.down(self._state)
        images.tidy(self._state)


PROVIDERS: Final[tuple[type[Given] | type[Kind] | type[TwoNodes], ...]] = (Given, Kind, TwoNodes)

__all__ = ["PROVIDERS", "Cluster", "CommandFailed", "Provider", "tool"]
