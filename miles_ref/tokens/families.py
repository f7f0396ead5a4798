"""Families: how the suffix of a turn joins the tokens that the model produced (tokens.md, table).

A third party registers its own with `register_family`; the fields are the columns of the contract's table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import numpy as np

from miles_ref.errors import PluginLoadError, UsageError
from miles_ref.records import IntArray
from miles_ref.tokens.tokenizer import Tokenizer

NEWLINE = "\n"


class Family:
    """The rules of one line of models; the base class is the family "default", which joins without any rule.

    A subclass sets the fields that differ, and overrides `join` if something must stand, or must not stand, between
    snapshot and suffix. The texts in `boundary_tokens` and `tail_tokens` must each be one token of the tokenizer.
    """

    name: ClassVar[str] = "default"
    max_trim_tokens: ClassVar[int] = 0
    """How many ids at the end of a snapshot `join` may drop; the next prompt is checked against the rest."""
    fixed_template_kwargs: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Template kwargs that keep earlier turns as they were; a request that contradicts one is refused (400)."""
    boundary_tokens: ClassVar[tuple[str, ...]] = ()
    """Texts of the tokens that `join` looks for or writes."""
    tail_tokens: ClassVar[tuple[str, ...]] = ()
    """Texts of the tokens that the mismatch report ignores at the end of both sequences."""
    assistant_opener: ClassVar[str | None] = None
    """The text with which an assistant's turn begins; None: the report calls no segment an assistant's."""
    append_roles: ClassVar[tuple[str, ...]] = ("tool", "user", "system", "assistant")
    supports_midpath_assistant_rerender: ClassVar[bool] = True
    """Whether a client's assistant that a later user message follows may be rendered (session-http.md, v2)."""

    def join(self, snapshot: IntArray, suffix: IntArray, ids: Mapping[str, int]) -> tuple[int, IntArray]:
        """Where the next prompt leaves the snapshot, and what follows: input_ids = snapshot[:kept] + tail.

        Arrays are int64, 1-d. `ids` has the ids of `boundary_tokens` by their texts.
        """
        return len(snapshot), suffix

    def bind(self, tokenizer: Tokenizer) -> BoundFamily:
        """The family with its token texts resolved to ids. Raises UsageError for a text that is not one token."""
        ids = {text: _token_id(tokenizer, self.name, text) for text in (*self.boundary_tokens, *self.tail_tokens)}
        return BoundFamily(self, ids, frozenset(ids[text] for text in self.tail_tokens))


@dataclass(frozen=True, slots=True)
class BoundFamily:
    """A family and the ids that its token texts have in one tokenizer."""

    family: Family
    ids: Mapping[str, int]
    tail_ids: frozenset[int]

    def join(self, snapshot: IntArray, suffix: IntArray) -> tuple[int, IntArray]:
        """`Family.join` with the ids filled in."""
        return self.family.join(snapshot, suffix, self.ids)


AnyFamily = TypeVar("AnyFamily", bound=type[Family])

_FAMILIES: dict[str, Family] = {}


def register_family(cls: AnyFamily) -> AnyFamily:
    """Make a family known by its name; usable as a class decorator.

    Raises PluginLoadError for a name that another class has taken.
    """
    taken = _FAMILIES.get(cls.name)
    if taken is not None and type(taken) is not cls:
        raise PluginLoadError(
            f"family {cls.name!r} of {cls.__module__}.{cls.__qualname__}: the name is taken by {type(taken)}"
        )
    _FAMILIES[cls.name] = cls()
    return cls


def get_family(name: str) -> Family:
    """The registered family of that name. Raises UsageError with the choices."""
    if name not in _FAMILIES:
        raise UsageError(f"no family {name!r}: choose one of {', '.join(family_names())}")
    return _FAMILIES[name]


def family_names() -> list[str]:
    """Names of all registered families, sorted."""
    return sorted(_FAMILIES)


def _token_id(tokenizer: Tokenizer, family: str, text: str) -> int:
    ids = tokenizer.encode(text)
    if len(ids) != 1:
        raise UsageError(
            f"family {family!r} needs {text!r} to be one token, but tokenizer {tokenizer.name!r} encodes it to "
            f"{len(ids)} ids {ids[:8]}: choose the family that belongs to the tokenizer"
        )
    return ids[0]


class _ChatML(Family):
    """The template writes a newline after `<|im_end|>`; the model stops at `<|im_end|>`."""

    boundary_tokens = ("<|im_end|>", NEWLINE)
    tail_tokens = (NEWLINE,)

    def join(self, snapshot: IntArray, suffix: IntArray, ids: Mapping[str, int]) -> tuple[int, IntArray]:
        if len(snapshot) and snapshot[-1] == ids["<|im_end|>"]:
            return len(snapshot), np.concatenate(([ids[NEWLINE]], suffix), dtype=np.int64)
        return len(snapshot), suffix


register_family(Family)


@register_family
class Qwen3(_ChatML):
    """Qwen 3."""

    name = "qwen3"
    fixed_template_kwargs = MappingProxyType({"clear_thinking": False})
    assistant_opener = "<|im_start|>assistant"


@register_family
class Qwen35(Qwen3):
    """Qwen 3.5: its template takes a system message only at the start."""

    name = "qwen35"
    append_roles = ("tool", "user", "assistant")


@register_family
class Nemotron3(_ChatML):
    """Nemotron 3."""

    name = "nemotron3"
    fixed_template_kwargs = MappingProxyType({"truncate_history_thinking": False})
    assistant_opener = "<|im_start|>assistant\n"


@register_family
class GLM47(Family):
    """GLM 4.7: the stop token of a turn is the opener of the next message, which the suffix brings itself."""

    name = "glm47"
    max_trim_tokens = 1
    fixed_template_kwargs = MappingProxyType({"clear_thinking": False})
    boundary_tokens = ("<|user|>", "<|observation|>")
    tail_tokens = ("<|user|>", "<|observation|>")
    assistant_opener = "<|assistant|>"

    def join(self, snapshot: IntArray, suffix: IntArray, ids: Mapping[str, int]) -> tuple[int, IntArray]:
        merged = len(snapshot) > 0 and int(snapshot[-1]) in ids.values()
        return len(snapshot) - merged, suffix
