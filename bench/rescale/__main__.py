"""Rescaling laws on real length traces, in virtual time: attainment, moves and GPU-seconds of every law.

    python -m bench.rescale --traces DIR --jobs 2          # all rows: about an hour on 2 cores
    python -m bench.rescale --traces DIR --short           # at most 3 minutes
    python -m bench.rescale --traces DIR --rows rows.jsonl --where mix=long --where gear=role,replica-30

With --rows, finished rows are kept in that file and not run again, so that the bench may be run in slices; the report
is about all rows in it that --where lets through. Every policy starts at 4:4. bench/mixes.py has the traffic.

The replay's inner loops are compiled first, as they are (bench/native.py); rows are the same without, and take three
times as long.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench import native


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        "python -m bench.rescale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--traces", type=Path, help="folder of the public traces")
    options.add_argument("--jobs", type=int, default=1)
    options.add_argument("--short", action="store_true")
    options.add_argument("--minutes", type=float, default=75.0, help="stop after this long, and say what is left out")
    options.add_argument("--where", action="append", default=[], metavar="COLUMN=VALUE,VALUE", help="only these rows")
    options.add_argument("--rows", type=Path, help="file of finished rows (JSON lines) to go on from")
    options.add_argument("--table", action="store_true", help="print the summary as a table, not as JSON")
    options.add_argument("--interpreted", action="store_true", help="compile nothing")
    return options


def main(words: list[str] | None = None) -> None:
    arguments = parser().parse_args(words)
    compiled: Path | None = None
    if not arguments.interpreted:
        try:
            compiled = native.built()
        except native.NotBuilt as error:
            print(f"left out: compiled loops, so that this takes three times as long: {error}", file=sys.stderr)
    native.use(compiled)
    # Not before: what is imported stays as it was first found.
    from bench.rescale.run import run

    run(arguments, compiled)


if __name__ == "__main__":
    main()
