"""The rescaling laws a replay can run: ours, and the peers' from their published formulas."""

from __future__ import annotations

from collections.abc import Callable

from forebay_operator.replay.policies.base import Law, Plant
from forebay_operator.replay.policies.demand import Demand, Fixed
from forebay_operator.replay.policies.dynamo import DynamoLoad, DynamoThroughput
from forebay_operator.replay.policies.forebay import Forebay
from forebay_operator.replay.policies.hpa import Hpa
from forebay_operator.replay.policies.kthena import KthenaRatio
from forebay_operator.replay.policies.llmd import LlmdToken

LAWS: dict[str, Callable[[Plant], Law]] = {
    "forebay": Forebay,
    "demand": Demand,
    "hpa": Hpa,
    "dynamo-load": DynamoLoad,
    "dynamo-throughput": DynamoThroughput,
    "llmd-token": LlmdToken,
    "kthena-ratio": KthenaRatio,
}
"""By the names of --policy; fixed:P:D and oracle come beside them."""

__all__ = ["LAWS", "Fixed", "Forebay", "Law", "Plant"]
