"""The CPU kernels against the torch path, and against themselves: a token's numbers come from its sequence only.

Every level that this processor can run is compiled, so that one machine covers what older ones would get.
"""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from engine.executor.cases import DTYPES, VOCAB, Bench, Case, assert_near, cases, spec_of  # noqa: E402
from forebay_engine.kernels.compiler import LEVELS, Level  # noqa: E402
from forebay_engine.model.dtype import read_cpu_flags  # noqa: E402

OWN_LEVELS = [level for level in LEVELS.get(platform.machine(), ()) if level.needs <= read_cpu_flags()]
PROPERTY = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


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
    )
    side = Bench(Case(spec, 16, "float32", 0, [(0, 1)], 2), tmp_path).native_side(OWN_LEVELS[0], 3)
    side.forward.close()
    side.forward.close()
