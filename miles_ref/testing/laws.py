"""Laws of picker and merger: what holds whatever they choose (design.md, Corpus; pipeline.md, v2).

A law case gives a forest and names laws. Picker and merger, ours where none is named, are run on it in our pipeline.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles_ref.errors import AssemblyError, CaseError
from miles_ref.plugins import Assembly, Pipeline
from miles_ref.sample import Sample
from miles_ref.testing.cases import Case
from miles_ref.testing.compare import first_difference
from miles_ref.testing.kinds.assemble import forest_chains, session_metadata, settings_of
from miles_ref.testing.kinds.codec import plain
from miles_ref.wire import SAMPLES_VALUE_SPEC_V2

SERVER_KEYS = ("accumulated_token_ids", "tito_session_mismatch", "leaf")
Place = tuple[int, int]
"""A node's id and the position of one of its completion's tokens."""


@dataclass
class Forest:
    """A case's forest, assembled as often as a law needs it; every time from the same records."""

    case: Case
    pipeline: Pipeline
    metadata: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self._settings = settings_of(self.case.config)
        self._chains = forest_chains(self.case.input["nodes"], self._settings)
        self.metadata = session_metadata(self.case)

    def leaf_samples(self) -> list[Sample]:
        """Fresh leaf samples, as pick gets them."""
        return self.pipeline.leaf_samples(self._chains, self.case.input.get("max_seq_len"), self._settings)

    def result(self, pipeline: Pipeline | None = None) -> Assembly:
        """The whole assembly."""
        chosen = pipeline or self.pipeline
        budget = self.case.input.get("max_seq_len")
        return chosen.assemble(self._chains, copy.deepcopy(self.metadata), budget, self._settings)


def law_differences(
    case: Case, *, picker: str | None = None, merger: str | None = None, plugin_set: str | None = None
) -> list[str]:
    """The laws of the case that do not hold, each with what was seen."""
    if case.kind != "assemble" or case.version != "v2":
        raise CaseError(f"{case.id}: laws are about assemble cases of v2")
    forest = Forest(case, Pipeline("v2", picker=picker, merger=merger, plugin_set=plugin_set))
    found = []
    for law in case.expect["laws"]:
        if law not in LAWS:
            raise CaseError(f"{case.id}: no law {law!r}; known are {', '.join(LAWS)}")
        try:
            broken = LAWS[law](forest)
        except AssemblyError as error:
            broken = str(error)
        if broken is not None:
            found.append(f"{law}: {broken}")
    return found


def selects_only(forest: Forest) -> str | None:
    """pick returns samples that it was given, none twice, none of its own."""
    leaf_samples = forest.leaf_samples()
    given = {id(sample) for sample in leaf_samples}
    picked = forest.pipeline.pick(list(leaf_samples), copy.deepcopy(forest.metadata))
    repeats = [count for count in Counter(id(sample) for sample in picked).values() if count > 1]
    if repeats:
        return f"a sample was returned {repeats[0]} times"
    strangers = sum(id(sample) not in given for sample in picked)
    return f"{strangers} samples were returned that were not given" if strangers else None


def inputs_untouched(forest: Forest) -> str | None:
    """pick changes neither the samples nor the session's metadata."""
    leaf_samples, metadata = forest.leaf_samples(), copy.deepcopy(forest.metadata)
    before = plain_samples(leaf_samples)
    forest.pipeline.pick(list(leaf_samples), metadata)
    return first_difference(before, plain_samples(leaf_samples), "samples") or first_difference(
        forest.metadata, metadata, "session_metadata"
    )


def deterministic(forest: Forest) -> str | None:
    """The same records give the same samples."""
    first, second = forest.result(), forest.result()
    return first_difference(plain_samples(first.samples), plain_samples(second.samples), "samples")


def total(forest: Forest) -> str | None:
    """Every well-formed forest gives an answer; an error is reported by who runs the law."""
    forest.result()
    return None


def exactly_once(forest: Forest) -> str | None:
    """A completion's token that a surviving chain kept is trained in one sample, never in two, never in none."""
    picked = forest.pipeline.pick(forest.leaf_samples(), copy.deepcopy(forest.metadata))
    kept = {place for sample in picked for place in trained_places(sample, forest)}
    if not picked:
        return None
    merged = forest.pipeline.merge(picked, copy.deepcopy(forest.metadata))
    trained = Counter(place for sample in merged for place in trained_places(sample, forest))
    twice = sorted(place for place, count in trained.items() if count > 1)
    if twice:
        return f"token {twice[0][1]}, of node {twice[0][0]}, is trained {trained[twice[0]]} times"
    never = sorted(kept - trained.keys())
    if never:
        return f"token {never[0][1]}, of node {never[0][0]}, was kept by a surviving chain and is never trained"
    return None


def lengths_agree(forest: Forest) -> str | None:
    """Mask, log probs and rows fit the tokens of each sample."""
    for index, sample in enumerate(forest.result().samples):
        for name in ("loss_mask", "rollout_log_probs"):
            values = getattr(sample, name)
            if values is not None and len(values) != sample.response_length:
                return f"samples[{index}].{name}: {len(values)} values for a response of {sample.response_length}"
        if sample.response_length > len(sample.tokens):
            return f"samples[{index}]: a response of {sample.response_length} in {len(sample.tokens)} tokens"
        for name in ("rollout_routed_experts", "rollout_indexer_topk"):
            rows = getattr(sample, name)
            if rows is not None and rows.shape[0] != len(sample.tokens) - 1:
                return f"samples[{index}].{name}: {rows.shape[0]} rows for {len(sample.tokens)} tokens"
    return None


def server_keys_kept(forest: Forest) -> str | None:
    """The server-owned keys of each sample's metadata are the server's."""
    own = {sample.metadata["leaf"]["node_id"]: sample.metadata for sample in forest.leaf_samples()}
    for index, sample in enumerate(forest.result().samples):
        leaf = sample.metadata.get("leaf")
        node_id = leaf.get("node_id") if isinstance(leaf, dict) else None
        if node_id not in own:
            return f"samples[{index}].metadata.leaf: got {leaf!r:.120}, which is no leaf of the forest"
        for key in SERVER_KEYS:
            wanted = own[node_id].get(key)
            got = _plain(key, sample.metadata.get(key))
            found = first_difference(_plain(key, wanted), got, f"samples[{index}].metadata.{key}")
            if found is not None:
                return found
    return None


def encodable(forest: Forest) -> str | None:
    """What merge returns can be written."""
    forest.pipeline.encode(forest.result())
    return None


def failure_contained(forest: Forest) -> str | None:
    """Whatever the plugin does, the same records give the built-in's samples afterwards."""
    built_in = Pipeline("v2")
    before = plain_samples(forest.result(built_in).samples)
    with contextlib.suppress(AssemblyError):
        forest.result()
    return first_difference(before, plain_samples(forest.result(built_in).samples), "samples")


LAWS: dict[str, Callable[[Forest], str | None]] = {
    "selects-only": selects_only,
    "inputs-untouched": inputs_untouched,
    "deterministic": deterministic,
    "total": total,
    "exactly-once": exactly_once,
    "lengths-agree": lengths_agree,
    "server-keys-kept": server_keys_kept,
    "encodable": encodable,
    "failure-contained": failure_contained,
}


def trained_places(sample: Sample, forest: Forest) -> set[Place]:
    """The tokens that a sample trains, by the node whose completion they belong to."""
    start = len(sample.tokens) - sample.response_length
    trained = {start + at for at, flag in enumerate(sample.loss_mask) if flag}
    nodes = forest.metadata["tree"]["nodes"]
    path = sample.metadata["leaf"]["path_node_ids"]
    spans = [nodes[node_id]["completion_span"] for node_id in path]
    places = set()
    for index, (node_id, (begin, end)) in enumerate(zip(path, spans, strict=True)):
        # What lies beyond the next completion's start was trimmed, and is another node's place.
        limit = min(end, spans[index + 1][0]) if index + 1 < len(spans) else end
        places |= {(node_id, at) for at in range(begin, limit) if at in trained}
    return places


def plain_samples(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Samples as plain values, copied: views and arrays become lists."""
    return [{name: _plain(name, getattr(sample, name)) for name in SAMPLES_VALUE_SPEC_V2} for sample in samples]


def _plain(name: str, value: Any) -> Any:
    if hasattr(value, "__array__"):
        return np.asarray(value).tolist()
    if isinstance(value, Mapping):
        return {key: _plain(name, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(name, item) for item in value]
    return plain(name, value)
