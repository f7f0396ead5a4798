"""Laws of picker and merger: what holds whatever they choose (docs/corpus.md; pipeline.md, v2).

A law case gives a forest and names laws. Picker and merger, ours where none is named, are run on it in our pipeline.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from miles_ref.errors import AssemblyError, CaseError
from miles_ref.plugins import Assembly, Pipeline
from miles_ref.plugins.guard import Implementation
from miles_ref.sample import Sample
from miles_ref.testing.cases import Case
from miles_ref.testing.compare import first_difference
from miles_ref.testing.kinds.assemble import forest_chains, session_metadata, settings_of
from miles_ref.testing.kinds.codec import plain
from miles_ref.wire import SAMPLES_VALUE_SPEC_V2

_ROWS = ("rollout_routed_experts", "rollout_indexer_topk")
_KEEP_FIELDS = "merge fills in masks, rewards and metadata of the samples that it is given; leave their other fields"
_KEPT = ("tokens", "response_length", "rollout_log_probs", *_ROWS)
_KEEP_KEYS = "keep the server's keys of the sample's metadata, beside those that merge adds"
SERVER_KEYS = ("accumulated_token_ids", "tito_session_mismatch", "leaf")
Place = tuple[int, int]
"""A node's id and the position of one of its completion's tokens."""


@dataclass
class Forest:
    """A case's forest, assembled as often as a law needs it; every time from the same records."""

    case: Case
    pipeline: Pipeline
    metadata: dict[str, Any] = field(init=False)
    merger: Implementation = field(init=False)

    def __post_init__(self) -> None:
        self._settings = settings_of(self.case.config)
        self._chains = forest_chains(self.case, self._settings)
        self.metadata = session_metadata(self.case)
        self.merger = next(one for one in self.pipeline.asked() if one.hook == "merge")

    def leaf_samples(self) -> list[Sample]:
        """Fresh leaf samples, as pick gets them."""
        return self.pipeline.leaf_samples(self._chains, self.case.input.get("max_seq_len"), self._settings)

    @cached_property
    def own(self) -> dict[int, Sample]:
        """Each leaf sample as the server made it, by node id."""
        return {sample.metadata["leaf"]["node_id"]: sample for sample in self.leaf_samples()}

    def fault(self, at: int, what: str, advice: str) -> str:
        """What is wrong with a merged sample, and how to go on."""
        return f"{self.merger}: samples[{at}].{what}; {advice}"

    def result(self, pipeline: Pipeline | None = None) -> Assembly:
        """The whole assembly."""
        chosen = pipeline or self.pipeline
        budget = self.case.input.get("max_seq_len")
        return chosen.assemble(self._chains, copy.deepcopy(self.metadata), budget, self._settings)


def law_differences(case: Case, pipeline: Pipeline | None = None) -> list[str]:
    """The laws of the case that do not hold for a pipeline of v2 (ours by default), each with what was seen.

    What breaks several laws alike, such as a plugin that raises, is said once, with all of them before it.
    """
    if case.kind != "assemble" or case.version != "v2":
        raise CaseError(f"{case.id}: laws are about assemble cases of v2")
    forest = Forest(case, pipeline or Pipeline("v2"))
    laws: dict[str, list[str]] = {}
    for law in case.expect["laws"]:
        if law not in LAWS:
            raise CaseError(f"{case.id}: no law {law!r}; known are {', '.join(LAWS)}")
        broken = _broken(LAWS[law], forest)
        if broken is not None:
            laws.setdefault(broken, []).append(law)
    return [f"{', '.join(names)}: {broken}" for broken, names in laws.items()]


def _broken(law: Callable[[Forest], str | None], forest: Forest) -> str | None:
    try:
        return law(forest)
    except AssemblyError as error:
        return str(error)
    except Exception as error:
        # Values of a plugin may raise wherever they are looked at; without one the fault is the kit's.
        plugins = [str(one) for one in forest.pipeline.asked() if not one.trusted]
        if not plugins:
            raise
        return (
            f"{', '.join(plugins)}: what it returned cannot be looked at: {type(error).__name__}: {error}; "
            "return samples with plain values, as they are given"
        )


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
    """A completion's token that a surviving chain kept is trained in one sample, never in two or none; no other is."""
    picked = forest.pipeline.pick(forest.leaf_samples(), copy.deepcopy(forest.metadata))
    kept = {place for sample in picked for place in trained_places(sample, forest)}
    if not picked:
        return None
    merged = forest.pipeline.merge(picked, copy.deepcopy(forest.metadata))
    for at, sample in enumerate(merged):
        # Of a sample without its mask or its leaf nobody can say what it trains.
        fault = (
            field_fault(at, sample, forest)
            or leaf_fault(at, sample, forest)
            or kept_fault(at, sample, forest)
            or mask_fault(at, sample, forest)
        )
        if fault is not None:
            return fault
    trained = Counter(place for sample in merged for place in trained_places(sample, forest))
    twice = sorted(place for place, count in trained.items() if count > 1)
    if twice:
        return f"token {twice[0][1]}, of node {twice[0][0]}, is trained {trained[twice[0]]} times"
    never = sorted(kept - trained.keys())
    if never:
        return f"token {never[0][1]}, of node {never[0][0]}, was kept by a surviving chain and is never trained"
    return None


def lengths_agree(forest: Forest) -> str | None:
    """Tokens, log probs and rows of each sample are its leaf's own, and there is a mask that fits them."""
    for at, sample in enumerate(forest.result().samples):
        fault = field_fault(at, sample, forest)
        if fault is None and leaf_fault(at, sample, forest) is None:
            fault = kept_fault(at, sample, forest)
        if fault is not None:
            return fault
    return None


def server_keys_kept(forest: Forest) -> str | None:
    """The server-owned keys of each sample's metadata are the server's."""
    for at, sample in enumerate(forest.result().samples):
        fault = leaf_fault(at, sample, forest)
        if fault is not None:
            return fault
        own = forest.own[sample.metadata["leaf"]["node_id"]].metadata
        for key in SERVER_KEYS:
            wanted, got = _plain(key, own.get(key)), _plain(key, sample.metadata.get(key))
            found = first_difference(wanted, got, f"metadata.{key}")
            if found is not None:
                return forest.fault(at, found, _KEEP_KEYS)
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


def field_fault(at: int, sample: Sample, forest: Forest) -> str | None:
    """The first field of a merged sample that is not of its form, or does not fit its tokens."""
    tokens = _count(sample.tokens)
    length: Any = sample.response_length  # a plugin puts there what it likes
    if tokens is None:
        return forest.fault(at, f"tokens is {_shown(sample.tokens)}, not a list of token ids", _KEEP_FIELDS)
    if isinstance(length, bool) or not isinstance(length, int | np.integer) or length < 0:
        return forest.fault(at, f"response_length is {_shown(length)}, not a number of tokens", _KEEP_FIELDS)
    if length > tokens:
        return forest.fault(at, f"response_length: a response of {length} in {tokens} tokens", _KEEP_FIELDS)
    for name in ("loss_mask", "rollout_log_probs"):
        values = getattr(sample, name)
        if values is None and name != "loss_mask":
            continue
        count = _count(values)
        if count is None:
            return forest.fault(at, f"{name} is {_shown(values)}, not a list of {length} numbers", _KEEP_FIELDS)
        if count != length:
            return forest.fault(at, f"{name}: {count} values for a response of {length}", _KEEP_FIELDS)
    for name in _ROWS:
        rows = getattr(sample, name)
        if rows is None:
            continue
        shape = getattr(rows, "shape", None)
        if not isinstance(shape, tuple) or len(shape) != 3:
            return forest.fault(at, f"{name} is {_shown(rows)}, not an array (rows, layers, topk)", _KEEP_FIELDS)
        if shape[0] != tokens - 1:
            return forest.fault(at, f"{name}: {shape[0]} rows for {tokens} tokens", _KEEP_FIELDS)
    return None


def leaf_fault(at: int, sample: Sample, forest: Forest) -> str | None:
    """Why a merged sample's metadata does not say which leaf it is of."""
    metadata: Any = sample.metadata
    if not isinstance(metadata, dict):
        return forest.fault(at, f"metadata is {_shown(metadata)}, not a dict", _KEEP_KEYS)
    if "leaf" not in metadata:
        return forest.fault(at, f"metadata has no leaf, only {_shown(sorted(map(str, metadata)))}", _KEEP_KEYS)
    leaf = metadata["leaf"]
    node_id = leaf.get("node_id") if isinstance(leaf, dict) else None
    if not isinstance(node_id, int) or node_id not in forest.own:
        return forest.fault(at, f"metadata.leaf is {_shown(leaf)}, which is no leaf of the forest", _KEEP_KEYS)
    found = first_difference(forest.own[node_id].metadata["leaf"], leaf, "metadata.leaf")
    return None if found is None else forest.fault(at, found, _KEEP_KEYS)


def kept_fault(at: int, sample: Sample, forest: Forest) -> str | None:
    """The first field of a merged sample, of a leaf that is one, that is no longer what the model and backend gave."""
    own = forest.own[sample.metadata["leaf"]["node_id"]]
    for name in _KEPT:
        found = first_difference(_plain(name, getattr(own, name)), _plain(name, getattr(sample, name)), name)
        if found is not None:
            return forest.fault(at, found, _KEEP_FIELDS)
    return None


def mask_fault(at: int, sample: Sample, forest: Forest) -> str | None:
    """The first token that a merged sample trains and no turn of its chain generated."""
    own: Any = forest.own[sample.metadata["leaf"]["node_id"]].loss_mask
    stray = np.flatnonzero((np.asarray(sample.loss_mask) != 0) & (np.asarray(own) == 0))
    if not len(stray):
        return None
    return forest.fault(at, f"loss_mask[{stray[0]}] trains a token that no turn generated", "train only what one did")


def _count(values: Any) -> int | None:
    """How many numbers a list or an array of rank 1 holds; None for anything else."""
    if values is None or isinstance(values, str | bytes | Mapping):
        return None
    try:
        array = np.asarray(values)
    except Exception:
        return None
    return len(array) if array.ndim == 1 and array.dtype.kind in "biuf" else None


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except Exception:
        return f"a {type(value).__name__} that cannot be shown"


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
        value = np.asarray(value).tolist()
    if isinstance(value, float) and math.isnan(value):
        return "nan"  # equal to another one: that it cannot be written is another law's
    if isinstance(value, Mapping):
        return {key: _plain(name, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(name, item) for item in value]
    return plain(name, value)
