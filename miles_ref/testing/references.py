"""`$ref`, `$ids` and `$tokens`: what in a step stands for an earlier reply or for token ids (cases.md, http)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles_ref.errors import CaseError
from miles_ref.testing.compare import show
from miles_ref.testing.subset import marker


class References:
    """Replies that steps saved, and the tokenizer of the case's config."""

    def __init__(self, encode: Callable[[str], Sequence[int]] | None = None) -> None:
        self._encode = encode
        self._saved: dict[str, Any] = {}

    def save(self, name: str, value: Any) -> None:
        """Keep a reply under a name; a later one under the same name replaces it."""
        self._saved[name] = value

    def resolve(self, value: Any) -> Any:
        """A copy of `value` in which references are replaced. Raises CaseError for one that leads nowhere.

        `{"$ref": "name.path"}` is a saved value; `{"$ids": [...]}` a list of token ids, each text in it encoded
        on its own; `"$tokens": text` in an object becomes its output_token_logprobs, with -k/128 for the k-th token,
        as does `"output_token_logprobs": {"$tokens": text}`.
        """
        mark = marker(value)
        if mark is not None and mark[0] == "$ref":
            return self._look_up(mark[1])
        if mark is not None and mark[0] == "$ids":
            return self._ids(mark[1])
        if isinstance(value, Mapping):
            out = {key: self._member(key, item) for key, item in value.items() if key != "$tokens"}
            if "$tokens" in value:
                out["output_token_logprobs"] = self._pairs(value["$tokens"])
            return out
        if isinstance(value, list):
            return [self.resolve(item) for item in value]
        return value

    def _member(self, key: str, value: Any) -> Any:
        mark = marker(value)
        if key == "output_token_logprobs" and mark is not None and mark[0] == "$tokens":
            return self._pairs(mark[1])
        return self.resolve(value)

    def _pairs(self, text: Any) -> list[list[Any]]:
        return [[0 - k / 128, token] for k, token in enumerate(self._ids(text))]

    def _ids(self, parts: Any) -> list[int]:
        if self._encode is None:
            raise CaseError("$ids and $tokens need a tokenizer, and this kind of case has none")
        ids: list[int] = []
        for part in [parts] if isinstance(parts, str) else parts:
            ids += [part] if isinstance(part, int) else self._encode(part)
        return ids

    def _look_up(self, reference: str) -> Any:
        name, _, path = reference.partition(".")
        if name not in self._saved:
            raise CaseError(f"$ref {reference!r}: no step before saved {name!r}; saved are {sorted(self._saved)}")
        value = self._saved[name]
        for part in path.split(".") if path else ():
            try:
                value = value[int(part)] if isinstance(value, list) else value[part]
            except (LookupError, TypeError, ValueError):
                raise CaseError(f"$ref {reference!r}: nothing at {part!r} in {show(value)}") from None
        return value
