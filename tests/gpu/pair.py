"""Prefill and decode in two processes on one device, KV by NIXL: `python pair.py MODEL DEVICE` is the prefill side.

It computes a prompt's KV, prints one JSON line that says where the blocks are, and keeps them until its standard input
closes. The other side reads the blocks, decodes from them, and wants the tokens it gets without a transfer.
"""

from __future__ import annotations

import base64
import json
import select
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from forebay_engine.core.processes import exit_now
from forebay_engine.executor.torch_executor import TorchExecutor
from forebay_engine.transfer.device_memory import DeviceMemory
from forebay_engine.transfer.memory import HOST
from forebay_engine.transfer.nixl import NixlTransport
from forebay_engine.types import SampleSpec, SequenceStep
from forebay_wire.messages import Compatibility, Handshake
from gpu.tokens import GREEDY, generate, prompts

DTYPE = "float32"
MEMORY = 256 << 20
COUNT = 16
READ_ROUNDS = 5
DEADLINE_SECONDS = 60.0


def open_worker(folder: Path, device: str) -> tuple[TorchExecutor, NixlTransport, DeviceMemory | None]:
    executor = TorchExecutor(folder, kv_memory_bytes=MEMORY, dtype=DTYPE, device=device)
    memory = None if executor.device.type == "cpu" else DeviceMemory(executor.arena)
    transport = NixlTransport(
        address=executor.base_address(),
        block_bytes=executor.layout.block_bytes,
        num_blocks=executor.num_blocks,
        keepalive=executor.arena,
        memory=memory,
    )
    return executor, transport, memory


def prompt_of(executor: TorchExecutor) -> tuple[list[int], list[int]]:
    """The prompt, and its blocks at the prefill side."""
    prompt = prompts(executor.vocab_size)[-1]
    return prompt, list(range(3, 3 + -(-len(prompt) // executor.layout.block_size)))


def prefill_side(folder: Path, device: str) -> None:
    executor, transport, memory = open_worker(folder, device)
    prompt, blocks = prompt_of(executor)
    executor.execute([SequenceStep("a", prompt, 0, blocks, None)])
    place = HOST if memory is None else memory.place
    told = {
        "agent": base64.b64encode(transport.agent()).decode(),
        "base_address": executor.base_address(),
        "memory": place.kind,
        "device": place.device,
    }
    print(json.dumps(told), flush=True)
    while not select.select([sys.stdin], [], [], 0.0005)[0]:
        transport.progress()
    transport.close()


def check(folder: Path, device: str) -> dict[str, Any]:
    """Raises AssertionError, TransferError, or TimeoutError when the other side does not come up."""
    executor, transport, _ = open_worker(folder, device)
    prompt, remote = prompt_of(executor)
    (wanted,) = generate(executor, [prompt], COUNT)
    executor.arena.fill_(float("nan"))  # what the decode below finds, NIXL has brought
    command = [sys.executable, __file__, str(folder), device]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            if not select.select([other.stdout], [], [], DEADLINE_SECONDS)[0]:
                raise TimeoutError(f"the prefill side said nothing for {DEADLINE_SECONDS:.0f} s")
            told = json.loads(other.stdout.readline() or "{}")
            assert told, "the prefill side ended: its error is above"
            compatibility = Compatibility("", "", DTYPE, 1, 1, 1, 1, "")
            transport.add_peer(
                Handshake(
                    engine_id="prefill",
                    compatibility=compatibility,
                    compat_hash="",
                    transport="nixl",
                    agent=base64.b64decode(told["agent"]),
                    base_address=told["base_address"],
                    block_bytes=executor.layout.block_bytes,
                    num_blocks=executor.num_blocks,
                    memory=told["memory"],
                    device=told["device"],
                )
            )
            local = list(reversed(range(executor.num_blocks)))[: len(remote)]
            seconds = []
            for _ in range(READ_ROUNDS):
                started = time.perf_counter()
                transport.read("prefill", remote, local, timeout=20.0)
                seconds.append(time.perf_counter() - started)
            in_use = transport.in_use()
        finally:
            other.stdin.close() if other.stdin is not None else None
            try:
                other.wait(10)
            except subprocess.TimeoutExpired:
                other.kill()
    found = _decode(executor, prompt, local)
    assert found == wanted, f"after the transfer {found}, without it {wanted}"
    transport.close()
    volume = len(remote) * executor.layout.block_bytes
    return {
        "memory": told["memory"],
        "transport": in_use,
        "tokens_equal": len(found),
        "megabytes": round(volume / 1e6, 1),
        "gigabytes_per_second": round(volume / statistics.median(seconds) / 1e9, 2),
    }


def _decode(executor: TorchExecutor, prompt: list[int], blocks: list[int]) -> list[int]:
    """All but the prompt's last token comes from the blocks that were read."""
    size = executor.layout.block_size
    spare = [block for block in range(executor.num_blocks) if block not in set(blocks)]
    table = blocks + spare[: -(-(len(prompt) + COUNT) // size) - len(blocks)]
    ids = list(prompt)
    while len(ids) < len(prompt) + COUNT:
        step = SequenceStep("a", ids[-1:], len(ids) - 1, table, SampleSpec(GREEDY, prompt, ids[len(prompt) :]))
        token = executor.execute([step])[0].token_id
        assert token is not None
        ids.append(token)
    return ids[len(prompt) :]


if __name__ == "__main__":
    with torch.inference_mode():
        prefill_side(Path(sys.argv[1]), sys.argv[2])
    exit_now(0)
