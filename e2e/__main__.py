"""`make e2e`: says what it will do on this machine and what it leaves out, then runs the suite."""

from __future__ import annotations

import subprocess
import sys

from e2e.cluster.binaries import CONTROL_PLANE, Unbuildable, bin_dir, build, missing

SUITE_SECONDS = 900


def main() -> int:
    print("Nothing outside of the cache folder and temporary folders is changed; no root is needed.")
    absent = missing(*CONTROL_PLANE)
    if absent:
        print(f"Building {', '.join(absent)} into {bin_dir()}: 5 minutes of two cores, once.", flush=True)
        try:
            build(*CONTROL_PLANE)
        except Unbuildable as error:
            print(f"Left out, a real API server: {error}. Its imitation of tests/support takes its place.")
    print("Left out: nodes with containers, so images, node selectors, kube-proxy and DNS. Pods run as processes.")
    command = [sys.executable, "-m", "pytest", "e2e", "-s", "--durations=0", *sys.argv[1:]]
    return subprocess.run(command, timeout=SUITE_SECONDS).returncode


if __name__ == "__main__":
    sys.exit(main())
