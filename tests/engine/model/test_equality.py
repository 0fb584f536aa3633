"""Greedy tokens of the torch executor = Hugging Face generate, in float32, whatever the chunks and the batch.

A token may differ only where the reference's two best logits lie within TIE: such ties are counted and printed, and the
comparison goes on from the reference's token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="the reference; pip install 'forebay[dev]'")

from forebay_engine.executor.torch_executor import TorchExecutor  # noqa: E402
from forebay_engine.types import SampleSpec, SamplingParams, SequenceStep  # noqa: E402

pytestmark = pytest.mark.model

TIE = 1e-3
GREEDY = SamplingParams(temperature=0.0, max_tokens=10_000)
CHUNKS = [1, 15, 16, 17, 64]


@dataclass
class Reference:
    """A prompt's answer by Hugging Face, and how clear each choice was."""

    prompt: list[int]
    answer: list[int]
    gaps: list[float]
    seconds: list[int]


@dataclass
class Run:
    """One sequence in the executor: its own blocks, its prompt in chunks, then token by token."""

    name: str
    reference: Reference
    blocks: list[int]
    chunk: int
    done: int = 0
    ids: list[int] = field(default_factory=list)
    ties: int = 0

    def __post_init__(self) -> None:
        self.ids = list(self.reference.prompt)

    @property
    def output(self) -> list[int]:
        return self.ids[len(self.reference.prompt) :]

    @property
    def finished(self) -> bool:
        return len(self.output) == len(self.reference.answer)

    def step(self) -> SequenceStep:
        end = min(len(self.ids), self.done + self.chunk)
        last = end == len(self.ids)
        sample = SampleSpec(GREEDY, self.reference.prompt, self.output) if last else None
        return SequenceStep(self.name, self.ids[self.done : end], self.done, self.blocks, sample)

    def take(self, step: SequenceStep, token: int | None) -> None:
        self.done += len(step.token_ids)
        if step.sample is None:
            assert token is None
            return
        at = len(self.output)
        wanted = self.reference.answer[at]
        if token != wanted:
            assert token == self.reference.seconds[at], f"{self.name}: token {at} is {token}, reference {wanted}"
            assert self.reference.gaps[at] <= TIE, f"{self.name}: token {at} differs, gap {self.reference.gaps[at]}"
            self.ties += 1
        self.ids.append(wanted)


def reference_of(model: Any, prompt: list[int], count: int) -> Reference:
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            # Without it generate() masks every id of the prompt that equals the pad id.
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=count,
            return_dict_in_generate=True,
            output_logits=True,
        )
    tops = [logits[0].topk(2) for logits in out.logits]
    return Reference(
        prompt,
        out.sequences[0, len(prompt) :].tolist(),
        [float(top.values[0] - top.values[1]) for top in tops],
        [int(top.indices[1]) for top in tops],
    )


def drive(executor: TorchExecutor, runs: Sequence[Run]) -> None:
    """All runs together, one executor step at a time, so that chunks and decode tokens mix."""
    for _ in range(10_000):
        active = [run for run in runs if not run.finished]
        if not active:
            break
        steps = [run.step() for run in active]
        for run, step, output in zip(active, steps, executor.execute(steps), strict=True):
            run.take(step, output.token_id)
    assert all(run.finished for run in runs)
    ties = sum(run.ties for run in runs)
    tokens = sum(len(run.output) for run in runs)
    print(f"{len(runs)} sequences, {tokens} tokens equal, of them {ties} ties within {TIE}")


def tables(executor: TorchExecutor, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Blocks for sequences of these lengths, scattered over the arena."""
    free = list(range(executor.num_blocks))
    random.Random(seed).shuffle(free)
    size = executor.layout.block_size
    return [[free.pop() for _ in range(-(-length // size))] for length in lengths]


def prompts(vocab: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


def compare(executor: TorchExecutor, references: Sequence[Reference], chunks: Sequence[int]) -> None:
    lengths = [len(r.prompt) + len(r.answer) for r in references]
    blocks = tables(executor, lengths, seed=len(references))
    drive(executor, [Run(f"r{i}", r, blocks[i], chunks[i % len(chunks)]) for i, r in enumerate(references)])


TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-untied-biased": ("Llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-head-dim": ("Llama", {"head_dim": 32}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "llama-all-kv-heads": ("Llama", {"num_key_value_heads": 6}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
}


def save_tiny(kind: str, folder: Path, **saving: Any) -> Any:
    """A random two-layer model whose choices are clear: weights larger than at initialisation, so logits spread."""
    family, changes = TINY[kind]
    torch.manual_seed(sorted(TINY).index(kind))
    config = getattr(transformers, f"{family}Config")(
        **{
            "vocab_size": 320,
            "hidden_size": 96,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,
            "tie_word_embeddings": True,
            "eos_token_id": None,
            "pad_token_id": 0,
            **changes,
        }
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name or "bias" in name:
                value.copy_(torch.rand_like(value) + 0.5)
    model.save_pretrained(folder, **saving)
    return model


@pytest.fixture(scope="module", params=sorted(TINY))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TorchExecutor]:
    folder = tmp_path_factory.mktemp(request.param)
    model = save_tiny(request.param, folder)
    return model, TorchExecutor(folder, kv_memory_bytes=16 << 20, dtype="float32")


@pytest.mark.parametrize("chunk", CHUNKS)
def test_tiny_models_one_at_a_time(tiny: tuple[Any, TorchExecutor], chunk: int) -> None:
    model, executor = tiny
    for prompt in prompts(executor.vocab_size, [1, 2, 16, 33, 130]):
        compare(executor, [reference_of(model, prompt, 12)], [chunk])


def test_tiny_models_in_a_mixed_batch(tiny: tuple[Any, TorchExecutor]) -> None:
    model, executor = tiny
    references = [reference_of(model, p, 20) for p in prompts(executor.vocab_size, [1, 3, 15, 16, 17, 48, 100, 200])]
    compare(executor, references, CHUNKS)


def test_sharded_folder_gives_the_same_model(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    executor = TorchExecutor(tmp_path, kv_memory_bytes=16 << 20, dtype="float32")
    compare(executor, [reference_of(model, prompts(executor.vocab_size, [40])[0], 12)], [16])


def test_prompt_logprobs_are_the_references(tiny: tuple[Any, TorchExecutor]) -> None:
    model, executor = tiny
    (prompt,) = prompts(executor.vocab_size, [70])
    with torch.inference_mode():
        wanted = torch.log_softmax(model(torch.tensor([prompt])).logits[0].double(), -1)
    (blocks,) = tables(executor, [80], seed=1)
    found = []
    for first in range(0, 70, 32):
        part = prompt[first : first + 32]
        last = first + len(part) == len(prompt)
        step = SequenceStep(
            "a",
            part,
            first,
            blocks,
            SampleSpec(GREEDY, prompt, []) if last else None,
            prompt_logprobs=3,
            next_token=None if last else prompt[first + 32],
        )
        found += executor.execute([step])[0].prompt_logprobs or []
    assert [entry.token_id for entry in found] == prompt[1:]
    for position, entry in enumerate(found):
        assert entry.logprob == pytest.approx(float(wanted[position, prompt[position + 1]]), abs=1e-3)
        assert [value for _, value in entry.top] == pytest.approx(wanted[position].topk(3).values.tolist(), abs=1e-3)


def test_a_foreign_block_changes_the_answer(tiny: tuple[Any, TorchExecutor]) -> None:
    """The arena is what is attended to: nothing is kept beside it."""
    _, executor = tiny
    (prompt,) = prompts(executor.vocab_size, [64])
    (blocks,) = tables(executor, [80], seed=2)

    def last_logprobs() -> list[tuple[int, float]]:
        params = SamplingParams(temperature=0.0, logprobs=5)
        step = SequenceStep("a", [7], 64, blocks, SampleSpec(params, [*prompt, 7], []))
        output = executor.execute([step])[0]
        assert output.logprob is not None
        return output.logprob.top

    executor.execute([SequenceStep("a", prompt, 0, blocks, None)])
    before = last_logprobs()
    assert last_logprobs() == before
    executor.arena[blocks[1]] = executor.arena[blocks[2]].clone()
    assert last_logprobs() != before


def test_garbage_behind_a_sequence_is_not_read(tiny: tuple[Any, TorchExecutor]) -> None:
    """Slots after the last token hold what their former owner left there."""
    model, executor = tiny
    executor.arena.fill_(1e4)
    references = [reference_of(model, p, 6) for p in prompts(executor.vocab_size, [5, 21, 22])]
    compare(executor, references, [64])


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> tuple[Any, TorchExecutor]:
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model, TorchExecutor(smollm2_dir, kv_memory_bytes=256 << 20, dtype="float32")


@pytest.mark.parametrize("chunk", CHUNKS)
def test_smollm2_single(smollm2: tuple[Any, TorchExecutor], chunk: int) -> None:
    model, executor = smollm2
    compare(executor, [reference_of(model, prompts(executor.vocab_size, [66], seed=chunk)[0], 10)], [chunk])


def test_smollm2_batch_of_8(smollm2: tuple[Any, TorchExecutor]) -> None:
    model, executor = smollm2
    lengths = [3, 16, 17, 31, 64, 90, 128, 129]
    references = [reference_of(model, p, 8) for p in prompts(executor.vocab_size, lengths, seed=8)]
    compare(executor, references, [64, 17])


def test_smollm2_long_prompt(smollm2: tuple[Any, TorchExecutor]) -> None:
    model, executor = smollm2
    (prompt,) = prompts(executor.vocab_size, [1100], seed=9)
    reference = reference_of(model, prompt, 6)
    compare(executor, [reference], [512])


def test_bfloat16_stays_near_float32(smollm2: tuple[Any, TorchExecutor], smollm2_dir: Path) -> None:
    """No token equality here: only that the path computes the same model."""
    model, _ = smollm2
    executor = TorchExecutor(smollm2_dir, kv_memory_bytes=64 << 20, dtype="bfloat16")
    (prompt,) = prompts(executor.vocab_size, [100], seed=10)
    with torch.inference_mode():
        wanted = torch.log_softmax(model(torch.tensor([prompt])).logits[0].double(), -1)
    step = SequenceStep("a", prompt, 0, list(range(8)), SampleSpec(GREEDY, prompt, []), prompt_logprobs=0)
    found = executor.execute([step])[0].prompt_logprobs or []
    errors = [abs(f.logprob - float(wanted[i, prompt[i + 1]])) for i, f in enumerate(found)]
    assert sum(errors) / len(errors) < 0.1
