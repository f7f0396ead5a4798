"""The rules on replay payloads that a chain of records must keep, so that it can be assembled (pipeline.md).

Each reply is held against the nearest turn before it that has a payload; what holds from turn to turn holds for the
chain. The rules on one payload are assembly's own.
"""

from __future__ import annotations

from collections.abc import Mapping

from miles_ref.assembly.replay import RowRule
from miles_ref.errors import FieldError
from miles_ref.records import AssemblySettings, Payload, Record
from miles_ref.trajectory.node import Node, ReplayField


def check_replay(
    record: Record, parent: Node | None, refused: Mapping[ReplayField, str], settings: AssemblySettings
) -> None:
    """Raises FieldError for payloads that would make assembly fail. Looks at configured fields only."""
    if settings.routed_experts:
        _check_decoded("routed_experts", refused)
        if settings.additional_r3:
            _check_additional(record, parent)
        _check_rows("routed_experts", record, parent, settings)
    if settings.indexer_topk:
        _check_decoded("indexer_topk", refused)
        _check_rows("indexer_topk", record, parent, settings)


def _check_decoded(field: ReplayField, refused: Mapping[ReplayField, str]) -> None:
    if field in refused:
        raise FieldError(field, refused[field])


def _check_additional(record: Record, parent: Node | None) -> None:
    """Rows that were asked for must come, and only they, unless no turn of the chain has any."""
    rows = record.end - 1 - (record.routed_experts_start or 0)
    if rows < 0:
        raise FieldError("routed_experts", f"its rows start after the last of {record.end} tokens")
    before = [] if parent is None else [node.record for node in parent.ancestry()]
    carried = any(one.routed_experts is not None for one in before)
    if record.routed_experts is None:
        if rows and carried:
            raise FieldError("routed_experts", f"is absent: {rows} rows were asked for, as in the turns before")
    elif not rows:
        raise FieldError("routed_experts", "is there, but no row was asked for")
    elif not carried and any(one.end - 1 > (one.routed_experts_start or 0) for one in before):
        raise FieldError("routed_experts", "is there, but the turns before came without: their rows are missing")


def _check_rows(field: ReplayField, record: Record, parent: Node | None, settings: AssemblySettings) -> None:
    if _payload(field, record) is None:
        return
    rule = RowRule(field, settings.moe_router_topk if field == "routed_experts" else 0)
    before = parent.ancestry() if parent is not None else iter(())
    known = next((node.record for node in before if _rows(field, node.record, settings)), None)
    if known is not None:
        _apply(rule, field, known, settings)
    _apply(rule, field, record, settings)


def _apply(rule: RowRule, field: ReplayField, record: Record, settings: AssemblySettings) -> None:
    payload = _payload(field, record)
    assert payload is not None
    layers = settings.num_layers if field == "routed_experts" else record.indexer_layers
    rule.rows(payload, _row_count(field, record, settings), layers or 0)


def _rows(field: ReplayField, record: Record, settings: AssemblySettings) -> int:
    """How many rows the record carries: those that tell the topk."""
    return 0 if _payload(field, record) is None else _row_count(field, record, settings)


def _row_count(field: ReplayField, record: Record, settings: AssemblySettings) -> int:
    start = record.routed_experts_start if field == "routed_experts" and settings.additional_r3 else 0
    return max(0, record.end - 1) - (start or 0)


def _payload(field: ReplayField, record: Record) -> Payload | None:
    return record.routed_experts if field == "routed_experts" else record.indexer_topk
