"""Fixtures of tests/ that the suite shares."""

from __future__ import annotations

from tests.conftest import smollm2_dir

__all__ = ["smollm2_dir"]
