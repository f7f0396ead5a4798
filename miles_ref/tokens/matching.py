"""Whether a message that a client sent again is the one that is stored (session-http.md, Matching messages).

A matcher is a function (stored, replayed) -> bool. All compare exactly: true is not 1, and no depth is too deep.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from miles_ref.errors import MatcherError, PluginLoadError, described
from miles_ref.tokens.exact_json import exact, parse_object, same

Message = Mapping[str, Any]
Matcher = Callable[[Message, Message], bool]

_FIELDS = ("role", "content", "reasoning_content", "tool_calls")


def strict(stored: Message, replayed: Message) -> bool:
    """Whether role, content, reasoning_content and tool_calls agree; null, "", [] and absent are the same there."""
    return _agree(stored, replayed, _FIELDS, same)


def loose_tool_call(stored: Message, replayed: Message) -> bool:
    """`strict`, but function arguments may also be the same JSON object in another spelling."""
    return _agree(stored, replayed, _FIELDS, _same_function)


def role_content_only(stored: Message, replayed: Message) -> bool:
    """Whether role and content agree; null, "", [] and absent are the same there."""
    return _agree(stored, replayed, ("role", "content"), same)


BUILT_IN: dict[str, Matcher] = {
    "strict": strict,
    "loose_tool_call": loose_tool_call,
    "role_content_only": role_content_only,
}


def get_matcher(name: str) -> Matcher:
    """A built-in matcher by its name, or a synchronous function (stored, replayed) -> bool by its dotted path.

    The path is `package.module.function` or `package.module:function`. Raises PluginLoadError for what cannot be
    imported, is not callable, does not take two arguments, or is async. The matcher that is returned raises
    MatcherError (500) naming the path when the function raises anything, SystemExit and CancelledError too, or returns
    something other than a bool. The function gets copies: what it writes into them changes no session and no request.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    function = _import(name)
    _check_callable(name, function)

    def custom(stored: Message, replayed: Message) -> bool:
        try:
            verdict = function(_copy(stored), _copy(replayed))
        except BaseException as error:  # It must not end the server. Nothing is awaited here, so nobody cancelled it.
            raise MatcherError(f"message matcher {name} raised {described(error)}") from error
        if type(verdict) is not bool:
            if inspect.iscoroutine(verdict):
                verdict.close()
            raise MatcherError(f"message matcher {name} returned {type(verdict).__name__}, not a bool")
        return verdict

    return custom


def _copy(value: Any) -> Any:
    """A copy of a JSON value; far faster than copy.deepcopy, which custom matchers would wait for at every message."""
    if isinstance(value, dict):
        return {key: _copy(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_copy(member) for member in value]
    return value


def first_difference(stored: Message, replayed: Message) -> str:
    """The first of the compared fields in which two messages differ under `strict`, with both values, for an error."""
    for field in _FIELDS:
        if not _agree(stored, replayed, (field,), same):
            return f"{field} is {_shown(replayed.get(field))}, stored is {_shown(stored.get(field))}"
    return "the message matcher does not take it for the stored one"


def _agree(
    stored: Message, replayed: Message, fields: tuple[str, ...], same_function: Callable[[Any, Any], bool]
) -> bool:
    for field in fields:
        one, other = stored.get(field), replayed.get(field)
        if type(one) is str and type(other) is str:  # Nearly all of them; the general way takes ten times as long.
            if one != other:
                return False
        elif _is_empty(one) and _is_empty(other):
            continue
        elif field == "tool_calls":
            if not _same_calls(one, other, same_function):
                return False
        elif not same(one, other):
            return False
    return True


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list) and not value)


def _same_calls(stored: Any, replayed: Any, same_function: Callable[[Any, Any], bool]) -> bool:
    if not (isinstance(stored, list) and isinstance(replayed, list)):
        return same(stored, replayed)
    return len(stored) == len(replayed) and all(
        _same_call(one, other, same_function) for one, other in zip(stored, replayed, strict=True)
    )


def _same_call(stored: Any, replayed: Any, same_function: Callable[[Any, Any], bool]) -> bool:
    if not (isinstance(stored, dict) and isinstance(replayed, dict)):
        return same(stored, replayed)
    keys = stored.keys() - {"index"}
    return keys == replayed.keys() - {"index"} and all(
        (same_function if key == "function" else same)(stored[key], replayed[key]) for key in keys
    )


def _same_function(stored: Any, replayed: Any) -> bool:
    """Like `same`, for the function of a tool call, but for its arguments in another spelling."""
    if not (isinstance(stored, dict) and isinstance(replayed, dict)) or stored.keys() != replayed.keys():
        return same(stored, replayed)
    return all((_same_arguments if key == "arguments" else same)(value, replayed[key]) for key, value in stored.items())


def _same_arguments(stored: Any, replayed: Any) -> bool:
    if same(stored, replayed):
        return True
    one, other = _arguments_object(stored), _arguments_object(replayed)
    return one is not None and other is not None and same(one, other)


def _arguments_object(arguments: Any) -> dict[str, Any] | None:
    """The exact object that function arguments mean: null and "" mean {}; None for what is no JSON object."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        return parse_object(arguments)
    if not isinstance(arguments, dict):
        return None
    try:
        return dict(exact(arguments))
    except ValueError:
        return None


def _import(name: str) -> Any:
    path, colon, attribute = name.partition(":")
    if not colon:
        path, _, attribute = name.rpartition(".")
    if not path or not attribute:
        choices = ", ".join(BUILT_IN)
        raise PluginLoadError(
            f"no message matcher {name!r}: choose {choices}, or give a dotted path package.module.function"
        )
    try:
        return getattr(importlib.import_module(path), attribute)
    except (Exception, SystemExit) as error:
        # Importing runs the plugin's code, which may raise anything.
        raise PluginLoadError(f"message matcher {name}: cannot import it: {described(error)}") from error


def _check_callable(name: str, function: Any) -> None:
    if not callable(function):
        raise PluginLoadError(f"message matcher {name} is {type(function).__name__}, not a function")
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    if any(kind(one) for kind in kinds for one in (inner, getattr(inner, "__call__", None))):  # noqa: B004
        raise PluginLoadError(f"message matcher {name} is async or a generator; it must return its bool directly")
    try:
        inspect.signature(function).bind({}, {})
    except TypeError as error:
        raise PluginLoadError(f"message matcher {name} must take (stored, replayed): {error}") from error
    except ValueError:
        return  # A built-in function without a readable signature: its first call will tell.


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (RecursionError, TypeError, ValueError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
