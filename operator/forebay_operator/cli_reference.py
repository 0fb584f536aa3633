"""docs/cli.md from the command itself, so that it is never behind. `make generate` writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
import typer.main

from forebay_operator.cli import app

EXIT_CODES: Mapping[int, str] = {
    0: "done; `status`: every process is ready; `plan`: nothing to do",
    1: "failed (a port in use, no space, nothing is up, ...); `status`: not every process is ready; `plan`: an error, "
    "or a change that would be refused",
    2: "the input cannot be used as it is (arguments, manifest); `plan`: there are changes",
    130: "interrupted (Ctrl-C); `up` drains on it and ends with 0 when nothing was cut off, else 1",
}

_HEAD = """# The forebay command

<!-- Made from the command by `make generate`; do not edit. -->

What goes wrong is one line on standard error that begins with `error: `; a wrong argument or option is shown in a box,
below the command's usage. For programs, `-o json` (`--json` for `replay`
and `calibrate`) prints one JSON document on standard output.

| exit code | means |
|---|---|
"""


_VARIABLES = """
| variable | means | default |
|---|---|---|
| `FOREBAY_CACHE` | keeps models prepared for `cache://NAME` | `$XDG_CACHE_HOME/forebay`, else `~/.cache/forebay` |
| `XDG_STATE_HOME` | logs and what a running `up` needs are in its folder `forebay/NAME` | `~/.local/state` |
| `FOREBAY_API_KEY` | sent by `chat` and `calibrate` | none |
| `CUDA_VISIBLE_DEVICES` | the GPUs that `up` deals out to workers | all of the machine's |
"""


def render() -> str:
    group: Any = typer.main.get_command(app)
    context = click.Context(group, info_name="forebay")
    codes = "".join(f"| {code} | {text} |\n" for code, text in EXIT_CODES.items())
    return (
        _HEAD
        + codes
        + _VARIABLES
        + "".join(_command(name, command, context) for name, command in group.commands.items())
    )


def _command(name: str, command: Any, parent: click.Context) -> str:
    context = click.Context(command, info_name=name, parent=parent)
    arguments = "".join(f" {_argument(p, context)}" for p in command.params if p.param_type_name == "argument")
    rows = [_row(p, context) for p in command.params]
    text = f"\n## forebay {name}\n\n    forebay {name}{arguments} [OPTIONS]\n\n{(command.help or '').strip()}\n"
    return text + ("\n| | | default |\n|---|---|---|\n" + "".join(rows) if rows else "")


def _argument(parameter: Any, context: click.Context) -> str:
    name = str(parameter.metavar or parameter.name).upper()
    return name if parameter.required else f"[{name}]"


def _row(parameter: Any, context: click.Context) -> str:
    if parameter.param_type_name == "argument":
        names = _argument(parameter, context)
    else:
        names = ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))
        names += " (repeatable)" if parameter.multiple else ""
    default = "required" if parameter.required else _default(parameter)
    return f"| {names} | {(getattr(parameter, 'help', None) or '').replace('|', chr(92) + '|')} | {default} |\n"


def _default(parameter: Any) -> str:
    value = parameter.default
    if value in (None, (), [], "") or (isinstance(value, bool) and not value):
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)
