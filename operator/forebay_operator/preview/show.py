"""A preview for people and for machines. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from forebay_operator.preview.changes import Action, ObjectChange
from forebay_operator.preview.forecast import Fate, PodForecast
from forebay_operator.preview.preview import Preview

_SIGNS = {Action.CREATE: "+", Action.CHANGE: "~", Action.DELETE: "-", Action.REFUSED: "!", Action.KEEP: " "}
_POD_SIGNS = {Fate.ADDED: "+", Fate.DRAINED: "-", Fate.LEAVING: "-", Fate.KEPT: " "}
_NODES_SHOWN = 3


def as_text(shown: Preview) -> str:
    lines: list[str] = []
    for change in (shown.model, *shown.objects):
        if change.action is not Action.KEEP:
            lines += _object(change)
    kept = sum(change.action is Action.KEEP for change in shown.objects)
    if kept:
        lines.append(f"  {kept} objects stay as they are")
    lines += ["", *_pods(shown)]
    if shown.forecast.steps:
        lines += ["", "In this order:", *(f"  {n}. {step}" for n, step in enumerate(shown.forecast.steps, 1))]
    if shown.forecast.waiting:
        lines += ["", f"Then it would wait {shown.forecast.waiting}"]
    for title, texts in (("Problems there are now:", shown.problems), ("Notes:", shown.notes)):
        if texts:
            lines += ["", title, *(f"  {text}" for text in texts)]
    return "\n".join([*lines, "", summary(shown)])


def summary(shown: Preview) -> str:
    if not shown.changes:
        return f"{shown.namespace}/{shown.name}: nothing to do"
    objects = Counter(change.action for change in (shown.model, *shown.objects))
    pods = Counter(pod.fate for pod in shown.forecast.pods)
    switched = sum(pod.fate is Fate.KEPT and pod.role != pod.becomes for pod in shown.forecast.pods)
    gone = pods[Fate.DRAINED] + pods[Fate.LEAVING]
    text = (
        f"{shown.namespace}/{shown.name}: objects: {objects[Action.CREATE]} to create, {objects[Action.CHANGE]} to "
        f"change, {objects[Action.DELETE]} to delete; pods: {pods[Fate.KEPT]} kept ({switched} in another role), "
        f"{pods[Fate.ADDED]} added, {gone} drained"
    )
    return text + (f"; {objects[Action.REFUSED]} REFUSED" if shown.refused else "")


def _object(change: ObjectChange) -> list[str]:
    note = f": {change.note}" if change.note else ""
    head = f"{_SIGNS[change.action]} {change.action} {change.kind} {change.name}{note}"
    return [head, *(f"    {field}" for field in change.fields)]


def _pods(shown: Preview) -> list[str]:
    rows = [("", "POD", "POOL", "ROLE", "NODE", "")]
    for pod in shown.forecast.pods:
        rows.append(
            (
                _POD_SIGNS[pod.fate],
                pod.name or f"(new, {pod.deployment})",
                pod.pool,
                _role(pod),
                _where(shown, pod),
                f"{pod.fate}{f' ({pod.why})' if pod.why else ''}",
            )
        )
    if len(rows) == 1:
        return ["no worker pods"]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _role(pod: PodForecast) -> str:
    if pod.becomes is None or pod.role == pod.becomes:
        return pod.role or "-"
    return f"{pod.role or '-'} -> {pod.becomes}" if pod.name else pod.becomes


def _where(shown: Preview, pod: PodForecast) -> str:
    if pod.fate is not Fate.ADDED:
        return pod.node or "(none yet)"
    places = shown.places[pod.pool]
    if places is None:
        return "(nodes not readable)"
    return _listed(places) if places else "(no node matches)"


def _listed(names: Sequence[str]) -> str:
    more = f" or {len(names) - _NODES_SHOWN} more" if len(names) > _NODES_SHOWN else ""
    return "one of " + ", ".join(names[:_NODES_SHOWN]) + more if len(names) > 1 else names[0]


def as_json(shown: Preview) -> dict[str, Any]:
    return {
        "namespace": shown.namespace,
        "name": shown.name,
        "changes": shown.changes,
        "refused": shown.refused,
        "objects": [
            {
                "action": change.action.value,
                "kind": change.kind,
                "name": change.name,
                "fields": list(change.fields),
                "note": change.note,
            }
            for change in (shown.model, *shown.objects)
        ],
        "pods": [
            {
                "name": pod.name or None,
                "deployment": pod.deployment,
                "pool": pod.pool,
                "fate": pod.fate.value,
                "node": pod.node,
                "nodes": None
                if pod.fate is not Fate.ADDED or (places := shown.places[pod.pool]) is None
                else list(places),
                "role": pod.role,
                "becomes": pod.becomes,
                "why": pod.why,
            }
            for pod in shown.forecast.pods
        ],
        "replicas": dict(shown.forecast.replicas),
        "steps": list(shown.forecast.steps),
        "waiting": shown.forecast.waiting,
        "problems": list(shown.problems),
        "notes": list(shown.notes),
        "summary": summary(shown),
    }
