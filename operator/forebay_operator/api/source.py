"""Where a model's files come from: the URL in spec.model.source."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Scheme(StrEnum):
    PVC = "pvc"
    """`pvc://claim/path`: a folder on a PersistentVolumeClaim."""

    IMAGE = "image"
    """`image://ref`: an OCI image mounted as a volume."""

    HOSTPATH = "hostpath"
    """`hostpath:///dir`: a folder of the node, or of this machine in local mode."""

    CACHE = "cache"
    """`cache://NAME`: a model that Forebay can prepare by itself."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    scheme: Scheme
    target: str
    """Claim, image reference, absolute folder or cache name."""

    path: str = ""
    """Folder inside the claim, without a leading slash."""


_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][-A-Za-z0-9._/:@]{0,511}")
_FORMS = "pvc://claim/path, image://ref, hostpath:///dir or cache://NAME"


def parse_source(text: str) -> ModelSource:
    """Raises ValueError with the allowed forms when `text` is none of them."""
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in set(Scheme):
        raise ValueError(f"{text!r} is not a model source; write {_FORMS}")
    kind = Scheme(scheme)
    if kind is Scheme.HOSTPATH:
        if not rest.startswith("/") or ".." in rest.split("/"):
            raise ValueError(f"{text!r} must name an absolute folder without '..': hostpath:///dir")
        return ModelSource(kind, rest.rstrip("/") or "/")
    if kind is Scheme.CACHE:
        if not _NAME.fullmatch(rest):
            raise ValueError(f"{text!r} must name a model in lower-case letters, digits, '-' and '.': cache://NAME")
        return ModelSource(kind, rest)
    if kind is Scheme.IMAGE:
        if not _IMAGE.fullmatch(rest):
            raise ValueError(f"{text!r} must name an image: image://ref")
        return ModelSource(kind, rest)
    claim, _, path = rest.partition("/")
    if not _NAME.fullmatch(claim) or ".." in path.split("/"):
        raise ValueError(f"{text!r} must name a claim and a folder without '..': pvc://claim/path")
    return ModelSource(kind, claim, path.strip("/"))
