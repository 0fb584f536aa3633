"""Random small models, sequences over a scattered arena, and the ways to compute them: what kernel tests compare."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file

from forebay_engine.executor.arena import allocate_arena
from forebay_engine.executor.forward import Forward, NativeForward, TorchForward
from forebay_engine.kernels.compiler import Level, find_library
from forebay_engine.kernels.library import Kernels
from forebay_engine.kv.arena import ArenaLayout
from forebay_engine.model.native import NativeNetwork
from forebay_engine.model.prepare import default_cache_dir
from forebay_engine.model.spec import ModelSpec
from forebay_engine.types import SequenceStep

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
VOCAB = 67


@dataclass(frozen=True)
class Case:
    """A model's shape, and sequences of (tokens before the last step, tokens in it)."""

    spec: ModelSpec
    block_size: int
    dtype: str
    seed: int
    sequences: list[tuple[int, int]]
    threads: int


def spec_of(**sizes: Any) -> ModelSpec:
    fixed = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": VOCAB,
        "max_len": 4096,
        "rms_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tied_embeddings": True,
        "eos_ids": (),
        "bos_id": None,
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
    }
    return ModelSpec(**{**fixed, **sizes})


specs = st.builds(
    spec_of,
    layers=st.integers(1, 2),
    hidden=st.integers(1, 70).map(lambda n: 2 * n),
    intermediate=st.integers(1, 150),
    kv_heads=st.integers(1, 3),
    heads=st.integers(1, 5),  # a KV head; multiplied below
    head_size=st.sampled_from([2, 6, 16, 24, 32, 64, 80, 128, 130]),
    qkv_bias=st.booleans(),
    o_bias=st.booleans(),
    mlp_bias=st.booleans(),
    qk_norm=st.booleans(),
).map(lambda spec: replace(spec, heads=spec.heads * spec.kv_heads))

edges = st.sampled_from([0, 1, 15, 16, 17, 31, 32, 63, 64, 65, 127, 128, 129])
decodes = st.lists(st.tuples(edges | st.integers(0, 150), st.just(1)), min_size=1, max_size=9)
mixtures = st.lists(st.tuples(edges, st.sampled_from([1, 2, 7, 16, 65])), min_size=1, max_size=4)
cases = st.builds(
    Case,
    spec=specs,
    block_size=st.sampled_from([1, 3, 16, 64]),
    dtype=st.sampled_from(sorted(DTYPES)),
    seed=st.integers(0, 2**31),
    sequences=decodes | mixtures,
    threads=st.integers(1, 3),
)


def save_model(spec: ModelSpec, seed: int, folder: Path) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    q, kv = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
    tensors = {"model.embed_tokens.weight": normal(VOCAB, spec.hidden), "model.norm.weight": normal(spec.hidden) + 1}
    for i in range(spec.layers):
        at = f"model.layers.{i}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = normal(spec.hidden) + 1
        for name in ("q_norm", "k_norm"):
            tensors[f"{at}.self_attn.{name}.weight"] = normal(spec.head_size) + 1
        for name, outputs, inputs in (
            ("self_attn.q", q, spec.hidden),
            ("self_attn.k", kv, spec.hidden),
            ("self_attn.v", kv, spec.hidden),
            ("self_attn.o", spec.hidden, q),
            ("mlp.gate", spec.intermediate, spec.hidden),
            ("mlp.up", spec.intermediate, spec.hidden),
            ("mlp.down", spec.hidden, spec.intermediate),
        ):
            tensors[f"{at}.{name}_proj.weight"] = normal(outputs, inputs)
            tensors[f"{at}.{name}_proj.bias"] = normal(outputs)
    save_file(tensors, folder / "model.safetensors")


@dataclass
class Side:
    """One way to compute the case, with an arena of its own."""

    forward: Forward
    arena: Any

    def run(self, steps: list[SequenceStep]) -> dict[str, Any]:
        """Hidden states by sequence."""
        with torch.inference_mode():
            order, hidden = self.forward.hidden(steps)
        found, row = {}, 0
        for i in order:
            count = len(steps[i].token_ids)
            found[steps[i].request_id] = hidden[row : row + count].clone()
            row += count
        return found


class Bench:
    """The sequences of a case: their tokens and blocks, scattered over the arena."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        save_model(case.spec, case.seed, folder)
        generator = torch.Generator().manual_seed(case.seed + 1)
        lengths = [before + now for before, now in case.sequences]
        self.tokens = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]
        counts = [-(-n // case.block_size) for n in lengths]
        scattered = torch.randperm(sum(counts), generator=generator).tolist()
        self.tables = [[scattered.pop() for _ in range(count)] for count in counts]
        self.blocks = sum(counts)

    def _arena(self) -> tuple[ArenaLayout, Any]:
        spec, dtype = self.case.spec, DTYPES[self.case.dtype]
        layout = ArenaLayout(
            spec.layers, spec.kv_heads, spec.head_size, self.case.block_size, self.case.dtype, dtype.itemsize
        )
        return layout, allocate_arena(layout, self.blocks, dtype, torch.device("cpu"))

    def torch_side(self) -> Side:
        layout, arena = self._arena()
        return Side(TorchForward(self.folder, self.case.spec, layout, arena), arena)

    def native_side(self, level: Level, threads: int) -> Side:
        _, arena = self._arena()
        arena.fill_(float("nan"))  # what a block's former owner left behind must not matter
        file, _ = find_library(level, self.case.dtype, default_cache_dir() / "kernels")
        kernels = Kernels(file, DTYPES[self.case.dtype])
        return Side(NativeForward(NativeNetwork(self.folder, self.case.spec, kernels, arena, threads)), arena)

    def gpu_side(self) -> Side:
        """The GPU kernels, in Triton's interpreter."""
        from forebay_engine.executor.gpu_forward import GpuForward

        _, arena = self._arena()
        arena.fill_(float("nan"))
        return Side(GpuForward(self.folder, self.case.spec, arena), arena)

    def step(self, i: int, first: int, end: int) -> SequenceStep:
        return SequenceStep(str(i), self.tokens[i][first:end], first, self.tables[i], None)

    def two_steps(self, side: Side) -> dict[str, Any]:
        """What came before in one step, then the case's own."""
        before = [self.step(i, 0, n) for i, (n, _) in enumerate(self.case.sequences) if n]
        if before:
            side.run(before)
        return side.run([self.step(i, n, n + now) for i, (n, now) in enumerate(self.case.sequences)])

    def kept(self, side: Side) -> Any:
        """K and V of every token, [tokens, kv_heads, layers, 2, head_size]."""
        size = self.case.block_size
        return torch.stack(
            [
                side.arena[self.tables[i][at // size], :, :, :, at % size]
                for i, tokens in enumerate(self.tokens)
                for at in range(len(tokens))
            ]
        )


def assert_near(found: Any, wanted: Any, near: float) -> None:
    """By the largest deviation over the size of what is wanted."""
    scale = wanted.float().square().mean().sqrt() + 1e-3
    assert float((found.float() - wanted.float()).abs().max() / scale) < near * 4
