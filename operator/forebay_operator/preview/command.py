"""`forebay plan`. Exit codes: 0 nothing to do, 2 changes, 1 an error, or a change that would be refused."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from forebay_operator.api.load import SpecError, load_manifest
from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.build.surroundings import Surroundings
from forebay_operator.kube import ApiError, KubeClient, NotFound
from forebay_operator.local.errors import LocalError
from forebay_operator.observe.discovery import find_operators, has_pod_monitors, served_namespaces, surroundings_of
from forebay_operator.observe.gather import Nodes
from forebay_operator.preview.preview import Preview, preview
from forebay_operator.preview.routers import ProxiedRouters
from forebay_operator.preview.show import as_json, as_text

NOTHING: Final = 0
FAILED: Final = 1
CHANGES: Final = 2
SECONDS: Final = 60.0
"""For the whole of it."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    file: str
    """`-` is the standard input."""

    kubeconfig: str | None = None
    context: str | None = None
    namespace: str | None = None
    engine_image: str | None = None
    """As the operator's argument; None: as the operator in the cluster has it."""

    router_image: str | None = None


def plan(options: PlanOptions, output: str) -> tuple[str, int]:
    """What to print, and the exit code. Raises LocalError."""
    model = _read(options.file)
    if options.kubeconfig is not None and not Path(options.kubeconfig).is_file():
        raise LocalError(f"--kubeconfig {options.kubeconfig} is no file; name one that kubectl can use")
    try:
        shown = asyncio.run(asyncio.wait_for(_preview(options, model), SECONDS))
    except SpecError as error:
        raise LocalError(str(error)) from None
    except ApiError as error:
        raise LocalError(_explained(error)) from None
    except TimeoutError:
        raise LocalError(f"the API server did not answer it all within {SECONDS:.0f} s; nothing was changed") from None
    text = json.dumps(as_json(shown)) if output == "json" else as_text(shown)
    return text, FAILED if shown.refused else CHANGES if shown.changes else NOTHING


def _read(file: str) -> DisaggregatedModel:
    source = "standard input" if file == "-" else file
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        return load_manifest(text, source).model
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise LocalError(f"cannot read {source}: {reason}") from None
    except SpecError as error:
        raise LocalError(str(error)) from None


def _explained(error: ApiError) -> str:
    if isinstance(error, NotFound) and "DisaggregatedModel" in error.doing and "namespaces" not in error.message:
        return f"{error}: the cluster has no kind DisaggregatedModel; install Forebay first (docs/kubernetes.md)"
    if error.reason == "NoConfig":
        return f"no cluster to ask: {error.message}, or name one with --kubeconfig (and --context)"
    if error.status == 0:
        return f"{error}: is the cluster of this kubeconfig up? Name another with --kubeconfig or --context"
    return str(error)


async def _preview(options: PlanOptions, model: DisaggregatedModel) -> Preview:
    kube = await KubeClient.connect(kubeconfig=options.kubeconfig, context=options.context)
    try:
        namespace = _namespace(options, model)
        surroundings, notes = await _surroundings(kube, namespace, options)
        written: dict[str, Any] = model.model_dump(mode="json", by_alias=True, exclude_unset=True)
        written["metadata"]["namespace"] = namespace
        workers = ProxiedRouters(kube, namespace, model.metadata.name)
        shown = await preview(kube, written, workers, Nodes(kube, time.monotonic), surroundings, datetime.now(UTC))
        return replace(shown, notes=(*notes, *shown.notes))
    finally:
        await kube.close()


def _namespace(options: PlanOptions, model: DisaggregatedModel) -> str:
    """As kubectl chooses it: the option and the file must agree; without either, that of the context."""
    in_file = model.metadata.namespace if "namespace" in model.metadata.model_fields_set else None
    if options.namespace is not None:
        if in_file not in (None, options.namespace):
            raise LocalError(
                f"--namespace is {options.namespace} and metadata.namespace is {in_file}; leave one of them out"
            )
        return options.namespace
    return in_file or _namespace_of_context(options) or model.metadata.namespace


def _namespace_of_context(options: PlanOptions) -> str | None:
    from kubernetes.aio import config

    try:
        contexts, current = config.list_kube_config_contexts(options.kubeconfig)
    except (config.ConfigException, OSError):
        return None
    chosen = next((c for c in contexts if c["name"] == options.context), None) if options.context else current
    namespace = ((chosen or {}).get("context") or {}).get("namespace")
    return str(namespace) if namespace else None


async def _surroundings(kube: KubeClient, namespace: str, options: PlanOptions) -> tuple[Surroundings, list[str]]:
    """What the operator of this cluster builds with: a pod template's revision depends on it."""
    notes: list[str] = []
    found = await find_operators(kube)
    serving = [o for o in found or [] if not (only := served_namespaces(o)) or namespace in only]
    if found is None:
        notes.append("Deployments of other namespaces may not be listed, so the operator's own settings are not known; "
                     "give --engine-image and --router-image where it has them")  # fmt: skip
    elif not serving:
        notes.append(f"no operator that serves namespace {namespace} was found: nobody would carry this out")
    made = surroundings_of(serving[0] if serving else None, pod_monitors=await has_pod_monitors(kube, [namespace]))
    if options.engine_image is not None:
        made = replace(made, engine_image=options.engine_image)
    if options.router_image is not None:
        made = replace(made, router_image=options.router_image)
    return made, notes
