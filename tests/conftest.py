"""Fixtures for every test folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

# Before anything imports Triton (transformers does): its kernels are tested in its interpreter, on CPU tensors.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import settings

# Seeded, so that a failure in CI is the same failure at home; no deadline, since machines may be busy.
settings.register_profile("forebay", derandomize=True, deadline=None)
settings.load_profile("forebay")


def pytest_configure(config: pytest.Config) -> None:
    """`-m soak` runs the law's and the replay's inner loops compiled.

    For all of `tests`: the conftest.py of a folder that is named alone may have imported them by now.
    """
    if config.option.markexpr == "soak":
        from bench import native

        try:
            native.use(native.built())
        except native.NotBuilt as why:
            print(f"the soak's inner loops are not compiled, and take up to three times as long: {why}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests found and have to say although they passed: `record_property("found", text)`."""
    reports = [report for report in terminalreporter.stats.get("passed", ()) if report.when == "call"]
    said = [text for report in reports for name, text in report.user_properties if name == "found"]
    if said:
        terminalreporter.section("found")
        for text in said:
            terminalreporter.line(text)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct (float32) in the default cache; the first run makes it: 5 s and a 93 MB download."""
    from forebay_engine.model.prepare import default_cache_dir, prepare_smollm2

    return prepare_smollm2(default_cache_dir(), lambda stage, share: None)


@pytest.fixture(scope="session")
def small_dir(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's first three layers: what it says makes no sense, but it says it at seven times the speed."""
    from support.models import truncated

    return truncated(smollm2_dir, tmp_path_factory.mktemp("small") / "model", 3)
