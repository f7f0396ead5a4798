"""The hook abort: all implementations run, ours first, and what they raise comes together (agents.md, Abort)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from miles_ref.hookspecs import hookimpl
from miles_ref.plugins import Catalogue, Pipeline, Plugin
from miles_ref.plugins.guard import Implementation, Origin

Abort = Callable[..., Any]


class Installed(Catalogue):
    """A catalogue with plugins that implement abort with these functions."""

    def __init__(self, *functions: Abort) -> None:
        super().__init__([])
        self._mine = [
            Plugin(origin, {"abort": Implementation.of(origin, "abort", function)})
            for at, function in enumerate(functions)
            for origin in [Origin(f"plugin-{at}", "their-package", "1")]
        ]

    def installed(self) -> list[Plugin]:
        return self._mine


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was called, in order; the built-in abort of worker calls is replaced by one that notes itself."""
    noted: list[Any] = []

    async def ours(scope: Any, every_scope: bool) -> None:
        noted.append(("ours", scope, every_scope))

    monkeypatch.setattr("miles_ref.agents.abort.abort_worker_calls", ours)
    return noted


def pipeline(*functions: Abort) -> Pipeline:
    return Pipeline(installed_aborts=True, catalogue=Installed(*functions))


async def test_all_run_ours_first_sync_or_async_with_what_they_take(calls: list[Any]) -> None:
    @hookimpl
    async def first(scope: Any) -> None:
        await asyncio.sleep(0)
        calls.append(("first", scope))

    def second(every_scope: bool) -> None:
        calls.append(("second", every_scope))

    await pipeline(first, second).abort("10.0.0.1:30000", every_scope=True)
    assert calls[0] == ("ours", "10.0.0.1:30000", True)
    assert sorted(calls[1:]) == [("first", "10.0.0.1:30000"), ("second", True)]


async def test_a_lazy_scope_is_passed_on_unevaluated(calls: list[Any]) -> None:
    def scope() -> str:
        raise AssertionError("evaluated")

    await pipeline().abort(scope)
    assert calls == [("ours", scope, False)]


async def test_one_that_fails_stops_nobody_and_all_errors_come_together(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken_ours(scope: Any, every_scope: bool) -> None:
        raise ValueError("ours")

    def raises(scope: Any) -> None:
        raise RuntimeError("theirs")

    async def exits(scope: Any) -> None:
        raise SystemExit(1)

    async def works(scope: Any) -> None:
        calls.append("works")

    monkeypatch.setattr("miles_ref.agents.abort.abort_worker_calls", broken_ours)
    with pytest.raises(ExceptionGroup, match="3 of 4 implementations of abort failed") as error:
        await pipeline(raises, works, exits).abort(None)
    assert calls == ["works"]
    assert str(error.value.exceptions[0]) == "ours"
    texts = sorted(str(one) for one in error.value.exceptions[1:])
    assert "plugin plugin-0 (their-package 1), hook abort" in texts[0]
    assert "raised RuntimeError: theirs" in texts[0]
    assert "raised SystemExit: 1" in texts[1]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BaseExceptionGroup("both", [SystemExit(1)])])
async def test_whatever_a_coroutine_raises_is_its_plugins_error(calls: list[Any], error: BaseException) -> None:
    async def raises(scope: Any) -> None:
        raise error

    with pytest.raises(ExceptionGroup) as caught:
        await pipeline(raises).abort(None)
    assert f"raised {type(error).__name__}" in str(caught.value.exceptions[0])


async def test_one_that_does_not_end_is_given_up_and_named(calls: list[Any]) -> None:
    async def hangs(scope: Any) -> None:
        await asyncio.Event().wait()

    async def works(scope: Any) -> None:
        calls.append("works")

    with pytest.raises(ExceptionGroup) as error:
        await pipeline(works, hangs).abort(None, time_limit=0.01)
    assert [type(one) for one in error.value.exceptions] == [TimeoutError]
    assert "plugin-1" in str(error.value.exceptions[0])
    assert "works" in calls


async def test_cancellation_passes_at_once(calls: list[Any]) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def waits(scope: Any) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    task = asyncio.create_task(pipeline(waits).abort(None))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await cancelled.wait()


async def test_one_that_awaits_what_it_cancelled_stops_nobody(calls: list[Any]) -> None:
    async def awaits_its_own(scope: Any) -> None:
        task = asyncio.ensure_future(asyncio.Event().wait())
        task.cancel()
        await task

    async def works(scope: Any) -> None:
        calls.append("works")

    with pytest.raises(ExceptionGroup) as error:
        await pipeline(awaits_its_own, works).abort(None)
    (mine,) = error.value.exceptions
    assert "plugin-0" in str(mine)
    assert "CancelledError" in str(mine)
    assert "works" in calls


async def test_one_that_swallows_its_cancellation_is_left_behind(calls: list[Any]) -> None:
    cancelled, end = asyncio.Event(), asyncio.Event()

    async def stays(scope: Any) -> None:
        try:
            await end.wait()
        except asyncio.CancelledError:
            cancelled.set()
            await end.wait()

    async def works(scope: Any) -> None:
        calls.append("works")

    with pytest.raises(ExceptionGroup) as error:
        await pipeline(stays, works).abort(None, time_limit=0.01)
    assert [type(one) for one in error.value.exceptions] == [TimeoutError]
    assert "works" in calls
    await cancelled.wait()
    end.set()


async def test_the_built_in_one_begins_with_the_abort(calls: list[Any]) -> None:
    """It takes the calls that are registered then."""
    abort = asyncio.ensure_future(pipeline().abort(None))
    await asyncio.sleep(0)
    assert calls == [("ours", None, False)]
    await abort


async def test_the_built_in_one_has_a_time_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hangs(scope: Any, every_scope: bool) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("miles_ref.agents.abort.abort_worker_calls", hangs)
    with pytest.raises(ExceptionGroup) as error:
        await pipeline().abort(None, time_limit=0.01)
    assert [type(one) for one in error.value.exceptions] == [TimeoutError]
    assert "not done after 0.01 s" in str(error.value.exceptions[0])
