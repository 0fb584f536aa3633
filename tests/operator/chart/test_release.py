"""The chart as a release on a real API server: installed, upgraded and uninstalled, with models left alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chart_tools import CHART, NAMESPACE

from forebay_operator.api.crd import NAME
from support.api_server import CRDS, MODELS, Server, api_server
from support.manifests import changed

helm = pytest.importorskip("helm_python", reason="needs Helm as a library: `pip install helm-python-sdk` (Linux)")
DEPLOYMENT = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/forebay"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with api_server(crd=False) as made:
        yield made


def test_a_release_is_upgraded_and_its_end_keeps_crd_and_models(server: Server) -> None:
    config = helm.Config(kubeconfig_path=str(server.plane.kubeconfig()), namespace=NAMESPACE)
    try:
        config.install(str(CHART), "forebay", {}, namespace=NAMESPACE)
        server.until_served()
        _, deployment = server.request("GET", DEPLOYMENT)
        assert deployment["spec"]["replicas"] == 2
        status, model = server.create(MODELS, changed({}), dry=False)
        assert status == 201, model

        config.upgrade(str(CHART), "forebay", {"replicas": 3}, namespace=NAMESPACE)
        _, after = server.request("GET", DEPLOYMENT)
        assert after["spec"]["replicas"] == 3
        assert after["spec"]["template"] == deployment["spec"]["template"]

        config.uninstall("forebay")
        assert server.request("GET", DEPLOYMENT)[0] == 404
        assert server.request("GET", f"{CRDS}/{NAME}")[0] == 200
        _, kept = server.request("GET", f"{MODELS}/assistant")
        assert kept["metadata"]["uid"] == model["metadata"]["uid"]

        # Again, over the CRD that was kept: Helm takes it for its own by the labels it left on it.
        config.install(str(CHART), "forebay", {}, namespace=NAMESPACE)
        assert server.request("GET", DEPLOYMENT)[0] == 200
    finally:
        config.close()
