"""Files for Argo CD and Flux: the health script run in Lua, and examples that are what they say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lupa
import pytest
import yaml

from forebay_operator.api.crd import custom_resource_definition
from support.admission import admit

EXAMPLES = Path(__file__).parents[3] / "examples"
SCRIPT = (EXAMPLES / "argocd" / "health.lua").read_text()
KEY = "resource.customizations.health.serving.forebay.dev_DisaggregatedModel"


def health(obj: dict[str, Any]) -> tuple[str, str]:
    lua = lupa.LuaRuntime(unpack_returned_tuples=True)
    lua.globals().obj = lua.table_from(obj, recursive=True)
    verdict = lua.execute(SCRIPT)
    return verdict["status"], verdict["message"]


def model(generation: int = 2, observed: int | None = 2, **conditions: str) -> dict[str, Any]:
    made: dict[str, Any] = {"metadata": {"generation": generation}}
    if observed is not None:
        made["status"] = {
            "observedGeneration": observed,
            "conditions": [{"type": t, "status": s, "message": f"{t} is {s}"} for t, s in conditions.items()],
        }
    return made


@pytest.mark.parametrize(
    ("obj", "status", "message"),
    [
        (model(observed=None), "Progressing", "Waiting for the operator"),
        (model(observed=-1), "Progressing", "Waiting for the operator"),
        (model(observed=1, Ready="True"), "Progressing", "Waiting for the operator"),
        (model(), "Progressing", "Waiting for the operator"),
        (model(Ready="False"), "Progressing", "Ready is False"),
        (model(Ready="True"), "Healthy", "Ready is True"),
        (model(Ready="True", Stalled="False", Reconciling="False", Paused="False"), "Healthy", "Ready is True"),
        (model(Ready="True", Reconciling="True"), "Progressing", "Reconciling is True"),
        (model(Ready="True", Stalled="True", Reconciling="True"), "Degraded", "Stalled is True"),
        (model(Ready="False", Stalled="True"), "Degraded", "Stalled is True"),
        (model(Ready="True", Paused="True"), "Suspended", "Paused is True"),
        (model(Ready="False", Paused="True"), "Progressing", "Ready is False"),
        ({"metadata": {"generation": 2, "deletionTimestamp": "t"}}, "Progressing", "Being deleted"),
    ],
)
def test_what_argo_cd_shows(obj: dict[str, Any], status: str, message: str) -> None:
    assert health(obj) == (status, message)


def test_the_config_map_carries_the_script() -> None:
    config = yaml.safe_load((EXAMPLES / "argocd" / "argocd-cm.yaml").read_text())
    assert config["data"] == {KEY: SCRIPT}


def documents() -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(EXAMPLES.rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            yield path, document


def test_models_of_all_examples_are_admitted() -> None:
    crd = custom_resource_definition()
    seen = set()
    for path, document in documents():
        if document["kind"] == "DisaggregatedModel":
            _, faults = admit(document, crd)
            assert faults == [], path
            seen.add(path.relative_to(EXAMPLES).parts[0])
    assert {"argocd", "flux"} <= seen


def test_models_in_git_hold_bounds_and_no_live_counts() -> None:
    """A count that scaling changes would show as drift."""
    for tool in ("argocd", "flux"):
        spec = yaml.safe_load((EXAMPLES / tool / "app" / "assistant.yaml").read_text())["spec"]
        assert "replicas" not in {**spec, **spec["prefill"], **spec["decode"]}
        assert spec["scaling"]["prefill"]["maxReplicas"] > spec["scaling"]["prefill"]["minReplicas"]
        files = yaml.safe_load((EXAMPLES / tool / "app" / "kustomization.yaml").read_text())["resources"]
        assert all((EXAMPLES / tool / "app" / name).exists() for name in files)


def test_the_flux_release_points_at_the_chart_with_values_it_takes() -> None:
    import chart_tools

    if problem := chart_tools.helm_missing():
        pytest.skip(problem)
    (release,) = [d for _, d in documents() if d["kind"] == "HelmRelease"]
    assert (EXAMPLES.parent / release["spec"]["chart"]["spec"]["chart"] / "Chart.yaml").exists()
    assert chart_tools.render(release["spec"]["values"])
