"""The client against the fake API server: paths, pages, and which error a refusal becomes."""

from __future__ import annotations

import pytest

from forebay_operator import kube as k
from forebay_operator.kube import KubeClient
from support.fake_kube import Call, FakeApi, Object, Refused


def service(name: str, **labels: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "llm", "labels": labels},
        "spec": {"ports": []},
    }


@pytest.mark.parametrize(
    ("resource", "namespace", "name", "subresource", "path"),
    [
        (k.PODS, "llm", "a", "", "/api/v1/namespaces/llm/pods/a"),
        (k.PODS, None, "", "", "/api/v1/pods"),
        (k.NODES, None, "n", "", "/api/v1/nodes/n"),
        (k.DEPLOYMENTS, "llm", "", "", "/apis/apps/v1/namespaces/llm/deployments"),
        (k.MODELS, "llm", "m", "status",
         "/apis/serving.forebay.dev/v1alpha1/namespaces/llm/disaggregatedmodels/m/status"),
    ],
)  # fmt: skip
def test_paths(resource: k.Resource, namespace: str | None, name: str, subresource: str, path: str) -> None:
    assert resource.path(namespace, name, subresource) == path


async def test_a_list_is_selected_and_its_items_say_what_they_are(api: FakeApi, kube: KubeClient) -> None:
    api.put(service("a", colour="red"))
    api.put(service("b", colour="blue"))
    found = await kube.list(k.SERVICES, "llm", selector="colour=red")
    assert [(o["kind"], o["metadata"]["name"]) for o in found] == [("Service", "a")]


async def test_an_outlived_continuation_starts_over_once(api: FakeApi, kube: KubeClient) -> None:
    api.put(service("a"))
    refusals = [Refused(410, "Expired", "too old")]

    def before(call: Call) -> None:
        if refusals:
            raise refusals.pop()

    api.before = before
    assert len(await kube.list(k.SERVICES, "llm")) == 1
    refusals[:] = [Refused(410, "Expired"), Refused(410, "Expired")]
    with pytest.raises(k.Gone):
        await kube.list(k.SERVICES, "llm")


@pytest.mark.parametrize(
    ("status", "reason", "error"),
    [
        (404, "NotFound", k.NotFound),
        (409, "Conflict", k.Conflict),
        (409, "AlreadyExists", k.AlreadyExists),
        (410, "Gone", k.Gone),
        (422, "Invalid", k.Invalid),
        (403, "Forbidden", k.Forbidden),
        (429, "TooManyRequests", k.Throttled),
        (500, "InternalError", k.Unavailable),
        (503, "ServiceUnavailable", k.Unavailable),
    ],
)
async def test_errors_by_remedy(api: FakeApi, kube: KubeClient, status: int, reason: str, error: type) -> None:
    def before(call: Call) -> None:
        raise Refused(status, reason, "the words", {"Retry-After": "7"})

    api.before = before
    with pytest.raises(k.ApiError, match=r"get Pod llm/a: .*the words") as caught:
        await kube.get(k.PODS, "llm", "a")
    assert type(caught.value) is error
    assert caught.value.retry_after == 7


def test_another_object_of_the_name_is_a_conflict() -> None:
    raw = b'{"reason":"Invalid","message":"Pod is invalid: metadata.uid: Invalid value: field is immutable"}'
    assert type(k.error_of("patch", 422, raw, None)) is k.Conflict


async def test_no_server_is_unavailable(api: FakeApi) -> None:
    api.url = "http://127.0.0.1:1"
    client = api.client()
    with pytest.raises(k.Unavailable, match=r"list pods|list Pod llm"):
        await client.list(k.PODS, "llm")
    await client.close()


async def test_a_write_without_the_lease_is_not_sent(api: FakeApi) -> None:
    seen: list[tuple[str, str, str, int]] = []
    client = api.client(may_write=lambda: False, on_request=lambda *what: seen.append(what))
    with pytest.raises(k.NotLeading, match="create Service llm"):
        await client.create(k.SERVICES, service("a"))
    with pytest.raises(k.NotFound):
        await client.get(k.SERVICES, "llm", "a")
    assert [str(call) for call in api.calls] == ["get services a"]
    assert seen == [("get", "", "services", 404)]
    await client.close()


async def test_delete_takes_exactly_the_object_meant(api: FakeApi, kube: KubeClient) -> None:
    made = api.put(service("a"))
    with pytest.raises(k.Conflict):
        await kube.delete(k.SERVICES, "llm", "a", uid="another")
    await kube.delete(k.SERVICES, "llm", "a", uid=made["metadata"]["uid"])
    assert api.find("services", "a") is None


@pytest.mark.parametrize(("asked", "waited"), [("7", 7.0), ("86400", 60.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 1.0)])
def test_a_wait_that_is_asked_for_has_a_bound(asked: str, waited: float) -> None:
    assert k.error_of("get", 429, b"{}", asked).retry_after == waited
