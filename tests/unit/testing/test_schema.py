"""The reader of schema.json takes and refuses what JSON Schema does, and the kit's tables are those of the file."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from miles_ref.errors import CaseError
from miles_ref.testing.cases import CONFIG_DEFAULTS
from miles_ref.testing.corpus import SCHEMA, corpus_root, raw_cases
from miles_ref.testing.kinds.worker import FLAGS
from miles_ref.testing.laws import LAWS
from miles_ref.testing.schema import definitions, first_fault, nearest

VALUES = (3, -1, 2.5, "x", None, True, [], {}, [3], {"x": 1}, {"$ref": "a.b"})
EDITS = 150


def validator() -> jsonschema.Draft202012Validator:
    schema = {"$defs": dict(definitions()), "$ref": "#/$defs/case"}
    jsonschema.Draft202012Validator.check_schema(json.loads((corpus_root() / SCHEMA).read_text()))
    return jsonschema.Draft202012Validator(schema)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (holder, key or index) below a value."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def edited(case: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A copy with one place changed: its value, its key, or left out."""
    case = copy.deepcopy(case)
    holder, key = chance.choice([place for place in places(case) if len(json.dumps(place[0][place[1]])) < 5000])
    what = chance.randrange(3)
    if what == 0:
        holder[key] = copy.deepcopy(chance.choice(VALUES))
    elif what == 1 or isinstance(holder, list):
        del holder[key]
    else:
        holder[f"{key}{chance.choice(('s', 'x'))}"] = holder.pop(key)
    return case


@pytest.mark.parametrize("kind", ["assemble", "encode", "decode", "match", "http", "worker"])
def test_it_agrees_with_json_schema(kind: str) -> None:
    chance = random.Random(kind)
    reference = validator()
    cases = [case for _, case in raw_cases(corpus_root()) if case["kind"] == kind and len(json.dumps(case)) < 8000]
    refused = 0
    for _ in range(EDITS):
        case = edited(chance.choice(cases), chance)
        fault = first_fault(case, "case")
        assert (fault is None) == reference.is_valid(case), (fault, case)
        refused += fault is not None
    assert 0 < refused < EDITS


@pytest.mark.parametrize(
    ("value", "schema", "said"),
    [
        (1.0, {"type": "integer"}, None),
        (True, {"type": "integer"}, "it is True, not a whole number"),
        (True, {"const": 1}, "it is True; known are 1"),
        (["a", "b", "a"], {"uniqueItems": True}, "it holds 'a' twice"),
        ("ab", {"minLength": 3}, "shorter than 3"),
        ("ab", {"pattern": "^b"}, "not of the form"),
        ({"a": 1}, {"maxProperties": 0}, "it has 1 keys, and may have 0"),
        ({"a": 1}, {"additionalProperties": {"type": "string"}}, "a is 1, not a text"),
        (3, {"if": {"type": "integer"}, "then": {"minimum": 4}}, "it is 3, less than 4"),
        ("x", {"if": {"type": "integer"}, "else": {"const": "y"}}, "it is 'x'"),
    ],
)
def test_each_keyword(value: Any, schema: dict[str, Any], said: str | None) -> None:
    fault = first_fault(value, "one", {"one": schema})
    assert (fault is None) == (said is None) == jsonschema.Draft202012Validator(schema).is_valid(value)
    assert said is None or said in str(fault)


def test_a_keyword_that_is_not_understood_is_an_error() -> None:
    with pytest.raises(CaseError, match="'maxItems', which is not understood"):
        first_fault([], "one", {"one": {"maxItems": 3}})


def test_names_are_proposed() -> None:
    assert nearest("statuss", ["status", "body"]) == "did you mean 'status'? known are body, status"
    assert nearest("zzz", ["status"]) == "known are status"
    assert nearest("x", []) == "none is known here"


def test_the_tables_of_the_kit_are_those_of_the_schema() -> None:
    defs = definitions()
    assert set(defs["config"]["properties"]) == set(CONFIG_DEFAULTS)
    assert set(defs["worker_config"]["properties"]) == {*FLAGS, "clean_env", "allow_function", "token", "env"}
    (laws,) = (form for form in defs["expect_assemble"]["oneOf"] if "laws" in form["properties"])
    assert set(laws["properties"]["laws"]["items"]["enum"]) == set(LAWS)
