"""Nodes and views on their paths: nobody changes them, where messages end, and the bytes that a node keeps."""

from __future__ import annotations

import base64
import json
from dataclasses import FrozenInstanceError, fields
from typing import Any

import numpy as np
import pytest

from miles_ref.tokens.matching import strict
from miles_ref.trajectory.commit import Times
from miles_ref.trajectory.node import KnownEnds, extended_ids_text, ids_text
from miles_ref.trajectory.reply import read_reply
from miles_ref.trajectory.request import MessageList, Seen
from miles_ref.trajectory.turn import ForwardSettings, Matching


def test_known_ends_are_those_within_the_limit(toys: Any) -> None:
    session = toys.Session()
    messages: list[Any] = []
    for turn in range(4):
        messages.append(toys.user(f"u{turn}"))
        # Another spelling of a message further back each time: what two requests share ends before their last messages.
        sent = [{**one, "extra": 1} if at == turn else one for at, one in enumerate(messages)]
        messages.append(session.say(sent, f"a{turn}").messages[-1])
    node = session.trajectory.path()[-1]
    text = node.text.to_bytes()
    ends = MessageList(text + b"]").ends(0)
    assert len(ends) == 7
    assert len(node.ends) > 2
    for limit in range(len(text) + 1):
        expected = [end for end in ends if end <= limit]
        known = KnownEnds(node, limit)
        assert len(known) == len(expected)
        assert [known[at - len(expected)] for at in range(len(expected))] == expected
        assert known[-2:] == expected[-2:]
        assert list(known) == expected
    assert list(KnownEnds(None, 0)) == []


def test_what_turns_under_way_share_cannot_be_changed(toys: Any) -> None:
    """A turn changes nothing before its commit, however many are planned beside it."""
    session = toys.Session("v2")
    turn, reply = session.turn([toys.user("u")]), toys.reply("a")
    shared = [turn, turn.attachment, read_reply(json.dumps(reply).encode()), session.node(turn, reply)]
    for thing in (*shared, Matching(strict), ForwardSettings(), Seen(b"", b"", 0), Times(1.0, 2.0)):
        with pytest.raises(FrozenInstanceError):
            setattr(thing, fields(thing)[0].name, None)


def test_a_node_equals_itself_only(toys: Any) -> None:
    one, other = (toys.Session().say([toys.user("u")], "a") for _ in range(2))
    assert one != other
    assert len({one, other, one}) == 2


def test_nobody_can_write_into_tokens(toys: Any) -> None:
    session = toys.Session("v2")
    node = session.say([toys.user("u")], "a")
    attachments = [session.turn(messages).attachment for messages in (node.stored_messages(), [toys.user("v")])]
    for ids in (node.tokens(), *map(session.trajectory.snapshot, attachments)):
        with pytest.raises(ValueError, match="read-only"):
            ids.fill(0)


def test_the_size_of_a_node_counts_what_it_keeps(toys: Any) -> None:
    def node(content: str = "u", reply: str = "a", ids: int = 1, **meta: Any) -> Any:
        return toys.Session().say([toys.user(content)], reply, ids=[97] * ids, **meta)

    def kept(pieces: Any) -> int:
        return sum(len(piece) for piece in pieces.response)

    base = node()
    # The text and the messages that are read of it, the ids of 8 bytes, their text.
    assert node("u" * 1001).size - base.size == 1000 * (2 + 8 + 1)
    assert node(reply="a" * 1001).size - base.size == 1000
    longer = node(ids=1001)
    # An id and its log prob, and their text.
    assert longer.size - base.size == 1000 * (8 + 8 + 1) + kept(longer) - kept(base)


@pytest.mark.parametrize("field", ["routed_experts", "indexer_topk"])
def test_the_size_of_a_node_counts_the_rows_that_its_parent_does_not_have(toys: Any, field: str) -> None:
    def rows(size: int) -> dict[str, str]:
        return {field: base64.b64encode(bytes(size)).decode()}

    # Additional rows begin anew each turn, but they are the routed experts' alone.
    session = toys.Session(additional_r3=field == "indexer_topk")
    first = session.say([toys.user("u")], "a", **rows(3000))
    turn = session.turn([*first.stored_messages(), toys.user("v")])
    without, same, *more = (
        session.node(turn, toys.reply("b", **meta)).size for meta in ({}, rows(3000), rows(6000), rows(9000))
    )
    assert 0 < same - without < 100
    assert more == [same + 3000, same + 6000]


@pytest.mark.parametrize(("field", "shares"), [("routed_experts", False), ("indexer_topk", True)])
def test_additional_rows_are_not_looked_for_in_the_parents(toys: Any, field: str, shares: bool) -> None:
    """They go on where the parent's end, however much they look like them."""
    session = toys.Session(additional_r3=True)
    rows = {field: base64.b64encode(bytes(3000)).decode()}
    first = session.say([toys.user("u")], "a", **rows)
    turn = session.turn([*first.stored_messages(), toys.user("v")])
    payload = getattr(session.node(turn, toys.reply("b", **rows)).record, field)
    assert payload.to_bytes() == bytes(3000)
    assert (payload.parent is not None) is shares


def test_the_text_of_ids_goes_on_wherever_the_parent_is_left(toys: Any) -> None:
    session = toys.Session()
    node = session.say([toys.user("u")], "a")
    ids = node.tokens()
    for shared in range(len(ids) + 1):
        for more in (ids[:0], ids[:3]):
            whole = np.concatenate([ids[:shared], more])
            assert extended_ids_text(node, ids, shared, more).to_bytes() == ids_text(whole)
