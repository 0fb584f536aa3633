"""Huge pages for weights that were packed into ordinary memory.

A decode step reads every weight once. With 4 KiB pages it waits for page-table walks, and by how much depends on where
the pages happen to lie: steps of the same model took 22 to 31 ms (bfloat16 SmolLM2, one core), 22 with huge pages.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from pathlib import Path

_LOG = logging.getLogger(__name__)
_HUGE = 2 * 1024 * 1024
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25
"""Linux 6.1: do it now, rather than when the kernel's scanner comes by."""

_ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p 00000000 00:00 0\s*(\[heap\])?$")


def use_huge_pages(skip: tuple[int, int] = (0, 0)) -> int:
    """Ask for huge pages under this process's private anonymous memory; content and addresses stay as they are.

    `skip` is an address range (first, end) to leave alone: memory that is not to be touched yet. Returns the bytes in
    2 MiB pieces that were asked for; 0 where the system has none of it. Never raises: without them it is only slower.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        madvise = libc.madvise
        maps = Path("/proc/self/maps").read_text()
    except (OSError, AttributeError) as error:
        _LOG.info("no huge pages for weights: %s", error)
        return 0
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    asked, failed = 0, ""
    for first, end in anonymous_ranges(maps, skip):
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            if madvise(first, end - first, advice) != 0:
                failed = os.strerror(ctypes.get_errno())
        asked += end - first
    _LOG.debug("huge pages asked for %d MiB%s", asked >> 20, f", in part refused: {failed}" if failed else "")
    return asked


def anonymous_ranges(maps: str, skip: tuple[int, int]) -> list[tuple[int, int]]:
    """The 2 MiB aligned insides of the private anonymous mappings in the text of /proc/PID/maps, without `skip`."""
    ranges = []
    for line in maps.splitlines():
        match = _ANONYMOUS.match(line)
        if match is None:
            continue
        low, high = int(match[1], 16), int(match[2], 16)
        for first, end in ((low, min(high, skip[0])), (max(low, skip[1]), high)) if skip[1] else ((low, high),):
            first, end = -(-first // _HUGE) * _HUGE, end // _HUGE * _HUGE
            if end > first:
                ranges.append((first, end))
    return ranges
