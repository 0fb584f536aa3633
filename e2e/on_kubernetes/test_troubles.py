"""What a cluster lacks or refuses, in its own words: a condition names the object and the remedy, what runs goes on
serving, and the condition clears by itself.

One model for the whole file, one prefill and two decode workers; each case begins and ends with these.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pytest

from e2e.cluster.shell import CommandFailed
from e2e.on_kubernetes.conftest import KubernetesSite, site_of
from e2e.on_kubernetes.deployed import NAMESPACE, POOL_LABEL, Deployed
from e2e.on_kubernetes.scene import NAME as SERVED
from e2e.on_kubernetes.scene import Scene, model

NAME: Final = "troubled"
ABSENT: Final = "absent"
"""Name of what is not there."""

REFUSED: Final = "example.com/refused"
"""Annotation of pods that a policy refuses."""

TOLD_SECONDS: Final = 60.0
CURED_SECONDS: Final = 150.0
"""kubelets and controllers try again after a while that grows."""

pytestmark = pytest.mark.timeout(400)
Object = dict[str, Any]


def _named(api: str, kind: str, name: str, **fields: Any) -> Object:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name}, **fields}


def _owned(api: str, kind: str, name: str, **fields: Any) -> Object:
    made = _named(api, kind, name, **fields)
    made["metadata"]["namespace"] = NAMESPACE
    return made


SECRET: Final = _owned("v1", "Secret", ABSENT, stringData={"key": "value"})
VOLUME: Final = {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}
CLAIM: Final = (
    _named(
        "v1", "PersistentVolume", f"{NAMESPACE}-{ABSENT}",
        spec={**VOLUME, "capacity": {"storage": "1Mi"}, "hostPath": {"path": "/usr", "type": "Directory"},
              "persistentVolumeReclaimPolicy": "Retain", "claimRef": {"name": ABSENT, "namespace": NAMESPACE}},
    ),
    _owned(
        "v1", "PersistentVolumeClaim", ABSENT,
        spec={**VOLUME, "volumeName": f"{NAMESPACE}-{ABSENT}", "resources": {"requests": {"storage": "1Mi"}}},
    ),
)  # fmt: skip
QUOTA: Final = _owned("v1", "ResourceQuota", NAME, spec={"hard": {"pods": "1"}})
POLICY: Final = _named(
    "admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy", f"{NAMESPACE}-{NAME}",
    spec={
        "matchConstraints": {"resourceRules": [
            {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]},
        ]},
        "validations": [{
            "expression": f"!has(object.metadata.annotations) || !('{REFUSED}' in object.metadata.annotations)",
            "message": "no such pods here",
        }],
    },
)  # fmt: skip
BINDING: Final = _named(
    "admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding", f"{NAMESPACE}-{NAME}",
    spec={
        "policyName": f"{NAMESPACE}-{NAME}",
        "validationActions": ["Deny"],
        "matchResources": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}}},
    },
)  # fmt: skip


@dataclass(frozen=True)
class Trouble:
    change: Object
    """Merged into the decode pool's spec; its containers into the engine's."""

    reason: str
    words: tuple[str, ...]
    """Of the message: the object and the remedy among them."""

    condition: str = "Stalled"
    made: tuple[Object, ...] = ()
    """Before: what refuses pods. The cure is to take it away."""

    lacks: tuple[Object, ...] = ()
    """The cure is to make it. Without either the cure is the spec as it was."""

    decode: int = 2


def _template(**spec: Any) -> Object:
    return {"podTemplate": {"spec": spec}}


def _engine(**container: Any) -> Object:
    return _template(containers=[{"name": "engine", **container}])


TROUBLES: Final = {
    "unknown claim": Trouble(
        _template(volumes=[{"name": "data", "persistentVolumeClaim": {"claimName": ABSENT}}]),
        "MissingObject",
        (f"Pod {NAMESPACE}/{NAME}-decode-", f'persistentvolumeclaim "{ABSENT}" not found', "create it or correct"),
        lacks=CLAIM,
    ),
    "unknown Secret in a variable": Trouble(
        _engine(env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": ABSENT, "key": "key"}}}]),
        "MissingObject",
        (f"Pod {NAMESPACE}/{NAME}-decode-", f'secret "{ABSENT}" not found', "create it or correct its name"),
        lacks=(SECRET,),
    ),
    "unknown Secret in a volume": Trouble(
        _template(volumes=[{"name": "keys", "secret": {"secretName": ABSENT}}]),
        "MissingObject",
        (f"Secret {NAMESPACE}/{ABSENT}", "spec.decode.podTemplate names it", "create it or correct its name"),
        lacks=(SECRET,),
    ),
    "image": Trouble(
        _engine(image="registry.invalid/none:1"),
        "ImagePullFailed",
        (f"Pod {NAMESPACE}/{NAME}-decode-", "registry.invalid/none:1 can't be pulled", "imagePullSecret"),
    ),
    "quota": Trouble(
        {"replicas": 3},
        "QuotaExceeded",
        (f"Deployment {NAMESPACE}/{NAME}-decode-", f"exceeded quota: {NAME}", "raise the quota"),
        made=(QUOTA,),
        decode=3,
    ),
    "admission": Trouble(
        {"podTemplate": {"metadata": {"annotations": {REFUSED: "yes"}}}},
        "Rejected",
        (f"Deployment {NAMESPACE}/{NAME}-decode-", "no such pods here", "or the policy that refuses it"),
        made=(POLICY, BINDING),
    ),
    "too large for any node": Trouble(
        _engine(resources={"requests": {"cpu": "1000"}}),
        "BelowTarget",
        (f"Pod {NAMESPACE}/{NAME}-decode-", "Insufficient cpu", "add nodes, or ask for fewer"),
        condition="PoolsAvailable",
    ),
    "no such node": Trouble(
        {"nodeSelector": {POOL_LABEL: "nowhere"}},
        "NoMatchingNode",
        ("decode", f"{POOL_LABEL}=nowhere"),
        condition="PinningSatisfied",
    ),
}


def troubled(change: Object) -> Object:
    made = model(1, 2)
    decode: Object = copy.deepcopy(made["spec"]["decode"])
    template = change.get("podTemplate", {})
    spec = {**decode["podTemplate"]["spec"], **template.get("spec", {})}
    if containers := template.get("spec", {}).get("containers"):
        (engine,) = decode["podTemplate"]["spec"]["containers"]
        spec["containers"] = [{**engine, **containers[0]}]
    made["spec"]["decode"] = {**decode, **change, "podTemplate": {**template, "spec": spec}}
    return made


@pytest.fixture(scope="module")
def cleared(deployed: Deployed) -> Iterator[None]:
    """Before too: what a run that was killed left on a kept cluster."""
    _clear(deployed)
    yield
    _clear(deployed)


def _clear(deployed: Deployed) -> None:
    deployed.kubectl("-n", NAMESPACE, "delete", "dm", NAME, "--ignore-not-found", seconds=120)
    for obj in (BINDING, POLICY, QUOTA, SECRET, *reversed(CLAIM)):
        _delete(deployed, obj)


def _delete(deployed: Deployed, obj: Object) -> None:
    words = ("delete", obj["kind"], obj["metadata"]["name"], "--ignore-not-found")
    deployed.kubectl("-n", obj["metadata"].get("namespace", "default"), *words, seconds=60)


@pytest.fixture
async def site(deployed: Deployed, cleared: None) -> AsyncIterator[KubernetesSite]:
    async for made in site_of(deployed, NAME):
        yield made


@pytest.mark.parametrize("name", TROUBLES)
async def test_a_trouble_is_told_and_clears(deployed: Deployed, site: KubernetesSite, name: str) -> None:
    trouble, scene = TROUBLES[name], Scene(deployed, site)
    await scene.serve(1, 2)
    before = {pod["metadata"]["uid"] for pod in await site.pods()}
    for obj in trouble.made:
        await asyncio.to_thread(deployed.apply, obj)
    if BINDING in trouble.made:
        await site.until("the policy is in force", lambda: _refused(deployed))
    await site.apply(troubled(trouble.change))

    async def told() -> bool:
        reason, message = await _condition(site, trouble.condition)
        return reason == trouble.reason and all(words in message for words in trouble.words)

    took = await site.until(f"{trouble.condition} with {trouble.reason} and {trouble.words}", told, TOLD_SECONDS)
    answer = await site.ask({"model": SERVED, "prompt": "still there?", "max_tokens": 4})
    assert (answer["status"], answer["error"]) == (200, None), answer
    assert (await _condition(site, "Ready"))[0] in ("Serving", "ServingDegraded")
    left = {pod["metadata"]["uid"] for pod in await site.pods() if not pod["metadata"].get("deletionTimestamp")}
    assert len(before & left) >= 2, "no more of what runs is taken than a rollout may"

    for obj in reversed(trouble.made):
        await asyncio.to_thread(_delete, deployed, obj)
    for obj in trouble.lacks:
        await asyncio.to_thread(deployed.apply, obj)
    decode = trouble.decode
    if not trouble.made and not trouble.lacks:
        await site.apply(model(1, 2))
    cured = await scene.serves(1, decode, CURED_SECONDS)
    print(f"\n{name}: told after {took:.1f} s, well {cured:.1f} s after the cure")

    async def clear() -> bool:
        conditions = {c["type"]: c["status"] for c in (await site.model())["status"]["conditions"]}
        return (conditions["Stalled"], conditions["PoolsAvailable"], conditions["PinningSatisfied"]) == (
            *("False", "True", "True"),
        )

    await site.until("no trouble is told any more", clear, TOLD_SECONDS)
    if trouble.lacks:
        # Absent again for the next one, once nobody needs it.
        await scene.serve(1, 2)
        for obj in reversed(trouble.lacks):
            await asyncio.to_thread(_delete, deployed, obj)


async def _condition(site: KubernetesSite, kind: str) -> tuple[str, str]:
    """Its reason and message, once the status is of the newest spec."""
    held = await site.model()
    if held["status"].get("observedGeneration") != held["metadata"]["generation"]:
        return "", ""
    found: Object = next((c for c in held["status"].get("conditions", []) if c["type"] == kind), {})
    return found.get("reason", ""), found.get("message", "")


async def _refused(deployed: Deployed) -> bool:
    """A pod that the policy is about is refused: it comes into force a moment after it was made."""
    restricted = {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    pod = _owned(
        "v1", "Pod", "refused", spec={"containers": [{"name": "a", "image": "a", "securityContext": restricted}]}
    )
    pod["metadata"]["annotations"] = {REFUSED: "yes"}
    try:
        await asyncio.to_thread(
            lambda: deployed.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
        )
    except CommandFailed as error:
        return "no such pods here" in str(error)
    return False
