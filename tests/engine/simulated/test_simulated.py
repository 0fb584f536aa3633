"""The simulated executor: its text is a function of what lies in the blocks, and of nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay_engine.executor.base import Executor
from forebay_engine.executor.simulated import SimulatedExecutor
from forebay_engine.executor.tags import PRINTABLE, TAG_BYTES
from forebay_engine.perf import load
from forebay_engine.types import SampleSpec, SamplingParams, SequenceStep, StepOutput
from support.simulated_answers import block_tags, expected_tokens

SIZE = 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
TABLE = [7, 2, 9, 4, 0, 5]
GREEDY = SamplingParams(temperature=0.0)


def made(num_blocks: int = 12) -> SimulatedExecutor:
    return SimulatedExecutor(load("instant"), num_blocks=num_blocks, block_size=SIZE)


def prefill(executor: Executor, prompt: list[int], table: list[int], cuts: list[int], params: SamplingParams) -> int:
    token = None
    edges = [0, *sorted(cuts), len(prompt)]
    for start, end in itertools.pairwise(edges):
        if start == end:
            continue
        sample = SampleSpec(params, prompt, []) if end == len(prompt) else None
        (output,) = executor.execute([SequenceStep("a", prompt[start:end], start, table, sample)])
        assert (output.token_id is None) == (sample is None)
        token = output.token_id
    assert token is not None
    return token


def decode(
    executor: Executor, prompt: list[int], answer: list[int], table: list[int], params: SamplingParams, until: int
) -> list[int]:
    """Decode until the answer has `until` tokens; the KV of all but its last token is in the blocks."""
    answer = list(answer)
    while len(answer) < until:
        start = len(prompt) + len(answer) - 1
        step = SequenceStep("a", answer[-1:], start, table, SampleSpec(params, prompt, answer))
        (output,) = executor.execute([step])
        assert output.token_id is not None
        answer.append(output.token_id)
    return answer


def test_is_an_executor() -> None:
    executor: Executor = made()
    assert executor.base_address() == 0
    executor.close()


@given(
    prompt=st.lists(st.integers(0, 300), min_size=1, max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=5),
    temperature=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 3),
)
@settings(deadline=None, derandomize=True)
def test_text_is_as_expected_however_the_prompt_is_cut(
    prompt: list[int], cuts: list[int], temperature: float, seed: int
) -> None:
    params = SamplingParams(temperature=temperature, seed=seed)
    table = [5, 3, 8, 1, 0, 7, 2, 6, 4, 11]
    executor = made()
    first = prefill(executor, prompt, table, [min(cut, len(prompt)) for cut in cuts], params)
    answer = decode(executor, prompt, [first], table, params, 15)
    assert answer == expected_tokens(prompt, 15, params, block_size=SIZE)
    assert set(answer) <= set(PRINTABLE)
    rest = expected_tokens(prompt, 10, params, output_ids=answer[:5], block_size=SIZE)
    assert answer[:5] + rest == answer


def lost(executor: SimulatedExecutor, block: int) -> None:
    executor.write_tags([block], bytes(TAG_BYTES))


def stale(executor: SimulatedExecutor, block: int) -> None:
    """The block as it was before its last token came."""
    index = TABLE.index(block)
    known = PROMPT[: (index + 1) * SIZE][:-1]
    executor.write_tags([block], block_tags(known, SIZE)[index])


def foreign(executor: SimulatedExecutor, block: int) -> None:
    """The same place in another prompt's KV, which differs in its first token only."""
    other = [PROMPT[0] + 1, *PROMPT[1:]]
    executor.write_tags([block], block_tags(other, SIZE)[TABLE.index(block)])


def swapped(executor: SimulatedExecutor, block: int) -> None:
    other = TABLE[1] if block != TABLE[1] else TABLE[0]
    mine, theirs = executor.read_tags([block]), executor.read_tags([other])
    executor.write_tags([block, other], theirs + mine)


@pytest.mark.parametrize("fault", [lost, stale, foreign, swapped])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_every_fault_in_every_block_changes_the_text(
    fault: Callable[[SimulatedExecutor, int], None], index: int
) -> None:
    right = expected_tokens(PROMPT, 12, GREEDY, block_size=SIZE)
    executor = made()
    first = prefill(executor, PROMPT, TABLE, [], GREEDY)
    assert decode(executor, PROMPT, [first], TABLE, GREEDY, 12) == right
    executor = made()
    first = prefill(executor, PROMPT, TABLE, [], GREEDY)
    fault(executor, TABLE[index])
    assert decode(executor, PROMPT, [first], TABLE, GREEDY, 12) != right


def test_a_fault_mid_answer_changes_what_follows() -> None:
    right = expected_tokens(PROMPT, 12, GREEDY, block_size=SIZE)
    executor = made()
    first = prefill(executor, PROMPT, TABLE, [], GREEDY)
    answer = decode(executor, PROMPT, [first], TABLE, GREEDY, 5)
    lost(executor, TABLE[0])
    answer = decode(executor, PROMPT, answer, TABLE, GREEDY, 12)
    assert answer[:5] == right[:5]
    assert answer[5:] != right[5:]


def test_kv_moved_to_another_worker_gives_the_same_text() -> None:
    here, there = made(), made()
    first = prefill(here, PROMPT, TABLE, [], GREEDY)
    moved = [1, 0, 11]
    there.write_tags(moved, here.read_tags(TABLE[:3]))
    table = [*moved, 3, 2, 4]
    assert decode(there, PROMPT, [first], table, GREEDY, 12) == expected_tokens(PROMPT, 12, GREEDY, block_size=SIZE)


class TestSampling:
    def test_seed_and_choice_matter_only_with_temperature(self) -> None:
        def text(**fields: float | int) -> list[int]:
            return expected_tokens(PROMPT, 8, SamplingParams(**fields), block_size=SIZE)  # type: ignore[arg-type]

        assert text(temperature=0.0, seed=1) == text(temperature=0.0, seed=2, choice=3)
        warm = [text(temperature=1.0, seed=seed, choice=choice) for seed in (1, 2) for choice in (0, 1)]
        assert len({tuple(answer) for answer in warm}) == 4

    def test_min_tokens_masks_stop_ids_and_no_longer(self) -> None:
        free = expected_tokens(PROMPT, 6, GREEDY, block_size=SIZE)
        stops = tuple(set(free))
        masked = SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=stops)
        answer = expected_tokens(PROMPT, 40, masked, block_size=SIZE)
        assert not set(answer[:4]) & set(stops)
        assert len(answer) == 40 or answer[-1] in stops
        at_once = SamplingParams(temperature=0.0, stop_token_ids=stops)
        assert expected_tokens(PROMPT, 6, at_once, block_size=SIZE) == free[:1]

    def test_logprobs_have_as_many_alternatives_as_asked_and_change_no_token(self) -> None:
        executor = made()
        params = SamplingParams(temperature=0.0, logprobs=3)
        step = SequenceStep("a", PROMPT, 0, TABLE, SampleSpec(params, PROMPT, []))
        (output,) = executor.execute([step])
        assert output.logprob is not None
        assert output.token_id == expected_tokens(PROMPT, 1, GREEDY, block_size=SIZE)[0] == output.logprob.token_id
        assert len(output.logprob.top) == 3
        assert [value for _, value in output.logprob.top] == sorted((v for _, v in output.logprob.top), reverse=True)

    @pytest.mark.parametrize("cuts", [[], [4], [1, 2, 3, 7], [10]])
    def test_prompt_logprobs_do_not_depend_on_chunks(self, cuts: list[int]) -> None:
        def scores(edges: list[int]) -> list[object]:
            executor = made()
            found: list[object] = []
            for start, end in itertools.pairwise(edges):
                after = PROMPT[end] if end < len(PROMPT) else None
                step = SequenceStep("a", PROMPT[start:end], start, TABLE, None, 2, after)
                (output,) = executor.execute([step])
                found += output.prompt_logprobs or []
            return found

        whole = scores([0, len(PROMPT)])
        assert len(whole) == len(PROMPT) - 1
        assert scores([0, *cuts, len(PROMPT)]) == whole


class TestTime:
    def test_a_step_sleeps_for_what_its_work_left_of_the_models_time(self) -> None:
        slept: list[float] = []
        ticks = iter([100.0, 100.005])
        perf = load("slow")
        executor = SimulatedExecutor(
            perf, num_blocks=40, block_size=SIZE, sleep=slept.append, clock=lambda: next(ticks)
        )
        chunk = SequenceStep("a", [1] * 8, 0, [0, 1], None)
        token = SequenceStep("b", [1], 9, [2, 3, 4], SampleSpec(GREEDY, [1] * 9, [1]))
        executor.execute([chunk, token])
        assert slept == [pytest.approx(perf.step_seconds([(8, 0)], 1, 10) - 0.005)]

    def test_instant_never_sleeps(self) -> None:
        def refuse(seconds: float) -> None:
            raise AssertionError(f"slept {seconds}")

        executor = SimulatedExecutor(load("instant"), num_blocks=4, block_size=SIZE, sleep=refuse)
        assert executor.execute([SequenceStep("a", [1], 0, [0], None)]) == [StepOutput(None)]


class TestArena:
    def test_accounts_for_the_models_real_bytes(self) -> None:
        executor = SimulatedExecutor(load("h100-llama-8b"), block_size=16)
        assert executor.layout.block_bytes == 16 * 131_072
        assert executor.num_blocks == load("h100-llama-8b").kv_capacity_tokens // 16

    @pytest.mark.parametrize("block", [-1, 12])
    def test_a_block_outside_is_refused(self, block: int) -> None:
        executor = made(12)
        with pytest.raises(IndexError, match=f"block {block} is outside the arena of 12 blocks"):
            executor.read_tags([block])
        with pytest.raises(IndexError, match="outside"):
            executor.write_tags([block], bytes(TAG_BYTES))

    def test_tags_of_the_wrong_length_are_refused(self) -> None:
        with pytest.raises(ValueError, match="31 bytes of tags for 2 blocks"):
            made().write_tags([0, 1], bytes(31))

    def test_a_table_too_short_for_its_tokens_is_refused(self) -> None:
        with pytest.raises(IndexError, match="request a: 5 tokens, but its 1 blocks hold 4"):
            made().execute([SequenceStep("a", [1] * 5, 0, [0], None)])
