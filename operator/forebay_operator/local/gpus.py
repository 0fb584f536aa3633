"""GPUs of this machine, by device name as CUDA_VISIBLE_DEVICES takes them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from forebay_operator.local.errors import InputError

_DEVICE = re.compile(r"nvidia([0-9]+)")


def visible_gpus(environment: Mapping[str, str], devices: Iterable[str]) -> list[str]:
    """What CUDA_VISIBLE_DEVICES allows when it is set, else each /dev/nvidiaN among `devices`."""
    allowed = environment.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [name.strip() for name in allowed.split(",") if name.strip()]
    numbers = sorted(int(match.group(1)) for device in devices if (match := _DEVICE.fullmatch(device)))
    return [str(number) for number in numbers]


def assign_gpus(needed: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """`needed` GPUs of this machine, and the others. Raises InputError when it has fewer."""
    if needed == 0:
        return (), ()
    found = visible_gpus(os.environ, os.listdir("/dev"))
    if len(found) < needed:
        raise InputError(
            f"the workers need {needed} GPUs (gpus.count times workers), this machine shows {len(found)}; "
            "lower the number of workers, or set gpus: {count: 0} in both pools to run on CPU"
        )
    return tuple(found[:needed]), tuple(found[needed:])
