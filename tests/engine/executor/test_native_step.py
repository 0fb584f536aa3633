"""The CPU kernels against the torch path, and against themselves: a token's numbers come from its sequence only.

Every level that this processor can run is compiled, so that one machine covers what older ones would get.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from forebay_engine.executor.arena import allocate_arena  # noqa: E402
from forebay_engine.executor.forward import Forward, NativeForward, TorchForward  # noqa: E402
from forebay_engine.kernels.compiler import LEVELS, Level, find_library  # noqa: E402
from forebay_engine.kernels.library import Kernels  # noqa: E402
from forebay_engine.kv.arena import ArenaLayout  # noqa: E402
from forebay_engine.model.dtype import read_cpu_flags  # noqa: E402
from forebay_engine.model.native import NativeNetwork  # noqa: E402
from forebay_engine.model.prepare import default_cache_dir  # noqa: E402
from forebay_engine.model.spec import ModelSpec  # noqa: E402
from forebay_engine.types import SequenceStep  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
VOCAB = 67
OWN_LEVELS = [level for level in LEVELS.get(platform.machine(), ()) if level.needs <= read_cpu_flags()]
PROPERTY = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


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
    }
    return ModelSpec(**fixed, **sizes)


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


@pytest.mark.parametrize("level", OWN_LEVELS, ids=lambda level: level.name)
@PROPERTY
@given(case=cases)
def test_the_kernels_compute_what_torch_does(
    level: Level, case: Case, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bench = Bench(case, tmp_path_factory.mktemp("model"))
    theirs, ours = bench.torch_side(), bench.native_side(level, case.threads)
    wanted, found = bench.two_steps(theirs), bench.two_steps(ours)
    # bfloat16 differs by roundings: torch's sums are rounded after every operation, the kernels' are not.
    near = 2e-4 if case.dtype == "float32" else 6e-2
    for name in wanted:
        assert_near(found[name], wanted[name], near)
        logits = ours.forward.logits(found[name])
        assert logits.shape == (found[name].shape[0], VOCAB)
        assert_near(logits, theirs.forward.logits(found[name].to(DTYPES[case.dtype])), near)
    assert_near(bench.kept(ours), bench.kept(theirs), near)


def assert_near(found: Any, wanted: Any, near: float) -> None:
    """By the largest deviation over the size of what is wanted."""
    scale = wanted.float().square().mean().sqrt() + 1e-3
    assert float((found.float() - wanted.float()).abs().max() / scale) < near * 4


@pytest.mark.parametrize("level", OWN_LEVELS, ids=lambda level: level.name)
@PROPERTY
@given(case=cases, chunk=st.sampled_from([1, 5, 16, 64]), threads=st.integers(1, 3))
def test_batch_chunks_and_threads_change_no_bit(
    level: Level, case: Case, chunk: int, threads: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """So prefill/decode, a continuation and a preempted request say what an undisturbed worker says, in any dtype."""
    bench = Bench(case, tmp_path_factory.mktemp("model"))
    together, apart = bench.native_side(level, case.threads), bench.native_side(level, threads)
    wanted = bench.two_steps(together)
    for i, tokens in enumerate(bench.tokens):
        found = []
        for first in range(0, len(tokens), chunk):
            found.append(apart.run([bench.step(i, first, min(len(tokens), first + chunk))])[str(i)])
        last = wanted[str(i)]
        assert torch.equal(torch.cat(found)[-last.shape[0] :], last)
        assert torch.equal(apart.forward.logits(last), together.forward.logits(last))
    assert torch.equal(bench.kept(together), bench.kept(apart))


def test_a_step_of_more_rows_than_one_pass_takes(tmp_path: Path) -> None:
    """512 rows go through the layers at once; sequences that lie across the border are cut there."""
    spec = spec_of(
        layers=2,
        hidden=32,
        intermediate=48,
        kv_heads=2,
        heads=4,
        head_size=16,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
    )
    case = Case(spec, 16, "float32", 3, [(5, 500), (0, 600), (3, 1), (0, 40)], 2)
    bench = Bench(case, tmp_path)
    wanted, ours = bench.two_steps(bench.torch_side()), bench.native_side(OWN_LEVELS[0], 2)
    found = bench.two_steps(ours)
    for name in wanted:
        assert_near(found[name], wanted[name], 2e-4)
    many = torch.cat(list(found.values()))
    assert torch.equal(ours.forward.logits(many)[-3:], ours.forward.logits(many[-3:]))


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    spec = spec_of(
        layers=1,
        hidden=8,
        intermediate=8,
        kv_heads=1,
        heads=1,
        head_size=8,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
    )
    side = Bench(Case(spec, 16, "float32", 0, [(0, 1)], 2), tmp_path).native_side(OWN_LEVELS[0], 3)
    side.forward.close()
    side.forward.close()
