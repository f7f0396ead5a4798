"""Frames on the pipes between a call's child process and its parent (agents.md, The child process).

A frame is one byte of kind, eight bytes of length (big-endian), and that many bytes of JSON text.
"""

from __future__ import annotations

import json
import struct
from enum import Enum
from typing import Any, NoReturn

_HEADER = struct.Struct(">cQ")
MAX_FRAME_BYTES = 4 << 30


class Frame(Enum):
    """Kinds of frames: one request down; then started, reports and one outcome up."""

    REQUEST = b"Q"
    STARTED = b"S"
    REPORT = b"R"
    OUTCOME = b"O"


class FrameError(ValueError):
    """The bytes on a pipe are not frames: somebody else wrote to it."""


def pack(kind: Frame, payload: bytes = b"") -> bytes:
    """Return the bytes of one frame."""
    return _HEADER.pack(kind.value, len(payload)) + payload


class FrameReader:
    """Cuts a stream of bytes into frames; linear in the bytes, whatever the sizes of the chunks."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Add bytes as they arrived."""
        self._buffer += data

    def next_frame(self) -> tuple[Frame, bytes] | None:
        """Take the next complete frame, or None. Raises FrameError for an unknown kind or an absurd length."""
        if len(self._buffer) < _HEADER.size:
            return None
        kind, length = _HEADER.unpack_from(self._buffer)
        if length > MAX_FRAME_BYTES:
            raise FrameError(f"a frame of {length} bytes on the channel of a child process")
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        payload = bytes(memoryview(self._buffer)[_HEADER.size : end])
        del self._buffer[:end]
        try:
            return Frame(kind), payload
        except ValueError:
            raise FrameError(f"a frame of unknown kind {kind!r} on the channel of a child process") from None


def read_json(payload: bytes) -> Any:
    """The value of a payload, which may be put into a JSON text as it is. Raises FrameError.

    To be called where a frame arrives, on the event loop itself: who is deep in a stack cannot go as deep as the limit.
    """
    try:
        # json.loads alone would take NaN, and other encodings than UTF-8.
        return json.loads(payload.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as exc:
        raise FrameError(f"a frame that is no JSON text: {type(exc).__name__}") from exc


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
