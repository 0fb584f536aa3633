"""`forebay up`: from a manifest to running processes, and back to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live

from forebay_operator.api.load import SpecError, load_manifest
from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.local import logs
from forebay_operator.local.containers import LOOPBACK, Places, build_containers, gpus_needed, pool_sizes
from forebay_operator.local.control import Control, serve
from forebay_operator.local.errors import InputError, LocalError
from forebay_operator.local.gpus import assign_gpus
from forebay_operator.local.limits import check_supported, ignored_fields
from forebay_operator.local.models import model_folder
from forebay_operator.local.places import Room
from forebay_operator.local.ports import Ports
from forebay_operator.local.process import find_command
from forebay_operator.local.state import StateFolder
from forebay_operator.local.status import UpStatus
from forebay_operator.local.supervisor import Supervisor
from forebay_operator.local.table import plain, table, troubles
from forebay_wire.secret import BadSecretFile, read_file

PLAIN_SECONDS = 5.0
LIVE_SECONDS = 0.5
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class UpOptions:
    file: Path
    name: str | None = None
    host: str = LOOPBACK
    """Of the router."""

    port: int = 8000
    worker_port: int | None = None
    """First port of the workers. None: the next free ones after the router's."""

    api_keys_file: Path | None = None


def read_model(file: Path) -> tuple[DisaggregatedModel, list[str]]:
    """The model in a file and what to tell the user about it. Raises InputError."""
    try:
        manifest = load_manifest(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}; give a DisaggregatedModel in YAML") from None
    except UnicodeDecodeError:
        raise InputError(f"cannot read {file}: it is not UTF-8 text") from None
    except SpecError as error:
        raise InputError(str(error)) from None
    notes = [f"document of kind {kind} is ignored: local mode runs the model alone" for kind in manifest.skipped]
    return manifest.model, notes + ignored_fields(manifest.model)


def up(options: UpOptions, console: Console) -> int:
    """Run until drained; the exit code. Raises InputError and LocalError before anything is started."""
    model, notes = read_model(options.file)
    keys = options.api_keys_file
    check_supported(model, api_keys_given=keys is not None)
    if keys is not None:
        if model.spec.router.api_keys_secret_ref is None:
            raise InputError("--api-keys-file needs spec.router.apiKeysSecretRef in the manifest, which asks for keys")
        try:
            # The router judges what is in it; that it can be read is told here, before anything starts.
            read_file(keys, "API key")
        except BadSecretFile as error:
            raise InputError(f"{error} (--api-keys-file)") from None
    gpus, spare_gpus = assign_gpus(gpus_needed(model))
    state = StateFolder(options.name or model.metadata.name)
    for note in notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)

    state.acquire()
    router_ports, ports = Ports(options.host), Ports(LOOPBACK)
    try:
        router_port = router_ports.take(options.port, "stop that process or choose another --port")
        count = sum(pool_sizes(model).values())
        if options.worker_port is None:
            worker_ports = ports.find(options.port + 1, count)
        else:
            remedy = "choose another --worker-port"
            worker_ports = [ports.take(options.worker_port + index, remedy) for index in range(count)]
        source = model.spec.model.parsed_source()
        folder = model_folder(source) if source is not None else None
        places = Places(
            router_host=options.host,
            router_port=router_port,
            worker_ports=tuple(worker_ports),
            token_file=str(state.token_file),
            workers_file=str(state.workers_file),
            model_dir=str(folder) if folder else None,
            api_keys_file=str(keys.resolve()) if keys else None,
            gpus=gpus,
        )
        containers = build_containers(model, places)
        for command in {container.argv[0] for container in containers}:
            find_command(command)
        token = state.make_token()
        supervisor = Supervisor(
            model,
            containers,
            state,
            token=token,
            on_event=lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True),
            room=Room(model, places, ports, spare_gpus, max(worker_ports) + 1),
        )
        return asyncio.run(_run(supervisor, console))
    except (InputError, LocalError):
        state.discard()
        raise
    finally:
        router_ports.close()
        ports.close()
        state.release()


async def _run(supervisor: Supervisor, console: Console) -> int:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, supervisor.request_down)
    async with serve(supervisor):
        # Detached, this process is the one that writes up.log.
        bounding = logs.keep_bounded(supervisor.state.up_log)
        beside = [asyncio.create_task(work) for work in (_show(supervisor, console), bounding)]
        try:
            outcome = await supervisor.run()
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
    console.print(f"{supervisor.state.name} is down" + ("" if outcome.drained else ", not all of it drained"))
    return 0 if outcome.drained else 1


async def _show(supervisor: Supervisor, console: Console) -> None:
    if not console.is_terminal:
        while True:
            await asyncio.sleep(PLAIN_SECONDS)
            console.print(plain(supervisor.status()), markup=False, highlight=False, soft_wrap=True)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(table(supervisor.status()), refresh=True)
            await asyncio.sleep(LIVE_SECONDS)


def up_detached(options: UpOptions, arguments: list[str], wait_seconds: float, console: Console) -> int:
    """Start `forebay up` with `arguments` in a session of its own, and return when it is ready.

    Raises InputError or LocalError with the cause when it ended, and LocalError with what its processes said last when
    it was not ready in time (it is left running then).
    """
    model, _ = read_model(options.file)
    state = StateFolder(options.name or model.metadata.name)
    state.create()
    if state.running():
        raise LocalError(f"{state.name} is already up; end it with `forebay down --name {state.name}`")
    with state.start_up_log() as log:
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "forebay_operator.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    status = _wait_ready(state, process, time.monotonic() + wait_seconds)
    if status is None or not status.ready:
        causes = f" ({'; '.join(troubles(status))})" if status is not None and troubles(status) else ""
        raise LocalError(
            f"{state.name} is not ready after {wait_seconds:g} s{causes}; it goes on in the background: see "
            f"`forebay status --name {state.name}` and {state.up_log}"
        )
    ready = f"{state.name} is ready: {status.served_name} at {status.endpoint} (log: {state.up_log})"
    console.print(ready, markup=False, highlight=False, soft_wrap=True)
    return 0


def _wait_ready(state: StateFolder, process: subprocess.Popen[bytes], deadline: float) -> UpStatus | None:
    """The last status that it told: ready, unless the deadline passed. Raises InputError, LocalError when it ended."""
    status = None
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise _ended(state, process.returncode)
        if state.running():
            with contextlib.suppress(LocalError):
                status = asyncio.run(Control(state).status())
                if status.ready:
                    return status
        time.sleep(_POLL_SECONDS)
    return status


def _ended(state: StateFolder, code: int) -> InputError | LocalError:
    cause = state.up_log_error()
    if not cause:
        return LocalError(f"{state.name} ended with exit code {code}:\n{state.up_log_tail()}")
    if os.listdir(state.logs) == [state.up_log.name]:
        # Nothing but what is told now.
        state.up_log.unlink()
        state.discard()
    return InputError(cause) if code == 2 else LocalError(cause)
