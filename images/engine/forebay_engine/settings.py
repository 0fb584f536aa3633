"""A worker's settings: one frozen object made from the command line, the same for the real and the simulated engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    name: str
    """The worker's name in headers and tables (pod name)."""

    engine: str
    """`native` (torch) or `simulated`."""

    served_name: str
    host: str
    port: int
    advertise_host: str
    """Address other workers reach this one at (pod IP); goes into kv_transfer_params.remote_host."""

    token_file: Path | None
    """The per-model secret: bearer of internal endpoints, key of the params' HMAC. None: internal endpoints closed."""

    model_dir: Path | None = None
    perf_model: str = "slow"
    """Simulated: name of the performance model (perf/)."""

    max_model_len: int | None = None
    """None: the model's own limit."""

    dtype: str = "auto"
    kv_memory_bytes: int = 512 * 1024 * 1024
    block_size: int = 16
    max_running: int = 64
    max_waiting: int = 1024
    max_batched_tokens: int = 512
    """Tokens of one step, decode tokens included; the chunk of chunked prefill is what is left."""

    threads: int = 1
    device: str = "cpu"
    """Native: where steps are computed; auto | cpu | cuda."""

    transport: str = "auto"
    """auto | rdma | nvlink | tcp | shared-memory (NIXL/UCX), or `simulated`."""

    transport_required: bool = False
    lease_seconds: float = 30.0
    pull_timeout_seconds: float = 20.0
    drain_timeout_seconds: float = 600.0
    drain_policy: str = "finish"
    """finish | move: what SIGTERM does to running requests. Moved ones go on at another worker, through the router."""

    chunked_prefill: bool = True
    """False: a prompt is one step, whatever its length (for comparison only)."""

    prefix_cache: bool = True
    log_level: str = "info"
