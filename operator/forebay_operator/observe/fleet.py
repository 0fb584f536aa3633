"""The workers a model should have, as whoever runs them knows: names, addresses and roles to be. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forebay_operator.api.labels import POOLS, Pool
from forebay_operator.build.ports import HTTP
from forebay_operator.observe.types import Observation, PodView
from forebay_wire.urls import host_port


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    target: Pool
    """The role it has or is to have."""

    address: str = ""
    """host:port of its HTTP server; empty while it has none."""

    serving: bool = True
    """False: it is known to take no requests (starting, draining, gone), whatever a router still says."""

    ready: bool = False
    there: bool = True
    """False: it stands for a worker that is not there yet."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """As many members as there should be workers: one that is missing is a member without an address."""

    members: tuple[Member, ...] = ()
    routers: tuple[str, ...] = ()
    """host:port of every ready router. Load is known only when all of them answer."""


def fleet_of(observation: Observation, routers: tuple[str, ...], targets: Mapping[Pool, int]) -> Fleet:
    """A cluster's: exactly as many members as `targets` sum up to.

    Pods that leave are none of them. Of more pods than that each role keeps as many as it is to have before others fill
    up: while a pool shrinks, the law sees the split that is meant. One that is not there yet is a member without an
    address, in the role that lacks it: the law moves the split of the workers there should be, and a pod that restarts
    does not change their number.
    """
    staying = [pod for pod in observation.pods if not pod.terminating and not pod.draining]
    total = sum(targets.values())
    room, first, rest = dict(targets), list[PodView](), list[PodView]()
    for pod in sorted(staying, key=lambda pod: (not pod.serving, pod.role is None, pod.name)):
        (first if room[pod.serves_as] > 0 else rest).append(pod)
        room[pod.serves_as] -= 1
    members = [_member(pod) for pod in [*first, *rest][:total]]
    lack = {pool: targets[pool] - sum(member.target == pool for member in members) for pool in POOLS}
    for number in range(total - len(members)):
        pool = max(POOLS, key=lambda each: lack[each])
        lack[pool] -= 1
        members.append(Member(f"(missing {number + 1})", pool, serving=False, there=False))
    return Fleet(tuple(members), tuple(host_port(address, HTTP) for address in routers))


def _member(pod: PodView) -> Member:
    address = host_port(pod.ip, HTTP) if pod.ip and pod.ready else ""
    return Member(pod.name, pod.serves_as, address, pod.serving, pod.ready)
