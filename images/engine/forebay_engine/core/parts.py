"""Puts a core together: executor, pool, scheduler, leases, transport. The one place that knows real from simulated."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable
from pathlib import Path

from forebay_engine.core.handle import CoreInfo
from forebay_engine.core.local import CoreParts, LoopOutbox
from forebay_engine.core.step_loop import StepLoop
from forebay_engine.errors import ModelError
from forebay_engine.executor.base import Executor
from forebay_engine.kv.arena import LAYOUT
from forebay_engine.kv.blocks import BlockPool
from forebay_engine.kv.lease_words import LeaseWords
from forebay_engine.kv.leases import LeaseTable
from forebay_engine.scheduler import Scheduler, SchedulerConfig
from forebay_engine.settings import WorkerSettings
from forebay_engine.transfer.base import Transport
from forebay_engine.transfer.compat import compat_hash
from forebay_engine.transfer.memory import HOST, Place
from forebay_engine.transfer.peers import PeerClient
from forebay_engine.transfer.service import Identity, TransferService
from forebay_wire import VERSION
from forebay_wire.messages import Compatibility
from forebay_wire.secret import read_token

SIMULATED_MAX_MODEL_LEN = 8192


def make_parts(settings: WorkerSettings) -> CoreParts:
    return simulated_parts(settings) if settings.engine == "simulated" else native_parts(settings)


def native_parts(settings: WorkerSettings) -> CoreParts:
    """Loads the model and registers its arena with NIXL. Raises ModelError; takes seconds."""
    if settings.model_dir is None:
        raise ModelError("a native engine needs a model folder: give --model-dir")
    # torch and NIXL are imported here only: a simulated worker must start without them.
    from forebay_engine.executor.torch_executor import TorchExecutor
    from forebay_engine.transfer.device_memory import DeviceMemory
    from forebay_engine.transfer.nixl import NixlTransport
    from forebay_engine.transfer.ucx import TransportUnavailable

    words = LeaseWords(_engine_id(settings))
    executor = TorchExecutor(
        settings.model_dir,
        kv_memory_bytes=settings.kv_memory_bytes,
        block_size=settings.block_size,
        dtype=settings.dtype,
        threads=settings.threads,
        device=settings.device,
    )
    memory = None if executor.device.type == "cpu" else DeviceMemory(executor.arena)
    try:
        transport = NixlTransport(
            address=executor.base_address(),
            block_bytes=executor.layout.block_bytes,
            num_blocks=executor.num_blocks,
            transport=settings.transport,
            words=words,
            keepalive=executor.arena,
            memory=memory,
        )
    except TransportUnavailable as error:
        raise ModelError(str(error)) from error
    model = f"{settings.served_name}:{_fingerprint(settings.model_dir)}"
    place = HOST if memory is None else memory.place
    return _join(settings, executor, transport, words, "nixl", model, executor.spec.max_len, place)


def simulated_parts(settings: WorkerSettings) -> CoreParts:
    """A core that fakes only time and bytes. Raises ModelError for a performance model that can't be read."""
    from forebay_engine.executor.simulated import SimulatedExecutor
    from forebay_engine.perf.catalog import load
    from forebay_engine.transfer.simulated import SimulatedTransport

    try:
        perf = load(settings.perf_model)
    except ValueError as error:
        raise ModelError(str(error)) from error
    executor = SimulatedExecutor(perf, block_size=settings.block_size)
    words = LeaseWords(_engine_id(settings))
    transport = SimulatedTransport(
        host=settings.advertise_host,
        block_bytes=executor.layout.block_bytes,
        num_blocks=executor.num_blocks,
        read_tags=executor.read_tags,
        write_tags=executor.write_tags,
        transfer_seconds=lambda size: perf.handoff_seconds(size // perf.kv_bytes_per_token),
        words=words,
    )
    model = f"{settings.served_name}:{perf.name}"
    return _join(settings, executor, transport, words, "simulated", model, SIMULATED_MAX_MODEL_LEN)


def _engine_id(settings: WorkerSettings) -> str:
    """Fresh per start."""
    return f"{settings.name}-{uuid.uuid4().hex[:12]}"


def _fingerprint(model_dir: Path) -> str:
    """Tells models apart that share a name: checkpoints differ in their configs or in their weights' sizes."""
    digest = hashlib.blake2b((model_dir / "config.json").read_bytes(), digest_size=8)
    generation = model_dir / "generation_config.json"
    # Sampling defaults too: a stream must not change its temperature where it goes on.
    digest.update(generation.read_bytes() if generation.exists() else b"")
    for shard in sorted(model_dir.glob("*.safetensors")):
        digest.update(f"{shard.name} {shard.stat().st_size}".encode())
    return digest.hexdigest()


def _join(
    settings: WorkerSettings,
    executor: Executor,
    transport: Transport,
    words: LeaseWords,
    kind: str,
    model: str,
    model_limit: int,
    place: Place = HOST,
) -> CoreParts:
    layout = executor.layout
    if settings.max_model_len is not None and settings.max_model_len > model_limit:
        raise ModelError(
            f"--max-model-len (spec.model.maxModelLen) is {settings.max_model_len}, the model was made for "
            f"{model_limit} positions at most; set it to at most {model_limit}, or leave it out"
        )
    pool = BlockPool(executor.num_blocks, layout.block_size, prefix_cache=settings.prefix_cache)
    wanted = settings.max_model_len or model_limit
    max_model_len = min(wanted, pool.num_blocks * pool.block_size)
    scheduler = Scheduler(
        SchedulerConfig(
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            max_batched_tokens=settings.max_batched_tokens,
            max_model_len=max_model_len,
            chunked_prefill=settings.chunked_prefill,
        ),
        pool,
    )
    leases = LeaseTable(settings.lease_seconds, words)
    compatibility = Compatibility(
        engine_version=VERSION,
        model=model,
        dtype=layout.dtype,
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_size=layout.head_size,
        block_size=layout.block_size,
        layout=LAYOUT,
    )
    identity = Identity(
        engine_id=words.engine_id,
        compatibility=compatibility,
        transport=kind,
        base_address=executor.base_address(),
        block_bytes=layout.block_bytes,
        num_blocks=executor.num_blocks,
        place=place,
    )
    token = read_token(settings.token_file).decode() if settings.token_file is not None else None

    def make_service(
        on_freed: Callable[[tuple[int, ...]], None], on_expired: Callable[[tuple[int, ...]], None]
    ) -> TransferService:
        return TransferService(
            identity=identity,
            transport=transport,
            leases=leases,
            peers=PeerClient(token),
            on_freed=on_freed,
            on_expired=on_expired,
            pull_timeout_seconds=settings.pull_timeout_seconds,
        )

    def make_loop(outbox: LoopOutbox, service: TransferService) -> StepLoop:
        return StepLoop(
            executor=executor,
            scheduler=scheduler,
            pool=pool,
            leases=leases,
            outbox=outbox,
            transfer_stats=service.fill,
            wake_transfer=service.wake,
        )

    info = CoreInfo(
        engine_id=words.engine_id,
        compat_hash=compat_hash(compatibility),
        max_model_len=max_model_len,
        vocab_size=executor.vocab_size,
        block_size=layout.block_size,
        total_blocks=executor.num_blocks,
        dtype=layout.dtype,
        transport=transport.in_use(),
    )
    return CoreParts(info=info, make_loop=make_loop, make_service=make_service, close=executor.close)
