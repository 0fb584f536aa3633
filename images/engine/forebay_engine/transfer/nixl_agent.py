"""NIXL's agent, under the one lock it needs, with errors that say what was being done."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay_engine.transfer.base import TransferError
from forebay_engine.transfer.memory import HOST, Place
from forebay_engine.transfer.ucx import PROCESS

OURSELVES = "NIXL_INIT_AGENT"


class NixlAgent:
    """Thread-safe by `lock`: NIXL is called by one thread at a time. Methods below `exclusive` are called under it.

    Descriptor lists and request handles are NIXL's own objects.
    """

    def __init__(self, name: str, transport: str, *, cuda: bool = False) -> None:
        """`cuda`: memory of a GPU will be registered.

        Raises ucx.TransportUnavailable, or TransferError when NIXL or its UCX backend can't start.
        """
        self.name = name
        self.lock = threading.Lock()
        self.closed = False
        self._regions: list[Any] = []
        with PROCESS.starting(transport, cuda=cuda), calling("start NIXL with its UCX backend"):
            api = _import_nixl()
            self._agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """The lock; raises TransferError once the agent is closed."""
        with self.lock:
            self.check_open()
            yield

    def check_open(self) -> None:
        """Under the lock: raises TransferError once the agent is closed."""
        if self.closed:
            raise TransferError("the transport is closed", reason="closed")

    def metadata(self) -> bytes:
        """What a peer needs to read all regions registered so far."""
        with calling("describe this agent"):
            return bytes(self._agent.get_agent_metadata())

    def register(self, address: int, nbytes: int, place: Place = HOST) -> None:
        with calling(f"register {nbytes} bytes of {place.kind}"):
            self._regions.append(self._agent.register_memory([(address, nbytes, place.device, "")], place.kind))

    def describe(self, agent: str, address: int, width: int, places: int, place: Place = HOST) -> Any:
        """A prepared list of `places` descriptors of `width` bytes each, side by side from `address` on."""
        strided = np.array([[address, width, place.device, width, places]], dtype=np.uint64)
        with calling(f"describe {places} places of {width} bytes of {place.kind}"):
            return self._agent.prep_xfer_dlist(agent, strided, place.kind)

    def add_remote(self, metadata: bytes) -> str:
        """The peer's agent name."""
        name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_remote(self, agent: str) -> None:
        with contextlib.suppress(Exception):
            self._agent.remove_remote_agent(agent)

    def prepare(
        self, target: Any, places: npt.NDArray[np.int32], source: Any, remote_places: npt.NDArray[np.int32]
    ) -> Any:
        """A request that reads remote_places[i] of `source` into places[i] of `target`; start() begins it."""
        return self._agent.make_prepped_xfer("READ", target, places, source, remote_places)

    def start(self, handle: Any) -> str:
        """DONE, PROC or ERR. Over cma (same host) the whole copy happens in here."""
        return str(self._agent.transfer(handle))

    def state(self, handle: Any) -> str:
        return str(self._agent.check_xfer_state(handle))

    def release(self, handle: Any) -> None:
        with contextlib.suppress(Exception):
            self._agent.release_xfer_handle(handle)

    def release_list(self, descriptors: Any) -> None:
        with contextlib.suppress(Exception):
            self._agent.release_dlist_handle(descriptors)

    def progress(self) -> None:
        with calling("drive its connections"):
            self._agent.get_new_notifs()  # the one call that drives UCX; nobody sends notifications

    def close(self) -> None:
        """From now on exclusive() refuses.

        The agent itself is never destroyed: UCX aborts the process when a peer hangs at that moment (an assertion on
        its queue of pending operations). It goes with the process, which has one transport.
        """
        self.closed = True
        never_free(self._agent)

    def deregister(self) -> None:
        """Gives all registered memory back to its owners. No request may be under way."""
        for region in self._regions:
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(region)
        self._regions.clear()


@contextlib.contextmanager
def calling(doing: str) -> Iterator[None]:
    """NIXL's exceptions as TransferError, with a one-word reason."""
    try:
        yield
    except TransferError:
        raise
    except Exception as error:
        raise failure(doing, error) from error


def failure(doing: str, error: Exception) -> TransferError:
    """What `calling` raises for an exception of NIXL's."""
    name = type(error).__name__
    if name == "nixlRemoteDisconnectError":
        reason = "disconnected"
    elif name in ("nixlNotFoundError", "nixlInvalidParamError", "nixlMismatchError"):
        reason = "refused"
    else:
        reason = "backend"
    return TransferError(f"could not {doing}: {name}: {error}", reason=reason)


def never_free(thing: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _import_nixl() -> Any:
    try:
        import nixl_cu13._api as api
    except ImportError as error:
        raise TransferError(
            f"NIXL can't be imported ({error}); install forebay[engine], or choose the simulated transport",
            reason="backend",
        ) from error
    return api
