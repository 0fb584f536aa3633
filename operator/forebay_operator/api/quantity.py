"""Kubernetes quantities of bytes: `40Gi`, `512Mi`, `1.5G`."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_PATTERN = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,3}))?(Ki|Mi|Gi|Ti|k|M|G|T)?")


def parse_bytes(text: str) -> int:
    """Bytes of a quantity. Raises ValueError with what is allowed when it is none, or no whole number of bytes."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a quantity of bytes; write a number with Ki, Mi, Gi, Ti, k, M, G or T: 512Mi"
        )
    whole, fraction, unit = match.group(1), match.group(2) or "", match.group(3) or ""
    scaled = int(whole + fraction) * _UNITS[unit]
    divisor: int = 10 ** len(fraction)
    value, rest = divmod(scaled, divisor)
    if rest:
        raise ValueError(f"{text!r} is not a whole number of bytes; use a smaller unit")
    return value


def format_bytes(value: int) -> str:
    """The shortest exact quantity in binary units: 1610612736 -> 1536Mi."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        if value and value % _UNITS[unit] == 0:
            return f"{value // _UNITS[unit]}{unit}"
    return str(value)
