"""Byte level BPE by dictionary: the ids and texts of the tokenizers library, for the texts where it can be exact.

Encoding a turn's suffix is the largest part of a turn's CPU, and most of that is the library's bookkeeping of offsets.
In ASCII the pre-tokenizer's pattern means the same to Python's `re`, and a word's ids do not depend on its neighbours
(Sennrich et al. 2016, https://arxiv.org/abs/1508.07909), so a word is merged once and found in a dictionary then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, count
from typing import Any

_MAX_WORDS = 1 << 15
"""Words that are remembered; when there are as many, all are forgotten."""
_MAX_WORD_LENGTH = 64
"""Characters; longer words do not come again."""
_MAX_TEXT = 1 << 22
"""Characters; longer texts are left to the library, which lets other threads run meanwhile, as `re` does not."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern that a ByteLevel step uses by itself (tokenizers, pre_tokenizers/byte_level.rs)."""

_SYNTAX = re.compile(
    r"""(?: \(\?i:['a-z|]+\) | \(\?[:!] | \)(?![*+{]) | \|          # groups, at most optional; alternatives
          | \[\^?(?:\\p\{[A-Z][a-z]?\}|\\[sSrn]|[ '/A-Za-z0-9])+\]  # classes
          | \\p\{[A-Z][a-z]?\} | \\[sSrn] | [ 'A-Za-z0-9/]           # single characters
          | (?:[?*+]|\{[0-9](?:,[0-9])?\})(?![?*+{])                 # quantifiers that are neither lazy nor possessive
        )*""",
    re.VERBOSE,
)
"""What Oniguruma and `re` read in the same way, but for the character properties."""

_PROPERTY = re.compile(r"\\p\{(\w+)\}")
_IN_ASCII = {"L": "A-Za-z", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": "", "N": "0-9"}
_CLASS = re.compile(r"\[[^\]]*\]")


def byte_letters() -> list[str]:
    """The 256 letters of byte level BPE: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = count(0x100)
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


_LETTERS = byte_letters()
_BYTES = {letter: byte for byte, letter in enumerate(_LETTERS)}
_TO_LETTERS = {byte: _LETTERS[byte] for byte in range(128)}


class TokenBytes(dict[int, bytes]):
    """Id to the bytes that it decodes to, each looked up once. Raises OverflowError or TypeError for a non-id."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._text_of: Callable[[int], str | None] = backend.id_to_token

    def __missing__(self, token: int) -> bytes:
        text = self._text_of(token)
        if text is None:
            return b""  # Not stored: there is no end of ids that a vocabulary lacks.
        try:
            found = bytes(map(_BYTES.__getitem__, text))
        except KeyError:
            found = text.encode()
        self[token] = found
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, one U+FFFD a maximal ill-formed part; ids that the vocabulary lacks give nothing."""
        return b"".join(map(self.__getitem__, ids)).decode("utf-8", "replace")


class _Words(dict[str, tuple[int, ...]]):
    """Word of an ASCII text to its ids, merged by the model of `backend` once."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._merge: Callable[[str], Sequence[Any]] = backend.model.tokenize

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = tuple(token.id for token in self._merge(word.translate(_TO_LETTERS)))
        if len(word) <= _MAX_WORD_LENGTH:
            if len(self) >= _MAX_WORDS:
                self.clear()
            self[word] = ids
        return ids


class AsciiEncoder:
    """Encodes ASCII texts as `backend` does; see `ascii_encoder`."""

    def __init__(self, backend: Any, words: re.Pattern[str], added: Mapping[str, int]) -> None:
        self._ids_of = _Words(backend).__getitem__
        self._words = words.findall
        self._added = added
        self._added_pattern = pattern_of(added)

    def encode(self, text: str) -> list[int] | None:
        """The ids of an ASCII text; None for a long one, and where the pattern of words leaves something out or matches
        nothing.
        """
        if len(text) > _MAX_TEXT:
            return None
        ids: list[int] = []
        start = 0
        for match in self._added_pattern.finditer(text) if self._added_pattern else ():
            if not self._add(text[start : match.start()], ids):
                return None
            ids.append(self._added[match.group()])
            start = match.end()
        return ids if self._add(text[start:], ids) else None

    def _add(self, text: str, ids: list[int]) -> bool:
        words = self._words(text)
        if "" in words:  # `re` goes on after an empty match in another way than Oniguruma
            return False
        ids.extend(chain.from_iterable(map(self._ids_of, words)))
        return sum(map(len, words)) == len(text)


def pattern_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Finds the leftmost of `texts`, the longest where several begin there; None if there are none."""
    pattern = "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))
    return re.compile(pattern) if pattern else None


def ascii_encoder(state: Mapping[str, Any], backend: Any) -> AsciiEncoder | None:
    """For a byte level BPE `backend` with `state` as its tokenizer.json; None where it is not known to be exact.

    To be asked only of tokenizers that work piecewise (`HFTokenizer.pieces`). A normalizer of theirs keeps ASCII.
    """
    words = _ascii_pattern(state["pre_tokenizer"])
    added = {token["content"]: token["id"] for token in state["added_tokens"]}
    if words is None or any(token["normalized"] for token in state["added_tokens"]):
        return None
    return AsciiEncoder(backend, words, added)


def _ascii_pattern(pre_tokenizer: Mapping[str, Any] | None) -> re.Pattern[str] | None:
    """What a pre-tokenizer, as tokenizer.json writes it, finds in ASCII texts; None where that is not known.

    Known are a ByteLevel step with its own pattern, and one before it that isolates what a pattern of letters,
    numbers and white space finds, as those of GPT-2, Qwen, GLM and Llama 3 are.
    """
    step = pre_tokenizer or {}
    steps = list(step["pretokenizers"]) if step.get("type") == "Sequence" else [step]
    last = steps.pop()
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    if last["use_regex"]:
        return None if steps else _translated(_GPT2)
    if len(steps) != 1 or steps[0]["type"] != "Split":
        return None
    pattern = steps[0]["pattern"].get("Regex")
    if pattern is None or steps[0]["behavior"] != "Isolated" or steps[0]["invert"]:
        return None
    return _translated(pattern)


def _translated(pattern: str) -> re.Pattern[str] | None:
    """A pattern of Oniguruma as one of `re` for ASCII texts; None where it has what `re` might read in another way."""
    names = set(_PROPERTY.findall(pattern))
    if not _SYNTAX.fullmatch(pattern) or not names <= _IN_ASCII.keys():
        return None
    inside = _CLASS.sub(lambda found: _PROPERTY.sub(lambda name: _IN_ASCII[name[1]], found[0]), pattern)
    translated = _PROPERTY.sub(lambda name: f"[{_IN_ASCII[name[1]]}]", inside)
    if "[]" in translated or "[^]" in translated:
        return None  # A class without a member in ASCII, where `re` would take the bracket for its first member.
    try:
        return re.compile(translated, re.ASCII)
    except re.error:
        return None
