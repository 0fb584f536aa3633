"""Which core a worker gets: in its own process for a real model, in the server's for a simulated one."""

from __future__ import annotations

from forebay_engine.core.handle import CoreHandle
from forebay_engine.settings import WorkerSettings


def make_core(settings: WorkerSettings) -> CoreHandle:
    """Not started yet: see CoreHandle.start."""
    if settings.engine == "simulated":
        from forebay_engine.core.local import LocalCore
        from forebay_engine.core.parts import make_parts

        return LocalCore(lambda: make_parts(settings))
    from forebay_engine.core.process import ProcessCore

    return ProcessCore(settings)
