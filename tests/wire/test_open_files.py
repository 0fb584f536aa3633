"""A small limit on open files means fewer connections, said aloud, and no failure later."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging, resource, sys
from forebay_wire.open_files import connections_that_fit
logging.basicConfig(stream=sys.stdout, format="%(message)s")
soft, hard, wanted, each = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(connections_that_fit(wanted, each=each), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "each", "fits", "limit"),
    [
        (256, 1024, 100, 2, 100, 1024),
        (1024, 1024, 100, 2, 100, 1024),
        (100, 1000, 4096, 2, 372, 1000),
        (100, 200, 4096, 2, 50, 200),
        (20, 40, 4096, 1, 20, 40),
    ],
    ids=["raised", "enough", "raised to the hard limit", "small", "hardly any"],
)
def test_what_fits(soft: int, hard: int, wanted: int, each: int, fits: int, limit: int) -> None:
    numbers = [str(number) for number in (soft, hard, wanted, each)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *numbers], capture_output=True, text=True, timeout=60, check=True
    )
    *said, found = done.stdout.splitlines()
    assert found == f"{fits} {limit}"
    assert bool(said) == (fits < wanted)
    assert all(f"at most {fits} connections" in line and "ulimit -n" in line for line in said)
