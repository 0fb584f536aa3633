"""Which memory is asked to be huge, and that asking changes no byte."""

from __future__ import annotations

import mmap

from forebay_engine.executor.huge_pages import anonymous_ranges, use_huge_pages

MB = 1024 * 1024
MAPS = """\
00400000-00c00000 rw-p 00000000 00:00 0                                  [heap]
10000000-10100000 rw-p 00000000 00:00 0
20100000-20900000 rw-p 00000000 00:00 0
30000000-30800000 r--p 00000000 00:00 0
40000000-40800000 rw-s 00000000 00:01 77                                 /dev/zero (deleted)
50000000-50800000 rw-p 00000000 08:01 99                                 /lib/libc.so.6
60000000-60800000 rw-p 00000000 00:00 0                                  [stack]
"""


def test_only_private_anonymous_writable_memory_in_whole_pieces() -> None:
    found = anonymous_ranges(MAPS, (0, 0))
    assert found == [(0x00400000, 0x00C00000), (0x20200000, 0x20800000)]
    assert all(first % (2 * MB) == end % (2 * MB) == 0 for first, end in found)


def test_the_skipped_range_is_left_alone() -> None:
    assert anonymous_ranges(MAPS, (0x20400000, 0x20600000)) == [
        (0x00400000, 0x00C00000),
        (0x20200000, 0x20400000),
        (0x20600000, 0x20800000),
    ]
    assert anonymous_ranges(MAPS, (0x00400000, 0x21000000)) == []


def test_content_stays() -> None:
    memory = mmap.mmap(-1, 8 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pattern = bytes(range(256)) * (8 * MB // 256)
    memory[:] = pattern
    use_huge_pages()
    assert memory[:] == pattern
    memory.close()
