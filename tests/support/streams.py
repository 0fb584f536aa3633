"""Streamed requests to a cluster of simulated workers, whose progress a test can wait for."""

import asyncio
import contextlib
import json

from support.client import Answer, complete
from support.cluster import Cluster

PROMPT = "The quick brown fox jumps over the lazy dog and then considers its position. " * 4


def body(seed: int = 1, tokens: int = 40, prompt: str = PROMPT, **more):
    return {
        "model": "simulated",
        "prompt": f"{seed} {prompt}",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        **more,
    }


@contextlib.asynccontextmanager
async def cluster(tmp_path, *, prefill=2, decode=2, lease=6.0, perf="slow", router_args=(), worker_args=()):
    args = ["--perf-model", perf, "--lease-seconds", str(lease), "--pull-timeout-seconds", str(lease / 2)]
    async with Cluster(
        tmp_path,
        prefill=prefill,
        decode=decode,
        worker_args=[*args, *worker_args],
        router_args=["--stall-timeout-seconds", "3", *router_args],
    ) as running:
        yield running


async def truth(cluster: Cluster, request, worker="d1") -> str:
    """The answer of one undisturbed worker, both phases."""
    answer = await complete(cluster.session, cluster.workers[worker].url, {**request, "stream": False})
    assert answer.status == 200, answer.error
    return answer.text


class Watched:
    """A streamed request whose progress a test can wait for."""

    def __init__(self, cluster: Cluster, request):
        self._cluster = cluster
        self.chunks = 0
        self.decode_worker = ""
        self.prefill_worker = ""
        self._progress = asyncio.Event()
        self.task = asyncio.create_task(self._run(request))

    async def _run(self, request) -> Answer:
        answer = Answer(0)
        async with self._cluster.session.post(self._cluster.router.url + "/v1/completions", json=request) as response:
            answer.status = response.status
            if response.status != 200:
                answer.error = await response.text()
                self._progress.set()
                return answer
            self.decode_worker = response.headers["x-forebay-decode"]
            self.prefill_worker = response.headers["x-forebay-prefill"]
            async for raw in response.content:
                line = raw.decode().strip()
                if line == "data: [DONE]":
                    answer.done = True
                elif line.startswith("data:"):
                    chunk = json.loads(line[5:])
                    if "error" in chunk:
                        answer.error = chunk["error"]
                        continue
                    for choice in chunk["choices"]:
                        answer.text += choice["text"]
                        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
                    self.chunks += 1
                    self._progress.set()
        return answer

    async def reach(self, chunks: int, seconds: float = 30.0) -> None:
        async with asyncio.timeout(seconds):
            while self.chunks < chunks and not self.task.done():
                self._progress.clear()
                await self._progress.wait()


async def check(watched: Watched, expected: str) -> None:
    answer = await asyncio.wait_for(watched.task, 60)
    assert (answer.status, answer.error) == (200, None)
    assert answer.text == expected
    assert answer.done
    assert answer.finish_reason == "length"
