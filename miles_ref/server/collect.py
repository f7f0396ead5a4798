"""Samples of a session: one coherent list of records, assembled and encoded (session-http.md, Samples)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from miles_ref.errors import MessageValidationError
from miles_ref.plugins.pipeline import Pipeline
from miles_ref.records import AssemblySettings, Chain
from miles_ref.server.metadata import MismatchReporter, Snapshot
from miles_ref.server.sessions import Session
from miles_ref.trajectory.raw_json import RawJSONError, dump, join_object, parse

_ON_LOOP_TOKENS = 200_000
"""Up to here the assembly of one leaf is over before anybody notices; larger ones run in a thread."""

_ON_LOOP_TOKENS_OF_SEVERAL = 20_000
"""The same where there are several leaves."""

_ON_LOOP_BYTES = 32 << 20
"""The same for what a session stores: replay rows are copied into the payload, far more bytes than its tokens."""


@dataclass(frozen=True, slots=True)
class SamplesRequest:
    """The body of POST /sessions/{id}/samples; `metadata` is the agent's, read only under v2."""

    max_seq_len: int | None = None
    metadata: dict[str, Any] | None = None

    @classmethod
    def parse(cls, body: bytes, *, tree: bool) -> SamplesRequest:
        """Raises MessageValidationError (400). An empty body is `{}`."""
        try:
            value = parse(body) if body else {}
        except RawJSONError as error:
            raise MessageValidationError(f"the body is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise MessageValidationError("the body must be a JSON object")
        length = value.get("max_seq_len")
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
            raise MessageValidationError(f"max_seq_len must be null or a positive integer, not {length!r:.100}")
        metadata = value.get("metadata") if tree else None
        if metadata is not None and not isinstance(metadata, dict):
            raise MessageValidationError(f"metadata must be null or an object, not {metadata!r:.100}")
        return cls(length, metadata)


class Collector:
    """Collects samples. The result depends on the records and the request only, however often it is asked for."""

    def __init__(self, pipeline: Pipeline, settings: AssemblySettings, reporter: MismatchReporter) -> None:
        self._pipeline = pipeline
        self._settings = settings
        self._reporter = reporter

    def metadata_json(self, snapshot: Snapshot) -> bytes:
        """The session's metadata as GET gives it."""
        metadata = snapshot.metadata(self._reporter, self._settings.max_trim_tokens)
        del metadata["accumulated_token_ids"]
        ids = snapshot.path[-1].ids_text.to_bytes() if snapshot.path else b""
        members = {key: dump(value) for key, value in metadata.items()}
        return join_object({**members, "accumulated_token_ids": b"[" + ids + b"]"})

    async def collect(self, session: Session, request: SamplesRequest) -> bytes:
        """The samples payload. Raises AssemblyError (422)."""
        snapshot = Snapshot(session)
        limit = _ON_LOOP_TOKENS if len(snapshot.leaves) == 1 else _ON_LOOP_TOKENS_OF_SEVERAL
        if snapshot.token_count <= limit and session.stored_bytes <= _ON_LOOP_BYTES:
            return self._collect(snapshot, request)
        return await asyncio.to_thread(self._collect, snapshot, request)

    def _collect(self, snapshot: Snapshot, request: SamplesRequest) -> bytes:
        metadata = snapshot.metadata(self._reporter, self._settings.max_trim_tokens)
        if request.metadata is not None:
            metadata["agent"] = request.metadata
        return self._pipeline.collect(self._chains(snapshot), metadata, request.max_seq_len, self._settings)

    def _chains(self, snapshot: Snapshot) -> list[Chain]:
        return [
            leaf.chain(leaf=snapshot.is_tree, mismatch=self._reporter.report(leaf, snapshot.mismatches))
            for leaf in snapshot.leaves
        ]
