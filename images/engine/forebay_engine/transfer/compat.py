"""May one worker read another's KV blocks? A hash to compare, and words for the difference."""

from __future__ import annotations

import hashlib

import msgspec

from forebay_wire.messages import Compatibility


def compat_hash(compatibility: Compatibility) -> str:
    """Hex digest (32 characters) that is equal exactly when every field is."""
    return hashlib.blake2b(b"forebay/kv\0" + msgspec.json.encode(compatibility), digest_size=16).hexdigest()


def differences(ours: Compatibility, theirs: Compatibility) -> str:
    """Every field that differs, with both values: `dtype: float32 here, bfloat16 there`. Empty when equal."""
    return "; ".join(
        f"{field.name}: {getattr(ours, field.name)} here, {getattr(theirs, field.name)} there"
        for field in msgspec.structs.fields(Compatibility)
        if getattr(ours, field.name) != getattr(theirs, field.name)
    )
