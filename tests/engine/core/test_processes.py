"""The core process and its parent."""

import asyncio
import os
import socket
import subprocess
import sys

import pytest

from forebay_engine.core import child
from forebay_engine.transfer.base import TransferError

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


class Core:
    """Its end is what the test says, and can't be cancelled: a caller of NIXL waits for a read that may still write."""

    def __init__(self, ending):
        self._ending = ending

    async def close(self):
        over = asyncio.ensure_future(self._ending())
        while not over.done():
            try:
                await asyncio.shield(over)
            except asyncio.CancelledError:
                continue


async def hangs():
    await asyncio.Event().wait()


async def fails():
    raise TransferError("2 of 8 threads are still in a call", reason="wedged")


async def ends(): ...


@pytest.mark.parametrize(
    ("ending", "seconds", "said"), [(ends, 30, None), (hangs, 0.05, "within 0.05 s"), (fails, 30, "2 of 8 threads")]
)
async def test_a_core_leaves_in_time_though_a_call_of_nixl_hangs(caplog, ending, seconds, said):
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(20):
        assert await child.closed(Core(ending), seconds) is (said is None)
    assert said is None or said in caplog.text
    for task in asyncio.all_tasks(loop) - {asyncio.current_task()}:
        if task.get_coro().__name__ == "hangs":
            task.cancel()
