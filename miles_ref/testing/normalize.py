"""One spelling for what a case may spell in several ways, so that whoever runs it meets only that one.

Integral floats become integers where schema.json says integer, and what a case may leave out is filled in. Bodies of
http steps and the contents of records stay as they are: there the spelling is the matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_ref.errors import UsageError
from miles_ref.testing.compare import is_array
from miles_ref.tokens.families import get_family

CONFIG_DEFAULT_TRIM = 0
_CONFIG = ("max_trim_tokens", "num_layers", "moe_router_topk", "max_nodes")
_WORKER_CONFIG = ("max_calls", "report_budget_bytes")
_INPUT = ("max_seq_len", "accumulated_token_ids")
_NODE = ("parent", "token_ids")


def version_of(raw: Mapping[str, Any]) -> tuple[str, str | None]:
    """A case's version, and where the case does not say: why it is this one."""
    if "version" in raw:
        return raw["version"], None
    first = raw["id"].partition("/")
    if first[0] in ("v1", "v2") and first[1]:
        return first[0], f"as the id begins with {first[0]}"
    given = raw.get("input")
    if isinstance(given, Mapping) and "nodes" in given:
        return "v2", "as input has nodes"
    return "v1", "as neither the id nor input says otherwise"


def trim_fault(raw: Mapping[str, Any]) -> str | None:
    """A max_trim_tokens of an http case that is neither the default, as if absent, nor its family's.

    A server has no flag for it, so it always has that of the family.
    """
    config = raw.get("config", {})
    if raw["kind"] != "http" or "max_trim_tokens" not in config:
        return None
    name = config.get("family", "default")
    try:
        own = get_family(name).max_trim_tokens
    except UsageError:
        return None  # the server says which families there are
    given = config["max_trim_tokens"]
    if given in (CONFIG_DEFAULT_TRIM, own):
        return None
    return (
        f"config.max_trim_tokens is {given}, and a session server has no flag for it: it takes that of the family "
        f"{name!r}, {own}; write {own}, or leave it out"
    )


def normalized(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A copy, as deep as it differs, of a case that has a version and is of the schema's form."""
    kind = raw["kind"]
    config = _whole(raw.get("config", {}), _CONFIG)
    if kind == "http":
        config.pop("max_trim_tokens", None)  # the family's own, see trim_fault
    case = {**raw, "config": config, "input": _input(kind, raw["input"], config)}
    if "expect" in raw:
        case["expect"] = _expect(kind, raw["expect"])
    return case


def _input(kind: str, given: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    made = _whole(given, _INPUT) if kind == "assemble" else dict(given)
    match kind:
        case "assemble" if "nodes" in given:
            made["nodes"] = [_whole(node, _NODE) for node in given["nodes"]]
        case "encode":
            made = {"session_metadata": {}, "empty_reason": None, **given}
            made["samples"] = [_sample(sample) for sample in given["samples"]]
        case "decode" if given.get("input_sample"):
            made["input_sample"] = _sample(given["input_sample"])
        case "match":
            made = {"matcher": config.get("matcher", "strict"), **given}
        case "http" | "worker":
            made["steps"] = [_step(step) for step in given["steps"]]
            if "config" in given:
                made["config"] = _whole(given["config"], _WORKER_CONFIG)
    return made


def _expect(kind: str, expect: Mapping[str, Any]) -> dict[str, Any]:
    if "error" in expect:
        return {"mentions": [], **expect}
    if kind == "assemble" and "samples" in expect:
        return {"empty_reason": None, **expect}
    return dict(expect)


def _sample(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _whole(value, ("shape",)) if isinstance(value, dict) and is_array(value) else value
        for name, value in values.items()
    }


def _step(step: Mapping[str, Any]) -> dict[str, Any]:
    made = _whole(step, ("pid",))
    backend = step.get("backend")
    if isinstance(backend, list):
        made["backend"] = [_whole(reply, ("status",)) for reply in backend]
    elif backend is not None:
        made["backend"] = _whole(backend, ("status",))
    if "step" in step:
        made["step"] = _step(step["step"])
    return made


def _whole(holder: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A copy in which the values of these keys, or the items of their lists, are integers where they are integral."""
    made = dict(holder)
    for name in names:
        value = made.get(name)
        if isinstance(value, list) and any(type(item) is float for item in value):
            made[name] = [_integer(item) for item in value]
        elif type(value) is float:
            made[name] = _integer(value)
    return made


def _integer(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value
