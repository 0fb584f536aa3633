"""The Dockerfiles, read: what an image is built from, as whom it runs, and that builders' commands are in it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from forebay_operator.build.router import router_template
from forebay_operator.build.worker import worker_template
from support.manifests import make_model

ROOT = Path(__file__).parents[3]
IMAGES = ["engine", "operator", "router"]
FILES = {**{image: f"{image}/Dockerfile" for image in IMAGES}, "simulated": "engine/Dockerfile.simulated"}


def instructions(image: str) -> list[tuple[str, str]]:
    text = (ROOT / "images" / FILES[image]).read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    return [(name, " ".join(rest.split())) for name, _, rest in (line.partition(" ") for line in lines)]


@pytest.mark.parametrize("image", FILES)
def test_bases_are_pinned_and_replaceable(image: str) -> None:
    found = instructions(image)
    (base,) = [value for name, value in found if name == "ARG" and value.startswith("PYTHON_IMAGE=")]
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.11\.\d+-slim-[a-z]+", base)
    for name, value in found:
        if name == "FROM":
            assert value.split()[0] in ("${PYTHON_IMAGE}", "runtime-${VARIANT}")
        assert name != "ADD"
    installs = [value for name, value in found if name == "RUN" and " install " in value and "pip" in value]
    assert installs
    assert all("-c constraints.txt" in value for value in installs)


@pytest.mark.parametrize("image", FILES)
def test_they_run_as_a_user_with_a_number_that_is_not_root(image: str) -> None:
    found = instructions(image)
    last_stage = found[max(i for i, (name, _) in enumerate(found) if name == "FROM") :]
    users = [value for name, value in last_stage if name == "USER"]
    assert users == ["65532:65532"]
    assert last_stage[-1][0] == "CMD"


@pytest.mark.parametrize("image", FILES)
def test_what_they_copy_is_there_and_in_the_build_context(image: str) -> None:
    allowed = {
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    for name, value in instructions(image):
        if name == "COPY" and not value.startswith("--from"):
            for source in value.split()[:-1]:
                assert (ROOT / source).exists()
                assert source in allowed


def test_extras_and_commands_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for image in IMAGES:
        text = (ROOT / "images" / image / "Dockerfile").read_text()
        (extra,) = re.findall(r'"\.\[([a-z]+)\]"', text)
        assert extra == image
        assert extra in project["optional-dependencies"]
        (command,) = re.findall(r'CMD \["([a-z-]+)"\]', text)
        assert command == f"forebay-{image}"
        assert command in project["scripts"]


def test_pods_run_the_commands_of_their_images() -> None:
    model = make_model()
    for template, command in (
        (worker_template(model, "decode"), "forebay-engine"),
        (router_template(model), "forebay-router"),
    ):
        assert template["spec"]["containers"][0]["command"] == [command]  # fmt: skip


def test_the_engine_has_a_cpu_variant() -> None:
    stages = {value.split(" AS ")[1] for name, value in instructions("engine") if name == "FROM" and " AS " in value}
    assert {"runtime-cuda", "runtime-cpu"} <= stages
