"""Which headers go on to the backend and which come back (session-http.md, A turn)."""

from __future__ import annotations

from collections.abc import Iterable

from multidict import CIMultiDict

ROUTING_KEY = "X-SMG-Routing-Key"
"""Carries the session id with every forwarded call, so that a router keeps a session on one backend."""

_HOP_BY_HOP = frozenset({"connection", "keep-alive", "te", "trailer", "upgrade"})
# The server answers 100-continue itself, and has read the body by the time it calls the backend.
_NOT_FORWARDED = _HOP_BY_HOP | {"host", "content-length", "transfer-encoding", "expect", ROUTING_KEY.lower()}
_NOT_COPIED = _HOP_BY_HOP | {"content-length", "transfer-encoding", "content-encoding", "server", "date"}

_DECODABLE = ("gzip", "deflate", "identity")

Headers = Iterable[tuple[str, str]]


def forwarded(headers: Headers, session_id: str) -> CIMultiDict[str]:
    """The client's headers as they go to the backend, the session's id among them."""
    pairs = list(headers)
    named = _named_by_connection(pairs)
    out: CIMultiDict[str] = CIMultiDict()
    for name, value in pairs:
        lower = name.lower()
        if lower in _NOT_FORWARDED or lower in named or lower.startswith("proxy-"):
            continue
        out.add(name, decodable(value) if lower == "accept-encoding" else value)
    out[ROUTING_KEY] = session_id
    return out


def copied_back(headers: Headers) -> CIMultiDict[str]:
    """The backend's headers as the client gets them."""
    pairs = list(headers)
    named = _named_by_connection(pairs)
    out: CIMultiDict[str] = CIMultiDict()
    for name, value in pairs:
        lower = name.lower()
        if lower not in _NOT_COPIED and lower not in named:
            out.add(name, value)
    return out


def decodable(accept_encoding: str) -> str:
    """The codings that we can undo, of those that a client accepts: replies go on decoded."""
    kept = [item.strip() for item in accept_encoding.split(",") if item.split(";")[0].strip().lower() in _DECODABLE]
    return ", ".join(kept) or "identity"


def _named_by_connection(pairs: list[tuple[str, str]]) -> set[str]:
    """Hop-by-hop headers that a Connection header names, as RFC 9110 has it."""
    return {item.strip().lower() for name, value in pairs if name.lower() == "connection" for item in value.split(",")}
