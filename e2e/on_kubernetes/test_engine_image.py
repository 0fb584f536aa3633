"""The engine's own Dockerfile: built here for CPUs, and a pair of workers from it. 5 minutes, 25 GB of disk meanwhile.

The image is too large to load into two nodes: its containers run as kubelet would run them, by runc.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from e2e.cluster import containers, host, images
from e2e.cluster.state import state
from support.client import complete
from support.cluster import Cluster

FREE_GB = 30
pytestmark = [pytest.mark.soak, pytest.mark.model, pytest.mark.timeout(3600)]


async def test_two_workers_of_the_image_serve(tmp_path: Path, smollm2_dir: Path) -> None:
    if problem := host.unfit():
        pytest.skip(f"buildah and runc build and run it: {problem}")
    state().root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(state().root).free >> 30
    if free < FREE_GB:
        pytest.skip(f"building the engine's image takes {FREE_GB} GB in {state().root}; {free} are free")
    with images.root_of(state(), images.ENGINE) as (root, environment):
        pair = Cluster(tmp_path, engine="native", model_dir=smollm2_dir, worker_args=["--kv-memory", "268435456"])
        os.chown(pair.token_file, containers.USER, containers.USER)
        shown = {"/model": smollm2_dir, "/token": pair.token_file}
        bundles = {name: tmp_path / f"bundle-{name}" for name in pair.workers}
        for name, worker in pair.workers.items():
            # The image's command in the place of the interpreter's, and what is mounted by the name that it has there.
            given = worker.command[worker.command.index("forebay_engine.main") + 1 :]
            there = {str(path): name for name, path in shown.items()}
            words = ["forebay-engine", *(there.get(word, word) for word in given)]
            worker.command = containers.command(
                f"forebay-{name}", bundles[name], root, words, env=environment, shown=shown
            )
        try:
            async with pair:
                for worker in pair.workers.values():
                    async with pair.session.get(worker.url + "/health") as answer:
                        assert answer.status == 200
                body = {"model": pair.model, "prompt": "The river ran on past the old mill. " * 8, "max_tokens": 12,
                        "temperature": 0, "stream": True, "ignore_eos": True}  # fmt: skip
                answers = [await complete(pair.session, pair.router.url, body) for _ in range(2)]
                for told in answers:
                    assert (told.status, told.error, told.done, told.finish_reason) == (200, None, True, "length")
                    assert [told.headers[f"x-forebay-{leg}"] for leg in ("prefill", "decode")] == ["p0", "d0"]
                assert answers[0].text == answers[1].text
                print(f"\n{answers[0].text!r}")
        finally:
            for name, bundle in bundles.items():
                containers.remove(f"forebay-{name}", bundle)
