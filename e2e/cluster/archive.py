"""Docker archives of one layer, written without any container tool."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_PATH = "PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"


def write(
    archive: Path,
    reference: str,
    content: Mapping[str, Path] | Path,
    *,
    entrypoint: Sequence[str] = (),
    command: Sequence[str] = (),
    user: str = "",
) -> None:
    """`content`: files by their path in the image (all executable), or a tar of a root file system. Atomic."""
    layer = archive.with_suffix(".layer")
    layer.unlink(missing_ok=True)
    if isinstance(content, Path):
        os.link(content, layer)
    else:
        with tarfile.open(layer, "w") as out:
            for name, source in content.items():
                member = tarfile.TarInfo(name)
                member.size, member.mode = source.stat().st_size, 0o755
                with source.open("rb") as file:
                    out.addfile(member, file)
    with layer.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    config = json.dumps({
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        # buildah's layers need it.
        "history": [{"created_by": "e2e.cluster.archive"}],
        "config": {"Entrypoint": list(entrypoint), "Cmd": list(command), "User": user, "Env": [_PATH]},
    }).encode()  # fmt: skip
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": [reference], "Layers": [f"{digest}.tar"]}]
    part = archive.with_suffix(".part")
    with tarfile.open(part, "w") as out:
        for member_name, data in ((name, config), ("manifest.json", json.dumps(manifest).encode())):
            member = tarfile.TarInfo(member_name)
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))
        out.add(layer, f"{digest}.tar")
    layer.unlink()
    part.rename(archive)
