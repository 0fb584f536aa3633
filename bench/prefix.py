"""What prefix-aware routing saves: conversations over four prefill workers, against one worker and against routing by
load alone.

Each conversation is one client that takes turns: a system prompt that all share, then question and answer, again and
again. All run at once. Simulated workers (one token a byte), no time but HTTP's. `cached_*`: share of the prompt tokens
found in a prefill worker's cache. `over_one_worker` is the one to look at: near 1, four workers cache as well as one.
`most_loaded`: the busiest prefill worker's computed tokens over the mean; 1 is even. With the instant model the worker
that answers first becomes the home of what all begin with, so this one depends on how fast the first answer is.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.report import finish
from support.client import complete
from support.cluster import Cluster

SYSTEM_BYTES = 800
QUESTION_BYTES = 300
ANSWER_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Shares:
    cached: float
    most_loaded: float


def _text(rng: random.Random, size: int) -> str:
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(size))


async def _converse(cluster: Cluster, rng: random.Random, system: str, turns: int) -> None:
    messages = [{"role": "system", "content": system}]
    for _ in range(turns):
        messages.append({"role": "user", "content": _text(rng, QUESTION_BYTES)})
        body = {"model": cluster.model, "messages": messages, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        answer = await complete(cluster.session, cluster.router.url, {**body, "stream": True})
        if not answer.done:
            raise RuntimeError(f"a turn failed with {answer.status}: {answer.error}")
        messages = [*messages, {"role": "assistant", "content": answer.text}]


async def measure(folder: Path, *, workers: int, conversations: int, turns: int, router: list[str]) -> Shares:
    """The shares of one system, fresh. Raises RuntimeError when an answer is not whole."""
    flags = ["--perf-model", "instant"]
    async with Cluster(folder, prefill=workers, decode=1, worker_args=flags, router_args=router) as cluster:
        system = _text(random.Random(0), SYSTEM_BYTES)
        await asyncio.gather(
            *(_converse(cluster, random.Random(1 + seed), system, turns) for seed in range(conversations))
        )
        async with cluster.session.get(cluster.router.url + "/load") as response:
            totals = (await response.json())["totals"]
        computed = [(await cluster.load(f"p{index}")).prefill_tokens_total for index in range(workers)]
    mean = sum(computed) / workers
    return Shares(totals["cached_prompt_tokens"] / totals["offered_prompt_tokens"], max(computed) / mean)


async def bench(conversations: int, turns: int, workers: int) -> dict[str, object]:
    systems: dict[str, tuple[int, list[str]]] = {
        "one_worker": (1, []),
        "by_prefix": (workers, []),
        "by_load": (workers, ["--no-prefix-routing"]),
    }
    shares: dict[str, Shares] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (count, flags) in systems.items():
            place = Path(folder) / name
            # R6 would refuse what it cannot serve in time; this is about caches.
            shares[name] = await measure(place, workers=count, conversations=conversations, turns=turns, router=flags)
    one = shares["one_worker"].cached
    return {
        **{f"cached_{name}": round(share.cached, 4) for name, share in shares.items()},
        "over_one_worker": round(shares["by_prefix"].cached / one, 4),
        "by_load_over_one_worker": round(shares["by_load"].cached / one, 4),
        "most_loaded": round(shares["by_prefix"].most_loaded, 3),
        "workers": workers,
        "conversations": conversations,
        "turns": turns,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()
    finish(asyncio.run(bench(args.conversations, args.turns, args.workers)))


if __name__ == "__main__":
    main()
