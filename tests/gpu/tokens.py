"""SmolLM2's tokens against Hugging Face's, on the same device."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from forebay_engine.executor.torch_executor import TorchExecutor
from forebay_engine.types import SampleSpec, SamplingParams, SequenceStep

TIE = 1e-3
"""Of logits: where the reference's two best are nearer than this, either may win."""

GREEDY = SamplingParams(temperature=0.0)
LENGTHS = (3, 16, 17, 130, 700)
ANSWER = 24


def prompts(vocabulary: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocabulary) for _ in range(length)] for length in LENGTHS]


def generate(executor: TorchExecutor, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy answers, computed together: prompts in chunks of 64, beside the decode tokens of the others."""
    free = list(range(executor.num_blocks))
    random.Random(1).shuffle(free)
    size = executor.layout.block_size
    tables = [[free.pop() for _ in range(-(-(len(prompt) + count) // size))] for prompt in prompts]
    ids, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
    while active := [i for i in range(len(prompts)) if len(ids[i]) < len(prompts[i]) + count]:
        steps = []
        for i in active:
            end = min(len(ids[i]), done[i] + 64)
            sample = SampleSpec(GREEDY, prompts[i], ids[i][len(prompts[i]) :]) if end == len(ids[i]) else None
            steps.append(SequenceStep(str(i), ids[i][done[i] : end], done[i], tables[i], sample))
        for i, step, output in zip(active, steps, executor.execute(steps), strict=True):
            done[i] += len(step.token_ids)
            if output.token_id is not None:
                ids[i].append(output.token_id)
    return [ids[i][len(prompts[i]) :] for i in range(len(prompts))]


def check(folder: Path, device: str) -> dict[str, Any]:
    """float32: every token is the reference's, but for ties, which are counted. The device's own dtype: how far
    log-probabilities of prompt tokens are from the reference's in float32, on average.

    Raises AssertionError.
    """
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)
    executor = TorchExecutor(folder, kv_memory_bytes=128 << 20, dtype="float32", device=device)
    asked = prompts(executor.vocab_size)
    ties, tokens = 0, 0
    for prompt, answer in zip(asked, generate(executor, asked, ANSWER), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer], device=device)).logits[0, len(prompt) - 1 : -1].float()
        for token, row in zip(answer, logits, strict=True):
            behind = float(row.max() - row[token])
            assert behind <= TIE, f"prompt of {len(prompt)}: token {token} is {behind:.1e} behind the reference's"
            ties += int(row.argmax()) != token
            tokens += 1
    executor.close()
    narrow = TorchExecutor(folder, kv_memory_bytes=128 << 20, device=device)
    prompt = asked[-1]
    blocks = list(range(-(-len(prompt) // narrow.layout.block_size)))
    step = SequenceStep("a", prompt, 0, blocks, SampleSpec(GREEDY, prompt, []), prompt_logprobs=0)
    scored = narrow.execute([step])[0].prompt_logprobs or []
    with torch.inference_mode():
        wanted = torch.log_softmax(model(torch.tensor([prompt], device=device)).logits[0].double(), -1).cpu()
    errors = [abs(entry.logprob - float(wanted[i, prompt[i + 1]])) for i, entry in enumerate(scored)]
    error = sum(errors) / len(errors)
    assert len(errors) == len(prompt) - 1
    assert error < 0.1, f"{narrow.dtype}: log-probabilities are off by {error:.3f} on average"
    narrow.close()
    return {"tokens_equal": tokens, "ties": ties, "dtype": str(narrow.dtype), "logprob_error": round(error, 5)}
