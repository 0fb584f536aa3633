"""What an idle pair of workers and its router cost: CPU, memory, and the time until a worker is ready."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import psutil

from bench.report import finish, spread
from forebay_engine.model.prepare import default_cache_dir, prepare_smollm2
from support.cluster import Cluster, Process


def tree(process: Process) -> list[psutil.Process]:
    root = psutil.Process(process.pid)
    return [root, *root.children(recursive=True)]


def cpu_seconds(process: Process) -> float:
    return sum(sum(p.cpu_times()[:2]) for p in tree(process))


def memory_mb(process: Process) -> float:
    """Proportional set size of all its processes: a page shared by two counts half in each. The KV arena is untouched
    while idle, so it is not in it."""
    return sum(p.memory_full_info().pss for p in tree(process)) / 1e6


async def run(seconds: float, rounds: int) -> dict[str, object]:
    model = prepare_smollm2(default_cache_dir(), lambda what, share: None)
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--dtype", "float32", "--max-model-len", "4096"]
        async with Cluster(Path(folder), engine="native", model_dir=model, worker_args=arguments) as cluster:
            ready: list[float] = []
            for worker in cluster.workers.values():
                await worker.end()
                started = time.monotonic()
                await worker.start()
                await cluster.ready(worker)
                ready.append(time.monotonic() - started)
            processes = {**cluster.workers, "router": cluster.router}
            await asyncio.sleep(3.0)
            percents: dict[str, list[float]] = {name: [] for name in processes}
            for _ in range(rounds):
                before = {name: cpu_seconds(process) for name, process in processes.items()}
                started = time.monotonic()
                await asyncio.sleep(seconds)
                elapsed = time.monotonic() - started
                for name, process in processes.items():
                    percents[name].append(100 * (cpu_seconds(process) - before[name]) / elapsed)
            memory = {name: memory_mb(process) for name, process in processes.items()}
    workers = [name for name in processes if name != "router"]
    return {
        "bench": "idle",
        "worker_cpu_percent": round(max(spread(percents[name])["median"] for name in workers), 2),
        "router_cpu_percent": round(spread(percents["router"])["median"], 2),
        "worker_rss_mb": round(max(memory[name] for name in workers)),
        "router_rss_mb": round(memory["router"]),
        "worker_ready_s": round(max(ready), 2),
        "spread": {name: spread(values) for name, values in percents.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    finish(asyncio.run(run(arguments.seconds, arguments.rounds)))


if __name__ == "__main__":
    main()
