"""The `forebay-engine` command: one worker."""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import uvloop

from forebay_engine.errors import ModelError
from forebay_engine.server.run import CannotServe, fail, serve
from forebay_engine.settings import WorkerSettings
from forebay_engine.transfer.lease_keeper import margin
from forebay_wire.connections import ConnectionLimits
from forebay_wire.open_files import connections_that_fit

_QUANTITY = re.compile(r"(\d+)(Ki|Mi|Gi|Ti|k|M|G|T)?")
_UNITS = {
    None: 1,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
}
_LOG_LEVELS = ("debug", "info", "warning", "error")
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_TRANSPORTS = ("auto", "rdma", "nvlink", "tcp", "shared-memory", "simulated")
_MIN_LEASE_SECONDS = 1.0


def quantity(text: str) -> int:
    """Bytes of a Kubernetes quantity without fractions: 512Mi, 40Gi, 1000000."""
    found = _QUANTITY.fullmatch(text)
    if found is None or int(found.group(1)) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a quantity of bytes; write for example 512Mi or 40Gi")
    return int(found.group(1)) * _UNITS[found.group(2)]


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not in {low}..{high}")
        return value

    return parse


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text} s is not above 0 and at most a day")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="forebay-engine", description="One Forebay worker: prefill and decode.")
    parser.add_argument("--type", choices=("native", "simulated"), default="native", dest="engine")
    parser.add_argument("--model-dir", type=Path, help="folder in Hugging Face layout; native workers need it")
    parser.add_argument("--served-name", required=True, help="the model's name in the API")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=_whole(0, 65535), default=8100, help="0: any free port")
    parser.add_argument("--advertise-host", help="address other workers reach this one at; default --host")
    parser.add_argument("--name", default=socket.gethostname(), help="the worker's name in headers and tables")
    parser.add_argument("--token-file", type=Path, help="the model's secret; without it internal endpoints are closed")
    parser.add_argument("--max-model-len", type=_whole(2, 2**24), help="default: the model's own limit")
    parser.add_argument("--dtype", choices=_DTYPES, default="auto")
    parser.add_argument("--kv-memory", type=quantity, default="512Mi", dest="kv_memory_bytes")
    parser.add_argument("--block-size", type=_whole(1, 1024), default=16, help="tokens in a KV block")
    parser.add_argument("--max-running", type=_whole(1, 65536), default=64)
    parser.add_argument("--max-waiting", type=_whole(0, 1_000_000), default=1024)
    parser.add_argument("--max-batched-tokens", type=_whole(1, 2**20), default=512)
    parser.add_argument("--threads", type=_whole(1, 1024), default=1)
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="cpu",
        help="where a native engine computes; auto: on a GPU where torch sees one",
    )
    parser.add_argument("--transport", choices=_TRANSPORTS, help="default: auto; simulated workers: simulated")
    parser.add_argument("--transport-required", action="store_true", help="never ready on a worse transport")
    parser.add_argument("--lease-seconds", type=_seconds, default=30.0)
    parser.add_argument("--pull-timeout-seconds", type=_seconds, default=20.0)
    parser.add_argument("--drain-timeout-seconds", type=_seconds, default=600.0)
    parser.add_argument("--drain-policy", choices=("finish", "move"), default="finish", help="for running requests")
    parser.add_argument("--perf-model", default="slow", help="simulated: how long steps take")
    parser.add_argument("--no-chunked-prefill", action="store_false", dest="chunked_prefill")
    parser.add_argument("--no-prefix-cache", action="store_false", dest="prefix_cache")
    parser.add_argument("--log-level", choices=_LOG_LEVELS, default="info")
    return parser


def read_settings(arguments: Sequence[str]) -> WorkerSettings:
    """Settings of a command line; a wrong one ends the process with a line on stderr and code 2, as argparse does."""
    parser = _parser()
    values = vars(parser.parse_args(arguments))
    if values["engine"] == "native" and values["model_dir"] is None:
        parser.error("--model-dir is required with --type native")
    if values["engine"] == "simulated" and values["transport"] not in (None, "auto", "simulated"):
        parser.error(f"--transport {values['transport']}: a simulated worker has only the simulated transport")
    if values["engine"] == "native" and values["transport"] == "simulated":
        parser.error("--transport simulated: only with --type simulated")
    longest = values["lease_seconds"] - margin(values["lease_seconds"])
    if values["pull_timeout_seconds"] > longest:
        parser.error(
            f"--pull-timeout-seconds {values['pull_timeout_seconds']:g} must be at most {longest:g} with "
            f"--lease-seconds {values['lease_seconds']:g}: a pull must end a margin before its lease"
        )
    if values["lease_seconds"] < _MIN_LEASE_SECONDS:
        parser.error(f"--lease-seconds {values['lease_seconds']:g} is below {_MIN_LEASE_SECONDS:g}")
    if values["transport"] is None or values["engine"] == "simulated":
        values["transport"] = "simulated" if values["engine"] == "simulated" else "auto"
    values["advertise_host"] = values["advertise_host"] or values["host"]
    return WorkerSettings(**values)


async def _run(settings: WorkerSettings) -> int:
    from forebay_engine.core.start import make_core  # the engine proper is loaded after the arguments are known good

    limits = ConnectionLimits()
    limits = replace(limits, max_connections=connections_that_fit(limits.max_connections, each=1))
    return await serve(settings, make_core(settings), limits=limits)


def main(arguments: Sequence[str] | None = None) -> None:
    settings = read_settings(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(
        level=settings.log_level.upper(),
        format=f"%(asctime)s %(levelname)s {settings.name} %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(_run(settings))
    except (CannotServe, ModelError) as error:
        code = fail(error)
    sys.exit(code)


if __name__ == "__main__":
    main()
