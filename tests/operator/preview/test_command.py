"""`forebay plan` against the fake API server: what it says, what it exits with, and that it changes nothing."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from forebay_operator.cli import app
from support.fake_cluster import FakeCluster, simulated_model
from support.fake_kube import Call, FakeApi, Object, Refused, clone, eventually
from support.operator_bench import operator

OPERATOR: Object = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {
        "name": "forebay",
        "namespace": "forebay",
        "labels": {"app.kubernetes.io/name": "forebay-operator"},
    },
    "spec": {
        "replicas": 2,
        "template": {"spec": {"containers": [{"name": "operator", "args": ["--operator-namespace=$(POD_NAMESPACE)"]}]}},
    },
}


@dataclass
class Site:
    api: FakeApi
    cluster: FakeCluster
    folder: Path

    async def plan(self, model: Object, *arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        file, config = self.folder / "model.yaml", self.folder / "kubeconfig"
        file.write_text(yaml.safe_dump(model))
        config.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "llm"}}],
            "clusters": [{"name": "c", "cluster": {"server": self.api.url}}],
            "users": [{"name": "u", "user": {"token": "none"}}],
        }))  # fmt: skip
        words = ["plan", "-f", str(file), "--kubeconfig", str(config), *arguments]
        result = await asyncio.to_thread(CliRunner().invoke, app, words)
        return result.exit_code, result.stdout, result.stderr

    async def planned(self, model: Object, *arguments: str) -> tuple[int, dict[str, Any]]:
        code, out, err = await self.plan(model, "-o", "json", *arguments)
        assert out, err
        return code, json.loads(out)

    async def serve(self, model: Object) -> None:
        """Let an operator bring it about, and go."""
        self.api.on_write = self.cluster.control
        async with operator(self.api, self.cluster):
            self.api.put(model)
            counts = {pool: model["spec"][pool]["replicas"] for pool in ("prefill", "decode")}
            await eventually(lambda: self.cluster.roles() == counts, "roles")
            await eventually(self._settled, "a settled status")
        self.api.on_write = None

    def _settled(self) -> bool:
        held = self.api.find("disaggregatedmodels", "assistant") or {}
        status = held.get("status", {})
        conditions = {c["type"]: c["status"] for c in status.get("conditions", [])}
        return conditions.get("PoolsAvailable") == "True" and conditions.get("Reconciling") == "False"


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with FakeApi().serving() as api:
        api.missing.add("podmonitors")
        yield Site(api, FakeCluster(api), tmp_path)


def by_action(made: dict[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for change in made["objects"]:
        found.setdefault(change["action"], []).append(change["kind"])
    return found


async def test_a_first_apply(site: Site) -> None:
    site.api.put(OPERATOR)
    code, made = await site.planned(simulated_model(1, 2))
    assert code == 2
    assert by_action(made)["create"].count("Deployment") == 3
    assert by_action(made).keys() == {"create"}
    assert [(p["pool"], p["fate"], p["becomes"]) for p in made["pods"]] == [
        ("prefill", "Added", "prefill"),
        ("decode", "Added", "decode"),
        ("decode", "Added", "decode"),
    ]
    assert made["notes"] == []
    assert [key[2] for key in site.api.objects] == ["forebay"], "the operator's own"
    assert all(call.query.get("dryRun") == "All" for call in site.api.writes())


async def test_what_an_operator_has_made_is_nothing_to_do(site: Site) -> None:
    await site.serve(simulated_model(1, 2))
    site.api.put(OPERATOR)
    before = site.api.snapshot()
    code, made = await site.planned(simulated_model(1, 2))
    assert (code, made["changes"]) == (0, False), made
    assert by_action(made).keys() == {"keep"}
    assert {p["fate"] for p in made["pods"]} == {"Kept"}
    code, out, _ = await site.plan(simulated_model(1, 2))
    assert code == 0
    assert out.strip().endswith("llm/assistant: nothing to do")
    assert site.api.snapshot() == before


async def test_a_scale_in_names_pod_and_node(site: Site) -> None:
    await site.serve(simulated_model(1, 3))
    site.api.put(OPERATOR)
    code, made = await site.planned(simulated_model(1, 2))
    assert code == 2
    (drained,) = [p for p in made["pods"] if p["fate"] == "Drained"]
    assert drained["name"] in {p["metadata"]["name"] for p in site.cluster.workers("decode")}
    assert drained["node"] in ("node1", "node2")
    changed = {c["name"]: c["fields"] for c in made["objects"] if c["action"] == "change"}
    assert changed["assistant"] == ["spec.decode.replicas: 3 -> 2"]
    (name,) = [name for name in changed if name.startswith("assistant-decode")]
    assert changed[name] == ["spec.replicas: 3 -> 2"]
    assert "routers' load could not be read" in " ".join(made["notes"]), "no proxy on this server"
    code, out, _ = await site.plan(simulated_model(1, 2))
    assert f"1. drain {drained['name']}" in out
    assert drained["node"] in out


async def test_a_rollout_is_told_in_order(site: Site) -> None:
    await site.serve(simulated_model(1, 1))
    image = {"type": "Simulated", "image": "e:2", "kvCache": {"memory": "1Gi"}}
    code, made = await site.planned(simulated_model(1, 1, engine=image))
    assert code == 2
    assert [p["fate"] for p in made["pods"]].count("Drained") == 2
    assert [p["fate"] for p in made["pods"]].count("Added") == 2
    assert by_action(made)["delete"] == ["Deployment", "Deployment"]
    assert made["steps"][0].startswith("drain")
    assert "(Rollout)" in made["steps"][0]


async def test_the_operators_own_settings_count(site: Site) -> None:
    """Its default image is part of the template: a plan with another one would tell of a rollout that never comes."""
    operator_with_image = clone(OPERATOR)
    operator_with_image["spec"]["template"]["spec"]["containers"][0]["args"] += ["--engine-image=mirror/engine:1"]
    site.api.put(operator_with_image)
    _, made = await site.planned(simulated_model(1, 1))
    created = {c["name"]: c["fields"] for c in made["objects"] if c["kind"] == "Deployment"}
    assert [f for name, f in created.items() if "decode" in name] == [["1 x mirror/engine:1"]]
    _, made = await site.planned(simulated_model(1, 1), "--engine-image", "other:2")
    assert ["1 x other:2"] in [c["fields"] for c in made["objects"]]


async def test_what_would_be_refused_is_an_error(site: Site) -> None:
    theirs: Object = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "assistant-router", "namespace": "llm"},
        "spec": {"selector": {"app": "theirs"}},
    }
    site.api.put(theirs)
    code, made = await site.planned(simulated_model(1, 1))
    assert code == 1
    (refused,) = [c for c in made["objects"] if c["action"] == "refused"]
    assert (refused["kind"], refused["name"]) == ("Service", "assistant-router")
    assert "rename the model" in refused["note"]


def _refuse(plural: str, status: int, message: str) -> Callable[[Call], None]:
    def before(call: Call) -> None:
        if call.plural == plural and call.write:
            raise Refused(status, "Refused", message)

    return before


async def test_a_webhook_that_would_refuse_pods_speaks_before(site: Site) -> None:
    site.api.before = _refuse("deployments", 403, 'admission webhook "policy" denied the request: no root')
    code, made = await site.planned(simulated_model(1, 1))
    assert code == 1
    notes = {c["note"] for c in made["objects"] if c["action"] == "refused"}
    assert notes == {'admission webhook "policy" denied the request: no root'}


async def test_a_reader_gets_a_plan_too(site: Site) -> None:
    await site.serve(simulated_model(1, 2))
    site.api.put(OPERATOR)

    def before(call: Call) -> None:
        if call.write:
            raise Refused(403, "Forbidden", f'{call.plural} "x" is forbidden: User "u" cannot patch resource')

    site.api.before = before
    code, made = await site.planned(simulated_model(1, 2))
    assert code == 0, made
    assert any("without a dry run" in note for note in made["notes"])
    code, made = await site.planned(simulated_model(1, 1))
    assert code == 2
    assert [p["fate"] for p in made["pods"]].count("Drained") == 1


async def test_who_may_not_see_all_children_gets_a_plan_of_the_others(site: Site) -> None:
    """Kubernetes' role `view` has no Roles, and no kind that a CustomResourceDefinition brings."""
    await site.serve(simulated_model(1, 2))
    site.api.put(OPERATOR)
    site.api.missing.discard("podmonitors")

    def before(call: Call) -> None:
        if call.plural in ("roles", "rolebindings", "podmonitors", "secrets"):
            raise Refused(403, "Forbidden", f'{call.plural} is forbidden: User "u" cannot list resource')

    site.api.before = before
    code, made = await site.planned(simulated_model(1, 1))
    assert code == 2
    assert [p["fate"] for p in made["pods"]].count("Drained") == 1
    said = " ".join(made["notes"])
    for kind in ("Role may not be read", "RoleBinding may not be read", "PodMonitor may not be listed"):
        assert kind in said
    assert {c["kind"] for c in made["objects"] if c["action"] == "change"} == {"DisaggregatedModel", "Deployment"}


async def test_a_field_that_the_file_has_no_more(site: Site) -> None:
    """Gone when the file set it before; kept when somebody else did."""
    key = "kubectl.kubernetes.io/last-applied-configuration"
    first = simulated_model(1, 2, drain={"timeoutSeconds": 30})
    live = copy.deepcopy(first)
    live["metadata"]["annotations"] = {key: json.dumps(first)}
    live["spec"]["replicas"] = 3
    site.api.put(live)
    _, made = await site.planned(simulated_model(1, 2))
    assert made["objects"][0]["fields"] == ['spec.drain: {"timeoutSeconds": 30} -> (none)'] or made["objects"][0][
        "fields"
    ] == ["spec.drain.timeoutSeconds: 30 -> (none)"]


@pytest.mark.parametrize(
    ("arguments", "model", "words"),
    [
        ((), simulated_model(0, 1), "at least 1"),
        (("-n", "other"), simulated_model(1, 1), "--namespace is other and metadata.namespace is llm"),
        (("--context", "nowhere"), simulated_model(1, 1), "nowhere"),
        (("-o", "xml"), simulated_model(1, 1), "xml"),
        (("--colour",), simulated_model(1, 1), "--colour"),
    ],
    ids=["spec", "namespace", "context", "output", "option"],
)
async def test_bad_input_is_1_and_not_2(site: Site, arguments: tuple[str, ...], model: Object, words: str) -> None:
    code, _, err = await site.plan(model, *arguments)
    assert code == 1
    assert words in err


async def test_no_such_kind(site: Site) -> None:
    site.api.missing.add("disaggregatedmodels")
    code, _, err = await site.plan(simulated_model(1, 1))
    assert code == 1
    assert "install Forebay first" in err


async def test_the_namespace_of_the_context(site: Site) -> None:
    model = simulated_model(1, 1)
    del model["metadata"]["namespace"]
    _, made = await site.planned(model)
    assert made["namespace"] == "llm"
    assert any("no operator" in note for note in made["notes"])
