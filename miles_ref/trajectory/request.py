"""A chat completion request as the client sent it, cut into raw parts (session-http.md, A turn).

What the session already knows byte for byte is never parsed again: `MessageList.know` says how far that goes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miles_ref.errors import MessageValidationError
from miles_ref.tokens.matching import Message
from miles_ref.trajectory.raw_json import Buffer, Raw, RawJSONError, cut_list, cut_object, parse

_SPACE = b" \t\r\n"
_FOUND_BY = 64
"""Bytes at the beginning of the messages' text by which their place in the body is found."""
_MARK = b'["miles-ref:seen"'
_BETWEEN = re.compile(rb"[ \t\r\n]*,?[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class Seen:
    """How an earlier request of the session began: the next one mostly begins in the same way.

    A hint on what need not be scanned again; nothing is believed of a request that does not begin so.
    """

    head: bytes
    """The body before its messages."""
    text: bytes
    """`MessageList.text`."""
    seq: int
    """The node that the request became."""


class MessageList(Sequence[Message]):
    """The messages of a request: their text, and the values of those that somebody asks for.

    `text` is the JSON array without its closing bracket, so that the text of a conversation that goes on begins with
    the text that it had before. `array` is the array, or what follows the text of `seen` in it.
    """

    def __init__(self, array: Buffer, seen: Seen | None = None) -> None:
        view = memoryview(array)
        if seen is None and view[0] != ord("["):
            raise MessageValidationError(f"messages must be a list of objects, not {_shown(bytes(view[:100]))}")
        end = len(view) - 1
        while end and view[end - 1] in _SPACE:
            end -= 1
        self.text = bytes(view[:end]) if seen is None else b"".join((seen.text, view[:end]))
        self.begins_with = None if seen is None else seen.seq
        """The node whose request's text this one is known to begin with."""
        self._known: Sequence[int] = ()
        self._known_values: dict[int, Message] = {}
        self._rest: list[Message] | None = None
        self._rest_ends: list[int] = []

    def know(self, ends: Sequence[int]) -> None:
        """Say that the first messages, whose texts end at these bytes, are known to be in order.

        To be called before any message is read; saying it again changes nothing. Raises MessageValidationError (400) if
        one of the others is not an object, or if there is none at all.
        """
        self._known = ends
        self._rest, self._rest_ends = [], []
        start = _end_of_gap(self.text, ends[-1] if len(ends) else 1)
        for raw in _cut(b"[" + self.text[start:] + b"]"):
            self._rest_ends.append(start + len(memoryview(raw)))
            self._rest.append(_read(raw, len(self)))
            start = _end_of_gap(self.text, self._rest_ends[-1])
        if not len(self):
            raise MessageValidationError("messages is empty: a request needs at least one message")

    def __len__(self) -> int:
        return len(self._known) + len(self._others())

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if index >= len(self._known):
            return self._others()[index - len(self._known)]
        if index not in self._known_values:
            start = _end_of_gap(self.text, self._known[index - 1] if index else 1)
            self._known_values[index] = _read(self.text[start : self._known[index]], index)
        return self._known_values[index]

    def ends(self, after: int) -> tuple[int, ...]:
        """Where in `text` the messages end, of those that end beyond byte `after`."""
        self._others()
        if not len(self._known) or self._known[-1] <= after:
            return tuple(end for end in self._rest_ends if end > after)
        return tuple(end for end in (*self._known, *self._rest_ends) if end > after)

    def _others(self) -> list[Message]:
        if self._rest is None:
            self.know(())
        assert self._rest is not None
        return self._rest


class ChatRequest:
    """The parts of a request's body: `messages`, and all other members as raw texts under their keys.

    `seen` is how an earlier request of the session began.

    Raises MessageValidationError (400) for a body that is not a JSON object in UTF-8, without lone surrogates, with a
    list of messages, and `n`, if any, 1.
    """

    def __init__(self, body: bytes, seen: Seen | None = None) -> None:
        self._body = body
        try:
            members = None if seen is None else self._cut_after(seen)
            if members is None:
                body.isascii() or body.decode()
                members = cut_object(body)
                if "messages" not in members:
                    raise MessageValidationError("the body has no messages")
                self.messages = MessageList(members.pop("messages"))
        except UnicodeDecodeError as error:
            raise MessageValidationError(f"the body is not UTF-8: {error}") from error
        except RawJSONError as error:
            raise MessageValidationError(f"the body is not a JSON object: {error}") from error
        self.members: dict[str, bytes] = {key: bytes(raw) for key, raw in members.items()}
        self._values: dict[str, Any] = {}
        for key in self.members:
            self.value(key)
        self.stream = self.value("stream") is True
        n = self.value("n")
        if n is not None and (isinstance(n, bool) or n != 1):
            raise MessageValidationError(f"n is {n!r:.100}: one choice is what a session can record; leave it out or 1")

    def as_seen(self, seq: int) -> Seen:
        """What the next request may begin with, if this one becomes node `seq`."""
        # Searching for the whole text would cost more than the hint saves.
        head = self._body[: self._body.index(self.messages.text[:_FOUND_BY])]
        return Seen(head, self.messages.text, seq)

    def _cut_after(self, seen: Seen) -> dict[str, Raw] | None:
        """The members but for the messages, where the body begins as `seen` does; else None.

        The seen text is cut out before the body is read. The mark in its place stands nowhere else, so the value that
        begins with it shows that the text is in truth the beginning of the messages.
        """
        body, size = self._body, len(seen.head) + len(seen.text)
        if not (body.startswith(seen.head) and body.startswith(seen.text, len(seen.head))):
            return None
        rest = b"".join((seen.head, _MARK, memoryview(body)[size:]))
        if rest.count(_MARK) != 1:
            return None
        try:
            rest.isascii() or rest.decode()
            members = cut_object(rest)
        except (UnicodeDecodeError, RawJSONError):
            return None  # Read as a whole, it gets an error that tells where.
        messages = memoryview(members.pop("messages", b""))
        if bytes(messages[: len(_MARK)]) != _MARK:
            return None
        self.messages = MessageList(messages[len(_MARK) :], seen)
        return members

    def value(self, key: str) -> Any:
        """The parsed member, None where there is none."""
        if key not in self._values:
            raw = self.members.get(key)
            try:
                self._values[key] = None if raw is None else parse(raw)
            except RawJSONError as error:
                raise MessageValidationError(f"{key}: {error}") from error
        return self._values[key]


def _cut(array: bytes) -> list[Raw]:
    try:
        return cut_list(array)
    except RawJSONError as error:
        raise MessageValidationError(f"messages: {error}") from error


def _read(raw: Buffer, index: int) -> Message:
    try:
        value = parse(raw)
    except RawJSONError as error:
        raise MessageValidationError(f"message {index}: {error}") from error
    if not isinstance(value, dict):
        raise MessageValidationError(f"message {index} must be an object, not {_shown(bytes(raw))}")
    return value


def _end_of_gap(text: bytes, at: int) -> int:
    match = _BETWEEN.match(text, at)
    assert match is not None
    return match.end()


def _shown(raw: bytes) -> str:
    return raw[:100].decode("utf-8", "replace")
