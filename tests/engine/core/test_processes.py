"""The core process and its parent."""

import os
import socket
import subprocess
import sys

CODE = """
import os
os.getppid = lambda: 1
from forebay_engine.core.processes import die_with_parent
die_with_parent()
print("lives")
"""


def test_a_parent_may_be_process_1():
    """In a container the worker is: nothing stands between it and the runtime."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "lives\n"), done.stderr


def test_a_core_whose_server_is_gone_before_it_began_ends():
    ours, theirs = socket.socketpair()
    ours.close()
    command = [sys.executable, "-m", "forebay_engine.core.child", str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], env=dict(os.environ)) as process:
        theirs.close()
        assert process.wait(timeout=60) == 1
