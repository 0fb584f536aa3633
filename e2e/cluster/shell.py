"""Commands with a deadline, whose failure says what was run and what it said."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

DEFAULT_SECONDS: Final = 60.0
SHOWN: Final = 3000
"""Characters of a failed command's output in the error."""


class CommandFailed(Exception):
    """A command ended with an error or not in time; the text holds the command and the end of its output."""


def run(
    *command: object,
    check: bool = True,
    seconds: float = DEFAULT_SECONDS,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Raises CommandFailed: after `seconds`, or (with `check`) for an exit status other than 0."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=seconds,
            env=env,
            cwd=cwd,
        )
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"`{shlex.join(words)}` did not end within {seconds:g} s") from error
    except OSError as error:
        raise CommandFailed(f"`{shlex.join(words)}` could not be started: {error}") from error
    if check and done.returncode:
        said = (done.stdout + done.stderr)[-SHOWN:].strip()
        raise CommandFailed(f"`{shlex.join(words)}` ended with {done.returncode}:\n{said}")
    return done
