"""The cluster's programs, compiled from Go modules: built once, kept in the user's cache folder.

    python -m e2e.cluster.binaries [NAME ...]     build what is missing of these, or of all

Two modules, since helm 4.3 needs a newer client-go than Kubernetes 1.34 may see.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from e2e.cluster import locks

HERE: Final = Path(__file__).resolve().parent

CONTROL_PLANE: Final = ("etcd", "kube-apiserver", "kube-controller-manager")
"""What tests/ need: no containers, no root."""

PROGRAMS: Final[dict[str, dict[str, str]]] = {
    "kube": {
        "etcd": "go.etcd.io/etcd/server/v3",
        **{
            name: f"k8s.io/kubernetes/cmd/{name}"
            for name in (
                "kube-apiserver",
                "kube-controller-manager",
                "kubectl",
                "kube-scheduler",
                "kubelet",
                "kube-proxy",
            )
        },
    },
    "addons": {
        "coredns": "./coredns",
        "helm": "helm.sh/helm/v4/cmd/helm",
    },
}
"""By module, the package of each program. Never built with the `tools` tag: that file only pins them."""

BUILD_SECONDS: Final = 1800


class Unbuildable(Exception):
    """A program can't be made here; the text says what to do."""


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/forebay/kube, else ~/.cache/forebay/kube."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "forebay" / "kube"


def bin_dir() -> Path:
    return cache_dir() / "bin"


def required(module: str, path: str) -> str:
    """The version of a module that go.mod asks for."""
    for line in (HERE / module / "go.mod").read_text().splitlines():
        words = line.removeprefix("require").split()
        if words[:1] == [path]:
            return words[1]
    raise Unbuildable(f"e2e/cluster/{module}/go.mod does not require {path}")


KUBERNETES: Final = required("kube", "k8s.io/kubernetes")


def _stamp_of(module: str) -> str:
    files = (HERE / module / name for name in ("go.mod", "go.sum"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def missing(*names: str) -> list[str]:
    """Which of `names` (all when none is given) are not there, or are of other versions than go.mod says."""
    absent = []
    for module, programs in PROGRAMS.items():
        want = _stamp_of(module)
        for name in programs:
            stamp = bin_dir() / f".{name}.stamp"
            current = (bin_dir() / name).exists() and stamp.exists() and stamp.read_text() == want
            if (not names or name in names) and not current:
                absent.append(name)
    return absent


def go_environment() -> dict[str, str]:
    return {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false", "GOWORK": "off"}


def build(*names: str) -> None:
    """Make what is missing: 8 minutes of two cores for all of it, 30 s with a warm build cache. Raises Unbuildable."""
    todo = missing(*names)
    if not todo:
        return
    if shutil.which("go") is None:
        raise Unbuildable("go is not installed; install Go 1.26 or newer, or give a KUBECONFIG of a cluster to use")
    try:
        with locks.held(cache_dir() / "programs.lock", "building programs", seconds=BUILD_SECONDS):
            _build(missing(*names))
    except TimeoutError as error:
        raise Unbuildable(str(error)) from error


def _build(todo: Sequence[str]) -> None:
    bin_dir().mkdir(parents=True, exist_ok=True)
    for module, programs in PROGRAMS.items():
        for name, package in programs.items():
            if name not in todo:
                continue
            started, out = time.monotonic(), bin_dir() / name
            command = ["go", "build", "-trimpath", "-ldflags", _ldflags(module), "-o", str(out), package]
            result = subprocess.run(
                command, cwd=HERE / module, env=go_environment(), capture_output=True, text=True, timeout=BUILD_SECONDS
            )
            if result.returncode:
                raise Unbuildable(f"building {name} failed:\n{result.stderr[-2000:]}")
            (bin_dir() / f".{name}.stamp").write_text(_stamp_of(module))
            took, size = time.monotonic() - started, out.stat().st_size >> 20
            print(f"built {name}: {took:.0f} s, {size} MiB", flush=True)


def _ldflags(module: str) -> str:
    if module == "addons":
        version = required("addons", "helm.sh/helm/v4")
        return f"-s -w -X helm.sh/helm/v4/internal/version.version={version}"
    component = "k8s.io/component-base/version"
    major, minor = KUBERNETES.removeprefix("v").split(".")[:2]
    values = {
        f"{component}.gitVersion": KUBERNETES,
        f"{component}.gitMajor": major,
        f"{component}.gitMinor": minor,
        "k8s.io/client-go/pkg/version.gitVersion": KUBERNETES,
    }
    return "-s -w " + " ".join(f"-X {key}={value}" for key, value in values.items())


def main() -> None:
    try:
        build(*sys.argv[1:])
    except Unbuildable as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
