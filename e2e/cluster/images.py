"""The images of the suite: what a node itself needs, and the product's, built by its own Dockerfiles with buildah.

Without a registry: archives in the cache folder, which the nodes import. What is unchanged is not built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from e2e.cluster import archive, dns, locks, node, processes
from e2e.cluster.binaries import HERE as MODULES
from e2e.cluster.binaries import go_environment
from e2e.cluster.shell import run
from e2e.cluster.state import State

REPOSITORY: Final = Path(__file__).parents[2]
BASE: Final = "docker.io/library/python:3.11-slim"
"""What the Dockerfiles build on. Made here of Debian 12, whose python3 is 3.11 too."""

_PACKAGES: Final = "ca-certificates,python3,python3-pip,python3-venv"
_SHRINK: Final = (
    "cd $1/usr; rm -rf lib/python3.11/EXTERNALLY-MANAGED share/doc/* share/man/* share/locale/*; "
    "for n in python python3; do ln -s /usr/bin/python3 $1/usr/local/bin/$n; done; "
    "ln -s /usr/bin/pip3 $1/usr/local/bin/pip"
)
_BASE_SECONDS: Final = 600
_BUILD_SECONDS: Final = 900
_ALONE_SECONDS: Final = 1800.0
"""For another suite's builds to end."""

_CERTIFICATES: Final = Path("/etc/ssl/certs")


@dataclass(frozen=True, slots=True)
class Image:
    name: str
    dockerfile: str
    arguments: tuple[str, ...] = ()
    """Of the build."""

    @property
    def reference(self) -> str:
        return f"localhost/{self.name}:e2e"


OPERATOR: Final = Image("forebay-operator", "images/operator/Dockerfile")
ROUTER: Final = Image("forebay-router", "images/router/Dockerfile")
SIMULATED: Final = Image("forebay-engine-simulated", "images/engine/Dockerfile.simulated")
ENGINE: Final = Image("forebay-engine", "images/engine/Dockerfile", ("VARIANT=cpu",))
"""5 GB, since torch's wheel brings CUDA along: built in the long form alone, and loaded into no node."""

PRODUCT: Final = (OPERATOR, ROUTER, SIMULATED)


def archive_of(state: State, image: Image) -> Path:
    return state.images / f"{image.name}.tar"


def make_system(state: State) -> list[Path]:
    """The archives of pause and CoreDNS, made when absent. Raises CommandFailed."""
    state.images.mkdir(parents=True, exist_ok=True)
    pause, coredns = state.images / "pause.tar", state.images / "coredns.tar"
    if not pause.exists():
        found = run("go", "list", "-m", "-f", "{{.Dir}}", "k8s.io/kubernetes", cwd=MODULES / "kube",
                    env=go_environment(), seconds=300)  # fmt: skip
        program = state.images / "pause"
        run("gcc", "-Os", "-static", "-s", "-DVERSION=3.10", "-o", program,
            f"{found.stdout.strip()}/build/pause/linux/pause.c")  # fmt: skip
        archive.write(pause, node.PAUSE, {"pause": program}, entrypoint=["/pause"], user="65535:65535")
        program.unlink()
    program = state.bin / "coredns"
    if not coredns.exists() or coredns.stat().st_mtime < program.stat().st_mtime:
        archive.write(coredns, dns.IMAGE, {"coredns": program}, entrypoint=["/coredns"])
    return [pause, coredns]


def _base(state: State) -> Path:
    return state.images / "base" / "python.tar"


def make_base(state: State) -> Path:
    """The archive of BASE: 35 s, once. Raises CommandFailed."""
    made = _base(state)
    if made.exists():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    started, root = time.monotonic(), made.with_name("root.tar")
    run("mmdebstrap", "--variant=minbase", "--mode=root", f"--include={_PACKAGES}", f"--customize-hook={_SHRINK}",
        "bookworm", root, seconds=_BASE_SECONDS)  # fmt: skip
    archive.write(made, BASE, root, command=["python3"])
    root.unlink()
    _tell(BASE, made, started)
    return made


def build(state: State, image: Image) -> Path:
    """The image's archive, built anew where anything that goes into it changed. Raises CommandFailed, TimeoutError."""
    if (made := _current(state, image)) is not None:
        return made
    with _alone(state):
        # Another suite may have built it meanwhile.
        return _current(state, image) or _build(state, image, make_base(state))


@contextlib.contextmanager
def _alone(state: State) -> Iterator[None]:
    """buildah's store has no lock that keeps one build's layers from another's tidying. Raises TimeoutError."""
    with locks.held(state.buildah.with_name("buildah.lock"), "building images", seconds=_ALONE_SECONDS):
        # What works there now lost its suite to a kill -9.
        processes.kill_users_of(state.buildah)
        yield


def _current(state: State, image: Image) -> Path | None:
    """The image's archive, where all that goes into it is what it was built from."""
    base, made = _base(state), archive_of(state, image)
    stamp = made.with_suffix(".stamp")
    if base.exists() and made.exists() and stamp.exists() and stamp.read_text() == _inputs(image, base):
        return made
    return None


def _build(state: State, image: Image, base: Path) -> Path:
    made, want = archive_of(state, image), _inputs(image, base)
    started = time.monotonic()
    _build_into_store(state, image, base)
    part = made.with_suffix(".part")
    part.unlink(missing_ok=True)
    run(*_store(state), "push", "--quiet", image.reference, f"docker-archive:{part}:{image.reference}",
        seconds=_BUILD_SECONDS)  # fmt: skip
    stamp = made.with_suffix(".stamp")
    stamp.unlink(missing_ok=True)
    part.rename(made)
    stamp.write_text(want)
    _tell(image.reference, made, started)
    return made


@contextlib.contextmanager
def root_of(state: State, image: Image) -> Iterator[tuple[Path, dict[str, str]]]:
    """A built image's root file system and environment. The image goes with the block; no other build runs beside it.

    Raises CommandFailed, TimeoutError.
    """
    store = _store(state)
    with _alone(state):
        container = ""
        try:
            _build_into_store(state, image, make_base(state))
            container = run(*store, "from", "--pull=never", image.reference).stdout.strip()
            described = json.loads(run(*store, "inspect", "--type=image", image.reference).stdout)
            environment = dict(entry.split("=", 1) for entry in described["OCIv1"]["config"]["Env"])
            yield Path(run(*store, "mount", container).stdout.strip()), environment
        finally:
            if container:
                run(*store, "rm", container, check=False, seconds=_BUILD_SECONDS)
            run(*store, "rmi", "--force", image.reference, check=False, seconds=_BUILD_SECONDS)
            _tidy(state)


def _build_into_store(state: State, image: Image, base: Path) -> None:
    store = _store(state)
    pulled = state.buildah / ".base"
    if not pulled.exists() or pulled.stat().st_mtime < base.stat().st_mtime:
        run(*store, "pull", "--quiet", f"docker-archive:{base}", seconds=_BUILD_SECONDS)
        pulled.touch()
    pip = state.root / "pip.conf"
    pip.write_text(_pip_settings())
    # chroot isolation needs neither a container runtime nor cgroups; pip trusts what this machine trusts.
    run(*store, "build", "--pull=never", "--layers", "--isolation=chroot", "--network=host",
        f"--volume={_CERTIFICATES}:{_CERTIFICATES}:ro", f"--volume={pip}:/etc/pip.conf:ro",
        f"--build-arg=PYTHON_IMAGE={BASE}", *(f"--build-arg={argument}" for argument in image.arguments),
        "--file", REPOSITORY / image.dockerfile, "--tag", image.reference, REPOSITORY,
        seconds=_BUILD_SECONDS)  # fmt: skip


def tidy(state: State) -> None:
    """Forget layers of older builds, each some 100 MB, and drop what buildah leaves behind. Raises TimeoutError."""
    with _alone(state):
        _tidy(state)


def _tidy(state: State) -> None:
    if shutil.which("buildah") and state.buildah.exists():
        run(*_store(state), "rm", "--all", check=False, seconds=_BUILD_SECONDS)
        run(*_store(state), "rmi", "--prune", check=False, seconds=_BUILD_SECONDS)
    below = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    # The last ones first: they lie on the earlier ones.
    for mount in reversed([path for path in below if path.startswith(f"{state.buildah}/")]):
        run("umount", mount, check=False)


def _store(state: State) -> list[object]:
    # The slash is the mark by which what a killed suite left is found.
    return [
        "buildah",
        "--root",
        f"{state.buildah}/",
        "--runroot",
        f"{state.buildah}-run",
        "--storage-driver",
        "overlay",
    ]


def _inputs(image: Image, base: Path) -> str:
    digest = hashlib.sha256(f"{image} {base.stat().st_mtime_ns}".encode())
    for file in sorted({REPOSITORY / image.dockerfile, *_context()}):
        digest.update(f"\0{file.relative_to(REPOSITORY)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _context() -> Iterator[Path]:
    """What .dockerignore lets into a build."""
    yield from (REPOSITORY / name for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"))
    for folder in ("operator", "images"):
        for file in (REPOSITORY / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts and not file.name.startswith("Dockerfile"):
                yield file


def _pip_settings() -> str:
    lines = ["[global]", f"cert = {_CERTIFICATES}/ca-certificates.crt"]
    if index := os.environ.get("PIP_INDEX_URL"):
        lines.append(f"index-url = {index}")
    return "\n".join(lines) + "\n"


def _tell(reference: str, made: Path, started: float) -> None:
    print(f"image {reference}: {time.monotonic() - started:.0f} s, {made.stat().st_size >> 20} MiB", flush=True)
