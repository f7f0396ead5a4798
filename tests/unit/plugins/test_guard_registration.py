"""What is refused before a server starts: pluggy would take all of it (docs/plugins.md)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from miles_ref.errors import PluginLoadError
from miles_ref.hookspecs import hookimpl
from miles_ref.plugins.guard import HOOKS, Implementation, Origin, implementations

ORIGIN = Origin("mine", "my-package", "1.2")


async def is_async(leaf_samples: Any) -> Any: ...


def generates(leaf_samples: Any) -> Any:
    yield leaf_samples


async def generates_async(leaf_samples: Any) -> Any:
    yield leaf_samples


def with_default(leaf_samples: Any, session_metadata: Any = None) -> Any: ...


def keyword_only(leaf_samples: Any, *, session_metadata: Any) -> Any: ...


def positional_only(leaf_samples: Any, /) -> Any: ...


def star(*leaf_samples: Any) -> Any: ...


def double_star(**arguments: Any) -> Any: ...


def unknown_argument(leaf_samples: Any, metadata: Any) -> Any: ...


class AsyncCallable:
    async def __call__(self, leaf_samples: Any) -> Any: ...


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (is_async, "it is async"),
        (functools.partial(is_async), "it is async"),
        (AsyncCallable(), "it is async"),
        (AsyncCallable().__call__, "it is async"),
        (generates, "it is a generator"),
        (generates_async, "it is a generator"),
        (with_default, "session_metadata has a default"),
        (keyword_only, "session_metadata.* is keyword-only"),
        (positional_only, "leaf_samples.* is positional-only"),
        (star, r"\*leaf_samples"),
        (double_star, r"\*\*arguments"),
        (unknown_argument, "there is no argument metadata"),
        (3, "it is 3, not a function"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_function_that_cannot_be_a_hook_is_refused_with_what_to_do(function: Any, said: str) -> None:
    with pytest.raises(PluginLoadError, match=rf"plugin mine \(my-package 1\.2\), hook pick \(.*\): .*{said}"):
        Implementation.of(ORIGIN, "pick", function)


def test_the_refusal_names_file_and_line() -> None:
    line = with_default.__code__.co_firstlineno
    with pytest.raises(PluginLoadError, match=rf"test_guard_registration\.py:{line}"):
        Implementation.of(ORIGIN, "pick", with_default)


def test_fewer_arguments_in_any_order_are_taken() -> None:
    assert Implementation.of(ORIGIN, "merge", lambda session_metadata, leaf_samples: 0).arguments == (
        "session_metadata",
        "leaf_samples",
    )
    assert Implementation.of(ORIGIN, "truncate", lambda turns: 0).arguments == ("turns",)
    assert Implementation.of(ORIGIN, "pick", lambda: 0).arguments == ()


def test_abort_alone_may_be_async() -> None:
    async def abort(scope: Any) -> None: ...

    assert Implementation.of(ORIGIN, "abort", abort).arguments == ("scope",)


def module(**members: Any) -> ModuleType:
    made = ModuleType("plugin")
    vars(made).update(members)
    return made


def test_hooks_are_what_is_marked() -> None:
    @hookimpl
    def pick(leaf_samples: Any) -> Any: ...

    @hookimpl(specname="merge")
    def finish(leaf_samples: Any) -> Any: ...

    def truncate(turns: Any) -> Any: ...

    found = implementations(ORIGIN, module(pick=pick, finish=finish, truncate=truncate, number=3))
    assert {hook: one.function for hook, one in found.items()} == {"pick": pick, "merge": finish}


def test_an_objects_methods_are_hooks_too() -> None:
    class Plugin:
        @hookimpl
        def pick(self, leaf_samples: Any) -> Any:
            return leaf_samples

        @property
        def broken(self) -> Any:
            raise RuntimeError

    assert implementations(ORIGIN, Plugin())["pick"].arguments == ("leaf_samples",)


def test_an_unknown_hook_is_refused() -> None:
    @hookimpl
    def choose(leaf_samples: Any) -> Any: ...

    with pytest.raises(PluginLoadError, match=r"hook choose .*the hooks are compute, truncate, pick"):
        implementations(ORIGIN, SimpleNamespace(choose=choose))


@pytest.mark.parametrize("options", [{"hookwrapper": True}, {"wrapper": True}])
def test_a_wrapper_around_other_hooks_is_refused(options: dict[str, bool]) -> None:
    def pick(leaf_samples: Any) -> Any:
        yield

    mark: Callable[[Any], Any] = hookimpl(**options)
    with pytest.raises(PluginLoadError, match="hook wrappers are refused"):
        implementations(ORIGIN, module(pick=mark(pick)))


def test_the_signatures_of_the_hooks_are_those_that_plugins_were_written_for() -> None:
    """Names are API: adding an argument is a minor version, all else a major one."""
    assert HOOKS == {
        "compute": ("chain", "settings"),
        "truncate": ("turns", "max_seq_len", "settings"),
        "pick": ("leaf_samples", "session_metadata"),
        "merge": ("leaf_samples", "session_metadata"),
        "encode": ("samples", "session_metadata", "empty_reason"),
        "abort": ("scope", "every_scope"),
    }
