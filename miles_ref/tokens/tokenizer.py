"""Tokenizers behind one small interface, so that nothing else knows transformers (tokens.md; cases.md, "bytes").

transformers and tokenizers are imported only when a tokenizer that needs them is loaded.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from miles_ref.data import tokenizer_names, tokenizer_path
from miles_ref.errors import MessageValidationError, TokenizationError, UsageError
from miles_ref.records import IntArray
from miles_ref.tokens.byte_level import AsciiEncoder, TokenBytes, ascii_encoder, byte_letters, pattern_of

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Template = Callable[[Messages, Tools | None, bool, Mapping[str, Any]], str]
"""A chat template: (messages, tools, add_generation_prompt, template_kwargs) -> text."""


@dataclass(frozen=True, slots=True)
class TextPieces:
    """How a tokenizer cuts a text at its special tokens, for tokenizers where working piece by piece is exact.

    Exact means: the encoding of a text is the encodings of its pieces, and the ids of a piece decode to
    `normalize(piece)`, to the last character. `HFTokenizer.pieces` is None where that is not known.
    """

    pattern: re.Pattern[str] | None
    """The added tokens that are found before anything else, longest first; None when there are none."""
    special: Mapping[str, int]
    """Text to id of those that are special."""
    normalizer: Callable[[str], str] | None

    def split(self, text: str) -> list[tuple[int | None, str]]:
        """`text` as (id, its text) for each special token and (None, text) for each non-empty run between them."""
        pieces: list[tuple[int | None, str]] = []
        start = 0
        for match in self.pattern.finditer(text) if self.pattern else ():
            token = self.special.get(match.group())
            if token is None:
                continue
            if match.start() > start:
                pieces.append((None, text[start : match.start()]))
            pieces.append((token, match.group()))
            start = match.end()
        if start < len(text):
            pieces.append((None, text[start:]))
        return pieces

    def normalize(self, piece: str) -> str:
        """The text that decoding the ids of `piece` gives."""
        return piece if self.normalizer is None or piece.isascii() else self.normalizer(piece)


@runtime_checkable
class Tokenizer(Protocol):
    """What the server needs of a tokenizer. Implementations are immutable and safe to use from several threads."""

    @property
    def name(self) -> str:
        """Name for messages and reports."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokenizer's special ids and its added tokens that are flagged special (tokens.md, Mismatch report)."""
        ...

    @property
    def pieces(self) -> TextPieces | None:
        """How the text is cut at added tokens; None where piecewise work is not known to be exact."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; no special tokens are added, the text of a special token becomes its id.

        Raises MessageValidationError (400) for a lone surrogate.
        """
        ...

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """The text of `ids`, special tokens kept, no clean-up."""
        ...

    def render(
        self,
        messages: Messages,
        *,
        tools: Tools | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        """The chat template's text. Raises MessageValidationError (400) with the template's own message."""
        ...


class BytesTokenizer:
    """The tokenizer "bytes" of cases.md: ids 0 to 255 are bytes, id n >= 256 decodes as `<|n|>`; no chat template."""

    name = "bytes"
    special_ids: frozenset[int] = frozenset()
    pieces: TextPieces | None = None

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of `text`. Raises MessageValidationError (400) for a lone surrogate."""
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise MessageValidationError("the text cannot be encoded, it holds a lone surrogate") from error

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """Runs of bytes as UTF-8, one U+FFFD for each maximal ill-formed part; other ids as `<|n|>`.

        Raises TokenizationError for a negative id.
        """
        parts: list[str] = []
        for is_byte, run in groupby(_to_list(ids), key=lambda token: token < 256):
            if not is_byte:
                parts.extend(f"<|{token}|>" for token in run)
                continue
            raw = list(run)
            if min(raw) < 0:
                raise TokenizationError(f"token id {min(raw)} is negative; ids start at 0")
            parts.append(bytes(raw).decode("utf-8", "replace"))
        return "".join(parts)

    def render(
        self,
        messages: Messages,
        *,
        tools: Tools | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        """Always raises MessageValidationError: there is no template."""
        raise MessageValidationError('the tokenizer "bytes" has no chat template; load one that has')


class HFTokenizer:
    """A tokenizer folder read by transformers; its Jinja template is compiled once, by transformers.

    Raises UsageError for a folder that transformers cannot read.
    """

    def __init__(self, path: str | Path) -> None:
        self.name = Path(path).name
        self._hf = _load_hf(Path(path))
        self.special_ids = frozenset(self._hf.all_special_ids) | {
            token for token, added in self._hf.added_tokens_decoder.items() if added.special
        }
        self._template: Template = _direct_template(self._hf) or partial(_apply_chat_template, self._hf)
        self._backend = getattr(self._hf, "backend_tokenizer", None)
        self.pieces: TextPieces | None = None
        self._token_bytes: TokenBytes | None = None
        self._ascii: AsciiEncoder | None = None
        if self._backend is not None:
            # A tokenizer.json may carry these from its training; they would cut or pad prompts.
            self._backend.no_truncation()
            self._backend.no_padding()
            state = json.loads(self._backend.to_str())
            self.pieces = _byte_level_pieces(state, self._backend, self.special_ids)
            if self.pieces is not None:
                self._token_bytes = TokenBytes(self._backend)
                self._ascii = ascii_encoder(state, self._backend)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Raises MessageValidationError (400) for a lone surrogate."""
        try:
            if self._backend is None:
                return cast("list[int]", self._hf.encode(text, add_special_tokens=False))
            ids = None if self._ascii is None or not text.isascii() else self._ascii.encode(text)
            if ids is None:
                # The batch call is the one that does not work out character offsets, which cost as much as the ids.
                ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return cast("list[int]", ids)
        except (TypeError, UnicodeEncodeError) as error:
            raise MessageValidationError(f"{self.name} cannot encode the text, it holds a lone surrogate") from error

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """The text of `ids`; ids that the vocabulary lacks give nothing. Raises TokenizationError for a non-id."""
        numbers = _to_list(ids)
        try:
            if self._token_bytes is not None:
                return self._token_bytes.decode(numbers)
            if self._backend is None:
                return cast(
                    "str", self._hf.decode(numbers, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                )
            return cast("str", self._backend.decode(numbers, skip_special_tokens=False))
        except (OverflowError, TypeError, ValueError) as error:
            raise TokenizationError(f"{self.name} cannot decode {_shown(numbers)}: {error}") from error

    def render(
        self,
        messages: Messages,
        *,
        tools: Tools | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        """The chat template's text. Raises MessageValidationError (400) with what the template raised."""
        try:
            return self._template(messages, tools or None, add_generation_prompt, template_kwargs)
        except Exception as error:
            # Templates are programs of somebody else: whatever they raise is about the messages they were given.
            raise MessageValidationError(f"the chat template refused the messages: {_reason(error)}") from error


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """ "bytes", a shipped folder's name (`miles_ref.data.tokenizer_names`), or a path to a tokenizer folder.

    Raises UsageError for anything else, and where transformers is not installed.
    """
    if str(name_or_path) == "bytes":
        return BytesTokenizer()
    if str(name_or_path) in tokenizer_names():
        return HFTokenizer(tokenizer_path(str(name_or_path)))
    if not Path(name_or_path).is_dir():
        choices = ", ".join(["bytes", *tokenizer_names()])
        raise UsageError(
            f"no tokenizer {str(name_or_path)!r}: give one of {choices}, or the path of a tokenizer folder"
        )
    return HFTokenizer(name_or_path)


def _load_hf(path: Path) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"tokenizer {path.name} needs transformers: pip install 'miles-ref[serve]' ({error})"
        ) from error
    # The generic class reads tokenizer.json as it is, without the model code (and torch) that AutoTokenizer imports.
    generic = (path / "tokenizer.json").is_file()
    loader = transformers.PreTrainedTokenizerFast if generic else transformers.AutoTokenizer
    try:
        return loader.from_pretrained(str(path), local_files_only=True)
    except Exception as error:
        raise UsageError(f"transformers cannot read the tokenizer in {path}: {_reason(error)}") from error


def _apply_chat_template(
    hf: Any,
    messages: Messages,
    tools: Tools | None,
    prompt: bool,
    kwargs: Mapping[str, Any],
    *,
    chat_template: str | None = None,
) -> str:
    text = hf.apply_chat_template(
        list(messages),
        tools=None if tools is None else list(tools),
        add_generation_prompt=prompt,
        tokenize=False,
        chat_template=chat_template,
        **kwargs,
    )
    return cast("str", text)


_PROBE_TEMPLATE = "{{ [messages, tools, documents, add_generation_prompt, extra, eos_token or ''] | tojson }}"
_PROBE: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "é", "cache": None}], "name": None},
    {"role": "assistant", "content": "", "reasoning": "r", "tool_calls": [{"function": {"arguments": {"a": [1.5]}}}]},
    {"role": "assistant", "content": None, "reasoning_content": " ", "thinking": "t"},
]


def _direct_template(hf: Any) -> Template | None:
    """The compiled template, called without apply_chat_template's two deep copies, which cost as much as the template.

    JSON needs no conversion to JSON. None where there is not one template, or where a probe, a template that writes
    down all that it is given, shows that this transformers prepares messages in another way than `direct` does.
    """
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template as compiled

        named = frozenset(inspect.signature(hf.apply_chat_template).parameters)
        constants = dict(hf.special_tokens_map)

        def direct(
            source: Any, messages: Messages, tools: Tools | None, prompt: bool, kwargs: Mapping[str, Any]
        ) -> str:
            if not named.isdisjoint(kwargs):
                return _apply_chat_template(hf, messages, tools, prompt, kwargs)
            chat = [_as_transformers_shows(message) for message in messages]
            names = {**constants, **kwargs}
            text = source.render(messages=chat, tools=tools, documents=None, add_generation_prompt=prompt, **names)
            return cast("str", text)

        probe: tuple[Any, ...] = (
            _PROBE,
            [{"type": "function", "function": {"name": "f"}}],
            True,
            {"extra": {"a": None}},
        )
        seen = direct(compiled(_PROBE_TEMPLATE), *probe)
        if seen != _apply_chat_template(hf, *probe, chat_template=_PROBE_TEMPLATE):
            return None
        return partial(direct, compiled(hf.chat_template)) if isinstance(hf.chat_template, str) else None
    except Exception:
        # Not this transformers, or no template: apply_chat_template does it, or says why not.
        return None


def _as_transformers_shows(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates see it: without null keys, the reasoning under each of the names that templates read."""
    shown = {key: value for key, value in message.items() if value is not None}
    for name in ("reasoning_content", "thinking", "reasoning"):
        if name in shown:
            return {"thinking": shown[name], **shown, "reasoning_content": shown[name]}
    return shown


def _byte_level_pieces(state: Mapping[str, Any], backend: Any, special_ids: frozenset[int]) -> TextPieces | None:
    """The pieces of a byte level BPE tokenizer whose every step is known to keep the text; None for any other.

    Byte level BPE maps each byte of a text to a letter, merges letters, and decodes by joining their bytes. So a text
    comes back whole when its pre-tokenizer drops and adds nothing and the vocabulary has all 256 letters.
    """
    model, normalizer, added = state["model"], state["normalizer"], state["added_tokens"]
    exact = (
        not backend.encode_special_tokens
        and model["type"] == "BPE"
        and not any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
        and model["vocab"].keys() >= set(byte_letters())
        and _keeps_text(state["pre_tokenizer"])
        and (state["decoder"] or {}).get("type") == "ByteLevel"
        and (normalizer is None or normalizer["type"] == "NFC")
        and special_ids <= {token["id"] for token in added}
        and all(_found_by_its_text_alone(token, token["id"] in special_ids, backend) for token in added)
    )
    if not exact:
        return None
    # Tokens that are looked for after normalisation never touch the special ones, which are found before it.
    first = {token["content"]: token["id"] for token in added if not token["normalized"]}
    return TextPieces(
        pattern=pattern_of(first),
        special={text: token for text, token in first.items() if token in special_ids},
        normalizer=None if normalizer is None else backend.normalizer.normalize_str,
    )


def _found_by_its_text_alone(token: Mapping[str, Any], special: bool, backend: Any) -> bool:
    """Whether an added token is exactly its text: it strips no neighbour, and nothing but its text decodes from it."""
    if token["lstrip"] or token["rstrip"] or token["single_word"]:
        return False
    return not token["normalized"] if special else backend.decode([token["id"]]) == token["content"]


def _keeps_text(step: Mapping[str, Any] | None) -> bool:
    """Whether a pre-tokenizer, as tokenizer.json writes it, ends in a byte level step and changes nothing else."""
    steps: Iterable[Mapping[str, Any]] = step["pretokenizers"] if step and step["type"] == "Sequence" else [step or {}]
    kinds = [one.get("type") for one in steps]
    return kinds.count("ByteLevel") == 1 and all(
        (one.get("type") == "ByteLevel" and not one["add_prefix_space"])
        or (one.get("type") in ("Split", "Punctuation") and one["behavior"] != "Removed")
        or one.get("type") == "Digits"
        for one in steps
    )


def _to_list(ids: Sequence[int] | IntArray) -> list[int]:
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)


def _shown(numbers: Sequence[int]) -> str:
    return f"{len(numbers)} ids {list(numbers[:8])}{'...' if len(numbers) > 8 else ''}"


def _reason(error: Exception) -> str:
    text = str(error)
    if isinstance(error, RecursionError):
        text = "the messages are nested too deeply"
    return text or type(error).__name__
