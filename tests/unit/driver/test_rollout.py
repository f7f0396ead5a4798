"""agents.md, Abort: the rollout's helper, through the hook."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from miles_ref.driver import rollout
from miles_ref.driver.rollout import abort_rollout
from miles_ref.driver.settings import DriverSettings

Call = tuple[str, Any, Any]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What the hook and the agent's own abort were called with, in order."""
    seen: list[Call] = []

    async def hook(scope: Any, every_scope: bool = False) -> None:
        seen.append(("hook", scope, every_scope))

    monkeypatch.setattr(rollout, "call_agent_abort_hook", hook)
    return seen


@pytest.fixture
def agent_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("an_agent_of_this_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def arguments(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(sglang_router_ip="10.0.0.9", sglang_router_port=3000, **more)


@pytest.mark.parametrize("every_scope", [False, True])
async def test_the_hook_gets_a_lazy_scope(calls: list[Call], every_scope: bool) -> None:
    await abort_rollout(arguments(), every_scope=every_scope)
    [(_, scope, every)] = calls
    assert callable(scope)
    assert (scope(), every) == ("10.0.0.9:3000", every_scope)


async def test_settings_are_taken_too(calls: list[Call]) -> None:
    await abort_rollout(DriverSettings(("h:1",), scope="r:2"))
    assert calls[0][1]() == "r:2"


async def test_without_a_router_the_scope_is_null(calls: list[Call]) -> None:
    await abort_rollout(SimpleNamespace())
    assert calls[0][1]() is None


@pytest.mark.parametrize("path", ["an_agent_of_this_test.run", "an_agent_of_this_test:Agent.run"])
@pytest.mark.parametrize("is_async", [False, True])
async def test_the_agents_own_abort_comes_after_the_hook(
    calls: list[Call], agent_module: ModuleType, path: str, is_async: bool
) -> None:
    async def abort_async(args: Any) -> None:
        calls.append(("own", args, None))

    agent_module.__dict__["abort"] = abort_async if is_async else lambda args: calls.append(("own", args, None))
    args = arguments(custom_agent_function_path=path)
    await abort_rollout(args)
    assert [(name, given) for name, given, _ in calls[1:]] == [("own", args)]
    assert calls[0][0] == "hook"


@pytest.mark.parametrize("path", ["an_agent_of_this_test.run", "no_such_module_here.run"])
async def test_an_agent_without_an_abort(calls: list[Call], agent_module: ModuleType, path: str) -> None:
    await abort_rollout(arguments(custom_agent_function_path=path))
    assert [call[0] for call in calls] == ["hook"]


async def test_all_run_and_the_errors_come_together(
    calls: list[Call], agent_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing_hook(scope: Any, every_scope: bool = False) -> None:
        raise ExceptionGroup("hooks", [ValueError("built-in"), KeyError("plugin")])

    def failing_abort(args: Any) -> None:
        raise OSError("own")

    monkeypatch.setattr(rollout, "call_agent_abort_hook", failing_hook)
    agent_module.__dict__["abort"] = failing_abort
    with pytest.raises(ExceptionGroup) as caught:
        await abort_rollout(arguments(custom_agent_function_path="an_agent_of_this_test.run"))
    assert [type(error) for error in caught.value.exceptions] == [ValueError, KeyError, OSError]


@pytest.mark.parametrize("error", [SystemExit("no more"), BaseExceptionGroup("no more", [SystemExit(1)])])
async def test_an_abort_of_the_agents_own_that_exits_ends_nothing(
    calls: list[Call], agent_module: ModuleType, error: BaseException
) -> None:
    async def leaves(args: Any) -> None:
        raise error

    agent_module.__dict__["abort"] = leaves
    with pytest.raises(ExceptionGroup) as caught:
        await abort_rollout(arguments(custom_agent_function_path="an_agent_of_this_test.run"))
    assert f"raised {type(error).__name__}: no more" in str(caught.value.exceptions[0])


async def test_an_abort_of_the_agents_own_that_awaits_what_it_cancelled_is_an_error(
    calls: list[Call], agent_module: ModuleType
) -> None:
    async def awaits_its_own(args: Any) -> None:
        task = asyncio.ensure_future(asyncio.Event().wait())
        task.cancel()
        await task

    agent_module.__dict__["abort"] = awaits_its_own
    with pytest.raises(ExceptionGroup) as caught:
        await abort_rollout(arguments(custom_agent_function_path="an_agent_of_this_test.run"))
    assert "the agent module's own abort" in str(caught.value.exceptions[0])
