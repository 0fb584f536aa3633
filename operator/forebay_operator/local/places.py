"""Where workers that come later run: a name, a port, GPUs. Given out when one comes, taken back when it has left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forebay_operator.api.labels import POOLS, Pool
from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.homes import Limits, home_limits
from forebay_operator.local.containers import Container, Places, build_worker
from forebay_operator.local.errors import LocalError
from forebay_operator.local.ports import Ports


class Room:
    """What this machine has for one `up` beyond the workers that it starts with."""

    def __init__(
        self, model: DisaggregatedModel, places: Places, ports: Ports, spare_gpus: Sequence[str], first_port: int
    ) -> None:
        """`ports` holds the ports until the `up` is over; `first_port`: from there up free ones are looked for."""
        self._model = model
        self._places = places
        self._ports = ports
        self._free_gpus = list(spare_gpus)
        self._first_port = first_port
        self._free_ports: list[int] = []

    def take(self, pool: Pool, names: Sequence[str]) -> Container:
        """A container for one more worker of `pool`; `names` are in use. Raises LocalError when there is no room."""
        count = self._model.spec.gpus_per_worker(pool).count
        if len(self._free_gpus) < count:
            raise LocalError(
                f"one more {pool} worker needs {count} GPUs, and {len(self._free_gpus)} of this machine are free; "
                f"lower scaling.{pool}.maxReplicas or set scaling.maxGPUs"
            )
        port = self._free_ports.pop() if self._free_ports else self._ports.find(self._first_port, 1)[0]
        index = next(i for i in range(len(names) + 1) if f"{pool}-{i}" not in names)
        gpus = tuple(self._free_gpus[:count])
        container = build_worker(self._model, self._places, pool, index, port=port, gpus=gpus)
        del self._free_gpus[:count]
        return container

    def give_back(self, container: Container) -> None:
        """It has ended."""
        self._free_ports.append(container.port)
        self._free_gpus += [gpu for gpu in container.env.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]

    def limits(self, counts: Mapping[Pool, int]) -> dict[Pool, Limits]:
        """What the spec allows each pool, and this machine's free GPUs."""
        found = home_limits(self._model.spec, counts)
        for pool in POOLS:
            each = self._model.spec.gpus_per_worker(pool).count
            if each:
                most = min(found[pool].most, counts[pool] + len(self._free_gpus) // each)
                found[pool] = Limits(found[pool].fewest, max(found[pool].fewest, most))
        return found
