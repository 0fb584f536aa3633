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
#include <sys/time.h>
#include <time.h>

int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, at);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += AHEAD;
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

LACKS: Final = (
    "" if shutil.which("cc") else "no C compiler (cc), for a library that moves the operator's clock: install gcc"
)


def _library(seconds: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "clock.c"), Path(folder, "clock.so")
        source.write_text(_SOURCE)
        words = ("cc", "-O1", "-shared", "-fPIC", f"-DAHEAD={seconds}", "-o", built, source, "-ldl")
        subprocess.run(words, check=True, timeout=60)
        return built.read_bytes()


@asynccontextmanager
async def ahead(deployed: Deployed, seconds: int) -> AsyncIterator[None]:
    """Operators' clocks are `seconds` ahead; each change of the clock replaces their pods."""
    meta = {"name": _NAME, "namespace": OPERATOR_NAMESPACE}
    library = base64.b64encode(_library(seconds)).decode()
    before = _template(deployed)
    deployed.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "binaryData": {"clock.so": library}})
    preload = {"name": "LD_PRELOAD", "value": f"{_FOLDER}/clock.so"}
    mount = {"name": _NAME, "mountPath": _FOLDER}
    container = {"name": "operator", "env": [preload], "volumeMounts": [mount]}
    try:
        await _roll(deployed, {"containers": [container], "volumes": [{"name": _NAME, "configMap": {"name": _NAME}}]})
        yield
    finally:
        gone = {"$patch": "delete"}
        container = {"name": "operator", "env": [preload | gone], "volumeMounts": [mount | gone]}
        try:
            await _roll(deployed, {"containers": [container], "volumes": [{"name": _NAME} | gone]})
        finally:
            words = ("delete", "configmap", _NAME, "--ignore-not-found")
            await asyncio.to_thread(deployed.kubectl, "-n", OPERATOR_NAMESPACE, *words)
        # Every later case has this operator.
        assert _template(deployed) == before


def _template(deployed: Deployed) -> str:
    words = ("get", "deployment", RELEASE, "-o", "jsonpath={.spec.template}")
    return deployed.kubectl("-n", OPERATOR_NAMESPACE, *words)


async def _roll(deployed: Deployed, spec: object) -> None:
    """Change the pods' spec by a strategic merge, and wait until new ones run."""
    where = ("-n", OPERATOR_NAMESPACE)
    patch = json.dumps({"spec": {"template": {"spec": spec}}})
    await asyncio.to_thread(deployed.kubectl, *where, "patch", "deployment", RELEASE, "-p", patch)
    rolled = (*where, "rollout", "status", f"deployment/{RELEASE}", "--timeout=120s")
    await asyncio.to_thread(deployed.kubectl, *rolled, seconds=130)
