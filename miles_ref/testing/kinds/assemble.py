"""Cases of kind assemble: records, or a forest of nodes, to the samples of a reply (cases.md, assemble)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from miles_ref.assembly.reading import read_record
from miles_ref.errors import AssemblyError
from miles_ref.plugins import Assembly, Pipeline
from miles_ref.records import AssemblySettings, Chain, IntArray, Leaf, Record, int_array
from miles_ref.sample import Sample
from miles_ref.testing.cases import Case
from miles_ref.testing.kinds.codec import fields_of, wire_sample
from miles_ref.tokens.families import get_family
from miles_ref.tokens.mismatch import Entry, full_report
from miles_ref.tokens.tokenizer import load_tokenizer
from miles_ref.wire import decode_samples_and_merge_input_sample

ERROR = AssemblyError.status_code


def run_case(case: Case, plugin_set: str | None = None) -> dict[str, Any]:
    """What a driver decodes of the reply, in the form of the case's expect; a refusal has its `message`.

    The samples go through the codec, so that what is compared is what a driver would train on.
    """
    pipeline = Pipeline(case.version, picker=case.config["picker"], merger=case.config["merger"], plugin_set=plugin_set)
    fields = fields_of(case)
    try:
        assembly = assemble(case, pipeline)
        payload = pipeline.encode(assembly)
    except AssemblyError as error:
        return {"error": ERROR, "message": str(error)}
    reply = decode_samples_and_merge_input_sample(payload, Sample(), fields=fields)
    return {"samples": [wire_sample(sample, fields) for sample in reply.samples], "empty_reason": reply.empty_reason}


def assemble(case: Case, pipeline: Pipeline) -> Assembly:
    """Assemble a case's input with a pipeline of its version. Raises AssemblyError."""
    settings = settings_of(case.config)
    chains = forest_chains(case, settings) if case.version == "v2" else linear_chains(case, settings)
    return pipeline.assemble(chains, session_metadata(case), case.input.get("max_seq_len"), settings)


def settings_of(config: Mapping[str, Any]) -> AssemblySettings:
    """The settings that a case's config means."""
    names = (
        "max_trim_tokens",
        "num_layers",
        "moe_router_topk",
        "routed_experts",
        "indexer_topk",
        "additional_r3",
        "speculative",
        "debug_messages",
    )
    decode = load_tokenizer(config["tokenizer"]).decode
    return AssemblySettings(decode=decode, **{name: config[name] for name in names})


def linear_chains(case: Case, settings: AssemblySettings) -> list[Chain]:
    """The one chain of v1; none without a record."""
    records: list[Record] = []
    before: IntArray | None = None
    for turn, raw in enumerate(case.input["records"]):
        record = read_record(raw, turn=turn, before=before, settings=settings)
        before = tokens_of(record, before)
        records.append(record)
    accumulated = case.input.get("accumulated_token_ids")
    return [Chain(records, None if accumulated is None else _accumulated(accumulated))] if records else []


def forest_chains(case: Case, settings: AssemblySettings) -> list[Chain]:
    """One chain a leaf, in commit order."""
    nodes = case.input["nodes"]
    paths: list[list[int]] = []
    records: list[Record] = []
    tokens: list[IntArray] = []
    for node_id, node in enumerate(nodes):
        parent = node["parent"]
        paths.append([node_id] if parent is None else [*paths[parent], node_id])
        before = None if parent is None else tokens[parent]
        records.append(read_record(node["record"], turn=len(paths[-1]) - 1, before=before, settings=settings))
        tokens.append(tokens_of(records[-1], before))
    return [
        Chain(
            [records[node_id] for node_id in paths[leaf]],
            _accumulated(nodes[leaf]["token_ids"]),
            Leaf(leaf, nodes[leaf]["parent"], tuple(paths[leaf]), records[leaf].response_id),
            mismatch(case, leaf),
        )
        for leaf in leaves(nodes)
    ]


def mismatch(case: Case, node_id: int) -> list[Entry] | None:
    """The mismatch report of a node's path; None where it is not known: the tokenizer "bytes" has no template."""
    path = [case.input["nodes"][at] for at in _path(case.input["nodes"], node_id)]
    family = get_family(case.config["family"])
    try:
        return full_report(
            load_tokenizer(case.config["tokenizer"]),
            family,
            int_array(path[-1]["token_ids"]),
            [message for node in path for message in node["messages"]],
            path[-1]["record"]["request"].get("tools"),
            family.fixed_template_kwargs,
        )
    except Exception:  # a failure to compute it never fails the call, whatever the messages do to the template
        return None


def _accumulated(ids: Sequence[int]) -> IntArray:
    """The accumulated token ids of a case. Raises AssemblyError (422) for one outside int64: no output can equal it."""
    try:
        return int_array(ids)
    except OverflowError as error:
        at = next(at for at, token in enumerate(ids) if not -(2**63) <= token < 2**63)
        raise AssemblyError(
            f"accumulated_token_ids[{at}] is {ids[at]!r:.80}, beyond int64: whatever the output holds there is a trim "
            "that is not allowed"
        ) from error


def tokens_of(record: Record, before: IntArray | None) -> IntArray:
    """Prompt + output of a record, given those of the record before it."""
    shared = record.prompt_tail[:0] if before is None else before[: record.shared]
    return int_array(np.concatenate((shared, record.prompt_tail, record.output_ids)))


def leaves(nodes: Sequence[Mapping[str, Any]]) -> list[int]:
    """The nodes that are no other's parent, in commit order."""
    parents = {node["parent"] for node in nodes}
    return [node_id for node_id in range(len(nodes)) if node_id not in parents]


def session_metadata(case: Case) -> dict[str, Any]:
    """What a server would say of the session (pipeline.md, v2)."""
    if case.version == "v1":
        metadata = {"accumulated_token_ids": case.input.get("accumulated_token_ids") or []}
        return {**metadata, "max_trim_tokens": case.config["max_trim_tokens"]}
    nodes = case.input["nodes"]
    metadata = {
        "accumulated_token_ids": nodes[-1]["token_ids"] if nodes else [],
        "max_trim_tokens": case.config["max_trim_tokens"],
        "tree": {
            "nodes": [_tree_node(node_id, node) for node_id, node in enumerate(nodes)],
            "leaves": [{"node_id": leaf, "path_node_ids": _path(nodes, leaf)} for leaf in leaves(nodes)],
        },
    }
    report = mismatch(case, len(nodes) - 1) if nodes else None
    if report is not None:
        metadata["tito_session_mismatch"] = report
    if case.input.get("agent") is not None:
        metadata["agent"] = case.input["agent"]
    return metadata


def _path(nodes: Sequence[Mapping[str, Any]], node_id: int | None) -> list[int]:
    path: list[int] = []
    while node_id is not None:
        path.append(node_id)
        node_id = nodes[node_id]["parent"]
    return path[::-1]


def _tree_node(node_id: int, node: Mapping[str, Any]) -> dict[str, Any]:
    """A node as `tree` describes it; what its record lacks is refused when the records are read."""
    record = node["record"]
    choices = record["response"].get("choices") or [{}]
    pairs = (choices[0].get("meta_info") or {}).get("output_token_logprobs") or []
    start = len(record["request"].get("input_ids") or [])
    end = start + len(pairs)
    return {
        "id": node_id,
        "parent": node["parent"],
        "seq": node_id,
        "truncated": choices[0].get("finish_reason") == "length",
        "committed_at": record["timestamp"],
        "completion_span": [start, end],
        "num_tokens": end,
        "response_id": record["response"].get("id"),
    }
