"""The corpus' schema.json, applied: the one place where the form of a case stands, for this package as for others.

Of JSON Schema 2020-12 only what that file uses, so that reading cases needs no further package. Faults name the path,
what stands there, and the nearest name that would be right.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from miles_ref.errors import CaseError
from miles_ref.testing.corpus import SCHEMA, corpus_root

Schema = Mapping[str, Any]

KEYWORDS = frozenset(
    {
        *(
            "$schema",
            "$defs",
            "$ref",
            "title",
            "description",
            "type",
            "const",
            "enum",
            "minimum",
            "minLength",
            "pattern",
        ),
        *("items", "minItems", "uniqueItems", "properties", "required", "additionalProperties", "maxProperties"),
        *("oneOf", "allOf", "if", "then", "else"),
    }
)
"""What is understood here. Another keyword in the file is an error, so that no rule of it is skipped unseen."""

_NAMES = {
    "null": "null",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "a text",
    "array": "a list",
    "object": "an object",
}


@functools.cache
def definitions() -> Mapping[str, Schema]:
    """The `$defs` of the corpus' schema. Raises CaseError where there is no corpus."""
    definitions: Mapping[str, Schema] = json.loads((corpus_root() / SCHEMA).read_text(encoding="utf-8"))["$defs"]
    return definitions


def first_fault(value: Any, name: str, defs: Mapping[str, Schema] | None = None) -> str | None:
    """What is wrong with a value by the definition `name`, as `path is ..., not ...`; None where nothing is."""
    defs = definitions() if defs is None else defs
    return next(_Walk(defs).faults(value, defs[name], ""), None)


def nearest(word: Any, known: Iterable[str]) -> str:
    """For messages: the name that may have been meant, and all that are known."""
    names = sorted(known)
    if not names:
        return "none is known here"
    close = difflib.get_close_matches(str(word), names, 1, 0.5)
    return (f"did you mean {close[0]!r}? " if close else "") + f"known are {', '.join(names)}"


class _Walk:
    """Faults in the order in which a reader meets them; generators, so that the first costs no more than it must."""

    def __init__(self, defs: Mapping[str, Schema]) -> None:
        self._defs = defs

    def faults(self, value: Any, schema: Schema, at: str) -> Iterator[str]:
        unknown = schema.keys() - KEYWORDS
        if unknown:
            raise CaseError(f"{SCHEMA} uses {sorted(unknown)[0]!r}, which is not understood here")
        if "$ref" in schema:
            yield from self.faults(value, self._resolved(schema), at)
        if "type" in schema:
            types = _types(schema)
            if not any(_is(value, name) for name in types):
                yield f"{_at(at)} is {value!r:.80}, not {' or '.join(_NAMES[name] for name in types)}"
                return
        yield from _value_faults(value, schema, at)
        if isinstance(value, list):
            yield from self._list(value, schema, at)
        if isinstance(value, dict):
            yield from self._object(value, schema, at)
        for part in schema.get("allOf", ()):
            yield from self.faults(value, part, at)
        if "if" in schema:
            holds = next(self.faults(value, schema["if"], at), None) is None
            yield from self.faults(value, schema.get("then" if holds else "else", {}), at)
        if "oneOf" in schema:
            yield from self._one_of(value, schema["oneOf"], at)

    def _resolved(self, schema: Schema) -> Schema:
        return self._defs[schema["$ref"].removeprefix("#/$defs/")] if "$ref" in schema else schema

    def _list(self, value: Sequence[Any], schema: Schema, at: str) -> Iterator[str]:
        if len(value) < schema.get("minItems", 0):
            yield f"{_at(at)} is a list of {len(value)}, and needs at least {schema['minItems']}"
        if schema.get("uniqueItems"):
            seen: list[Any] = []
            for item in value:
                if item in seen:
                    yield f"{_at(at)} holds {item!r:.80} twice"
                seen.append(item)
        items = schema.get("items")
        if items == {"type": "integer"} and all(type(item) is int for item in value):
            return  # token ids, the bulk of a case
        if items is not None:
            for index, item in enumerate(value):
                yield from self.faults(item, items, f"{at}[{index}]")

    def _object(self, value: Mapping[str, Any], schema: Schema, at: str, meant: Iterable[str] = ()) -> Iterator[str]:
        properties: Mapping[str, Schema] = schema.get("properties", {})
        others = schema.get("additionalProperties", True)
        for key in value if others is False else ():
            if key not in properties:
                yield f"{f'{at}: ' if at else ''}unknown key {key!r}; {nearest(key, meant or properties)}" + (
                    f" ({schema['description']})" if not properties and "description" in schema else ""
                )
        missing = [key for key in schema.get("required", ()) if key not in value]
        if missing:
            yield f"{_at(at)} has no {', '.join(missing)}"
        if len(value) > schema.get("maxProperties", len(value)):
            yield f"{_at(at)} has {len(value)} keys, and may have {schema['maxProperties']}"
        for key, item in value.items():
            if key in properties:
                yield from self.faults(item, properties[key], f"{at}.{key}" if at else key)
            elif isinstance(others, Mapping):
                yield from self.faults(item, others, f"{at}.{key}" if at else key)

    def _one_of(self, value: Any, branches: Sequence[Schema], at: str) -> Iterator[str]:
        """The faults by the branch that is meant. The branches of the file exclude each other."""
        resolved = [self._resolved(branch) for branch in branches]
        fitting = [branch for branch in resolved if any(_is(value, name) for name in _types(branch))]
        if not fitting:
            names = [_NAMES[name] for branch in resolved for name in _types(branch)]
            yield f"{_at(at)} is {value!r:.80}, not {' or '.join(dict.fromkeys(names))}"
            return
        if not isinstance(value, dict):
            yield from self.faults(value, fitting[0], at)
            return
        steps = [branch for branch in fitting if "const" in branch.get("properties", {}).get("do", {})]
        if steps:
            kinds = {branch["properties"]["do"]["const"] for branch in steps}
            do = value.get("do")
            if "do" not in value:
                yield f"{_at(at)} has no do; {nearest('', kinds)}"
                return
            fitting = [branch for branch in steps if branch["properties"]["do"]["const"] == do]
            if not fitting:
                yield f"{at}.do is {do!r:.80}; {nearest(do, kinds)}"
                return
            at = f"{at} ({do})"
        best = max(fitting, key=lambda branch: len(value.keys() & branch.get("properties", {}).keys()))
        meant = {name for branch in fitting for name in branch.get("properties", {})}
        # Of several branches, a key that none of them knows is misspelt; one of another branch is misplaced.
        yield from self._object(
            {key: value[key] for key in value if key not in meant}, {**best, "required": ()}, at, meant
        )
        yield from self.faults(value, best, at)


def _value_faults(value: Any, schema: Schema, at: str) -> Iterator[str]:
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices is not None and not any(_same(value, choice) for choice in choices):
        words = [str(choice) for choice in choices]
        yield f"{_at(at)} is {value!r:.80}; {nearest(value, words)}"
    if "minimum" in schema and _is(value, "number") and value < schema["minimum"]:
        yield f"{_at(at)} is {value!r:.80}, less than {schema['minimum']}"
    if isinstance(value, str):
        if len(value) < schema.get("minLength", 0):
            yield f"{_at(at)} is {value!r:.80}, shorter than {schema['minLength']} characters"
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{_at(at)} is {value!r:.80}, which is not of the form {schema['pattern']}"


def _types(schema: Schema) -> list[str]:
    types: str | list[str] = schema.get("type", list(_NAMES))
    return [types] if isinstance(types, str) else types


def _is(value: Any, name: str) -> bool:
    match name:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return not isinstance(value, bool) and (
                isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            )
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list)
        case _:
            return isinstance(value, dict)


def _same(left: Any, right: Any) -> bool:
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def _at(at: str) -> str:
    return at or "it"
