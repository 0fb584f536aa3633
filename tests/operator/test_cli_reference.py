"""docs/cli.md is what the command says of itself, and every command and option says something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from forebay_operator.cli import app
from forebay_operator.cli_reference import render

DOCS = Path(__file__).parents[2] / "docs"
GROUP: Any = typer.main.get_command(app)


def test_the_reference_is_up_to_date() -> None:
    assert (DOCS / "cli.md").read_text() == render(), "run `make generate`"


@pytest.mark.parametrize("name", GROUP.commands)
def test_every_option_has_a_help(name: str) -> None:
    command = GROUP.commands[name]
    assert command.help
    assert [p.name for p in command.params if not getattr(p, "help", None)] == []


@pytest.mark.parametrize("name", GROUP.commands)
def test_a_wrong_option_is_no_traceback(name: str) -> None:
    done = CliRunner().invoke(app, [name, "--no-such-option"])
    assert done.exit_code == (1 if name == "plan" else 2)
    assert "--no-such-option" in done.output


def test_a_kubeconfig_that_is_not_there_is_named_with_its_remedy(tmp_path: Path) -> None:
    file = DOCS.parent / "examples" / "simulated-8-workers.yaml"
    done = CliRunner().invoke(app, ["plan", "-f", str(file), "--kubeconfig", str(tmp_path / "none")])
    assert done.exit_code == 1
    assert done.stderr == f"error: --kubeconfig {tmp_path / 'none'} is no file; name one that kubectl can use\n"
    (tmp_path / "empty").write_text("{}")
    done = CliRunner().invoke(app, ["plan", "-f", str(file), "--kubeconfig", str(tmp_path / "empty")])
    assert done.exit_code == 1
    assert done.stderr.startswith("error: no cluster to ask: ")
    assert done.stderr.endswith("set KUBECONFIG, or name one with --kubeconfig (and --context)\n")
