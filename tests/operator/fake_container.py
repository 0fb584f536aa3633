"""Stands in for forebay-engine and forebay-router: what a supervisor sees of a container, steered by files.

    fake_container.py --port N --name NAME --control DIR [--workers-file F]

In DIR: `NAME.crash` ends it at start, `NAME.hopeless` with the exit code of what no start mends; `NAME.sick` fails
/health, `NAME.unready` fails /ready; `NAME.stubborn` makes it ignore SIGTERM; `NAME.child` makes it leave a child
process behind. It appends its pid to `NAME.starts`, and `NAME` to `stops` when a SIGTERM ended it, after the requests
it was serving.
"""

import argparse
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--control", type=Path, required=True)
    parser.add_argument("--workers-file", type=Path)
    options = parser.parse_args()
    control: Path = options.control

    def told(what: str) -> bool:
        return (control / f"{options.name}.{what}").exists()

    with (control / f"{options.name}.starts").open("a") as starts:
        starts.write(f"{os.getpid()}\n")
    print(f"{options.name} starts", flush=True)
    if told("crash"):
        print("told to crash", flush=True)
        sys.exit(3)
    if told("hopeless"):
        print("fake: no start mends this\n", flush=True)
        sys.exit(78)
    if told("child"):
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/health":
                self.answer(500 if told("sick") else 200, {})
            elif self.path == "/ready":
                self.answer(503 if told("unready") else 200, {})
            elif self.path == "/load":
                self.answer(200, load())
            elif self.path == "/held":
                # Answers when the test lets go: a running request for the drain to wait for.
                self.send_response(200)
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                self.chunk(b"begun\n")
                while not told("release"):
                    wake.wait(0.02)
                self.chunk(b"finished\n")
                self.chunk(b"")
            else:
                self.answer(404, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("x-forebay-prefill", "prefill-0")
            self.send_header("x-forebay-decode", "decode-0")
            self.send_header("connection", "close")
            self.end_headers()
            said = f"{len(body['messages'])} messages, last: {body['messages'][-1]['content']}"
            for part in (said[:5], said[5:] + "\x1b[31m"):
                self.wfile.write(
                    b": t 1\ndata: " + json.dumps({"choices": [{"delta": {"content": part}}]}).encode() + b"\n\n"
                )
            self.wfile.write(b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n')
            self.wfile.write(b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n')
            self.close_connection = True

        def answer(self, status: int, value: object) -> None:
            raw = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

    def load() -> object:
        workers = json.loads(options.workers_file.read_text())["workers"]
        report = {"engine_id": "e", "epoch": 1, "waiting": 1, "free_blocks": 75, "total_blocks": 100}
        report |= {"transport": "SharedMemory", "kv_bytes_received": 4096}
        return {
            "ttft_p95_ms": 123.0,
            "tpot_p95_ms": 7,
            "in_flight": 2,
            "workers": [{"name": w["name"], "load": {**report, "running": int(w["name"][-1])}} for w in workers],
        }

    wake = threading.Event()

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = False

    server = Server(("127.0.0.1", options.port), Handler)

    def on_term(*_: object) -> None:
        if not told("stubborn"):
            threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, on_term)
    server.serve_forever(poll_interval=0.02)
    server.server_close()  # waits for the requests that run
    with (control / "stops").open("a") as stops:
        stops.write(f"{options.name}\n")


if __name__ == "__main__":
    main()
