"""The command `miles-ref serve`. The tokenizer's libraries are imported only when it runs."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import click

from miles_ref.errors import MilesRefError
from miles_ref.process import ReadyProcess, say_ready, url_of

if TYPE_CHECKING:
    from miles_ref.server.app import SessionServer

_ENGINE_TIMEOUT = 120.0  # seconds for torch to be imported and the model to be built
_COLLECT_AFTER = 10_000  # new objects
_M_MMAP_THRESHOLD = -3  # of malloc.h
_LARGE_BLOCK = 1 << 20


def _json_object(context: click.Context, parameter: click.Parameter, text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise click.BadParameter(f"{text!r} is not a JSON object")
    return value


def _words(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(word.strip() for word in text.split(",") if word.strip())


_COUNT = click.IntRange(min=0)


@click.command("serve")
@click.option("--backend-url", help="Base URL of the backend.  [default: an embedded engine is started]")
@click.option(
    "--hf-checkpoint", default="tiny-chatml", show_default=True, help="Tokenizer: a folder or a shipped name."
)
@click.option("--tito-model", default="default", show_default=True, help="Family of the model, e.g. qwen3, glm47.")
@click.option(
    "--use-session-server",
    "version",
    type=click.Choice(["v1", "v2"]),
    is_flag=False,
    flag_value="v1",
    default="v1",
    help="v1: linear sessions, also alone or absent. v2: trajectory trees.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free port.")
@click.option(
    "--session-message-matcher",
    default="strict",
    show_default=True,
    help="strict, loose_tool_call, role_content_only, or the dotted path of a function (stored, replayed) -> bool.",
)
@click.option("--tito-allowed-append-roles", callback=_words, metavar="A,B", help="Roles that may be appended.")
@click.option("--session-sample-picker-path", help="v2: plugin name, pkg.module.fn or ./file.py:fn that picks samples.")
@click.option("--session-merge-function-path", help="v2: the same for the function that merges samples.")
@click.option("--session-strict-append-only", is_flag=True, help="v2: the forest must stay one chain.")
@click.option(
    "--session-max-nodes", default=1024, show_default=True, type=click.IntRange(min=1), help="v2: per session."
)
@click.option("--use-rollout-routing-replay", is_flag=True, help="Record routed experts; needs --num-layers.")
@click.option("--num-layers", default=0, type=_COUNT, help="Layers in a row of routed experts.")
@click.option("--moe-router-topk", default=0, type=_COUNT, help="Experts a layer.  [default: recovered from replies]")
@click.option("--use-rollout-indexer-replay", is_flag=True, help="Record the indexer's top-k.")
@click.option(
    "--pause-generation-mode",
    type=click.Choice(["abort", "in_place", "retract"]),
    help="in_place: the backend keeps its prefix, so only additional replay rows are asked for.",
)
@click.option("--lora-path", help="Adapter that is trained: sent to the backend as lora_path.")
@click.option("--sglang-speculative-algorithm", help="Collect counters of speculative decoding.")
@click.option("--save-debug-trajectory-data", is_flag=True, help="Put the messages into the samples' metadata.")
@click.option("--apply-chat-template-kwargs", callback=_json_object, metavar="JSON", help="Of every request.")
@click.option("--session-server-instance-id", help="Given in /health.")
@click.option("--session-ttl", default=0.0, show_default=True, help="Seconds after which an idle session is dropped.")
@click.option("--max-sessions", default=0, show_default=True, type=_COUNT, help="Open sessions; 0: no limit.")
@click.option(
    "--max-session-bytes", default=0, show_default=True, type=_COUNT, help="Stored in one session; 0: no limit."
)
@click.option(
    "--max-body-bytes", default=1 << 30, show_default=True, type=click.IntRange(min=1), help="Of one request."
)
@click.option("--shutdown-grace", default=30.0, show_default=True, help="Seconds for turns in flight after SIGTERM.")
def serve_command(backend_url: str | None, host: str, port: int, **flags: Any) -> None:
    """Serve agent sessions: turns, records and training samples.

    When it can serve, one JSON line with url and pid is printed on standard output; everything else goes to standard
    error. SIGTERM stops admitting, lets requests in flight finish within the grace, and exits with status 0.
    """
    # One text is encoded at a time: a pool of threads would only add their switching.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from miles_ref.server.app import SessionServer
    from miles_ref.server.settings import ServerSettings

    try:
        # What is wrong with the flags is found before an engine is started, which costs seconds.
        server = SessionServer(ServerSettings(backend_url=backend_url or "", **flags))
        with contextlib.ExitStack() as stack:
            if backend_url is None:
                server.use_backend(stack.enter_context(_engine(flags["hf_checkpoint"])).url)
            asyncio.run(_serve(server, host, port))
    except (MilesRefError, OSError) as error:
        raise click.ClickException(str(error)) from error


def _engine(tokenizer: str) -> ReadyProcess:
    argv = [sys.executable, "-m", "miles_ref", "engine", "--port", "0", "--tokenizer", tokenizer, "--until-eof"]
    return ReadyProcess(argv, timeout=_ENGINE_TIMEOUT)


async def _serve(server: SessionServer, host: str, port: int) -> None:
    from aiohttp import web

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = server.runner()
    await runner.setup()
    gc.collect()
    gc.freeze()  # The imported libraries stay for good: no collection needs to walk them again.
    gc.set_threshold(_COLLECT_AFTER)  # Turns make few cycles, and many objects that stay.
    _give_back_large_blocks()
    try:
        await web.TCPSite(runner, host, port, backlog=1024).start()
        say_ready(url_of(host, runner.addresses[0][1]))
        await stop.wait()
    finally:
        await runner.cleanup()


def _give_back_large_blocks() -> None:
    """Let the memory of large bodies go back to the system when they are gone.

    glibc stops doing that once it has seen some: what sessions keep then comes to lie between them, and a session with
    replay rows seems to cost four times its rows (mallopt(3), M_MMAP_THRESHOLD). Other C libraries are left alone.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)
