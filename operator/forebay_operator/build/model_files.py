"""Where a worker finds the model's files: volume, mount and, for a model Forebay prepares itself, an init container."""

from __future__ import annotations

from typing import Any, Final

from forebay_operator.api.source import ModelSource, Scheme
from forebay_operator.build import pod

MOUNT: Final = "/models"
_VOLUME: Final = "model"


def directory(source: ModelSource) -> str:
    if source.scheme is Scheme.PVC:
        return f"{MOUNT}/{source.path}".rstrip("/")
    return f"{MOUNT}/model" if source.scheme is Scheme.CACHE else MOUNT


def mounts(source: ModelSource | None) -> list[dict[str, Any]]:
    return [] if source is None else [{"name": _VOLUME, "mountPath": MOUNT, "readOnly": True}]


def volumes(source: ModelSource | None) -> list[dict[str, Any]]:
    if source is None:
        return []
    if source.scheme is Scheme.PVC:
        return [{"name": _VOLUME, "persistentVolumeClaim": {"claimName": source.target, "readOnly": True}}]
    if source.scheme is Scheme.IMAGE:
        return [{"name": _VOLUME, "image": {"reference": source.target}}]
    if source.scheme is Scheme.HOSTPATH:
        return [{"name": _VOLUME, "hostPath": {"path": source.target, "type": "Directory"}}]
    return [{"name": _VOLUME, "emptyDir": {}}]


def init_containers(source: ModelSource | None, image: str) -> list[dict[str, Any]]:
    if source is None or source.scheme is not Scheme.CACHE:
        return []
    # `$$(` reaches the shell as `$(`. The folder's name holds the model's version: the link hides that.
    prepare = f"python -m forebay_engine.model.prepare {source.target} --cache {MOUNT}/cache"
    return [
        {
            "name": "prepare",
            "image": image,
            "command": ["sh", "-ec", f'folder="$$({prepare})"; ln -sfn "$folder" {MOUNT}/model'],
            "securityContext": pod.container_security(),
            "volumeMounts": [{"name": _VOLUME, "mountPath": MOUNT}, pod.tmp_mount()],
        }
    ]
