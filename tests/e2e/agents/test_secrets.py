"""agents.md, Environment that travels: unique canaries, searched for in every byte that leaves or is written."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from miles_ref.agents import AgentFunctionError, AgentSettings, call_agent_function
from miles_ref.agents.environment import PROVIDER_CREDENTIALS
from tests.e2e.agents.proxy import Proxy, lose_reply
from tests.e2e.agents.support import AGENTS, Reports, children, exchange, worker_process

ENDINGS = ("SECRET", "SECRET_KEY", "TOKEN", "PASSWORD", "API_KEY", "secret", "Api_Key")
KEYS = tuple(name for credentials in PROVIDER_CREDENTIALS.values() for name in credentials.key_env_vars)


def hostile() -> dict[str, str]:
    """Two hundred variables that patterns match and rules forbid, each with a value of its own."""
    names = [f"{prefix}_{n}_{end}" for prefix in ("AGENT", "HARBOR", "LITE") for n in range(8) for end in ENDINGS]
    names += [*KEYS, *(key.lower() for key in KEYS)]
    urls = {f"AGENT_URL_{n}": f"https://user:canary-url-{n}@host/" for n in range(200 - len(names))}
    return {name: f"canary-{n}-of-a-secret" for n, name in enumerate(names)} | urls


def title(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


async def test_forbidden_values_are_in_no_request_log_error_title_or_listing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    variables = hostile()
    assert len(variables) >= 200
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AGENT_ALLOWED", "control-value")
    names = ["AGENT_ALLOWED", *variables]
    with worker_process(env=dict.fromkeys(variables, "")) as process:
        async with Proxy(process.url) as proxy:
            proxy.on("POST", "/calls", lose_reply, times=1)
            how = AgentSettings(
                worker_urls=(proxy.url,), worker_env=("*_SECRET*", "AGENT_*", "HARBOR_*", "LITE_*", *KEYS)
            )
            got = await call_agent_function(
                AGENTS + "environ",
                mode="worker",
                kwargs={"names": names},
                settings=how,
                env={"MY_TOKEN": "canary-mine"},
            )
            with pytest.raises(AgentFunctionError) as caught:
                await call_agent_function(AGENTS + "fail", mode="worker", settings=how)
            reports = Reports()
            waiting = asyncio.create_task(
                call_agent_function(AGENTS + "wait", mode="worker", settings=how, on_report=reports.append)
            )
            await reports.reach(1)
            titles = [title(pid) for pid in [process.pid, *children(process.pid)]]
            assert len(titles) == 2
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            written = [
                *(seen.body + json.dumps([seen.path, seen.headers]).encode() for seen in proxy.seen),
                *(answer.body for _, answer in proxy.answered),
                *titles,
                process.stderr().encode(),
                caplog.text.encode(),
                repr(caught.value).encode(),
                caught.value.traceback.encode(),
            ]
    everything = b"\n".join(written)
    assert b"control-value" in everything, "the control: what may travel is found"
    assert got["AGENT_ALLOWED"] == "control-value"
    assert b"canary" not in everything
    assert all(not got[name] for name in variables)
    assert "AGENT_URL_0" in caplog.text
    assert "MY_TOKEN" in caplog.text


async def test_the_worker_s_token_is_in_no_agent_and_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text("canary-token")
    env = {"MILES_REF_WORKER_TOKEN": "canary-token", "HEADER": "Bearer canary-token", "OTHER": "control-value"}
    with worker_process("--token-file", str(token), env=env) as process:
        how = AgentSettings(worker_urls=(process.url,), worker_token_file=token)
        got: dict[str, Any] = await call_agent_function(AGENTS + "environ", mode="worker", settings=how)
        assert got["OTHER"] == "control-value"
        assert "canary-token" not in json.dumps(got)
        assert "canary-token" not in process.stderr()


async def test_a_request_that_cannot_be_read_is_not_quoted_in_the_log() -> None:
    with worker_process() as process:
        said = await exchange(
            process.url, b"GET /calls HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer canary-token\x01\r\n\r\n"
        )
        assert b" 400 Bad Request" in said
        log = process.stderr()
    assert "Error handling request from 127.0.0.1: BadHttpMessage" in log
    assert "canary-token" not in log


async def test_keep_env_and_clean_env(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_KEY_FILE", "/of/the/caller")
    monkeypatch.setenv("AGENT_ABSENT_FILE", "/of/the/caller")
    monkeypatch.setenv("AGENT_OTHER", "of the caller")
    names = ["AGENT_KEY_FILE", "AGENT_ABSENT_FILE", "AGENT_OTHER", "HOME", "PASSED"]
    host = {"AGENT_KEY_FILE": "/of/the/worker", "PASSED": "of the worker"}
    monkeypatch.delenv("PASSED", raising=False)
    flags = ["--keep-env", "AGENT_KEY_FILE,AGENT_ABSENT_FILE", "--clean-env", "--pass-env", "AGENT_KEY_FILE,PASSED"]
    monkeypatch.delenv("AGENT_ABSENT_FILE")
    with worker_process(*flags, env=host) as process:
        monkeypatch.setenv("AGENT_ABSENT_FILE", "/of/the/caller")
        got = await call_agent_function(
            AGENTS + "environ",
            mode="worker",
            kwargs={"names": names},
            settings=AgentSettings(worker_urls=(process.url,)),
        )
    assert got == {
        "AGENT_KEY_FILE": "/of/the/worker",
        "AGENT_ABSENT_FILE": None,
        "AGENT_OTHER": "of the caller",
        "HOME": None,
        "PASSED": "of the worker",
    }
