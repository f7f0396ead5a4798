"""The records of a path as JSON, put together from what client and backend sent (session-http.md, GET)."""

from __future__ import annotations

from collections.abc import Iterable

import pybase64

from miles_ref.trajectory.node import Node
from miles_ref.trajectory.raw_json import Buffer, dump, object_parts


def record_json(node: Node) -> bytes:
    """One record: the request as it went to the backend, the reply as it came (pipeline.md, Record)."""
    record = node.record
    parts: list[Buffer] = [b'{"timestamp":', dump(record.timestamp)]
    if record.request_timestamp is not None:
        parts += (b',"request_timestamp":', dump(record.request_timestamp))
    parts += (b',"method":"POST","path":"/v1/chat/completions","status_code":200,"request":',)
    parts += object_parts(node.members.items())[:-1]
    parts += (b',"messages":', *node.text.chunks(node.text.size), b'],"input_ids":[')
    parts += (*node.ids_text.chunks(node.prompt_size), b']},"response":', *_response(node), b"}")
    return b"".join(parts)


def dump_json(session_id: str, records: Iterable[bytes], metadata: bytes) -> bytes:
    """The body of GET /sessions/{id}; records and metadata are JSON texts."""
    parts: list[bytes] = [b'{"session_id":', dump(session_id), b',"records":[']
    for at, record in enumerate(records):
        parts += (b"," if at else b"", record)
    return b"".join((*parts, b'],"metadata":', metadata, b"}"))


def _response(node: Node) -> list[Buffer]:
    parts: list[Buffer] = []
    for piece in node.response:
        if isinstance(piece, bytes):
            parts.append(piece)
            continue
        payload = node.record.routed_experts if piece == "routed_experts" else node.record.indexer_topk
        parts.append(b"" if payload is None else pybase64.b64encode(payload.to_bytes()))
    return parts
