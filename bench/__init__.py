"""Figures. Each `python -m bench.NAME` prints one JSON object as its last line; ratios are measured interleaved.

The harness (real processes on free ports) is the tests' own.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
