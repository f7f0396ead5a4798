"""session-http.md, Driver; wire.md, Metadata authority; agents.md, The caller's side: generate in mode inline."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import aiohttp
import pytest

from miles_ref.agents.api import InfraAbort
from miles_ref.driver import SessionServerError, generate
from miles_ref.errors import DecodeError, UsageError
from miles_ref.sample import Sample, Status
from tests.e2e.driver.scripted import ScriptedSessionServer, answer, assembled, half, payload, reset

COLLECTED = ["POST /sessions", "POST /sessions/abc/samples", "DELETE /sessions/abc"]
DELETED = ["POST /sessions", "DELETE /sessions/abc"]
LEAF = {"leaf": {"node_id": 0}}


def returning(value: Any) -> Any:
    async def agent(**kwargs: Any) -> Any:
        return value

    return agent


def raising(error: BaseException) -> Any:
    async def agent(**kwargs: Any) -> Any:
        raise error

    return agent


async def run(
    server: ScriptedSessionServer, agent: Any = None, sample: Any = None, params: Any = None, **settings: Any
) -> list[Any]:
    agent = returning(None) if agent is None else agent
    sample = Sample() if sample is None else sample
    before = copy.deepcopy(sample)
    try:
        return await generate(server.settings(agent_function=agent, **settings), sample, params or {})
    finally:
        assert sample == before, "generate changed its input"


async def test_what_the_agent_gets(server: ScriptedSessionServer) -> None:
    seen: dict[str, Any] = {}

    async def agent(**kwargs: Any) -> None:
        seen.update(copy.deepcopy(kwargs))
        kwargs["metadata"]["task"]["x"] = 2
        kwargs["prompt"].append("more")
        kwargs["request_kwargs"]["stop"].append("b")

    sample = Sample(prompt=[{"role": "user", "content": "hi"}], metadata={"task": {"x": 1}})
    params = {"max_new_tokens": 5, "top_p": None, "stop": ["a"]}
    samples = await run(server, agent, sample, params, max_seq_len=99, session_server_instance_id="i-1")
    assert params["stop"] == ["a"]
    assert seen == {
        "base_url": f"http://127.0.0.1:{server.port}/sessions/abc",
        "prompt": [{"role": "user", "content": "hi"}],
        "request_kwargs": {"max_tokens": 5, "stop": ["a"]},
        "metadata": {
            "task": {"x": 1},
            "max_seq_len": 99,
            "session_server_id": f"127.0.0.1:{server.port}",
            "session_server_instance_id": "i-1",
        },
    }
    assert json.loads(server.bodies[1]) == {"max_seq_len": 99}
    assert samples[0].metadata == {"task": {"x": 1}}


async def test_an_agent_that_returns_is_collected(server: ScriptedSessionServer) -> None:
    [sample] = await run(server, sample=Sample(index=4, label="l"))
    assert server.calls == COLLECTED
    assert (sample.index, sample.label, sample.tokens, sample.status) == (4, "l", [1, 2, 3], Status.COMPLETED)


@pytest.mark.parametrize(
    "agent",
    [
        raising(RuntimeError("tool broke")),
        raising(TimeoutError("the agent's own")),
        raising(UsageError("the agent's own use of the package")),
        raising(SystemExit("the agent wants to leave")),
        raising(ExceptionGroup("several", [ValueError("one")])),
        returning([1]),
        returning("text"),
        returning({"reward": float("nan")}),
        returning({"reward": object()}),
        returning({1: "a key that is no string"}),
        returning({"text": "\ud800"}),
    ],
)
@pytest.mark.parametrize("version", ["v1", "v2"])
async def test_an_agents_own_error_is_logged_and_its_trajectory_collected(
    server: ScriptedSessionServer, agent: Any, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.samples = answer(payload(assembled(metadata={"k": 1}), version=version))
    with caplog.at_level(logging.WARNING, logger="miles_ref.driver"):
        [sample] = await run(server, agent, version=version)
    assert server.calls == COLLECTED
    assert (sample.tokens, sample.metadata, sample.remove_sample) == ([1, 2, 3], {"k": 1}, False)
    assert json.loads(server.bodies[1]).get("metadata") is None
    [record] = caplog.records
    assert record.exc_info is not None


async def test_a_collect_timeout_costs_one_sample(server: ScriptedSessionServer) -> None:
    server.samples = server.never
    given = Sample(index=2, prompt="p", metadata={"a": 1})
    samples = await run(server, returning({"reward": 1}), given, collect_timeout=0.2)
    assert samples == [Sample(index=2, prompt="p", metadata={"a": 1}, status=Status.ABORTED)]
    assert server.calls == COLLECTED


@pytest.mark.parametrize("agent", [returning(None), raising(RuntimeError("tool broke"))])
@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (reset, aiohttp.ClientError),
        (half, aiohttp.ClientError),
        (answer(b"turn 1", 422), SessionServerError),
        (answer(b"", 404), SessionServerError),
        (answer(b"", 504), SessionServerError),
        (answer(b"garbage"), DecodeError),
        (answer(b""), DecodeError),
    ],
)
async def test_every_other_failure_of_the_collect_propagates(
    server: ScriptedSessionServer, reply: Any, error: type[Exception], agent: Any
) -> None:
    server.samples = reply
    with pytest.raises(error):
        await run(server, agent)
    assert server.calls == COLLECTED


async def test_an_input_that_is_not_at_its_defaults_is_an_error(server: ScriptedSessionServer) -> None:
    with pytest.raises(DecodeError, match="weight_versions"):
        await run(server, sample=Sample(weight_versions=["1"]))
    assert server.calls == COLLECTED


@pytest.mark.parametrize("reason", ["no_records", "all_truncated"])
async def test_an_empty_v1_reply_is_one_aborted_copy_with_the_metadata(
    server: ScriptedSessionServer, reason: str
) -> None:
    server.samples = answer(payload(session_metadata={"a": "session", "s": "session"}, empty_reason=reason))
    agent = returning({"a": "agent", "g": "agent", "agent_metrics": {"total_tool_time": 2}})
    # An empty reply does not check the input's defaults.
    [sample] = await run(server, agent, Sample(weight_versions=["1"], metadata={"a": "input", "i": "input"}))
    assert sample.status is Status.ABORTED
    assert sample.metadata == {
        "a": "session",
        "i": "input",
        "g": "agent",
        "s": "session",
        "agent_metrics": {"total_tool_time": 2},
    }
    assert (sample.non_generation_time, sample.weight_versions, sample.remove_sample) == (2.0, ["1"], False)


@pytest.mark.parametrize("reason", ["no_records", "all_truncated"])
async def test_an_empty_v2_reply_is_one_aborted_copy_of_the_input_only(
    server: ScriptedSessionServer, reason: str
) -> None:
    server.samples = answer(payload(session_metadata={"s": 1}, empty_reason=reason, version="v2"))
    agent = returning({"g": 1, "agent_metrics": {"total_tool_time": 2}})
    samples = await run(server, agent, Sample(metadata={"i": 1}), version="v2")
    assert samples == [Sample(metadata={"i": 1}, status=Status.ABORTED)]


async def test_v1_metadata_layers(server: ScriptedSessionServer) -> None:
    # Each layer sets its own key and those of the layers above it, so every overlay is seen once.
    names = ["input", "server", "agent", "session"]
    layer = {name: dict.fromkeys(names[at:], name) for at, name in enumerate(names)}
    server.samples = answer(payload(assembled(metadata=layer["server"]), session_metadata=layer["session"]))
    [sample] = await run(server, returning(layer["agent"]), Sample(metadata=layer["input"]))
    assert sample.metadata == {name: name for name in names}


async def test_v2_metadata_travels_and_is_not_applied_again(server: ScriptedSessionServer) -> None:
    reply = payload(assembled(metadata=LEAF | {"a": "server"}), version="v2", session_metadata={"a": "session", "s": 1})
    server.samples = answer(reply)
    [sample] = await run(server, returning({"a": "agent", "g": 1}), Sample(metadata={"i": 1}), version="v2")
    assert json.loads(server.bodies[1]) == {"max_seq_len": None, "metadata": {"a": "agent", "g": 1}}
    assert sample.metadata == {"i": 1, "a": "server"} | LEAF


@pytest.mark.parametrize(("returned", "sent"), [(None, None), ({}, {})])
async def test_v2_sends_what_the_agent_returned(server: ScriptedSessionServer, returned: Any, sent: Any) -> None:
    server.samples = answer(payload(assembled(), version="v2"))
    await run(server, returning(returned), version="v2")
    assert json.loads(server.bodies[1])["metadata"] == sent


async def test_v1_gives_exactly_one_sample(server: ScriptedSessionServer) -> None:
    server.samples = answer(payload(assembled(), assembled()))
    with pytest.raises(DecodeError, match="holds 2"):
        await run(server)
    assert server.calls == COLLECTED


@pytest.mark.parametrize(("ids", "shared"), [((0, 5), 0), ((7, 5), 7), ((None, 5), 5), ((None, 0), 0)])
async def test_several_v2_samples_share_a_rollout_id(
    server: ScriptedSessionServer, ids: tuple[int | None, int], shared: int
) -> None:
    server.samples = answer(payload(assembled(), assembled(), version="v2"))
    samples = await run(server, sample=Sample(rollout_id=ids[0], index=ids[1]), version="v2")
    assert [sample.rollout_id for sample in samples] == [shared, shared]


async def test_several_v2_samples_without_an_id_to_share(server: ScriptedSessionServer) -> None:
    server.samples = answer(payload(assembled(), assembled(), version="v2"))
    with pytest.raises(UsageError, match="rollout_id nor index"):
        await run(server, version="v2")
    assert server.calls == COLLECTED


async def test_a_single_v2_sample_keeps_its_rollout_id(server: ScriptedSessionServer) -> None:
    server.samples = answer(payload(assembled(), version="v2"))
    [sample] = await run(server, sample=Sample(index=5), version="v2")
    assert sample.rollout_id is None


@pytest.mark.parametrize("version", ["v1", "v2"])
async def test_tool_time_becomes_non_generation_time(server: ScriptedSessionServer, version: str) -> None:
    server.samples = answer(payload(assembled(), version=version))
    [sample] = await run(server, returning({"agent_metrics": {"total_tool_time": 1.5, "turns": 3}}), version=version)
    assert sample.non_generation_time == 1.5


@pytest.mark.parametrize(
    "metrics",
    [
        None,
        [],
        {},
        {"total_tool_time": None},
        {"total_tool_time": True},
        {"total_tool_time": "1"},
        {"total_tool_time": 10**400},
    ],
)
async def test_tool_time_that_is_no_number_is_ignored(server: ScriptedSessionServer, metrics: Any) -> None:
    [sample] = await run(server, returning({"agent_metrics": metrics}))
    assert sample.non_generation_time == 0.0
    assert sample.metadata == {"agent_metrics": metrics}


@pytest.mark.parametrize("exit_status", [None, 0, -9])
async def test_infra_abort_is_not_collected(server: ScriptedSessionServer, exit_status: int | None) -> None:
    given = Sample(index=1, prompt="p", metadata={"a": 1})
    samples = await run(server, raising(InfraAbort("WorkerLost", exit_status)), given)
    assert server.calls == DELETED
    assert samples == [
        Sample(
            index=1,
            prompt="p",
            status=Status.ABORTED,
            remove_sample=True,
            metadata={"a": 1, "infra_abort": {"reason": "WorkerLost", "exit_status": exit_status}},
        )
    ]


async def test_infra_abort_survives_a_failing_delete(server: ScriptedSessionServer) -> None:
    server.delete = reset
    [sample] = await run(server, raising(InfraAbort("WorkerUnreachable")))
    assert sample.metadata["infra_abort"] == {"reason": "WorkerUnreachable", "exit_status": None}
    assert server.calls == DELETED


async def test_a_cancelled_agent_is_not_collected(server: ScriptedSessionServer) -> None:
    started = asyncio.Event()
    cleaned_up: list[bool] = []

    async def agent(**kwargs: Any) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned_up.append(True)

    task = asyncio.create_task(run(server, agent))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned_up == [True]
    assert server.calls == DELETED


@pytest.mark.parametrize("ends", ["returns", "raises"])
async def test_a_cancel_counts_whatever_an_inline_agent_makes_of_it(server: ScriptedSessionServer, ends: str) -> None:
    started = asyncio.Event()

    async def agent(**kwargs: Any) -> Any:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if ends == "raises":
                raise RuntimeError("mine") from None
        return {"swallowed": True}

    task = asyncio.create_task(run(server, agent))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.calls == DELETED


async def test_an_inline_agents_own_time_limit_is_its_own(server: ScriptedSessionServer) -> None:
    async def agent(**kwargs: Any) -> Any:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        return {"gave": "up"}

    [sample] = await run(server, agent)
    assert sample.metadata == {"gave": "up"}


@pytest.mark.parametrize(("levels", "sent"), [(199, True), (200, False)])
async def test_v2_metadata_fits_the_request_that_carries_it(
    server: ScriptedSessionServer, levels: int, sent: bool
) -> None:
    """A body has at most 200 levels, and is one of them."""
    value: Any = 1
    for _ in range(levels - 1):
        value = [value]
    server.samples = answer(payload(assembled(), version="v2"))
    await run(server, returning({"x": value}), version="v2")
    assert (json.loads(server.bodies[1])["metadata"] is not None) is sent
    assert server.calls == COLLECTED


@pytest.mark.parametrize("agent", [returning({"a": 1}), raising(InfraAbort("WorkerLost"))])
async def test_an_input_without_metadata(server: ScriptedSessionServer, agent: Any) -> None:
    server.samples = answer(payload(empty_reason="no_records"))
    [sample] = await run(server, agent, Sample(metadata=None))  # type: ignore[arg-type]
    assert sample.status is Status.ABORTED
    assert set(sample.metadata) & {"a", "infra_abort"}


async def test_an_infra_abort_that_lacks_what_its_class_sets(server: ScriptedSessionServer) -> None:
    class Mine(InfraAbort):
        def __init__(self) -> None:
            Exception.__init__(self, "the sandbox is gone")

    [sample] = await run(server, raising(Mine()))
    assert sample.metadata["infra_abort"] == {"reason": "InfraAbort", "exit_status": None}


async def test_a_cancelled_collect_is_only_deleted(server: ScriptedSessionServer) -> None:
    server.samples = server.never
    task = asyncio.create_task(run(server))
    await server.asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.calls == COLLECTED


@pytest.mark.parametrize("error", [asyncio.CancelledError(), GeneratorExit()])
async def test_what_is_no_exception_ends_the_session_and_goes_on(
    server: ScriptedSessionServer, error: BaseException
) -> None:
    with pytest.raises(type(error)):
        await run(server, raising(error))
    assert server.calls == DELETED


async def test_a_session_that_cannot_be_opened_runs_no_agent(server: ScriptedSessionServer) -> None:
    ran: list[bool] = []

    async def agent(**kwargs: Any) -> None:
        ran.append(True)

    server.create = answer(b"full", 429)
    with pytest.raises(SessionServerError, match="full"):
        await run(server, agent)
    assert ran == []


async def test_no_agent_function_is_an_error_before_a_session_is_opened(server: ScriptedSessionServer) -> None:
    with pytest.raises(UsageError, match="--custom-agent-function-path"):
        await generate(server.settings(), Sample(), {})
    assert server.calls == []


class ForeignStatus(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    ABORTED = "aborted"


@dataclass
class ForeignSample(Sample):
    """What a user of another code base passes: more fields, and an enum of its own."""

    status: Any = ForeignStatus.PENDING
    extra: list[int] = field(default_factory=lambda: [1])


@pytest.mark.parametrize("empty", [True, False])
async def test_any_object_with_the_attributes_is_taken(server: ScriptedSessionServer, empty: bool) -> None:
    server.samples = answer(payload(empty_reason="no_records") if empty else payload(assembled()))
    [sample] = await run(server, sample=ForeignSample())
    assert type(sample) is ForeignSample
    assert sample.status is (ForeignStatus.ABORTED if empty else ForeignStatus.COMPLETED)
    assert sample.extra == [1]


async def test_many_at_once(start_server: Callable[[], Awaitable[ScriptedSessionServer]]) -> None:
    server = await start_server()
    results = await asyncio.gather(*(run(server, sample=Sample(index=index)) for index in range(32)))
    assert [samples[0].index for samples in results] == list(range(32))
    assert sorted(server.calls) == sorted(COLLECTED * 32)
