"""What the documentation points at is there: files, anchors, make targets, benches, commands."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from forebay_operator.cli import app

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("charts/**/*.md"), *ROOT.glob("examples/**/*.md")],
)
FENCED = re.compile(r"^```.*?^```", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
COMMANDS: Any = typer.main.get_command(app)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ +(.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_exist(page: Path) -> None:
    text = page.read_text()
    assert set(re.findall(r"(?:`|^ {4})make ([a-z0-9-]+)", text, re.M)) <= TARGETS
    for module in set(re.findall(r"python -m (bench\.[a-z_]+)", text)):
        assert importlib.util.find_spec(module), module
    commands = set(re.findall(r"(?:`|^ {4})(?:\.venv/bin/)?forebay ([a-z]+)", text, re.M))
    assert commands <= set(COMMANDS.commands)
    for file in set(re.findall(r"(?:examples|charts|crds)/[\w./-]+\.yaml", text)):
        assert (ROOT / file).exists() or (page.parent / file).exists(), file


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/*.md")), ids=name)
def test_every_page_is_reached_from_the_readme(path: Path) -> None:
    assert name(path) in (ROOT / "README.md").read_text()


def test_every_bench_is_described() -> None:
    text = (ROOT / "docs" / "benches.md").read_text()
    benches = {path.stem for path in (ROOT / "bench").glob("*.py") if "__main__" in path.read_text()}
    assert {bench for bench in benches if f"`bench.{bench}`" not in text} == set()
