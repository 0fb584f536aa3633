"""The `forebay` command. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted; `plan` has its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import msgspec
import typer
from rich.console import Console
from typer.core import TyperCommand

from forebay_operator.api.ratio import parse_ratio
from forebay_operator.local import control, table
from forebay_operator.local.chat import Answer, stream_chat
from forebay_operator.local.errors import InputError, LocalError
from forebay_operator.local.state import choose_running
from forebay_wire import VERSION

P = ParamSpec("P")
T = TypeVar("T")

app = typer.Typer(
    name="forebay",
    help="Serve large language models with prefill and decode in separate workers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
Name = Annotated[str | None, typer.Option("--name", help="Which `forebay up`; not needed when only one runs.")]
Output = Annotated[str, typer.Option("--output", "-o", help="`table` or `json`.")]


class _UpConsole(Console):
    """When nobody reads the output any more, drain as when the terminal goes; rich would exit on the spot."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.kill(os.getpid(), signal.SIGHUP)


class _FailsWithOne(TyperCommand):
    """Bad arguments end with 1: of `forebay plan` 2 says that there are changes."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        try:
            return super().make_context(*args, **options)
        except Exception as error:
            if getattr(error, "exit_code", None) == 2:
                error.exit_code = 1  # type: ignore[attr-defined]
            raise


def _reports_errors(command: Callable[P, T]) -> Callable[P, T]:
    """One clear line and an exit code instead of a traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            try:
                return command(*args, **kwargs)
            finally:
                sys.stdout.flush()
        except InputError as error:
            code, text = 2, str(error)
        except LocalError as error:
            code, text = 1, str(error)
        except KeyboardInterrupt:
            code, text = 130, "interrupted"
        except BrokenPipeError:
            # Whoever read the output has enough.
            _drop_output()
            raise typer.Exit(1) from None
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            code, text = 1, f"{where}{error.strerror or error}"
            _drop_output()
        print(f"error: {text}", file=sys.stderr)
        raise typer.Exit(code)

    return run


def _drop_output() -> None:
    """What is still in its buffer would fail once more when Python ends."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.command(name="up")
@_reports_errors
def up_command(
    file: Annotated[Path, typer.Argument(help="A DisaggregatedModel in YAML.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the router: the OpenAI API.")] = 8000,
    host: Annotated[str, typer.Option(help="Address that the router listens on; workers use 127.0.0.1.")] = "127.0.0.1",
    name: Annotated[str | None, typer.Option(help="Instead of metadata.name; one `up` per name.")] = None,
    worker_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="First port of the workers. Default: the next free ones.")
    ] = None,
    api_keys_file: Annotated[
        Path | None, typer.Option(help="Keys that clients must send, one a line; for router.apiKeysSecretRef.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Go on in the background once ready.")] = False,
    wait: Annotated[float, typer.Option(min=1, help="With --detach: seconds to wait for readiness.")] = 900,
) -> None:
    """Run a model's workers and router on this machine. Ctrl-C drains, a second one kills."""
    from forebay_operator.local import up  # half a second of imports that the other commands do without

    options = up.UpOptions(file, name, host, port, worker_port, api_keys_file)
    console = _UpConsole()
    if not detach:
        raise typer.Exit(up.up(options, console))
    arguments = ["up", str(file), "--port", str(port), "--host", host]
    for flag, value in (("--name", name), ("--worker-port", worker_port), ("--api-keys-file", api_keys_file)):
        if value is not None:
            arguments += [flag, str(value)]
    raise typer.Exit(up.up_detached(options, arguments, wait, console))


@app.command()
@_reports_errors
def down(
    name: Name = None,
    now: Annotated[bool, typer.Option("--now", help="Kill instead of drain.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for the end of the drain.")] = 660,
) -> None:
    """Drain a running `forebay up` and wait until it has ended."""
    state = choose_running(name)
    control.down(state, now=now, timeout=timeout)
    print(f"{state.name} is down")


@app.command()
@_reports_errors
def status(name: Name = None, output: Output = "table") -> None:
    """Workers, load, latency and transport. Exit code 0 only when every process is ready."""
    _check_output(output)
    answer = asyncio.run(control.Control(choose_running(name)).status())
    if output == "json":
        print(msgspec.json.format(msgspec.json.encode(answer)).decode())
    else:
        Console().print(table.table(answer))
    raise typer.Exit(0 if answer.ready else 1)


@app.command()
@_reports_errors
def ratio(
    target: Annotated[str, typer.Argument(metavar="PREFILL:DECODE", help="Such as 1:2.")],
    name: Name = None,
    output: Output = "table",
) -> None:
    """Switch roles by hand, to a ratio: of 8 workers 1:3 makes 2 serve prefill and 6 decode. What runs is not touched.

    The ratio must divide the workers that there are; a refusal lists those that do.
    """
    _check_output(output)
    try:
        parse_ratio(target)
    except ValueError as error:
        raise InputError(str(error)) from None
    answer = asyncio.run(control.Control(choose_running(name)).ratio(target))
    if output == "json":
        print(msgspec.json.encode(answer).decode())
        return
    for worker, role in answer.switched.items():
        print(f"{worker} serves {role} now")
    print(f"prefill:decode is {answer.ratio}" + ("" if answer.switched else " already"))


@app.command()
@_reports_errors
def chat(
    prompt: Annotated[str | None, typer.Argument(help="One question. Without it: a conversation; Ctrl-D ends.")] = None,
    name: Name = None,
    url: Annotated[str | None, typer.Option(help="Another OpenAI API, such as http://host:8000/v1.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name; needed with --url.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of each answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0: always the likeliest.")] = None,
) -> None:
    """Talk to the model, streamed; says which workers answered. $FOREBAY_API_KEY is sent when it is set."""
    if url is None:
        answer = asyncio.run(control.Control(choose_running(name)).status())
        url, model = answer.endpoint, model or answer.served_name
    if model is None:
        raise InputError("--url needs --model, the name that the API serves")
    fixed: dict[str, Any] = {"model": model}
    if max_tokens is not None:
        fixed["max_tokens"] = max_tokens
    if temperature is not None:
        fixed["temperature"] = temperature
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    if prompt is not None:
        _turn(url, fixed, messages, prompt)
        return
    while True:
        try:
            said = input("> ")
        except EOFError:
            print()
            return
        if said.strip():
            try:
                _turn(url, fixed, messages, said)
            except LocalError as error:
                # A question that failed is taken back, so that the next one stands alone.
                messages.pop()
                print(f"error: {error}", file=sys.stderr)


def _turn(url: str, fixed: dict[str, Any], messages: list[dict[str, str]], prompt: str) -> None:
    messages.append({"role": "user", "content": prompt})
    answer = Answer()

    async def show() -> None:
        body = {**fixed, "messages": messages}
        async for piece in stream_chat(url, body, answer, api_key=os.environ.get("FOREBAY_API_KEY")):
            print(piece, end="", flush=True)

    asyncio.run(show())
    print()
    print(f"[{answer.summary()}]", file=sys.stderr)
    messages.append({"role": "assistant", "content": answer.text})


@app.command(name="replay")
@_reports_errors
def replay_command(
    trace: Annotated[list[Path], typer.Option(help="A trace file; repeat it to chain traces.")],
    trace_format: Annotated[
        list[str] | None,
        typer.Option("--format", help="azure, mooncake, servegen or csv. Default: csv where the name ends in .csv."),
    ] = None,
    at: Annotated[list[float] | None, typer.Option(help="Second at which each trace starts.")] = None,
    rate: Annotated[list[float] | None, typer.Option(help="Requests/s of each trace, by superposition.")] = None,
    until: Annotated[float | None, typer.Option(help="End of the last trace, in seconds.")] = None,
    workers: Annotated[int, typer.Option(min=2, max=512, help="Of both pools together.")] = 8,
    start: Annotated[str | None, typer.Option(metavar="P:D", help="First split; half and half by default.")] = None,
    perf: Annotated[str, typer.Option(help="Performance model: a name, or a JSON file.")] = "h100-llama-8b",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="forebay, demand, fixed:P:D, hpa, dynamo-load, dynamo-throughput, llmd-token, kthena-ratio or oracle; "
            "repeat it to compare."
        ),
    ] = None,
    gear: Annotated[str, typer.Option(help="role, or replica-N with N seconds of start-up.")] = "role",
    role_switch_s: Annotated[float | None, typer.Option(min=0, help="Gear role with this delay.")] = None,
    replica_start_s: Annotated[float | None, typer.Option(min=0, help="Gear replica with this start-up.")] = None,
    drain: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Replica gears: how long a worker drains before what it still runs continues elsewhere. "
            "Default: as spec.drain.timeoutSeconds, 600; 0: at once.",
        ),
    ] = None,
    convertible: Annotated[str, typer.Option(help="on: decoders take prompts when prefill is late.")] = "off",
    refuse_over: Annotated[
        float,
        typer.Option(min=0, help="Answer 429 at once when the expected TTFT is over this many objectives; 0: never."),
    ] = 0.0,
    ttft_ms: Annotated[float | None, typer.Option(help="Objective; the performance model's by default.")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="As --ttft-ms.")] = None,
    metric_lag_s: Annotated[float, typer.Option(min=0, help="Age of what the law sees.")] = 0.0,
    lost_writes: Annotated[float, typer.Option(help="Share of the law's changes that get lost.")] = 0.0,
    stale: Annotated[list[str] | None, typer.Option(metavar="FROM:TO", help="Seconds without new metrics.")] = None,
    path: Annotated[str, typer.Option(help="fast, or exact: the engine's scheduler step by step.")] = "fast",
    max_running: Annotated[int, typer.Option(min=1, help="Requests of one worker.")] = 256,
    max_batched_tokens: Annotated[int, typer.Option(min=16, help="Tokens of one step.")] = 2048,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="A PNG of the first policy's run; needs matplotlib.")] = None,
) -> None:
    """Replay request traces in virtual time under rescaling laws, and compare what they attain."""
    from forebay_operator.replay.command import ReplayOptions, replay  # imports the engine's scheduler

    if convertible not in ("on", "off"):
        raise InputError(f"--convertible is {convertible!r}; use on or off")
    options = ReplayOptions(
        traces=trace,
        formats=trace_format or [],
        at=at or [],
        rates=rate or [],
        until=until,
        workers=workers,
        start=start,
        perf=perf,
        policies=policy or ["forebay"],
        gear=gear,
        role_switch_seconds=role_switch_s,
        replica_start_seconds=replica_start_s,
        drain_seconds=drain,
        convertible=convertible == "on",
        refuse_over=refuse_over,
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        metric_lag_seconds=metric_lag_s,
        lost_writes=lost_writes,
        stale=stale or [],
        path=path,
        max_running=max_running,
        max_batched_tokens=max_batched_tokens,
        seed=seed,
        json=as_json,
        plot=plot,
    )
    try:
        replay(options, Console())
    except ValueError as error:
        raise InputError(str(error)) from None


@app.command(name="calibrate")
@_reports_errors
def calibrate_command(
    url: Annotated[str | None, typer.Argument(help="Of a router. Without it: the running `forebay up`.")] = None,
    name: Name = None,
    out: Annotated[Path, typer.Option(help="The performance model to write.")] = Path("calibrated.json"),
    minutes: Annotated[float, typer.Option(min=0.1, max=60, help="At most, about.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Of the prompts' text.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")] = False,
) -> None:
    """Measure an idle pool's prefill, decode, transfer and role switch; write what replay can start from.

    $FOREBAY_API_KEY is sent when it is set.
    """
    from forebay_operator.calibrate.command import CalibrateOptions, calibrate  # imports the performance models

    switch = None
    if url is None:
        running = control.Control(choose_running(name))
        url = asyncio.run(running.status()).endpoint

        async def switch(split: str) -> None:
            await running.ratio(split)

    key = os.environ.get("FOREBAY_API_KEY")
    options = CalibrateOptions(url, out, out.stem, 60 * minutes, seed, key)
    try:
        calibrate(options, Console(), switch, as_json=as_json)
    except ValueError as error:
        raise LocalError(str(error)) from None


@app.command(name="plan", cls=_FailsWithOne)
@_reports_errors
def plan_command(
    file: Annotated[str, typer.Option("--filename", "-f", help="A DisaggregatedModel in YAML; - is standard input.")],
    kubeconfig: Annotated[str | None, typer.Option(help="Instead of $KUBECONFIG or ~/.kube/config.")] = None,
    context: Annotated[str | None, typer.Option(help="Of the kubeconfig, instead of the current one.")] = None,
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help="Instead of the context's.")] = None,
    engine_image: Annotated[
        str | None, typer.Option(help="The operator's, where its Deployment can't be read.")
    ] = None,
    router_image: Annotated[str | None, typer.Option(help="As --engine-image.")] = None,
    output: Output = "table",
) -> None:
    """What applying a file to a cluster would change, pod by pod and object by object. Changes nothing.

    Exit code 0: nothing to do. 2: there are changes. 1: an error, or a change that would be refused.
    """
    from forebay_operator.preview import command  # the Kubernetes client takes a second to import

    if output not in ("table", "json"):
        raise LocalError(f"{output!r} is no output format; use table or json")
    options = command.PlanOptions(file, kubeconfig, context, namespace, engine_image, router_image)
    text, code = command.plan(options, output)
    print(text)
    raise typer.Exit(code)


@app.command()
@_reports_errors
def version(output: Output = "table") -> None:
    """The version of Forebay."""
    _check_output(output)
    print(msgspec.json.encode({"version": VERSION}).decode() if output == "json" else f"forebay {VERSION}")


def _check_output(output: str) -> None:
    if output not in ("table", "json"):
        raise typer.BadParameter(f"{output!r} is no output format; use table or json", param_hint="--output")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
