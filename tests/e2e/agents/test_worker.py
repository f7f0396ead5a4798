"""agents.md, Worker: the process, its flags, and what the wire shows beyond the cases of the corpus."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from miles_ref.agents import worker_server
from miles_ref.agents.command import worker_group
from miles_ref.agents.core import CoreSettings
from miles_ref.agents.submission import Order
from miles_ref.agents.worker_server import WRITE_BYTES, ServerSettings, WorkerServer, running_worker
from tests.e2e.agents.support import AGENTS, ODD, children, ends, exchange, watch_frames, worker_process


@pytest.fixture(scope="module")
def worker() -> Iterator[str]:
    with worker_process("--cancel-grace", "60") as process:
        yield process.url


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def submit(http: aiohttp.ClientSession, url: str, call_id: str, agent: str, **kwargs: Any) -> None:
    fn = agent if ":" in agent else AGENTS + agent
    body = {"call_id": call_id, "fn": fn, "kwargs": kwargs, "scope": "10.0.0.1:30000"}
    async with http.post(f"{url}/calls", json=body) as reply:
        assert reply.status == 200


async def poll(http: aiohttp.ClientSession, url: str, call_id: str, after: int = 0, **query: Any) -> dict[str, Any]:
    async with http.get(f"{url}/calls/{call_id}", params={"after": after, "wait": 24, **query}) as reply:
        body: dict[str, Any] = await reply.json()
        return body


async def listed(
    http: aiohttp.ClientSession, url: str, call_id: str, when: Callable[[dict[str, Any]], bool] = lambda row: True
) -> dict[str, Any]:
    """What the listing says of a call, as soon as `when` holds for it; waits without polling the call."""
    for _ in range(1000):
        async with http.get(f"{url}/calls") as reply:
            (row,) = [row for row in (await reply.json())["calls"] if row["call_id"] == call_id]
        if when(row):
            return dict(row)
        await asyncio.sleep(0.05)
    raise AssertionError(f"the listing still says {row}")


async def finish(http: aiohttp.ClientSession, url: str, call_id: str) -> None:
    """Wait until a call has ended, without polling it."""
    await listed(http, url, call_id, lambda row: row["state"] == "finished")


async def finished(http: aiohttp.ClientSession, url: str, call_id: str) -> dict[str, Any]:
    """What a poll from the first report on gets once the call has ended; waits without polling the call."""
    await finish(http, url, call_id)
    return await poll(http, url, call_id)


# --- the process ------------------------------------------------------------------------------------------------------


def test_the_ready_line_is_one_json_line(worker: str) -> None:
    process = subprocess.Popen([sys.executable, "-m", "miles_ref.worker"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout:
        said = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == ""
    assert set(said) == {"url", "pid"}
    assert said["pid"] == process.pid
    assert said["url"].startswith("http://127.0.0.1:")
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("flags", "mentions"),
    [
        (["--host", "0.0.0.0"], "--insecure"),
        (["--host", "0.0.0.0", "--token-file", "{tmp}/empty"], "empty"),
        (["--token-file", "{tmp}/missing"], "cannot be read"),
        (["--token-file", "{tmp}/binary"], "binary is not UTF-8 text"),
        (["--pass-env", "HOME"], "--clean-env"),
        (["--max-calls", "0"], "--max-calls"),
        (["--orphan-timeout", "nan"], "--orphan-timeout"),
        (["--agent-log-dir", "{tmp}/missing"], "--agent-log-dir"),
        (["--unknown"], "--unknown"),
    ],
)
def test_flags_that_cannot_work(flags: list[str], mentions: str, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"t0ken\xff")
    argv = [flag.format(tmp=tmp_path) for flag in flags]
    ended = subprocess.run(
        [sys.executable, "-m", "miles_ref.worker", *argv], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert mentions in ended.stderr
    assert ended.stdout == ""


def test_a_port_that_is_taken_is_said(worker: str) -> None:
    argv = [sys.executable, "-m", "miles_ref.worker", "--port", worker.rpartition(":")[2]]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "cannot listen" in ended.stderr


def test_the_import_is_light() -> None:
    heavy = ("torch", "transformers", "sglang", "ray", "numpy", "pluggy", "click", "rich", "orjson", "msgspec")
    code = f"import sys, miles_ref.worker, miles_ref.agents; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_agents_api_needs_not_even_aiohttp_or_asyncio() -> None:
    code = "import sys, miles_ref.agents.api; print([m for m in ('aiohttp', 'asyncio') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


async def test_children_end_with_a_worker_that_is_killed(http: aiohttp.ClientSession) -> None:
    with worker_process() as process:
        for number, agent in enumerate(("stubborn", "hold_interpreter", "wait")):
            await submit(http, process.url, f"c{number}", agent)
            await poll(http, process.url, f"c{number}")
        pids = children(process.pid)
        assert len(pids) == 3
        os.kill(process.pid, signal.SIGKILL)
        assert [pid for pid in pids if not ends(pid)] == []


async def test_a_second_sigterm_kills_the_children_at_once(http: aiohttp.ClientSession) -> None:
    with worker_process("--cancel-grace", "600") as process:
        await submit(http, process.url, "c", "stubborn")
        await poll(http, process.url, "c")
        os.kill(process.pid, signal.SIGTERM)
        assert (await poll(http, process.url, "c", after=1))["reports"] == ["ignored a cancel"]
        os.kill(process.pid, signal.SIGTERM)
        body = await poll(http, process.url, "c", after=2)
        assert body["outcome"] == {"kind": "cancelled", "by": "drain", "exit_status": -9}
        assert process.stop() == 0


async def test_agents_print_to_their_own_files_where_a_directory_is_given(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    with worker_process("--agent-log-dir", str(tmp_path)) as process:
        await submit(http, process.url, "noisy", "print", lines=2)
        assert (await poll(http, process.url, "noisy", after=0))["reports"] == [0]
        await poll(http, process.url, "noisy", after=1)
        assert '"kind"' not in process.stderr()
    assert (tmp_path / "noisy.log").read_bytes().count(b'"kind"') == 4


@pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="the system does not say how much a pipe may hold")
async def test_small_reports_that_nobody_reads_block_the_agent_soon_after_the_budget(
    http: aiohttp.ClientSession,
) -> None:
    with worker_process("--report-budget-bytes", "4096") as process:
        # 40 KB: more than the budget and what the channel may hold, less than a pipe takes by default.
        await submit(http, process.url, "c", "report", n=1000)
        await listed(http, process.url, "c", lambda row: row["reports"] >= 100)
        await submit(http, process.url, "other", "echo")
        await finish(http, process.url, "other")
        row = await listed(http, process.url, "c")
        assert (row["state"], row["reports"] < 200) == ("running", True)
        body = await poll(http, process.url, "c")
        got = body["reports"]
        while body["outcome"] is None:
            body = await poll(http, process.url, "c", after=body["next"])
            got += body["reports"]
    assert [item["index"] for item in got] == list(range(1000))


@pytest.fixture
def small_send_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel take little at once of what the servers of this process write."""
    create = asyncio.BaseEventLoop.create_server

    async def create_server(self: asyncio.BaseEventLoop, *args: Any, **more: Any) -> asyncio.Server:
        server = await create(self, *args, **more)
        for listening in server.sockets:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return server

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_server", create_server)


@pytest.fixture
async def worker_here(small_send_buffers: None) -> AsyncIterator[tuple[WorkerServer, str]]:
    """A worker in this process that would wait long for an outcome to be fetched."""
    async with running_worker(CoreSettings(drain_linger=600), ServerSettings(), "127.0.0.1", 0) as running:
        yield running


@pytest.mark.parametrize("size", [60_000, 600_000], ids=["less than a server keeps back", "more than that"])
async def test_a_drain_ends_when_the_kernel_has_the_last_outcome_whole(
    worker_here: tuple[WorkerServer, str], http: aiohttp.ClientSession, size: int
) -> None:
    server, url = worker_here
    await submit(http, url, "c", "echo", text="x" * size)
    await finish(http, url, "c")
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        reader.sendall(b"GET /calls/c HTTP/1.1\r\nHost: x\r\n\r\n")
        reader.setblocking(False)
        server.drain()
        got = b""
        while not server.ended.is_set():
            await asyncio.sleep(0)
            with contextlib.suppress(BlockingIOError):
                got += reader.recv(1000)
        # From here on the worker does nothing more, like one that has exited: nothing is awaited.
        reader.settimeout(20)
        head, _, body = got.partition(b"\r\n\r\n")
        length = int(re.findall(rb"Content-Length: (\d+)", head)[0])
        while len(body) < length:
            body += reader.recv(1 << 16)
    assert json.loads(body)["outcome"] == {"kind": "ok", "value": {"text": "x" * size}}


async def test_a_connection_serves_on_after_a_large_outcome(
    worker_here: tuple[WorkerServer, str], http: aiohttp.ClientSession
) -> None:
    _, url = worker_here
    await submit(http, url, "c", "echo", text="x" * 600_000)
    await finish(http, url, "c")

    def exchanges() -> list[tuple[int, int]]:
        connection = HTTPConnection(url.removeprefix("http://"), timeout=60)
        with contextlib.closing(connection):
            connection.connect()
            opened, replies = connection.sock, []
            for path in ("/calls/c", "/calls/unknown", "/calls/c", "/health"):
                connection.request("GET", path)
                reply = connection.getresponse()
                replies.append((reply.status, len(reply.read()) // 600_000))
                assert connection.sock is opened
        return replies

    assert await asyncio.to_thread(exchanges) == [(200, 1), (404, 0), (200, 1), (200, 0)]


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@contextlib.asynccontextmanager
async def call_with_a_reply_under_way(http: aiohttp.ClientSession, url: str) -> AsyncIterator[socket.socket]:
    """A call, and a client that has taken the first byte of a large reply and reads on only if told so."""
    await submit(http, url, "c", ODD + "reports_much_then_waits", size=4 << 20)
    try:
        await listed(http, url, "c", lambda row: row["reports"] == 1)
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            reader.sendall(b"GET /calls/c HTTP/1.1\r\nHost: x\r\n\r\n")
            reader.setblocking(False)
            await take(reader, 1)
            yield reader
    finally:
        async with http.delete(f"{url}/calls/c") as reply:
            assert reply.status in (200, 202)
        await finish(http, url, "c")


async def take(reader: socket.socket, size: int) -> None:
    """Read that many bytes."""
    while size > 0:
        data = await asyncio.get_running_loop().sock_recv(reader, min(size, 1 << 16))
        assert data
        size -= len(data)


async def test_a_client_that_does_not_read_its_reply_does_not_stop_the_orphan_timer(
    worker_here: tuple[WorkerServer, str], http: aiohttp.ClientSession
) -> None:
    server, url = worker_here
    clock = server.core.clock = Clock()
    async with call_with_a_reply_under_way(http, url):
        clock.now += 119.9
        assert (await listed(http, url, "c"))["state"] == "running"
        clock.now += 0.1
        assert (await listed(http, url, "c"))["state"] != "running"
        await finish(http, url, "c")
        body = await poll(http, url, "c", after=1)
    assert body["outcome"] == {"kind": "cancelled", "by": "orphan", "exit_status": -15}


async def test_a_client_that_reads_its_reply_slowly_keeps_the_call(
    worker_here: tuple[WorkerServer, str], http: aiohttp.ClientSession
) -> None:
    server, url = worker_here
    clock = server.core.clock = Clock()
    async with call_with_a_reply_under_way(http, url) as reader:
        for _ in range(3):
            clock.now += 100
            await take(reader, 2 * WRITE_BYTES)
        clock.now += 100
        assert (await listed(http, url, "c"))["state"] == "running"
        clock.now += 20
        assert (await listed(http, url, "c"))["state"] != "running"


async def test_neither_arguments_nor_values_are_kept_once_the_child_has_them(
    worker_here: tuple[WorkerServer, str], http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, url = worker_here
    frames = watch_frames(monkeypatch, worker_server)
    await submit(http, url, "c", "wait", prompt="p")
    assert (await poll(http, url, "c"))["reports"] == ["started"]
    gc.collect()
    assert [frame() for frame in frames] == [None]
    assert [order for order in gc.get_objects() if type(order) is Order] == []
    async with http.delete(f"{url}/calls/c") as reply:
        assert reply.status == 202
    await finish(http, url, "c")


# --- the wire ---------------------------------------------------------------------------------------------------------


async def test_every_reply_has_the_boot_id(worker: str, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{worker}/health") as reply:
        boot_id = (await reply.json())["boot_id"]
    requests = [
        ("GET", "/calls", None, 200),
        ("GET", "/calls/unknown", None, 404),
        ("DELETE", "/calls/no%20id", None, 400),
        ("POST", "/calls", b"{", 400),
        ("GET", "/nowhere", None, 404),
        ("PUT", "/calls", b"", 405),
        ("GET", "/calls/unknown?wait=-1", None, 400),
        ("GET", "/calls/unknown?wait=nan", None, 400),
        ("GET", "/calls/unknown?wait=1_0", None, 400),
        ("GET", "/calls/unknown?after=x", None, 400),
        ("GET", "/calls/unknown?after=-1", None, 400),
        ("GET", "/calls/unknown?cancel=yes", None, 400),
        ("GET", "/calls/" + "x" * 20_000, None, 404),
        ("DELETE", "/calls/" + "x" * 20_000, None, 400),
    ]
    for method, path, body, status in requests:
        async with http.request(method, worker + path, data=body) as reply:
            said = await reply.json()
            assert (reply.status, said["boot_id"]) == (status, boot_id), (method, path)
            assert status < 400 or set(said) == {"error", "code", "boot_id"}


@pytest.mark.parametrize(
    ("version", "expect", "statuses"),
    [("1.1", "100-continue", [100, 400]), ("1.1", "a-miracle", [417]), ("1.0", "a-miracle", [400])],
)
async def test_what_a_request_may_expect(worker: str, version: str, expect: str, statuses: list[int]) -> None:
    head = (
        f"POST /calls HTTP/{version}\r\nHost: x\r\nExpect: {expect}\r\nContent-Length: 2\r\nConnection: close\r\n\r\n"
    )
    said = await exchange(worker, head.encode() + b"{}")
    assert [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d+) ", said)] == statuses
    assert set(json.loads(said.rpartition(b"\r\n\r\n")[2])) == {"error", "code", "boot_id"}


async def test_a_poll_whose_client_vanished_starts_the_orphan_timer(http: aiohttp.ClientSession) -> None:
    with worker_process("--orphan-timeout", "1") as process:
        await submit(http, process.url, "c", "wait", n=0)
        await poll(http, process.url, "c")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await poll(http, process.url, "c", after=1)
        # The held poll was longer than the orphan timeout, and the call lived; nobody polls now.
        body = await finished(http, process.url, "c")
        assert body["outcome"] == {"kind": "cancelled", "by": "orphan", "exit_status": -15}


async def test_several_pollers_get_the_same(worker: str, http: aiohttp.ClientSession) -> None:
    await submit(http, worker, "shared", "report", n=3)
    first = await finished(http, worker, "shared")
    again = await asyncio.gather(*(poll(http, worker, "shared") for _ in range(5)))
    assert all(body == first for body in again)
    assert [item["index"] for item in first["reports"]] == [0, 1, 2]


async def test_health_answers_while_agents_block_and_a_burst_starts(worker: str, http: aiohttp.ClientSession) -> None:
    await submit(http, worker, "loop", "block", where="loop")
    await asyncio.gather(*(submit(http, worker, f"burst{n}", "echo") for n in range(50)))
    for _ in range(20):
        async with asyncio.timeout(20), http.get(f"{worker}/health") as reply:
            assert (await reply.json())["running"] >= 1
    async with http.delete(f"{worker}/calls/loop") as reply:
        assert reply.status == 202
    for n in range(50):
        assert (await poll(http, worker, f"burst{n}"))["outcome"] == {"kind": "ok", "value": {}}


async def test_the_token_opens_everything_but_health_is_open(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    token = tmp_path / "token"
    token.write_text("t0ken\n")
    with worker_process("--token-file", str(token), "--host", "0.0.0.0") as process:
        url = process.url.replace("0.0.0.0", "127.0.0.1")
        async with http.get(f"{url}/health") as reply:
            assert reply.status == 200
        for given in ({}, {"Authorization": "t0ken"}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer ä"}):
            async with http.get(f"{url}/calls", headers=given) as reply:
                assert (reply.status, (await reply.json())["code"]) == (401, "token")
                assert reply.headers["WWW-Authenticate"] == "Bearer"
        async with http.get(f"{url}/calls", headers={"Authorization": "Bearer t0ken"}) as reply:
            assert reply.status == 200
        status = CliRunner().invoke(worker_group, ["status", url])
        assert status.exit_code == 1
        assert "--token-file" in status.output
        status = CliRunner().invoke(worker_group, ["status", url, "--token-file", str(token), "--json"])
        assert json.loads(status.output)["health"]["running"] == 0


# --- miles-ref worker status ------------------------------------------------------------------------------------------


async def test_status_shows_calls_scopes_ages_and_children(http: aiohttp.ClientSession) -> None:
    with worker_process() as process:
        await submit(http, process.url, "shown", "wait", secret="canary")
        await poll(http, process.url, "shown")
        said = await asyncio.to_thread(CliRunner().invoke, worker_group, ["status", process.url, "--json"])
        (row,) = json.loads(said.output)["calls"]
        assert (row["call_id"], row["state"], row["scope"]) == ("shown", "running", "10.0.0.1:30000")
        assert [row["pid"]] == children(process.pid)
        table = await asyncio.to_thread(CliRunner(env={"COLUMNS": "200"}).invoke, worker_group, ["status", process.url])
        for shown in ("shown", "running", "10.0.0.1:30000", str(row["pid"]), "1 of 256 calls run"):
            assert shown in table.output
        assert "canary" not in table.output + said.output


def test_status_says_where_no_worker_is() -> None:
    said = CliRunner().invoke(worker_group, ["status", "http://127.0.0.1:9"])
    assert said.exit_code == 1
    assert "no worker answers" in said.output
    assert CliRunner().invoke(worker_group, ["status", "nonsense"]).exit_code == 2
    said = CliRunner().invoke(worker_group, ["status", "http://127.0.0.1:9", "--token-file", "/no/such/file"])
    assert said.exit_code == 2
    assert "Error: --token-file /no/such/file cannot be read" in said.output
