"""Attaching by text finds what asking the matcher about every message finds, whatever a client sends."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles_ref.errors import MilesRefError
from miles_ref.tokens.matching import strict

# A step replays the first messages of an earlier path, changes nothing, a spelling or a content, and appends.
STEPS = st.lists(
    st.tuples(
        st.integers(0, 7),  # which of the paths so far
        st.integers(0, 9),  # how many of its messages are replayed
        st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["key order", "extra key", "content"])), max_size=2),
        st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.sampled_from("ab")), max_size=2),
        st.sampled_from([(",", ":"), (", ", ": ")]),
        st.sampled_from("xy"),
    ),
    min_size=1,
    max_size=12,
)


def spelled(message: dict[str, Any], how: str) -> dict[str, Any]:
    if how == "key order":
        return dict(reversed(message.items()))
    if how == "extra key":
        return {**message, "cache_control": 1}
    return {**message, "content": f"{message['content']}!"}


@pytest.mark.parametrize("version", ["v1", "v2"])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_text_and_matcher_agree(toys: Any, version: str, steps: list[Any]) -> None:
    sessions = [toys.Session(version), toys.Session(version, matcher=strict)]
    paths: list[list[dict[str, Any]]] = [[]]
    for which, count, changes, appended, separators, reply in steps:
        messages = paths[which % len(paths)][:count]
        for at, how in changes:
            if at < len(messages):
                messages[at] = spelled(messages[at], how)
        messages += [{"role": role, "content": content} for role, content in appended] or [toys.user("u")]
        body = json.dumps({"messages": messages}, separators=separators).encode()
        outcomes = [outcome(session, body, toys.reply(reply)) for session in sessions]
        assert outcomes[0] == outcomes[1]
        paths.append([*messages, toys.assistant(reply)])
    dumps = [[node.stored_messages() for node in session.trajectory.nodes()] for session in sessions]
    assert dumps[0] == dumps[1]
    for node in sessions[0].trajectory.nodes():
        assert json.loads(node.text.to_bytes() + b"]") == node.chain().records[-1].messages()[:-1]


def outcome(session: Any, body: bytes, reply: Any) -> Any:
    """Where the turn went, or why it was refused."""
    try:
        turn = session.turn_of(body)
    except MilesRefError as error:
        return type(error), str(error)
    node = session.commit(turn, reply)
    parent = None if node.parent is None else node.parent.seq
    return node.seq, parent, turn.attachment.matched, node.tokens().tolist(), len(node.messages)
