"""The `forebay-router` command."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import uvloop

from forebay_router import trust
from forebay_router.app import Router
from forebay_router.discovery import Discovery, WorkersFileDiscovery
from forebay_router.gear import CONVERTIBLE
from forebay_router.pods import CREDENTIALS, ApiFailed, ApiServer, PodDiscovery
from forebay_router.server import Listener
from forebay_router.settings import MIB, RouterSettings
from forebay_wire import VERSION, exit_codes
from forebay_wire.connections import MAX_BODY_BYTES
from forebay_wire.open_files import connections_that_fit
from forebay_wire.secret import BadSecretFile, read_token

log = logging.getLogger("forebay_router")

BACKLOG = 1024
GARBAGE = 10_000
"""Objects made, and not freed by their last reference, after which the collector looks for cycles."""

CANCEL_SECONDS = 5.0
MEET_SECONDS = 1.0
"""For the first word of the workers, before clients may connect."""


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _objective(text: str) -> float:
    """Milliseconds; infinity where there is none."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is neither a positive number of milliseconds nor 0 for none")
    return value or math.inf


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port (0..65535)")
    return value


def _body_memory(text: str) -> int:
    value, least = int(text), MAX_BODY_BYTES // MIB
    if not least <= value <= 1024 * 1024:
        raise argparse.ArgumentTypeError(f"{text} MiB is not in {least}..1048576: one body may have {least} MiB")
    return value


def parse_args(argv: Sequence[str] | None = None) -> RouterSettings:
    """Settings from the command line. Exits with 2 and one line on a bad one; raises BadSecretFile."""
    parser = argparse.ArgumentParser(
        prog="forebay-router",
        description="The front door of one model: an OpenAI API over prefill and decode workers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=VERSION)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=_port, default=8000)
    parser.add_argument("--name", default=socket.gethostname(), help="id of this router towards its workers")
    workers = parser.add_mutually_exclusive_group(required=True)
    workers.add_argument("--workers-file", type=Path, help="JSON list of the workers; may change any time")
    workers.add_argument("--kubernetes-model", metavar="NAME", help="the workers are the pods of this model")
    parser.add_argument("--kubernetes-namespace", default="default", help="where the model is")
    parser.add_argument(
        "--kubernetes-api", metavar="URL", help="such as kubectl proxy's; by default this pod's cluster"
    )
    parser.add_argument("--kubernetes-credentials", type=Path, metavar="DIR", help="holds token and ca.crt")
    parser.add_argument("--token-file", type=Path, help="the per-model secret that workers ask for")
    parser.add_argument("--served-name", help="model name that clients send; by default what the workers report")
    parser.add_argument("--fallback", choices=("both-phases", "refuse"), default="both-phases")
    parser.add_argument("--api-keys-file", type=Path, help="clients' keys, one a line; by default none is asked for")
    parser.add_argument("--ttft-ms", type=_objective, default=1000.0, help="objective: time to first token; 0: none")
    parser.add_argument("--tpot-ms", type=_objective, default=100.0, help="objective: time per output token; 0: none")
    parser.add_argument(
        "--convertible",
        choices=CONVERTIBLE,
        default="overflow",
        help="when decode workers with head-room compute prompts: if the prefill queue is long, or also short prompts",
    )
    parser.add_argument(
        "--refusal-factor",
        type=_positive,
        help="answer 429 at once when the first token is expected after so many times --ttft-ms; default: never",
    )
    parser.add_argument("--no-prefix-routing", action="store_false", dest="prefix_routing", help="route by load alone")
    parser.add_argument("--request-timeout-seconds", type=_positive, default=600.0)
    parser.add_argument("--stall-timeout-seconds", type=_positive, default=20.0)
    parser.add_argument(
        "--drain-timeout-seconds", type=_positive, default=600.0, help="for running requests on SIGTERM"
    )
    parser.add_argument(
        "--body-memory-mib",
        type=_body_memory,
        default=512,
        metavar="MIB",
        help="of all request bodies that are being read or served, together; more get a 503",
    )
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    args = parser.parse_args(argv)
    return RouterSettings(
        name=args.name,
        host=args.host,
        port=args.port,
        workers_file=args.workers_file,
        kubernetes_namespace=args.kubernetes_namespace,
        kubernetes_model=args.kubernetes_model,
        kubernetes_api=args.kubernetes_api,
        kubernetes_credentials=args.kubernetes_credentials,
        token=read_token(args.token_file) if args.token_file else None,
        served_name=args.served_name,
        both_phases=args.fallback == "both-phases",
        api_keys=trust.load_api_keys(args.api_keys_file) if args.api_keys_file else (),
        ttft_objective=args.ttft_ms / 1000,
        tpot_objective=args.tpot_ms / 1000,
        convertible=args.convertible,
        refusal_factor=args.refusal_factor or 0.0,
        prefix_routing=args.prefix_routing,
        request_timeout=args.request_timeout_seconds,
        stall_timeout=args.stall_timeout_seconds,
        drain_timeout=args.drain_timeout_seconds,
        max_bodies=args.body_memory_mib * MIB,
        log_level=args.log_level,
    )


def discovery_of(settings: RouterSettings) -> Discovery:
    """Raises ApiFailed when the pods are asked for outside of a cluster."""
    if settings.workers_file is not None:
        return WorkersFileDiscovery(settings.workers_file, settings.role_grace)
    assert settings.kubernetes_model is not None
    credentials = settings.kubernetes_credentials or CREDENTIALS
    url = settings.kubernetes_api
    server = ApiServer(url.rstrip("/"), credentials) if url else ApiServer.in_cluster(credentials)
    return PodDiscovery(server, settings.kubernetes_namespace, settings.kubernetes_model, settings.role_grace)


async def serve(settings: RouterSettings) -> None:
    """Serve until SIGTERM or SIGINT; then accept no more, finish what runs within the drain timeout, and return."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    router = Router(settings, discovery_of(settings))
    listener = Listener(router.handle, settings)
    try:
        server = await loop.create_server(listener, settings.host, settings.port, backlog=BACKLOG, start_serving=False)
        router.start()
        await router.meet_workers(MEET_SECONDS)
        await server.start_serving()
        log.info("router %s listens on %s:%d", settings.name, settings.host, settings.port)
        await stop.wait()
        router.drain()
        server.close()
        await _drain(router, listener, settings.drain_timeout)
    finally:
        await router.close()


async def _drain(router: Router, listener: Listener, timeout: float) -> None:
    log.info("draining: %d requests run", router.metrics.in_flight)
    listener.retire()
    deadline = asyncio.get_running_loop().time() + timeout
    while listener.connections and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 (nobody tells us)
        await asyncio.sleep(0.05)
    if listener.connections:
        log.warning("%d connections are cut at the end of the drain timeout", len(listener.connections))
    await listener.shutdown(CANCEL_SECONDS)


def main(argv: Sequence[str] | None = None) -> None:
    try:
        settings = parse_args(argv)
    except BadSecretFile as error:
        sys.exit(_fail(str(error), exit_codes.CONFIG))
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname).1s %(name)s %(message)s", stream=sys.stderr
    )
    # No line shows them, and each costs every record a system call or a look-up.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    # A stream takes two sockets: its client's and its worker's.
    settings = replace(settings, max_connections=connections_that_fit(settings.max_connections, each=2))
    # What was made so far stays: without this, every few requests' garbage has all modules looked through again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE)
    try:
        uvloop.run(serve(settings))
    except ApiFailed as error:
        sys.exit(_fail(str(error)))
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        sys.exit(_fail(f"cannot listen on {settings.host}:{settings.port}: {reason}"))


def _fail(text: str, code: int = 2) -> int:
    sys.stderr.write(f"forebay-router: {text}\n")
    return code


if __name__ == "__main__":
    main()
