"""Turn handed vectors into golden cases: `python tools/convert_recordings.py FOLDER [tests/golden/vectors]`.

FOLDER holds assemble.json and codec.json (cases, which only gain the keys that a golden case must have) and
http-*.json.gz: sessions recorded at a trusted server, with `steps` and one `observed` entry a step, in which times and
session ids are "*". An observation becomes the step's `expect`; objects stay exact (`$exact`), times become `$any`, the
session's id a `$ref`.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

WHY = {
    "assemble": "Right values of a trusted implementation for generated records: a rule of any stage may break here.",
    "encode": "Right bytes of a trusted implementation for generated samples: order, layout and number spelling.",
    "decode": "Right values or refusal of a trusted implementation for a generated, perhaps damaged payload.",
    "match": "Right verdict of a trusted implementation for a generated pair of messages.",
    "http": "A generated session recorded at a trusted server: all replies, backend requests and samples must agree.",
}
SPEC = {
    "assemble": "pipeline.md#Contract: from turn records to training samples",
    "encode": "wire.md#Contract: the samples payload",
    "decode": "wire.md#Contract: the samples payload",
    "match": "session-http.md#Matching messages",
    "http": "session-http.md#Contract: the session server over HTTP",
}
SESSION = {"$ref": "s.session_id"}
ANY = {"$any": True}
BACK_HEADERS = ("x-request-id", "x-custom-back", "retry-after")
ROWS = ("rollout_routed_experts", "rollout_indexer_topk")
DTYPES = {"I32": "int32", "I64": "int64", "F64": "float64", "U8": "uint8"}


def golden(case: Mapping[str, Any]) -> dict[str, Any]:
    """The case with the keys that tests/golden requires."""
    kind = case["kind"]
    head = {"id": case["id"], "why": WHY[kind], "kind": kind}
    if "version" in case:
        head["version"] = case["version"]
    added = {"tags": ["generated", kind], "config": case.get("config", {}), "spec": SPEC[kind], "provenance": "oracle"}
    return {**head, **added, **{k: v for k, v in case.items() if k not in head and k not in added}}


def http_case(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded session as an http case."""
    steps = [
        {**step, "expect": expectation(seen)}
        for step, seen in zip(recorded["steps"], recorded["observed"], strict=True)
    ]
    return golden(
        {**{k: recorded[k] for k in ("id", "kind", "version", "config")}, "input": {"steps": steps}, "expect": {}}
    )


def expectation(seen: Mapping[str, Any]) -> dict[str, Any]:
    """One observation as the step's `expect`; empty for a step that was not compared."""
    if "_skip" in seen:
        return {}
    expect: dict[str, Any] = {"status": seen["status"]}
    if seen["type"]:
        expect["content_type"] = seen["type"]
    if "body" in seen:
        expect["body"] = {"$exact": unscrub(seen["body"])}
    elif seen.get("error"):
        expect["body"] = {"error": ANY}
    if "samples" in seen:
        expect["samples"] = samples(seen["samples"])
    if "sse" in seen:
        expect["sse"] = {"$exact": seen["sse"]}
    headers = {name: seen["back_headers"].get(name) for name in BACK_HEADERS} if "back_headers" in seen else {}
    if "cache" in seen:
        headers |= dict(zip(("cache-control", "x-accel-buffering"), seen["cache"], strict=True))
    if headers:
        expect["headers"] = headers
    if "backend" in seen:
        expect["backend_request"] = backend_request(seen["backend"])
    return expect


def backend_request(requests: list[dict[str, Any]]) -> dict[str, Any] | None:
    if not requests:
        return None
    (request,) = requests
    headers = {"authorization": request["auth"], "x-custom": request["custom"]}
    if request["routing"]:
        headers["x-smg-routing-key"] = SESSION
    whole = {"method": request["method"], "path": request["path"], "headers": headers}
    return {**whole, "body": {"$exact": request["body"]}}


def samples(reply: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "samples": [sample(entry) for entry in reply["samples"]],
        "session_metadata": {"$exact": unscrub(reply["session_metadata"])},
        "empty_reason": reply["empty_reason"],
    }


def sample(entry: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = unscrub(dict(entry))
    for field in ROWS:
        if out[field] is not None:
            dtype, shape, data = out[field]
            out[field] = {"dtype": DTYPES[dtype], "shape": shape, "data": data}
    return out


def unscrub(value: Any, key: str = "") -> Any:
    """`value` with "*" replaced: the session's id by a reference, a time by any value."""
    if value == "*":
        return SESSION if key == "session_id" else ANY
    if isinstance(value, dict):
        return {name: unscrub(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [unscrub(item) for item in value]
    return value


def lines(cases: list[dict[str, Any]]) -> str:
    """A JSON list with one case a line, so that a difference between two versions names the case."""
    return "[\n" + ",\n".join(json.dumps(case, ensure_ascii=True, separators=(",", ":")) for case in cases) + "\n]\n"


def files(folder: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for path in sorted(folder.glob("*.json")):
        yield path.name, [golden(case) for case in json.loads(path.read_text())]
    for path in sorted(folder.glob("http-*.json.gz")):
        with gzip.open(path, "rt") as file:
            yield path.name.removesuffix(".gz"), [http_case(case) for case in json.load(file)]


def main(arguments: list[str]) -> int:
    source = Path(arguments[0])
    target = Path(arguments[1] if len(arguments) > 1 else "tests/golden/vectors")
    target.mkdir(parents=True, exist_ok=True)
    for name, cases in files(source):
        (target / name).write_text(lines(cases))
        print(f"{target / name}: {len(cases)} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
