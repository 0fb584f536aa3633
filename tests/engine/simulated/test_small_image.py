"""Simulated workers have a small image (images/engine/Dockerfile.simulated): what computes must not be imported."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.client import complete
from support.cluster import Cluster

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "images" / "engine" / "Dockerfile.simulated").read_text()
MAIN = "import sys; sys.modules.update(dict.fromkeys({absent})); from forebay_engine.main import main; sys.exit(main())"


def _absent() -> Iterator[str]:
    """Modules of the distributions that the engine needs and the small image does not install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installs = re.search(r"constraints\.txt \. (.*)$", DOCKERFILE, re.M)
    assert installs is not None
    by_distribution: dict[str, list[str]] = {}
    for module, names in importlib.metadata.packages_distributions().items():
        for name in names:
            by_distribution.setdefault(name.lower().replace("_", "-"), []).append(module)
    for needed in project["optional-dependencies"]["engine"]:
        name = re.split(r"[<>=]", needed)[0]
        if name not in installs.group(1).split():
            yield from by_distribution[name]


@pytest.mark.live
async def test_a_pair_serves_without_what_computes(tmp_path: Path) -> None:
    absent = sorted(set(_absent()))
    assert {"numpy", "torch", "safetensors"} <= set(absent)
    pair = Cluster(tmp_path)
    for worker in pair.workers.values():
        at = worker.command.index("-m")
        worker.command[at : at + 2] = ["-c", MAIN.format(absent=absent)]
    async with pair:
        body = {"model": pair.model, "prompt": "The river ran on. " * 20, "max_tokens": 8, "stream": True,
                "ignore_eos": True}  # fmt: skip
        answer = await complete(pair.session, pair.router.url, body)
    assert (answer.status, answer.error, answer.done, answer.finish_reason) == (200, None, True, "length")
    assert [answer.headers[f"x-forebay-{leg}"] for leg in ("prefill", "decode")] == ["p0", "d0"]
