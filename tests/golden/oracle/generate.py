"""Seeded random cases, to compare an implementation with the oracle on inputs that nobody thought of.

``generate(kind, version, seed)`` is a pure function: the same arguments give the same case, without an expectation.
"""

from __future__ import annotations

import base64
import copy
import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any

from .encode import encode, safetensors_bytes
from .table import CODES, META, TENSORS

ALPHABET = [97, 98, 99, 10, 195, 169, 240, 159, 153, 130, 300, 301, 302]
STATUS_WORDS = ["pending", "completed", "truncated", "aborted", "failed"]


def generate(kind: str, version: str, seed: int) -> dict[str, Any]:
    """A case of ``kind`` (assemble, encode, decode, match) without its ``expect``."""
    rng = Random(f"{kind}/{version}/{seed}")
    case: dict[str, Any] = {"id": f"{version}/{kind}/random-{seed:06d}", "kind": kind, "version": version, "config": {}}
    makers: dict[str, Callable[[Random, dict[str, Any]], None]] = {
        "assemble": _assemble,
        "encode": _encode,
        "decode": _decode,
        "match": _match,
    }
    makers[kind](rng, case)
    return case


# assemble


def _assemble(rng: Random, case: dict[str, Any]) -> None:
    config = _config(rng)
    linear = case["version"] == "v1"
    nodes: list[dict[str, Any]] = []
    topk = config.get("moe_router_topk") or rng.randint(1, 2)
    for i in range(rng.choice([0, 1, 2, 2, 3, 3, 4, 5, 6, 7])):
        nodes.append(_node(rng, nodes, _parent(rng, i, linear), config, topk))
    if nodes and rng.random() < 0.3:
        rng.choice(FAULTS)(rng, nodes, config)
    lengths = [len(node["token_ids"]) for node in nodes] or [5]
    budget = rng.choice([None, None, rng.randint(1, max(lengths) + 1), rng.choice(lengths)])
    case["config"] = config
    if not linear:
        case["input"] = {"nodes": nodes, "max_seq_len": budget or None, "agent": _agent(rng, nodes)}
        return
    accumulated = nodes[-1]["token_ids"] if nodes else []
    case["input"] = {
        "records": [node["record"] for node in nodes],
        "accumulated_token_ids": None if config["max_trim_tokens"] == 0 and rng.random() < 0.1 else accumulated,
        "max_seq_len": budget or None,
    }


def _config(rng: Random) -> dict[str, Any]:
    config: dict[str, Any] = {"max_trim_tokens": rng.choice([0, 0, 1, 2])}
    if rng.random() < 0.4:
        config |= {"routed_experts": True, "num_layers": rng.randint(1, 2)}
        if rng.random() < 0.5:
            config["moe_router_topk"] = rng.randint(1, 2)
        config["additional_r3"] = rng.random() < 0.4
    for key in ("indexer_topk", "speculative", "debug_messages"):
        if rng.random() < 0.25:
            config[key] = True
    return config


def _parent(rng: Random, i: int, linear: bool) -> int | None:
    if i == 0:
        return None
    if linear or rng.random() < 0.55:
        return i - 1
    return rng.choice([None, rng.randrange(i), rng.randrange(i)])


def _tokens(rng: Random, low: int, high: int) -> list[int]:
    return [rng.choice(ALPHABET) for _ in range(rng.randint(low, high))]


def _node(
    rng: Random, nodes: list[dict[str, Any]], parent: int | None, config: dict[str, Any], topk: int
) -> dict[str, Any]:
    before = nodes[parent]["token_ids"] if parent is not None else []
    trim = rng.choice([0, config["max_trim_tokens"]]) if parent is not None else 0
    prompt = before[: len(before) - trim] + _tokens(rng, 1, 4)
    output = _tokens(rng, 0 if rng.random() < 0.2 else 1, 5)
    i = len(nodes)
    start = max(0, len(before) - 1)
    meta: dict[str, Any] = {
        "output_token_logprobs": [[-rng.randint(0, 64) / 128, token] for token in output],
        "completion_tokens": len(output),
    }
    if rng.random() < 0.8:
        meta["weight_version"] = rng.choice([str(i), i, None, "w"])
    if rng.random() < 0.7:
        meta |= {"cached_tokens": rng.choice([None, 0, 3]), "prompt_tokens": len(prompt)}
    if rng.random() < 0.7:
        meta["e2e_latency"] = rng.choice([None, 0.5, 2.25])
    if config.get("speculative"):
        meta |= {"spec_accept_token_num": 2, "spec_draft_token_num": 3, "spec_verify_ct": 1}
    if config.get("routed_experts") and rng.random() < 0.95:
        first = start if config.get("additional_r3") else 0
        rows = len(prompt) + len(output) - 1 - first
        if rows > 0 or not config.get("additional_r3"):
            meta["routed_experts"] = _payload(rng, rows * config["num_layers"] * topk)
    if config.get("indexer_topk") and rng.random() < 0.95:
        meta["indexer_topk"] = _payload(rng, (len(prompt) + len(output) - 1) * 2)
        meta["indexer_topk_num_layers"] = 1
    request: dict[str, Any] = {"messages": [{"role": "user", "content": f"turn {i}"}], "input_ids": prompt}
    if config.get("additional_r3"):
        request["routed_experts_start_len"] = start
    reason = rng.choice(["stop", "stop", "stop", "stop", "tool_calls", "tool_calls", "length", "abort"])
    message = {"role": "assistant", "content": f"answer {i}"}
    return {
        "parent": parent,
        "messages": [*request["messages"], message],
        "token_ids": prompt + output,
        "record": {
            "timestamp": 1000.0 + i,
            "request_timestamp": rng.choice([None, 999.5 + i]),
            "request": request,
            "response": {
                "id": f"resp-{i}",
                "choices": [{"index": 0, "message": message, "finish_reason": reason, "meta_info": meta}],
            },
        },
    }


def _payload(rng: Random, count: int) -> str:
    values = [rng.randint(0, 255) for _ in range(max(0, count))]
    return base64.b64encode(struct.pack(f"<{len(values)}i", *values)).decode("ascii")


def _agent(rng: Random, nodes: list[dict[str, Any]]) -> dict[str, Any] | None:
    agent: dict[str, Any] = {}
    if rng.random() < 0.5:
        agent["rewards"] = {f"resp-{i}": rng.choice([0.0, 1.0, None]) for i in range(len(nodes)) if rng.random() < 0.5}
    for key, value in (("task", "t"), ("lifecycle", "mine"), ("leaf", 1), ("tito_session_mismatch", [])):
        if rng.random() < 0.2:
            agent[key] = value
    return rng.choice([None, agent, agent])


def _meta_of(node: dict[str, Any]) -> dict[str, Any]:
    meta: dict[str, Any] = node["record"]["response"]["choices"][0]["meta_info"]
    return meta


def _fault_request(rng: Random, nodes: list[dict[str, Any]], config: dict[str, Any]) -> None:
    request = rng.choice(nodes)["record"]["request"]
    if rng.random() < 0.3:
        del request["input_ids"]
    elif rng.random() < 0.5:
        request["input_ids"][rng.randrange(len(request["input_ids"]))] = 303
    else:
        request["input_ids"].append(304)


def _fault_reply(rng: Random, nodes: list[dict[str, Any]], config: dict[str, Any]) -> None:
    node = rng.choice(nodes)
    pairs = _meta_of(node)["output_token_logprobs"]
    if pairs and rng.random() < 0.6:
        rng.choice(pairs)[0] = rng.choice([None, "nan", "inf", "-inf"])
    else:
        node["record"]["response"]["choices"][0]["finish_reason"] = rng.choice([None, "content_filter", "abort"])


def _fault_accumulated(rng: Random, nodes: list[dict[str, Any]], config: dict[str, Any]) -> None:
    ids = nodes[-1]["token_ids"]
    if rng.random() < 0.5:
        ids.append(97)
    else:
        ids.pop()


def _fault_rows(rng: Random, nodes: list[dict[str, Any]], config: dict[str, Any]) -> None:
    node = rng.choice(nodes)
    for field in ("routed_experts", "indexer_topk"):
        payload = _meta_of(node).get(field)
        if payload:
            raw = base64.b64decode(payload)
            raw = rng.choice([raw[:-4], raw + raw, raw[: len(raw) // 2], raw + b"\0"])
            _meta_of(node)[field] = rng.choice([base64.b64encode(raw).decode("ascii"), "*" + payload, None])
    if "routed_experts_start_len" in node["record"]["request"]:
        node["record"]["request"]["routed_experts_start_len"] += rng.choice([0, 1])


FAULTS = [_fault_request, _fault_reply, _fault_accumulated, _fault_rows]


# encode


def _encode(rng: Random, case: dict[str, Any]) -> None:
    samples = [_sample(rng, case["version"]) for _ in range(rng.choice([0, 1, 1, 2, 3, 12]))]
    if samples and rng.random() < 0.3:
        _spoil_sample(rng, rng.choice(samples))
    case["input"] = {
        "samples": samples,
        "session_metadata": rng.choice([{}, {"ü": [1, 2.5, None, True, {"k": "v"}]}]),
        "empty_reason": None if samples else rng.choice([None, "no_records", "all_truncated"]),
    }


def _sample(rng: Random, version: str) -> dict[str, Any]:
    length = rng.randint(0, 3)
    total = length + rng.randint(0, 3)
    sample: dict[str, Any] = {
        "tokens": [rng.choice([0, 1, 151645, 2**31, 2**40]) for _ in range(total)],
        "response": rng.choice(["", "ok", "é\n", '"\\', "\x00x", "🙂"]),
        "response_length": length,
        "loss_mask": rng.choice([None, [rng.randint(0, 1) for _ in range(length)]]),
        "rollout_log_probs": rng.choice([None, [rng.choice([0.0, -0.1, -1e-30, "-inf"]) for _ in range(length)]]),
        "rollout_routed_experts": _array(rng, total),
        "rollout_indexer_topk": _array(rng, total),
        "status": rng.choice(STATUS_WORDS),
        "weight_versions": rng.choice([[], ["1"], ["1", "é"]]),
        "prefix_cache_info": {"cached_tokens": rng.randint(0, 9), "total_prompt_tokens": rng.randint(0, 9)},
        "metadata": rng.choice([{}, {"a": 1}, {"z": {"b": [0.5]}, "a": None}]),
    }
    if total == 0 and rng.random() < 0.5:
        sample["tokens"] = None
    if version == "v2":
        sample["reward"] = rng.choice([None, 0.0, 1, {"acc": 0.5}])
    return sample


def _array(rng: Random, total: int) -> dict[str, Any] | None:
    if rng.random() < 0.6:
        return None
    shape = [max(0, total - 1), rng.randint(1, 2), rng.randint(1, 2)]
    count = shape[0] * shape[1] * shape[2]
    return {"dtype": "int32", "shape": shape, "data": [rng.randint(-1, 255) for _ in range(count)]}


def _spoil_sample(rng: Random, sample: dict[str, Any]) -> None:
    field = rng.choice(["loss_mask", "rollout_log_probs", "tokens", "rollout_routed_experts", "response_length"])
    bad: dict[str, list[Any]] = {
        "loss_mask": [[-1] * sample["response_length"], [256] * sample["response_length"], [1] * 9],
        "rollout_log_probs": [["nan"] * sample["response_length"], ["inf"] * sample["response_length"], [0.0] * 9],
        "tokens": [[2**63] * 9, [0.5] * 9, []],
        "rollout_routed_experts": [{"dtype": dtype, "shape": [1, 1, 1], "data": [1]} for dtype in ("int64", "int16")],
        "response_length": [sample["response_length"] + 1, 99],
    }
    sample[field] = rng.choice(bad[field])


# decode


def _decode(rng: Random, case: dict[str, Any]) -> None:
    source: dict[str, Any] = {"version": case["version"]}
    samples = [_sample(rng, case["version"]) for _ in range(rng.choice([0, 1, 2, 3, 11]))]
    source["input"] = {"samples": samples, "session_metadata": {"k": [1]}, "empty_reason": None}
    payload = encode(source)
    if rng.random() < 0.5:
        payload = _corrupt(rng, payload)
    case["input"] = {"payload": base64.b64encode(payload).decode("ascii"), "input_sample": _input_sample(rng)}


def _input_sample(rng: Random) -> dict[str, Any]:
    pool: dict[str, Any] = {
        "index": 7,
        "rollout_id": 0,
        "prompt": [{"role": "user", "content": "q"}],
        "label": "l",
        "reward": 0.25,
        "tokens": [9],
        "loss_mask": [1],
        "metadata": {"a": {"mine": 1}, "kept": True},
    }
    sample = {key: copy.deepcopy(value) for key, value in pool.items() if rng.random() < 0.3}
    if rng.random() < 0.1:
        sample |= rng.choice([{"weight_versions": ["1"]}, {"teacher_log_probs": []}, {"opd_reverse_kl": [0.0]}])
    return sample


def _corrupt(rng: Random, payload: bytes) -> bytes:
    if rng.random() < 0.15:
        return payload[: rng.randrange(len(payload))]
    (size,) = struct.unpack("<Q", payload[:8])
    data = payload[8 + size :]
    tensors: dict[str, Any] = {}
    for name, info in json.loads(payload[8 : 8 + size]).items():
        start, end = info["data_offsets"]
        tensors[name] = (name, info["dtype"], info["shape"], data[start:end])
    meta = json.loads(tensors.pop(META)[3])
    if tensors and rng.random() < 0.5:
        _corrupt_tensors(rng, tensors)
    else:
        _corrupt_meta(rng, meta)
    text = json.dumps(meta).encode("utf-8")
    return safetensors_bytes([*tensors.values(), (META, "U8", [len(text)], text)])


def _corrupt_tensors(rng: Random, tensors: dict[str, Any]) -> None:
    name = rng.choice(sorted(tensors))
    _, dtype, shape, raw = tensors[name]
    choice = rng.randrange(4)
    if choice == 0:
        del tensors[name]
    elif choice == 1:
        tensors["extra"] = (name.split(".")[0] + ".99", dtype, shape, raw)
    elif choice == 2:
        tensors[name] = (name, dtype, [1, *shape], raw)
    else:
        width = struct.calcsize(CODES[dtype])
        tensors[name] = (name, dtype, [*shape[:-1], shape[-1] + 1], raw + bytes(width * _rows(shape)))


def _rows(shape: list[int]) -> int:
    count = 1
    for dimension in shape[:-1]:
        count *= dimension
    return count


def _corrupt_meta(rng: Random, meta: dict[str, Any]) -> None:
    if not meta["samples"] or rng.random() < 0.3:
        key = rng.choice(sorted(meta))
        meta[key] = rng.choice([None, 1, "x", [], {}])
        return
    entry = rng.choice(meta["samples"])
    key = rng.choice(sorted(entry))
    choice = rng.randrange(3)
    if choice == 0:
        del entry[key]
    elif choice == 1:
        entry[key] = rng.choice([None, -1, True, "x", [1], {"a": 1}])
    else:
        entry["nulls"] = [*entry["nulls"], rng.choice([*TENSORS, "response", "reward"])]


# match


def _match(rng: Random, case: dict[str, Any]) -> None:
    del case["config"]
    stored = _message(rng)
    replayed = copy.deepcopy(stored)
    for _ in range(rng.randint(0, 2)):
        _edit_message(rng, replayed)
    case["input"] = {
        "stored": stored,
        "replayed": replayed,
        "matcher": rng.choice(["strict", "loose_tool_call", "role_content_only"]),
    }


ARGUMENTS: list[Any] = [
    '{"a":1,"b":[1,2.5]}', '{"b": [1.0, 2.5], "a": 1}', {"a": 1, "b": [1, 2.5]}, '{"a":9007199254740993}',
    '{"a":9007199254740992}', '{"a":true}', '{"a":1}', "", None, "{}", "not json", "[1]", "[1 ]", '{"a":1,"a":1}',
]  # fmt: skip


def _message(rng: Random) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": rng.choice(["user", "assistant", "tool"]),
        "content": rng.choice([None, "", "x", [{"type": "text", "text": "x"}]]),
    }
    if rng.random() < 0.7:
        function = {"name": "f", "arguments": rng.choice(ARGUMENTS)}
        message["tool_calls"] = [{"id": "c1", "type": "function", "index": 0, "function": function}]
    if rng.random() < 0.3:
        message["reasoning_content"] = rng.choice([None, "", "r"])
    return message


def _edit_message(rng: Random, message: dict[str, Any]) -> None:
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls and rng.random() < 0.7:
        edits: list[dict[str, Any]] = [{"index": 5}, {"id": "c2"}, {"id": None}, {"extra": 1}, {}, {}, {}]
        edit = rng.choice(edits)
        calls[0].update(edit)
        if not edit:
            calls[0]["function"]["arguments"] = rng.choice(ARGUMENTS)
        return
    field = rng.choice(["role", "content", "reasoning_content", "tool_calls", "name"])
    message[field] = rng.choice([None, "", [], "x", "r"])
