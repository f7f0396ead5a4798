"""Agent functions for tests of a worker, one a behaviour (cases.md, worker). Light to import."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import Any

from miles_ref.agents.api import InfraAbort, report_to_caller


async def echo(**kwargs: Any) -> dict[str, Any]:
    """Return the arguments."""
    return kwargs


async def report(n: int = 3, size: int = 0, **kwargs: Any) -> dict[str, Any]:
    """Report `n` items, each with its index and `size` bytes of padding, then return how many they were."""
    for index in range(n):
        report_to_caller({"index": index, "padding": "x" * size})
    return {"reported": n}


async def fail(message: str = "the agent failed", **kwargs: Any) -> None:
    """Raise an ordinary error."""
    raise ValueError(message)


async def infra(reason: str = "SandboxLost", exit_status: int | None = None, **kwargs: Any) -> None:
    """Raise InfraAbort."""
    raise InfraAbort(reason, exit_status)


async def exit(code: int = 0, **kwargs: Any) -> None:
    """End the process without an outcome."""
    os._exit(code)


async def killed(signal: int = 9, **kwargs: Any) -> None:
    """End the process by a signal, by default SIGKILL as the out-of-memory killer does."""
    os.kill(os.getpid(), signal)
    await asyncio.Event().wait()


async def not_json(**kwargs: Any) -> Any:
    """Return what JSON has no form for."""
    return {"value": object()}


async def wait(n: int = 2, pause: float = 0.0, **kwargs: Any) -> None:
    """Report "started" and wait until cancelled; then report "cleanup 1" to "cleanup n", after pauses in seconds."""
    report_to_caller("started")
    try:
        await asyncio.Event().wait()
    finally:
        for index in range(1, n + 1):
            await asyncio.sleep(pause)
            report_to_caller(f"cleanup {index}")


async def swallow(**kwargs: Any) -> dict[str, Any]:
    """Report "started", wait, and return a value when cancelled, as if nothing had happened."""
    report_to_caller("started")
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        report_to_caller("swallowed")
    return {"swallowed": True}


async def block(seconds: float = 3600.0, where: str = "thread", **kwargs: Any) -> dict[str, Any]:
    """Block for `seconds`: in a thread that the coroutine awaits, or (`where="loop"`) the event loop itself."""
    report_to_caller("started")
    if where == "loop":
        time.sleep(seconds)  # noqa: ASYNC251
    else:
        await asyncio.get_running_loop().run_in_executor(None, time.sleep, seconds)
    return {"blocked": seconds}


async def grandchild(fork: bool = False, stay: bool = False, **kwargs: Any) -> dict[str, Any]:
    """Leave a grandchild that ignores SIGTERM, in the call's process group, and return its pid.

    With `fork` it also holds the call's channel. With `stay` the call goes on until it is cancelled.
    """
    if fork:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(3600)  # noqa: ASYNC251
            os._exit(0)
    else:
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(3600)"
        process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)  # noqa: ASYNC220
        assert process.stdout is not None
        process.stdout.readline()
        pid = process.pid
    report_to_caller({"grandchild": pid})
    if stay:
        await asyncio.Event().wait()
    return {"grandchild": pid}


async def print(lines: int = 100, **kwargs: Any) -> dict[str, Any]:
    """Write noise to both streams, some of it like JSON and some of it no text, and report in between."""
    for index in range(lines):
        noise = b'{"kind": "ok", "value": %d}\n\x00\xff\xfe R\x00\x00\n' % index
        for descriptor in (1, 2):
            os.write(descriptor, noise)
        if index % 10 == 0:
            report_to_caller(index)
    return {"lines": lines}


async def close_streams(**kwargs: Any) -> dict[str, Any]:
    """Close the standard streams, as a daemon does, and go on."""
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    report_to_caller("closed")
    return {"closed": True}


async def environ(names: list[str] | None = None, **kwargs: Any) -> dict[str, str | None]:
    """Return the named variables of the process, null for those that are not set; without names, all of them."""
    return dict(os.environ) if names is None else {name: os.environ.get(name) for name in names}


async def big(n: int = 50, **kwargs: Any) -> dict[str, Any]:
    """Return a value of `n` MiB."""
    return {"data": "x" * (n << 20)}


async def stubborn(**kwargs: Any) -> None:
    """Report "started" and go on waiting whatever is cancelled: only SIGKILL ends it."""
    report_to_caller("started")
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            report_to_caller("ignored a cancel")


async def steady(pause: float = 0.01, **kwargs: Any) -> None:
    """Report 0, 1, 2, ... with pauses in seconds until cancelled, then "cleanup 1"."""
    index = 0
    try:
        while True:
            report_to_caller(index)
            index += 1
            await asyncio.sleep(pause)
    finally:
        report_to_caller("cleanup 1")


async def threads(n: int = 4, each: int = 100, **kwargs: Any) -> dict[str, Any]:
    """Report from `n` threads at once, `each` items a thread."""

    def work(thread: int) -> None:
        for index in range(each):
            report_to_caller([thread, index])

    await asyncio.gather(*(asyncio.to_thread(work, thread) for thread in range(n)))
    return {"reported": n * each}


async def burn(seconds: float = 1.0, **kwargs: Any) -> dict[str, Any]:
    """Use CPU for `seconds` of process time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return {"burned": seconds}


async def hold_interpreter(**kwargs: Any) -> None:
    """Report "started", then never let another thread run: a regular expression that does not end."""
    import re

    report_to_caller("started")
    re.match(r"(a|a)*$", "a" * 64 + "b")


async def _slow_import(**kwargs: Any) -> dict[str, Any]:
    return {"imported": True}


def __getattr__(name: str) -> Any:
    """`slow_import` is looked up while the child imports, and takes MILES_REF_SLOW_IMPORT seconds (5)."""
    if name != "slow_import":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    time.sleep(float(os.environ.get("MILES_REF_SLOW_IMPORT", "5")))
    return _slow_import
