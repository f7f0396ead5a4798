"""Which replay payloads a chain may take, so that its rows make one array (pipeline.md, Additional replay rows)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from miles_ref.errors import FieldError
from miles_ref.records import Payload, int_array
from miles_ref.trajectory.node import NO_IDS, Node
from miles_ref.trajectory.replay_rules import check_replay

Turn = tuple[int, int | None]
"""len(prompt + output), and how many rows the reply carries; None: no payload."""


def check(toys: Any, turns: list[Turn]) -> None:
    """Take the turns one after the other, each asked for the rows that its parent does not have."""
    session = toys.Session(num_layers=1, moe_router_topk=1, routed_experts=True, additional_r3=True)
    any_node: Node = toys.Session().say([toys.user("u")], "a")
    parent: Node | None = None
    for end, rows in turns:
        record = replace(
            any_node.record,
            prompt_tail=int_array(list(range(end))),
            output_ids=NO_IDS,
            routed_experts=None if rows is None else Payload(bytes(4 * rows)),
            routed_experts_start=0 if parent is None else max(0, parent.record.end - 1),
        )
        check_replay(record, parent, {}, session.settings)
        parent = replace(any_node, parent=parent, record=record)


@pytest.mark.parametrize(
    "turns",
    [
        [(3, 2), (5, 2), (9, 4)],
        [(3, None), (5, None), (9, None)],
        # A single token has no rows, so there is nothing that could be missing.
        [(1, None), (3, 2)],
        [(1, None), (3, None)],
        [(3, 2), (3, None), (4, 1)],
        [(3, None), (3, None), (4, None)],
    ],
)
def test_chains_whose_rows_join(toys: Any, turns: list[Turn]) -> None:
    check(toys, turns)


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        ([(3, 2), (5, None)], "is absent: 2 rows were asked for"),
        ([(3, 2), (3, None), (4, None)], "is absent: 1 rows were asked for"),
        ([(3, None), (5, 2)], "the turns before came without"),
        ([(2, None), (2, None), (5, 3)], "the turns before came without"),
        ([(1, 0)], "is there, but no row was asked for"),
        ([(3, 2), (3, 0)], "is there, but no row was asked for"),
        ([(3, 2), (2, None)], "its rows start after the last of 2 tokens"),
        ([(3, 2), (5, 4)], "2 rows"),
    ],
)
def test_a_payload_that_leaves_a_hole_or_overlaps_is_refused(toys: Any, turns: list[Turn], said: str) -> None:
    check(toys, turns[:-1])
    with pytest.raises(FieldError, match=said):
        check(toys, turns)
