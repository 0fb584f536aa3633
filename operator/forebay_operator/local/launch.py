"""exec a command so that it dies with its parent: python -I -S launch.py PARENT_PID COMMAND [ARG ...]

Run as a script, by path, so that it starts in 20 ms: it imports nothing of Forebay.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    # Survives exec. The kernel sends it when the *thread* that forked us ends, so the supervisor forks from its main
    # thread only.
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    # The race: a parent that died before the call above sends no signal any more. Then we have another parent by now.
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
    # Python ignores SIGPIPE, and exec would hand that on.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
