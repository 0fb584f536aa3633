"""Files generated from the API and the chart (`python charts/chart_tools.py`), and how to run Helm, in one place.

Helm is the library of helm-python-sdk where that is installed, else the `helm` binary.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from forebay_operator import cli_reference
from forebay_operator.api import crd
from forebay_operator.api.reference import render_reference

CHART = Path(__file__).parent / "forebay"
CRD_TEMPLATE = CHART / "templates" / "crd.yaml"
README = CHART / "README.md"
INSTALL = Path(__file__).parent / "install.yaml"
API_REFERENCE = Path(__file__).parents[1] / "docs" / "api.md"
CLI_REFERENCE = Path(__file__).parents[1] / "docs" / "cli.md"
NAMESPACE = "forebay-system"
HELM_SECONDS = 60


class HelmMissing(RuntimeError):
    """Neither the library nor the binary is there; the text says how to get one."""


class HelmRefused(ValueError):
    """Helm does not take the chart with these values; the text is Helm's."""


def _library() -> Any | None:
    try:
        import helm_python
    except ImportError:
        return None
    return helm_python


def helm_missing() -> str | None:
    """What to install, or None when Helm can be run."""
    if _library() is not None or shutil.which("helm"):
        return None
    return "needs Helm: `pip install helm-python-sdk` (Linux), or the `helm` binary on the PATH"


def _binary(arguments: list[str], values: Mapping[str, Any]) -> str:
    if problem := helm_missing():
        raise HelmMissing(problem)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(values, file)
        file.flush()
        command = ["helm", *arguments, str(CHART), "--values", file.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HELM_SECONDS, check=False)  # noqa: S603
    if done.returncode:
        raise HelmRefused(done.stderr)
    return done.stdout


def render(
    values: Mapping[str, Any] | None = None, *, name: str = "forebay", namespace: str = NAMESPACE
) -> list[dict[str, Any]]:
    """All objects of the chart.

    Raises HelmRefused (values that the schema refuses, a template that fails) and HelmMissing.
    """
    helm = _library()
    if helm is None:
        texts = [_binary(["template", name, "--namespace", namespace], values or {})]
    else:
        try:
            rendered = helm.Chart.load(str(CHART)).render(dict(values or {}), name=name, namespace=namespace)
        except helm.HelmError as error:
            raise HelmRefused(str(error)) from error
        texts = [text for path, text in sorted(rendered.items()) if path.endswith(".yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def lint(values: Mapping[str, Any] | None = None) -> list[str]:
    """Helm's findings that are more than information."""
    helm = _library()
    if helm is None:
        _binary(["lint", "--strict"], values or {})
        return []
    report = helm.lint(str(CHART), dict(values or {}), strict=True)
    return [str(found) for found in report.get("messages", []) if found.get("severity") in ("WARNING", "ERROR", 2, 3)]


def crd_template() -> str:
    """The CRD as a template: switched by values, and kept on uninstall."""
    text = crd.render()
    header, body = text.split("\n", 1)
    name = f"  name: {crd.NAME}\n"
    keep = (
        "  {{- if .Values.crds.keep }}\n"
        "  annotations:\n"
        "    helm.sh/resource-policy: keep\n"
        "  {{- end }}\n"
        "  labels:\n"
        '    {{- include "forebay.labels" . | nindent 4 }}\n'
    )
    if body.count(name) != 1 or "{{" in body:
        raise ValueError("the CRD holds template syntax, or its name more than once")
    return f"{header}\n{{{{- if .Values.crds.enabled }}}}\n{body.replace(name, name + keep)}{{{{- end }}}}\n"


def documented_values() -> Iterator[tuple[str, str, str]]:
    """(path, default as JSON, comment above it) of each value that has no values below it."""
    text = (CHART / "values.yaml").read_text()
    lines = text.splitlines()

    def comment(line: int) -> str:
        above: list[str] = []
        while line > 0 and lines[line - 1].lstrip().startswith("#"):
            line -= 1
            above.insert(0, lines[line].lstrip().removeprefix("#").strip())
        return " ".join(above)

    def walk(node: yaml.MappingNode, path: str, inherited: str) -> Iterator[tuple[str, str, str]]:
        for key, value in node.value:
            here = f"{path}.{key.value}" if path else key.value
            said = comment(key.start_mark.line) or inherited
            if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
                yield from walk(value, here, "")
            else:
                constructed = yaml.SafeLoader("").construct_object(value, deep=True)
                yield here, json.dumps(constructed), said

    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    yield from walk(root, "", "")


def readme() -> str:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    rows = "\n".join(f"| `{path}` | `{default}` | {said} |" for path, default, said in documented_values())
    return f"""<!-- Generated by `make generate` from Chart.yaml and values.yaml. Do not edit. -->
# {chart["name"]} {chart["version"]}

{chart["description"]}.

Needs Kubernetes {chart["kubeVersion"].removeprefix(">=").removesuffix("-0")} or later.

    helm install forebay charts/forebay --namespace {NAMESPACE} --create-namespace

The CustomResourceDefinition is part of the chart's templates: `helm upgrade` upgrades it, and uninstalling keeps it and
all models (`crds.keep`). To remove everything, delete the models first, then the release, then the CRD. Without Helm,
`kubectl apply --server-side -f charts/install.yaml` installs the same with default values.

## Values

| value | default | |
|---|---|---|
{rows}
"""


def install() -> str:
    """The chart with default values as plain objects, in the order in which they can be applied."""
    namespace = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
    }
    order = ["Namespace", "CustomResourceDefinition", "ServiceAccount", "ClusterRole", "Role"]
    objects = [namespace, *render()]
    objects.sort(key=lambda o: order.index(o["kind"]) if o["kind"] in order else len(order))
    for made in objects:
        made["metadata"].get("labels", {}).pop("helm.sh/chart", None)
        if made["metadata"].get("labels", {}).get("app.kubernetes.io/managed-by") == "Helm":
            made["metadata"]["labels"]["app.kubernetes.io/managed-by"] = "kubectl"
        # What only Helm reads.
        if made["metadata"].pop("annotations", None) not in (None, {"helm.sh/resource-policy": "keep"}):
            raise ValueError(f"{made['kind']} {made['metadata']['name']} has annotations that would be lost")
    header = "# Generated by `make generate` from charts/forebay with default values. Do not edit.\n"
    return header + yaml.safe_dump_all(objects, sort_keys=False, width=120, explicit_start=True)


def main() -> None:
    crds = Path(__file__).parents[1] / "crds"
    (crds / f"{crd.labels.GROUP}_{crd.PLURAL}.yaml").write_text(crd.render())
    API_REFERENCE.write_text(render_reference())
    CLI_REFERENCE.write_text(cli_reference.render())
    CRD_TEMPLATE.write_text(crd_template())
    README.write_text(readme())
    if problem := helm_missing():
        sys.stderr.write(f"{os.path.relpath(INSTALL)} is left as it is: it {problem}\n")
    else:
        INSTALL.write_text(install())


if __name__ == "__main__":
    main()
