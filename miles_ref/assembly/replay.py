"""Replay rows: which experts each token was routed to, int32 rows beside the tokens (pipeline.md, compute and
Additional replay rows).

Row r belongs to token r; a turn of T tokens has T - 1 rows. Payloads are little-endian int32.
"""

from __future__ import annotations

from typing import Any

from miles_ref.errors import AssemblyError, FieldError
from miles_ref.limits import MAX_ARRAY_BYTES
from miles_ref.records import AssemblySettings, Chain, Payload, Record, RowView

_ITEM = 4
"""Bytes of an int32."""


class RowRule:
    """What the payloads of one field must keep along a chain: size, and one topk for all (pipeline.md, compute).

    `topk` 0: not configured, so it is recovered from the first payload that has rows.
    """

    def __init__(self, field: str, topk: int = 0) -> None:
        self._field = field
        self._configured = topk
        self._recovered = 0

    def rows(self, payload: Payload, rows: int, layers: int) -> RowView:
        """The payload as `rows` rows of `layers` layers. Raises FieldError for any other size or another topk.

        Zero rows say nothing of the topk: their shape is (0, layers, configured topk or 0).
        """
        payload.check()
        _check_row(self._field, layers, self._configured)
        if rows == 0 or self._configured:
            wanted = rows * layers * self._configured * _ITEM
            if payload.size != wanted:
                raise FieldError(
                    self._field,
                    f"has {payload.size} bytes; {rows} rows of {layers} layers and topk {self._configured} in int32 "
                    f"take {wanted}",
                )
            return RowView(payload, rows, layers, self._configured)
        return RowView(payload, rows, layers, self._recover(payload.size, rows, layers))

    def _recover(self, size: int, rows: int, layers: int) -> int:
        unit = rows * layers * _ITEM
        if layers < 1 or size == 0 or size % unit:
            raise FieldError(self._field, f"has {size} bytes, which are not {rows} rows of {layers} layers in int32")
        topk = size // unit
        if self._recovered and topk != self._recovered:
            raise FieldError(self._field, f"has topk {topk} by its size, but topk {self._recovered} in an earlier turn")
        self._recovered = topk
        return topk


def additional_rows(chain: Chain, tokens: int, settings: AssemblySettings) -> RowView | None:
    """Rows (tokens - 1, layers, topk) joined, without a copy, from records that each carry only their new rows.

    None where no record carries any. Every record is checked for start, end and presence, also beyond the rows that
    are needed; only needed payloads are read. Raises AssemblyError (422) naming the turn.
    """
    if all(record.routed_experts is None for record in chain.records):
        return None
    rule = RowRule("routed_experts", settings.moe_router_topk)
    _check_row("routed_experts", settings.num_layers, settings.moe_router_topk)
    needed, covered = max(tokens - 1, 0), 0
    joined, topk = Payload(b""), settings.moe_router_topk
    for turn, record in enumerate(chain.records):
        try:
            end = _check_patch(record, covered)
            if record.routed_experts is not None and covered < needed:
                patch = rule.rows(record.routed_experts, end - covered, settings.num_layers)
                joined, topk = Payload(patch.payload.to_bytes(), joined, joined.size), patch.topk
        except FieldError as error:
            raise AssemblyError(f"turn {turn}: {error}") from error
        covered = end
    if covered < needed:
        raise AssemblyError(f"routed_experts: the records hold {covered} rows, {tokens} tokens need {needed}")
    return RowView(joined, needed, settings.num_layers, topk)


def _check_row(field: str, layers: int, topk: int) -> None:
    """Raise AssemblyError for a row beyond any memory: no array has such a shape, also where it has no rows."""
    if layers * max(topk, 1) * _ITEM > MAX_ARRAY_BYTES:
        raise AssemblyError(f"{field}: a row of {layers} layers and topk {topk} in int32 is beyond any memory")


def _check_patch(record: Record, covered: int) -> int:
    """Start, end and presence of one record's rows; the row at which they end."""
    start: Any = record.routed_experts_start
    if type(start) is not int:
        raise FieldError(
            "routed_experts_start_len", f"is {start!r:.80}, but a turn of this chain carries additional rows"
        )
    if start != covered:
        raise FieldError("routed_experts_start_len", f"is {start}, but the rows before it end at {covered}")
    end = record.end - 1
    if end < start:
        raise FieldError("routed_experts", f"end at row {end}, before their start {start}")
    if (record.routed_experts is not None) != (end > start):
        said = "is missing" if record.routed_experts is None else "is there"
        raise FieldError("routed_experts", f"{said}, but the rows asked for are {start} to {end}")
    return end
