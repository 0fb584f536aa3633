"""The simulated executor: fakes only time and bytes. Blocks, tags and the order of reads and writes are real."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from forebay_engine.executor.tags import TAG_BYTES, VOCAB_SIZE, extend, open_block, sample, score
from forebay_engine.kv.arena import ArenaLayout
from forebay_engine.perf.model import PerfModel
from forebay_engine.types import SequenceStep, StepOutput
from forebay_wire.transfer import TokenLogprob


class SimulatedExecutor:
    """executor/base.py: Executor over a buffer of tags (executor/tags.py), one per block.

    `layout` is the simulated model's, so that block_bytes accounts for what a real worker would move. A step takes the
    performance model's time: `sleep` gets what is left of it after the step's own work (`clock`, seconds).
    `num_blocks` None: what the performance model's KV capacity holds.
    """

    def __init__(
        self,
        perf: PerfModel,
        *,
        num_blocks: int | None = None,
        block_size: int = 16,
        vocab_size: int = VOCAB_SIZE,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.perf = perf
        self.layout: ArenaLayout = perf.layout(block_size)
        self.num_blocks = num_blocks if num_blocks is not None else max(1, perf.kv_capacity_tokens // block_size)
        self.vocab_size = vocab_size
        self._sleep = sleep
        self._clock = clock
        self._tags = bytearray(self.num_blocks * TAG_BYTES)

    def base_address(self) -> int:
        """0: there is no memory that a one-sided read could reach; the simulated transport uses read_tags()."""
        return 0

    def execute(self, steps: Sequence[SequenceStep]) -> list[StepOutput]:
        started = self._clock()
        outputs = [self._run(step) for step in steps]
        seconds = self._step_seconds(steps) - (self._clock() - started)
        if seconds > 0:
            self._sleep(seconds)
        return outputs

    def close(self) -> None:
        pass

    def read_tags(self, blocks: Sequence[int]) -> bytes:
        """TAG_BYTES of what lies in each block now. May be called from any thread, as a one-sided read."""
        self._check(blocks)
        tags = self._tags
        return b"".join([tags[block * TAG_BYTES : (block + 1) * TAG_BYTES] for block in blocks])

    def write_tags(self, blocks: Sequence[int], data: bytes) -> None:
        """Fill blocks[i] with the i-th TAG_BYTES of `data`. One block changes at once, several do not."""
        self._check(blocks)
        if len(data) != len(blocks) * TAG_BYTES:
            raise ValueError(f"{len(data)} bytes of tags for {len(blocks)} blocks, {TAG_BYTES} each are needed")
        for i, block in enumerate(blocks):
            self._tags[block * TAG_BYTES : (block + 1) * TAG_BYTES] = data[i * TAG_BYTES : (i + 1) * TAG_BYTES]

    def _check(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                raise IndexError(f"block {block} is outside the arena of {self.num_blocks} blocks")

    def _run(self, step: SequenceStep) -> StepOutput:
        size = self.layout.block_size
        table = step.block_table
        position, end = step.start, step.start + len(step.token_ids)
        if end > len(table) * size:
            raise IndexError(
                f"request {step.request_id}: {end} tokens, but its {len(table)} blocks hold {len(table) * size}"
            )
        scores: list[TokenLogprob] = []
        while position < end:
            index = position // size
            if position % size:
                tag = self.read_tags(table[index : index + 1])
            else:
                tag = open_block(self.read_tags(table[index - 1 : index]) if index else None)
            stop = min(end, (index + 1) * size)
            if step.prompt_logprobs is not None:
                scores += self._score(step, tag, position, stop)
            tag = extend(tag, step.token_ids[position - step.start : stop - step.start])
            self.write_tags(table[index : index + 1], tag)
            position = stop
        token = None
        logprob = None
        if step.sample is not None:
            tags = self.read_tags(table[: -(-end // size)])
            token, logprob = sample(tags, step.sample.params, len(step.sample.output_ids))
        return StepOutput(token, logprob, scores if step.prompt_logprobs is not None else None)

    def _score(self, step: SequenceStep, tag: bytes, position: int, stop: int) -> list[TokenLogprob]:
        """Scores of the prompt tokens at position + 1 .. stop."""
        scores = []
        for i in range(position - step.start, stop - step.start):
            tag = extend(tag, step.token_ids[i : i + 1])
            following = step.token_ids[i + 1] if i + 1 < len(step.token_ids) else step.next_token
            if following is not None:
                scores.append(score(tag, following, step.prompt_logprobs or 0))
        return scores

    def _step_seconds(self, steps: Sequence[SequenceStep]) -> float:
        chunks = [(len(step.token_ids), step.start) for step in steps if len(step.token_ids) > 1]
        single = [step.start + 1 for step in steps if len(step.token_ids) == 1]
        return self.perf.step_seconds(chunks, len(single), sum(single))
