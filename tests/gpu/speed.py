"""A step's time against what the device can do at most: decode by its memory, prefill by its matrix products.

The model has Llama 3.2 1B's shape and random weights. Both bounds are measured in the same run: bandwidth by a copy,
products by one large matrix product in the model's dtype.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from forebay_engine.executor.gpu_forward import GpuForward
from forebay_engine.executor.torch_executor import TorchExecutor
from forebay_engine.types import SampleSpec, SamplingParams, SequenceStep

GREEDY = SamplingParams(temperature=0.0)
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, VOCABULARY = 2048, 8192, 16, 32, 8, 128256
HEAD = HIDDEN // HEADS
KV_BYTES = 4 << 30
COPY_BYTES = 4 << 30
SIDE = 8192
PROMPT = 8192
DECODES = ((1, 1024, True), (1, 16384, True), (64, 1024, True), (1, 1024, False), (64, 1024, False))
"""(sequences, context of each, by CUDA graphs); those without are last, since graphs are not turned on again."""

ROUNDS = 20


def make_model(folder: Path, device: str) -> None:
    """A folder in Hugging Face layout, 2.5 GB in bfloat16."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        scale = 0.02 if len(shape) > 1 else 0.0
        made = torch.randn(*shape, generator=generator, device=device) * scale + (0.0 if scale else 1.0)
        return made.to(torch.bfloat16).cpu()

    tensors = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN), "model.norm.weight": normal(HIDDEN)}
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    for layer in range(LAYERS):
        tensors |= {f"model.layers.{layer}.{name}.weight": normal(*shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))


def check(folder: Path, device: str) -> dict[str, Any]:
    """`decode_over_bandwidth`: time to read weights and KV once over a step's time. `prefill_over_gemm`: the layers'
    products at the measured rate over the time to the first token. Near 1 is as fast as the device is.
    """
    make_model(folder, device)
    executor = TorchExecutor(folder, kv_memory_bytes=KV_BYTES, device=device)
    bandwidth, rate = copy_bandwidth(device), product_rate(device, executor.dtype)
    weights = (LAYERS * _layer_elements() + VOCABULARY * HIDDEN) * executor.dtype.itemsize
    found: dict[str, Any] = {
        "gigabytes_per_second": round(bandwidth / 1e9),
        "teraflops": round(rate / 1e12),
        "decode": [],
    }
    for count, context, graphs in DECODES:
        if not graphs:
            without_graphs(executor)
        seconds = median_seconds(partial(executor.execute, decode_steps(executor, count, context)))
        read = weights + count * context * executor.layout.bytes_per_token
        found["decode"].append(
            {
                "sequences": count,
                "context": context,
                "graphs": graphs,
                "ms": round(seconds * 1e3, 3),
                "decode_over_bandwidth": round(read / bandwidth / seconds, 3),
            }
        )
    blocks = list(range(PROMPT // executor.layout.block_size))
    step = SequenceStep("p", [5] * PROMPT, 0, blocks, SampleSpec(GREEDY, [5] * PROMPT, []))
    seconds = median_seconds(partial(executor.execute, [step]), rounds=5)
    products = 2 * PROMPT * LAYERS * _layer_elements()
    found["prefill"] = {
        "tokens": PROMPT,
        "ms": round(seconds * 1e3, 1),
        "prefill_over_gemm": round(products / rate / seconds, 3),
    }
    executor.close()
    return found


def without_graphs(executor: TorchExecutor) -> None:
    forward = executor._forward
    assert isinstance(forward, GpuForward)
    forward._graphs = None


def _layer_elements() -> int:
    return HIDDEN * (2 * HEADS * HEAD + 2 * KV_HEADS * HEAD + 3 * INTERMEDIATE)


def decode_steps(executor: TorchExecutor, count: int, context: int) -> list[SequenceStep]:
    """The contexts' KV is what lies there: its numbers change no time."""
    size = executor.layout.block_size
    width = -(-context // size)
    sample = SampleSpec(GREEDY, [5], [])
    return [
        SequenceStep(str(i), [5], context - 1, list(range(i * width, (i + 1) * width)), sample) for i in range(count)
    ]


def median_seconds(run: Callable[[], object], rounds: int = ROUNDS) -> float:
    """By the clock of this thread's caller: what is around the kernels counts too. `run` waits for the device."""
    seconds = []
    for i in range(rounds + 3):
        started = time.perf_counter()
        run()
        if i >= 3:  # kernels are compiled, memory is taken
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def copy_bandwidth(device: str) -> float:
    """Bytes per second, read and written counted."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    return 2 * COPY_BYTES / median_seconds(copy, rounds=5)


def product_rate(device: str, dtype: torch.dtype) -> float:
    """Floating-point operations per second, on random numbers: zeros are faster."""
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=dtype) for _ in range(2))

    def product() -> None:
        for _ in range(10):
            torch.mm(a, b)
        torch.cuda.synchronize()

    return 10 * 2 * SIDE**3 / median_seconds(product, rounds=5)
