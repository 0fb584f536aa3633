"""A real API server for a test module, with the CRD installed, spoken to by plain HTTP."""

from __future__ import annotations

import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from e2e.cluster.control_plane import ControlPlane, NotBuilt, control_plane

from forebay_operator.api.crd import custom_resource_definition

MODELS = "/apis/serving.forebay.dev/v1alpha1/namespaces/llm/disaggregatedmodels"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
ESTABLISHED_SECONDS = 30.0

Object = dict[str, Any]


@dataclass
class Server:
    plane: ControlPlane

    def request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        content_type: str = "application/json",
        accept: str = "application/json",
        **query: str,
    ) -> tuple[int, Object]:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        headers = {"Authorization": f"Bearer {self.plane.token}", "Content-Type": content_type, "Accept": accept}
        url = f"{self.plane.url}{path}?{urllib.parse.urlencode(query)}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with opener.open(request, timeout=30) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            text = error.read()
            try:
                return error.code, json.loads(text)
            except ValueError:  # "404 page not found", while the kind is not served yet
                return error.code, {"message": text.decode(errors="replace")}

    def until_served(self) -> None:
        deadline = time.monotonic() + ESTABLISHED_SECONDS
        while self.request("GET", MODELS)[0] != 200:
            assert time.monotonic() < deadline, "the CRD is not served"
            time.sleep(0.1)  # the API server tells nobody when it begins to serve a kind

    def create(self, path: str, body: Object, *, dry: bool = True) -> tuple[int, Object]:
        query = {"fieldValidation": "Strict", **({"dryRun": "All"} if dry else {})}
        return self.request("POST", path, body, **query)

    def apply(self, path: str, body: Object, *, dry: bool = True) -> tuple[int, Object]:
        query = {"fieldManager": "test", "force": "true", "fieldValidation": "Strict"}
        if dry:
            query["dryRun"] = "All"
        return self.request("PATCH", path, body, content_type="application/apply-patch+yaml", **query)


@contextmanager
def api_server(*, crd: bool = True) -> Iterator[Server]:
    """With namespaces llm and forebay-system and, unless the test installs it, the CRD. Skips where it is not built."""
    try:
        with control_plane(controllers=False) as plane:
            made = Server(plane)
            for namespace in ("llm", "forebay-system"):
                made.create("/api/v1/namespaces", {"metadata": {"name": namespace}}, dry=False)
            if crd:
                status, answer = made.create(CRDS, custom_resource_definition(), dry=False)
                assert status == 201, answer
                made.until_served()
            yield made
    except NotBuilt as error:
        pytest.skip(str(error))
