"""The engine's speed on one CPU thread, each figure beside what it is measured against, in the same run.

decode_over_gemv    one decode step of one stream: time of the model's bare matrix-vector products over the step's time.
                    The products use, for each matrix, the fastest of F.linear, transposed mm and oneDNN-packed.
decode_over_read    the time that this machine's memory needs to be read by one thread, for as many bytes as the step
                    reads (weights, K and V), over the step's time; decode1024 is the same at context 1,024.
batch8_over_hf      tokens/s of 8 streams at context 128 over Hugging Face generate with batch 8, same dtype.
prefill_over_gemm   512 prompt tokens: time of the layers' bare matrix products over the time to the first token.

With --vllm URL (an OpenAI server with the same model): batch8_over_vllm (tokens/s) and ttft512_over_vllm (our TTFT over
its own: below 1 is faster), both over HTTP against a Forebay worker that the bench starts.

What is compared takes turns (A B A B); each ratio is the median over the rounds, with its least and greatest. Times are
CPU seconds of the one thread that computes, so that what else the machine does is not counted; --vllm is by the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import torch
import torch.nn.functional as F

from bench.report import finish, spread
from forebay_engine.executor.huge_pages import use_huge_pages
from forebay_engine.executor.torch_executor import TorchExecutor
from forebay_engine.model.linear import can_pack
from forebay_engine.model.prepare import default_cache_dir, prepare_smollm2
from forebay_engine.model.spec import ModelSpec
from forebay_engine.types import SampleSpec, SamplingParams, SequenceStep

GREEDY = SamplingParams(temperature=0.0, max_tokens=4096)
BLOCK = 16
CONTEXT = 128
LONG_CONTEXT = 1024
PROMPT = 512
STREAMS = 8
HF_TOKENS = 16
READ_BYTES = 256 << 20


def seconds(call: Callable[[], object]) -> float:
    started = time.thread_time()
    call()
    return time.thread_time() - started


class Products:
    """The model's matrix products alone, for `rows` rows, each matrix kind in its fastest layout for that count."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, rows: int, *, head: bool) -> None:
        q, kv = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
        kinds = {
            "qkv": (q + 2 * kv, spec.hidden, spec.layers),
            "out": (spec.hidden, q, spec.layers),
            "gate_up": (2 * spec.intermediate, spec.hidden, spec.layers),
            "down": (spec.hidden, spec.intermediate, spec.layers),
        }
        if head:
            kinds["head"] = (spec.vocab_size, spec.hidden, 1)
        self.layouts: dict[str, str] = {}
        self._passes: list[Callable[[], object]] = []
        generator = torch.Generator().manual_seed(0)
        for name, (outputs, inputs, count) in kinds.items():
            weights = [torch.randn(outputs, inputs, generator=generator).to(dtype) for _ in range(count)]
            x = torch.randn(rows, inputs, generator=generator).to(dtype)
            layouts = self._layouts(weights, x)
            times: dict[str, list[float]] = {layout: [] for layout in layouts}
            for _ in range(5):
                for layout, run in layouts.items():
                    times[layout].append(seconds(run))
            best = min(times, key=lambda layout: statistics.median(times[layout]))
            self.layouts[name] = best
            self._passes.append(layouts[best])
        use_huge_pages()  # as the executor does

    @staticmethod
    def _layouts(weights: list[torch.Tensor], x: torch.Tensor) -> dict[str, Callable[[], object]]:
        transposed = [w.t().contiguous() for w in weights]
        plain: dict[str, Callable[[], object]] = {
            "linear": lambda: [F.linear(x, w) for w in weights],
            "transposed": lambda: [torch.mm(x, w) for w in transposed],
        }
        if not can_pack(x.device, x.dtype):
            return plain
        packed = [torch.ops.mkldnn._reorder_linear_weight(w, x.shape[0]) for w in weights]
        run = torch.ops.mkldnn._linear_pointwise
        return {**plain, "packed": lambda: [run(x, w, None, "none", [], "") for w in packed]}

    def __call__(self) -> None:
        for run in self._passes:
            run()


class Reading:
    """Sums of a buffer that no cache holds: as fast as one thread reads memory, in huge pages as the weights' are."""

    def __init__(self) -> None:
        self._buffer = torch.ones(READ_BYTES // 4)
        use_huge_pages()

    def seconds_for(self, size: int) -> float:
        return seconds(self._buffer.sum) * size / READ_BYTES


def step_bytes(executor: TorchExecutor, context: int) -> int:
    """What one decode step of one stream can't do without reading."""
    spec = executor.spec
    q, kv = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
    layer = (q + 2 * kv) * spec.hidden + q * spec.hidden + 3 * spec.intermediate * spec.hidden
    weights = (spec.layers * layer + spec.vocab_size * spec.hidden) * executor.dtype.itemsize
    return weights + context * executor.layout.bytes_per_token


class Streams:
    """Sequences in the executor, with block tables side by side."""

    def __init__(self, executor: TorchExecutor, count: int, context: int, room: int) -> None:
        rng = random.Random(0)
        self.executor = executor
        blocks = -(-(context + room) // BLOCK)
        self.tables = [list(range(i * blocks, (i + 1) * blocks)) for i in range(count)]
        self.prompts = [[rng.randrange(1000, 40000) for _ in range(context)] for _ in range(count)]
        self.context = context
        self.next = [1] * count
        for i in range(count):
            self.prefill(i)

    def prefill(self, i: int) -> None:
        step = SequenceStep(str(i), self.prompts[i], 0, self.tables[i], SampleSpec(GREEDY, self.prompts[i], []))
        token = self.executor.execute([step])[0].token_id
        assert token is not None
        self.next[i] = token

    def decode(self, tokens: int = 1) -> None:
        for n in range(tokens):
            steps = [
                SequenceStep(str(i), [self.next[i]], self.context + n, table, SampleSpec(GREEDY, self.prompts[i], []))
                for i, table in enumerate(self.tables)
            ]
            self.next = [token for output in self.executor.execute(steps) if (token := output.token_id) is not None]


class HuggingFace:
    """generate() with static batches: decode time is what tokens after the first add."""

    def __init__(self, model_dir: Path, dtype: torch.dtype, prompts: list[list[int]]) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        self._prompts = torch.tensor(prompts)

    def _generate(self, tokens: int) -> float:
        with torch.inference_mode():
            return seconds(partial(self._model.generate, self._prompts, do_sample=False, max_new_tokens=tokens))

    def seconds_per_step(self) -> float:
        first = self._generate(1)
        return (self._generate(1 + HF_TOKENS) - first) / HF_TOKENS


def on_cpu(model_dir: Path, dtype: str, rounds: int) -> dict[str, Any]:
    executor = TorchExecutor(model_dir, kv_memory_bytes=512 << 20, block_size=BLOCK, dtype=dtype)
    ratios: dict[str, list[float]] = {}
    times: dict[str, list[float]] = {}
    rates: dict[str, dict[str, float]] = {}

    def compare(name: str, other: Callable[[], float], ours: Callable[[], float], turns: int) -> None:
        other(), ours()
        for _ in range(turns):
            theirs, mine = other(), ours()
            ratios.setdefault(name, []).append(theirs / mine)
            times.setdefault(f"{name}_other_ms", []).append(theirs * 1e3)
            times.setdefault(f"{name}_ours_ms", []).append(mine * 1e3)
        print(f"{name}: {statistics.median(ratios[name]):.3f}", flush=True)

    with torch.inference_mode():
        gemv = Products(executor.spec, executor.dtype, 1, head=True)
        for context, name in ((CONTEXT, "decode_over_gemv"), (LONG_CONTEXT, "decode1024_over_gemv")):
            one = Streams(executor, 1, context, 1)
            compare(name, partial(seconds, gemv), partial(seconds, one.decode), 10 * rounds)
        gemv_layouts = gemv.layouts
        del gemv
        reading = Reading()
        for context, name in ((CONTEXT, "decode_over_read"), (LONG_CONTEXT, "decode1024_over_read")):
            one = Streams(executor, 1, context, 1)
            size = step_bytes(executor, context)
            compare(name, partial(reading.seconds_for, size), partial(seconds, one.decode), 4 * rounds)
            rates[name] = {
                side: round(size / statistics.median(times[f"{name}_{side}_ms"]) / 1e6, 2) for side in ("other", "ours")
            }
        del reading
        gemm = Products(executor.spec, executor.dtype, PROMPT, head=False)
        prompt = Streams(executor, 1, PROMPT, 1)
        compare("prefill_over_gemm", partial(seconds, gemm), partial(seconds, partial(prompt.prefill, 0)), rounds)
        del gemm
    batch = Streams(executor, STREAMS, CONTEXT, HF_TOKENS)
    reference = HuggingFace(model_dir, executor.dtype, batch.prompts)
    compare(
        "batch8_over_hf",
        reference.seconds_per_step,
        lambda: seconds(partial(batch.decode, HF_TOKENS)) / HF_TOKENS,
        rounds,
    )
    medians = {name: round(statistics.median(values), 2) for name, values in times.items()}
    return {
        "dtype": executor.layout.dtype,
        "threads": torch.get_num_threads(),
        **{name: round(statistics.median(values), 3) for name, values in ratios.items()},
        "spread": {name: spread(values) for name, values in ratios.items()},
        "ms": medians,
        "gigabytes_per_second": rates,
        "batch8_tokens_per_cpu_second": round(STREAMS / medians["batch8_over_hf_ours_ms"] * 1e3, 1),
        "prefill_tokens_per_cpu_second": round(PROMPT / medians["prefill_over_gemm_ours_ms"] * 1e3, 1),
        "gemv_layouts": gemv_layouts,
    }


async def http_batch(session: aiohttp.ClientSession, url: str, model: str, seed: int) -> tuple[float, float]:
    """Tokens/s of 8 streams between the last one's first token and the end, and TTFT of one 512-token prompt."""
    rng = random.Random(seed)
    tokens = 64

    async def stream(length: int, count: int) -> list[float]:
        prompt = [rng.randrange(1000, 40000) for _ in range(length)]
        body = {"model": model, "prompt": prompt, "max_tokens": count, "temperature": 0}
        times = [time.perf_counter()]
        async with session.post(url + "/v1/completions", json={**body, "ignore_eos": True, "stream": True}) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())
        return times

    alone = await stream(PROMPT, 1)
    streams = await asyncio.gather(*(stream(CONTEXT, tokens) for _ in range(STREAMS)))
    begin, end = max(times[1] for times in streams), max(times[-1] for times in streams)
    # Chunks may hold several tokens (a server may hold text back), so tokens are counted by time, not by chunk.
    counted = sum(tokens * sum(t >= begin for t in times[1:]) / len(times[1:]) for times in streams)
    return counted / (end - begin), alone[1] - alone[0]


async def over_http(model_dir: Path, dtype: str, vllm: str, vllm_model: str, rounds: int) -> dict[str, Any]:
    from support.cluster import Cluster

    args = ["--dtype", dtype, "--threads", "1", "--max-model-len", "2048"]
    rates, firsts = [], []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = await stack.enter_async_context(
            Cluster(
                folder, prefill=1, decode=0, engine="native", model_dir=model_dir, worker_args=args, with_router=False
            )
        )
        url = cluster.workers["p0"].url
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
            for turn in range(rounds + 1):
                theirs = await http_batch(session, vllm, vllm_model, turn)
                ours = await http_batch(session, url, "smollm2", turn)
                if turn:
                    rates.append(ours[0] / theirs[0])
                    firsts.append(ours[1] / theirs[1])
    return {
        "batch8_over_vllm": round(statistics.median(rates), 3),
        "ttft512_over_vllm": round(statistics.median(firsts), 3),
        "vllm_spread": {"batch8": spread(rates), "ttft512": spread(firsts)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="auto", help="auto (default), float32 or bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vllm", metavar="URL", help="an OpenAI server with the same model, one thread, same dtype")
    parser.add_argument("--vllm-model", default="smol", help="the model's name there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model_dir = prepare_smollm2(default_cache_dir(), lambda stage, share: None)
    result: dict[str, object] = {"bench": "engine", **on_cpu(model_dir, options.dtype, options.rounds)}
    if options.vllm:
        result |= asyncio.run(
            over_http(model_dir, str(result["dtype"]), options.vllm.rstrip("/"), options.vllm_model, options.rounds)
        )
    finish(result)


if __name__ == "__main__":
    main()
