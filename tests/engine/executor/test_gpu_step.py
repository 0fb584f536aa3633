"""The GPU path in Triton's interpreter: its steps against the torch path's, its tokens against the CPU kernels'."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="comes with torch's Linux build; pip install triton")

from engine.executor.cases import VOCAB, Bench, Case, assert_near, save_model, spec_of, specs  # noqa: E402
from forebay_engine.executor.decode_graphs import shape_of  # noqa: E402
from forebay_engine.executor.gpu_forward import GpuForward  # noqa: E402
from forebay_engine.executor.step_inputs import Cut, pack, padded_layout  # noqa: E402
from forebay_engine.executor.torch_executor import TorchExecutor  # noqa: E402
from forebay_engine.types import SampleSpec, SamplingParams, SequenceStep  # noqa: E402

# Few and small: the interpreter takes a millisecond for each program of a kernel.
edges = st.sampled_from([0, 1, 15, 16, 17])
gpu_cases = st.builds(
    Case,
    spec=specs,
    block_size=st.sampled_from([1, 3, 16]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 2**31),
    sequences=st.lists(st.tuples(edges, st.sampled_from([1, 1, 2, 17])), min_size=1, max_size=3),
    threads=st.just(1),
)


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=gpu_cases)
def test_the_kernels_compute_what_torch_does(case: Case, tmp_path_factory: pytest.TempPathFactory) -> None:
    bench = Bench(case, tmp_path_factory.mktemp("model"))
    theirs, ours = bench.torch_side(), bench.gpu_side()
    wanted, found = bench.two_steps(theirs), bench.two_steps(ours)
    near = 2e-4 if case.dtype == "float32" else 8e-2
    for name in wanted:
        assert_near(found[name], wanted[name], near)
        logits = ours.forward.logits(found[name])
        assert logits.shape == (found[name].shape[0], VOCAB)
        assert logits.dtype == torch.float32
        assert_near(logits, theirs.forward.logits(found[name]), near)
    assert_near(bench.kept(ours), bench.kept(theirs), near)


@pytest.fixture
def executors(tmp_path: Path) -> tuple[TorchExecutor, TorchExecutor]:
    """The same model by the CPU kernels and by the GPU path."""
    spec = spec_of(
        layers=2,
        hidden=48,
        intermediate=80,
        kv_heads=2,
        heads=6,
        head_size=16,
        qkv_bias=True,
    )
    save_model(spec, 5, tmp_path)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours, theirs = (TorchExecutor(tmp_path, kv_memory_bytes=1 << 20, dtype="float32") for _ in range(2))
    ours._forward.close()
    ours._forward = GpuForward(tmp_path, ours.spec, ours.arena)
    return ours, theirs


def tokens(executor: TorchExecutor, params: list[SamplingParams], prompts: list[list[int]]) -> list[Any]:
    """8 tokens of each prompt, computed together: prompts in chunks of different sizes, then token by token."""
    free = list(range(executor.num_blocks))
    random.Random(1).shuffle(free)
    tables = [[free.pop() for _ in range(6)] for _ in prompts]
    ids, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
    outputs: list[list[Any]] = [[] for _ in prompts]
    for _ in range(40):
        active = [i for i in range(len(prompts)) if len(outputs[i]) < 8]
        if not active:
            break
        steps = []
        for i in active:
            end = min(len(ids[i]), done[i] + (7, 64, 16, 1)[i])
            sample = SampleSpec(params[i], prompts[i], ids[i][len(prompts[i]) :]) if end == len(ids[i]) else None
            steps.append(SequenceStep(str(i), ids[i][done[i] : end], done[i], tables[i], sample))
        for i, step, output in zip(active, steps, executor.execute(steps), strict=True):
            done[i] += len(step.token_ids)
            if output.token_id is not None:
                ids[i].append(output.token_id)
                outputs[i].append((output.token_id, output.logprob))
    assert all(len(found) == 8 for found in outputs)
    return outputs


def test_tokens_are_those_of_the_cpu_kernels(executors: tuple[TorchExecutor, TorchExecutor]) -> None:
    ours, theirs = executors
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (9, 17, 16, 3)]
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, logprobs=3),
        SamplingParams(temperature=0.8, top_p=0.9, seed=4),
        SamplingParams(temperature=1.2, top_k=20, seed=9, logprobs=0),
    ]
    found, wanted = tokens(ours, params, prompts), tokens(theirs, params, prompts)
    assert [[token for token, _ in row] for row in found] == [[token for token, _ in row] for row in wanted]
    for one, other in zip(found[1], wanted[1], strict=True):
        assert one[1].logprob == pytest.approx(other[1].logprob, abs=1e-4)


class Recording:
    """Stands for CUDA's graphs: recorded calls are made when replayed, into the memory of their first result."""

    def __init__(self) -> None:
        self.made = 0
        self.replayed = 0

    def __call__(self, run: Any) -> tuple[Any, Any]:
        self.made += 1
        out = torch.empty(0)

        def replay() -> None:
            self.replayed += 1
            out.set_(run())

        return replay, out


def test_decode_steps_from_graphs_give_the_same_tokens(
    executors: tuple[TorchExecutor, TorchExecutor], tmp_path: Path
) -> None:
    """Padded to a graph's shape, computed from inputs that are copied over the recorded step's."""
    ours, theirs = executors
    record = Recording()
    ours._forward = GpuForward(tmp_path, ours.spec, ours.arena, record)
    rng = random.Random(4)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (5, 17, 1)]
    params = [SamplingParams(temperature=0.0)] * 3
    assert tokens(ours, params, prompts) == tokens(theirs, params, prompts)
    assert record.made
    assert record.replayed > record.made


def test_warming_up_leaves_a_worker_as_good_as_new(
    executors: tuple[TorchExecutor, TorchExecutor], tmp_path: Path
) -> None:
    ours, theirs = executors
    record = Recording()
    forward = ours._forward = GpuForward(tmp_path, ours.spec, ours.arena, record)
    forward.warm_up()
    assert record.made  # graphs too
    params = [SamplingParams(temperature=0.0)]
    assert tokens(ours, params, [[5, 6, 7]]) == tokens(theirs, params, [[5, 6, 7]])


def test_a_graph_that_can_not_be_recorded_is_done_without(
    executors: tuple[TorchExecutor, TorchExecutor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(run: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    ours, theirs = executors
    ours._forward = GpuForward(tmp_path, ours.spec, ours.arena, refuse)
    params = [SamplingParams(temperature=0.0)]
    assert tokens(ours, params, [[1, 2, 3]]) == tokens(theirs, params, [[1, 2, 3]])
    assert caplog.text.count("decode goes on without graphs") == 1


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [
        ([1], (1, 16)),
        ([1, 1, 1], (4, 16)),
        ([16 * 16], (1, 16)),
        ([16 * 15, 1], (2, 16)),
        ([16 * 15 + 1, 4], (2, 32)),
        ([700, 64, 65], (4, 64)),
        ([1] * 256, (256, 256)),
        ([1] * 257, None),
    ],
)
def test_a_graphs_shape_holds_the_step(lengths: list[int], wanted: tuple[int, int] | None) -> None:
    steps = [SequenceStep(str(i), [7], length - 1, list(range(64)), None) for i, length in enumerate(lengths)]
    shape = shape_of(steps, 16)
    assert (None if shape is None else (shape.rows, shape.blocks)) == wanted
    assert shape_of([*steps, SequenceStep("chunk", [7, 8], 0, [0], None)], 16) is None
    if shape is not None:
        cut = Cut(8, 64)
        plain, inputs = pack(steps, 16, cut), pack(steps, 16, cut, pad_to=shape)
        assert inputs.places == padded_layout(shape, 16, cut.span)
        padding = {"slots": -1, "decode_tiles": [0, 0, 0, -1], "joins": [0, 0, 0, 0]}
        for name in plain.places.__slots__:
            mine, longer = plain.part(name).tolist(), inputs.part(name).tolist()
            assert longer[: len(mine)] == mine, name
            assert longer[len(mine) :] == [padding.get(name, 0)] * (len(longer) - len(mine)), name


@pytest.mark.model
def test_a_real_models_layers_give_the_same_tokens(small_dir: Path) -> None:
    """SmolLM2's first three: real weights, its own GQA ratio, tied embeddings."""
    ours, theirs = (TorchExecutor(small_dir, kv_memory_bytes=8 << 20, dtype="float32") for _ in range(2))
    ours._forward.close()
    ours._forward = GpuForward(small_dir, ours.spec, ours.arena)
    rng = random.Random(6)
    prompts = [[rng.randrange(ours.vocab_size) for _ in range(length)] for length in (7, 17)]
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, top_p=0.9, seed=2)]
    assert tokens(ours, params, prompts) == tokens(theirs, params, prompts)


def test_prompts_are_scored_as_by_the_cpu_kernels(executors: tuple[TorchExecutor, TorchExecutor]) -> None:
    prompt = [int(n) for n in torch.randint(VOCAB, (30,), generator=torch.Generator().manual_seed(0))]
    step = SequenceStep(
        "a", prompt, 0, [4, 9], SampleSpec(SamplingParams(temperature=0.0), prompt, []), prompt_logprobs=2
    )
    found, wanted = (executor.execute([step])[0].prompt_logprobs or [] for executor in executors)
    assert [entry.token_id for entry in found] == prompt[1:]
    assert [entry.logprob for entry in found] == pytest.approx([entry.logprob for entry in wanted], abs=1e-4)


steps_of = st.lists(
    st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 2, 5, 8, 9, 40])), min_size=1, max_size=6
).flatmap(lambda shapes: st.tuples(st.just(shapes), st.integers(1, 17), st.integers(1, 9)))


@given(steps_of, st.sampled_from([1, 16, 64]))
def test_inputs_say_where_each_token_is(drawn: tuple[list[tuple[int, int]], int, int], span: int) -> None:
    shapes, block_size, chunk_queries = drawn
    rng = random.Random(str(drawn))
    steps = [
        SequenceStep(
            str(i),
            [rng.randrange(1000) for _ in range(now)],
            before,
            [rng.randrange(500) for _ in range(-(-(before + now) // block_size) + rng.randrange(3))],
            None,
        )
        for i, (before, now) in enumerate(shapes)
    ]
    inputs = pack(steps, block_size, Cut(chunk_queries, span))
    flat = [(i, at) for i, step in enumerate(steps) for at in range(step.start, step.start + len(step.token_ids))]
    assert inputs.part("token_ids").tolist() == [steps[i].token_ids[at - steps[i].start] for i, at in flat]
    assert inputs.part("positions").tolist() == [at for _, at in flat]
    assert inputs.part("slots").tolist() == [
        steps[i].block_table[at // block_size] * block_size + at % block_size for i, at in flat
    ]
    used = [step.block_table[: -(-(step.start + len(step.token_ids)) // block_size)] for step in steps]
    assert inputs.part("tables").tolist() == [block for table in used for block in table]
    offsets = [sum(map(len, used[:i])) for i in range(len(used))]
    seen = []
    for offset, first, count, position in inputs.part("chunk_tiles").tolist():
        sequence = flat[first][0]
        assert 1 <= count <= chunk_queries
        assert offset == offsets[sequence]
        assert flat[first : first + count] == [(sequence, position + n) for n in range(count)]
        seen += range(first, first + count)
    tiles = inputs.part("decode_tiles").tolist()
    for row, first, count, _ in inputs.part("joins").tolist():
        sequence, position = flat[row]
        assert tiles[first : first + count] == [
            [offsets[sequence], row, begin, position] for begin in range(0, position + 1, span)
        ]
        seen.append(row)
    # Each row is attended to once, in the way of its step.
    assert sorted(seen) == list(range(len(flat)))
    assert len(inputs.part("joins")) == sum(len(step.token_ids) == 1 for step in steps)
    assert len(tiles) == sum(count for _, _, count, _ in inputs.part("joins").tolist())
    assert all(getattr(inputs.places, name).first % 4 == 0 for name in inputs.places.__slots__)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=20), st.sampled_from([1, 16]), st.sampled_from([64, 512]))
def test_a_shape_has_room_for_every_steps_spans(lengths: list[int], block_size: int, span: int) -> None:
    steps = [SequenceStep("", [7], length - 1, [0] * length, None) for length in lengths]
    shape = shape_of(steps, block_size)
    assert shape is not None
    assert sum(-(-length // span) for length in lengths) <= shape.tiles(block_size, span)
