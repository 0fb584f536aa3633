"""The real executor: a transformer over one arena tensor, on a CPU or a GPU (forward.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from forebay_engine.device import choose_device, download, finish, upload
from forebay_engine.errors import ModelError
from forebay_engine.executor.arena import allocate_arena
from forebay_engine.executor.forward import make_forward
from forebay_engine.executor.huge_pages import use_huge_pages
from forebay_engine.kv.arena import ArenaLayout
from forebay_engine.model.dtype import resolve_dtype
from forebay_engine.model.spec import read_spec
from forebay_engine.sampling.sampler import sample, score
from forebay_engine.types import SequenceStep, StepOutput
from forebay_wire.transfer import TokenLogprob

_SCORED_ROWS = 64
"""Prompt positions whose logits are made at once: 512 rows of a 150k vocabulary would be 300 MB."""


class TorchExecutor:
    """Implements executor/base.py's Executor. One thread calls it; the same steps give the same outputs."""

    def __init__(
        self,
        model_dir: Path,
        *,
        kv_memory_bytes: int,
        block_size: int = 16,
        dtype: str = "auto",
        threads: int = 1,
        device: str = "cpu",
        kernels: bool = True,
    ) -> None:
        """Load the model and allocate the arena. `device` is auto, cpu or cuda (device.py). `kernels` False computes
        with torch alone where there are kernels too.

        Raises ModelError when the folder can't be served, the device isn't there, the dtype doesn't fit it, or the
        memory is too small for one block.
        """
        self.device = choose_device(device)
        self.dtype = resolve_dtype(dtype, self.device)
        if self.device.type == "cpu":
            torch.set_num_threads(threads)
        self.spec = read_spec(model_dir)
        self.vocab_size = self.spec.vocab_size
        self.layout = ArenaLayout(
            layers=self.spec.layers,
            kv_heads=self.spec.kv_heads,
            head_size=self.spec.head_size,
            block_size=block_size,
            dtype=str(self.dtype).removeprefix("torch."),
            itemsize=self.dtype.itemsize,
        )
        self.num_blocks = self.layout.blocks_in(kv_memory_bytes)
        if self.num_blocks < 1:
            raise ModelError(
                f"KV memory of {kv_memory_bytes} bytes holds no block: one of {block_size} tokens takes "
                f"{self.layout.block_bytes} bytes; give the worker more (--kv-memory, spec.engine.kvCache.memory)"
            )
        self.arena = allocate_arena(self.layout, self.num_blocks, self.dtype, self.device)
        self._forward = make_forward(model_dir, self.spec, self.layout, self.arena, threads=threads, kernels=kernels)
        if self.device.type == "cpu":
            use_huge_pages(skip=(self.base_address(), self.base_address() + self.num_blocks * self.layout.block_bytes))

    def base_address(self) -> int:
        return self.arena.data_ptr()

    def execute(self, steps: Sequence[SequenceStep]) -> list[StepOutput]:
        """Run one step of any mixture of prefill chunks and decode tokens.

        When it returns, the step's K and V are in the arena: a peer may read them the next moment, and knows nothing of
        this GPU's queue.
        """
        if not steps:
            return []
        with torch.inference_mode():
            order, hidden = self._forward.hidden(steps)
            outputs = self._outputs(steps, order, hidden)
            if all(step.sample is None for step in steps):
                finish(self.device)  # else sampling has waited for all of it
            return outputs

    def close(self) -> None:
        """The arena lives until the transport lets go of it too."""
        self._forward.close()

    def _outputs(self, steps: Sequence[SequenceStep], order: list[int], hidden: torch.Tensor) -> list[StepOutput]:
        outputs = [StepOutput(None) for _ in steps]
        scored: dict[int, list[TokenLogprob]] = {}
        sampled: list[int] = []
        rows: list[int] = []
        specs = []
        row = 0
        for i in order:
            step = steps[i]
            if step.prompt_logprobs is not None:
                scored[i] = self._score_prompt(step, hidden[row : row + len(step.token_ids)])
            row += len(step.token_ids)
            if step.sample is not None:
                sampled.append(i)
                rows.append(row - 1)
                specs.append(step.sample)
        if sampled:
            # Only rows that give a token meet the vocabulary: for a small model it is the largest matrix.
            chosen = upload(np.array(rows, dtype=np.int32), self.device)
            tokens = sample(self._forward.logits(hidden.index_select(0, chosen)), specs)
            for i, output in zip(sampled, tokens, strict=True):
                outputs[i] = output
        for i, logprobs in scored.items():
            outputs[i] = StepOutput(outputs[i].token_id, outputs[i].logprob, logprobs)
        return outputs

    def _score_prompt(self, step: SequenceStep, hidden: torch.Tensor) -> list[TokenLogprob]:
        """Log-probabilities of the prompt tokens that follow the step's positions."""
        targets = step.token_ids[1:]
        if step.next_token is not None:
            targets = [*targets, step.next_token]
        if step.sample is not None:
            # Positions after the prompt hold output ids (a continuation); those are not the prompt's.
            targets = targets[: max(0, len(step.sample.prompt_ids) - step.start - 1)]
        top = step.prompt_logprobs or 0
        found: list[TokenLogprob] = []
        for first in range(0, len(targets), _SCORED_ROWS):
            part = targets[first : first + _SCORED_ROWS]
            (logits,) = download(self._forward.logits(hidden[first : first + len(part)]))
            wide = logits.double().numpy()
            found.extend(score(wide[i], target, top) for i, target in enumerate(part))
        return found
