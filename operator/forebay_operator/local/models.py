"""Model files on this machine: a folder given, or one that forebay_engine prepares in the user's cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from forebay_operator.api.source import ModelSource, Scheme
from forebay_operator.local.errors import InputError, LocalError
from forebay_operator.local.process import launcher, search_path
from forebay_wire import exit_codes

PREPARE_TIMEOUT_SECONDS = 3600.0


def model_folder(source: ModelSource) -> Path:
    """Folder of the model's files, prepared first when need be; progress goes to stderr.

    Raises InputError for a folder that holds no model and a name that is not known, LocalError when preparing failed.
    """
    if source.scheme is Scheme.HOSTPATH:
        folder = Path(source.target)
        try:
            found = (folder / "config.json").is_file()
        except OSError as error:
            raise InputError(
                f"spec.model.source hostpath://{folder}: cannot look there: {error.strerror}; let this user read it"
            ) from None
        if not found:
            raise InputError(
                f"spec.model.source hostpath://{folder}: no config.json there; give a folder in Hugging Face layout"
            )
        return folder
    return prepare(source.target)


def prepare(name: str) -> Path:
    """The folder is the last line that the tool prints, or the reason why there is none."""
    command = [sys.executable, "-m", "forebay_engine.model.prepare", name, "--errors=stdout"]
    try:
        done = subprocess.run(  # noqa: S603
            launcher(command),
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=PREPARE_TIMEOUT_SECONDS,
            env={**os.environ, "PATH": search_path()},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LocalError(f"preparing the model {name} took longer than {PREPARE_TIMEOUT_SECONDS:g} s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode == exit_codes.CONFIG and lines:
        raise InputError(f"spec.model.source cache://{name}: {lines[-1]}")
    if done.returncode != 0:
        reason = lines[-1] if lines else f"exit code {done.returncode}; the reason stands above"
        raise LocalError(f"preparing the model {name} failed: {reason}")
    if not lines or not Path(lines[-1]).is_dir():
        raise LocalError(f"preparing the model {name} printed no folder as its last line: {lines[-1:]}")
    return Path(lines[-1])
