"""The operator with a clock of its own, minutes from that of its nodes."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from e2e.on_kubernetes.deployed import OPERATOR_NAMESPACE, RELEASE, Deployed

_NAME: Final = "another-clock"
_FOLDER: Final = "/another-clock"
_SOURCE: Final = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static time_t ahead(void) { return atol(getenv("CLOCK_AHEAD_SECONDS")); }

int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, at);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += ahead();
    return failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""
"""A process asks libc for the time. libfaketime does this and much more; no package registry has it built."""

LACKS: Final = "" if shutil.which("cc") else "a C compiler (cc), for a library that moves the operator's clock"


def _library() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "clock.c"), Path(folder, "clock.so")
        source.write_text(_SOURCE)
        words = ("cc", "-O1", "-shared", "-fPIC", "-o", built, source, "-ldl")
        subprocess.run(words, check=True, timeout=60)
        return built.read_bytes()


@asynccontextmanager
async def ahead(deployed: Deployed, seconds: int) -> AsyncIterator[None]:
    """Operators' clocks are `seconds` ahead; each change of the clock replaces their pods."""
    meta = {"name": _NAME, "namespace": OPERATOR_NAMESPACE}
    library = base64.b64encode(_library()).decode()
    deployed.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "binaryData": {"clock.so": library}},
    )
    container = {
        "name": "operator",
        "env": [
            {"name": "LD_PRELOAD", "value": f"{_FOLDER}/clock.so"},
            {"name": "CLOCK_AHEAD_SECONDS", "value": str(seconds)},
        ],
        "volumeMounts": [{"name": _NAME, "mountPath": _FOLDER}],
    }
    spec = {"containers": [container], "volumes": [{"name": _NAME, "configMap": {"name": _NAME}}]}
    try:
        await _roll(deployed, spec)
        yield
    finally:
        undone = {
            "containers": [
                {
                    "name": "operator",
                    "env": [{"name": each["name"], "$patch": "delete"} for each in container["env"]],
                    "volumeMounts": [{"mountPath": _FOLDER, "$patch": "delete"}],
                }
            ],
            "volumes": [{"name": _NAME, "$patch": "delete"}],
        }
        await _roll(deployed, undone)
        deployed.kubectl("-n", OPERATOR_NAMESPACE, "delete", "configmap", _NAME)


async def _roll(deployed: Deployed, spec: object) -> None:
    """Change the pods' spec by a strategic merge, and wait until new ones run."""
    where = ("-n", OPERATOR_NAMESPACE)
    patch = json.dumps({"spec": {"template": {"spec": spec}}})
    await asyncio.to_thread(deployed.kubectl, *where, "patch", "deployment", RELEASE, "-p", patch)
    rolled = (*where, "rollout", "status", f"deployment/{RELEASE}", "--timeout=120s")
    await asyncio.to_thread(deployed.kubectl, *rolled, seconds=130)
