"""A process in an image's root file system by runc, as a restricted pod has it: for images too large for nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from e2e.cluster.shell import run

USER: Final = 65532
_READ_ONLY: Final = ["rbind", "ro", "nosuid", "nodev"]
_TEMPORARY: Final = ["nosuid", "nodev", "mode=1777"]


def command(
    name: str, bundle: Path, root: Path, words: Sequence[str], *, env: Mapping[str, str], shown: Mapping[str, Path]
) -> list[str]:
    """What runs `words` in `root` until they end, with the paths of `shown` mounted read-only where its keys say.

    As `USER` without any capability, on a read-only root with a /tmp; the machine's network. Writes into `bundle`.
    """
    bundle.mkdir(parents=True, exist_ok=True)
    (bundle / "config.json").write_text(json.dumps(_config(root, words, env, shown)))
    return ["runc", "--root", str(bundle / "state"), "run", "--bundle", str(bundle), name]


def remove(name: str, bundle: Path) -> None:
    """End it, its starter being gone or not."""
    run("runc", "--root", bundle / "state", "delete", "--force", name, check=False)


def _config(root: Path, words: Sequence[str], env: Mapping[str, str], shown: Mapping[str, Path]) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": _TEMPORARY},
        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": _TEMPORARY},
        {"destination": "/sys", "type": "bind", "source": "/sys", "options": _READ_ONLY},
        *({"destination": to, "type": "bind", "source": str(p), "options": _READ_ONLY} for to, p in shown.items()),
    ]
    return {
        "ociVersion": "1.0.2",
        "root": {"path": str(root), "readonly": True},
        "process": {
            "user": {"uid": USER, "gid": USER},
            "args": list(words),
            "env": [f"{key}={value}" for key, value in env.items()],
            "cwd": "/",
            "noNewPrivileges": True,
        },
        "mounts": mounts,
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")]},
    }
