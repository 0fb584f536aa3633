"""Errors that end a `forebay` command with one line."""

from __future__ import annotations


class InputError(Exception):
    """What the user asked for can't be done as asked (exit code 2)."""


class LocalError(Exception):
    """It was rightly asked for and failed (exit code 1)."""
