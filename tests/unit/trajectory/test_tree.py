"""v2: where a request attaches in the forest (session-http.md, v2: tree)."""

import itertools
import logging
from typing import Any

import pytest

from miles_ref.errors import MessageValidationError, TruncatedGenerationError


def test_a_request_goes_on_from_the_deepest_node(toys: Any) -> None:
    session = toys.Session("v2")
    first = session.say([toys.user("u")], "a")
    second = session.say([*first.stored_messages(), toys.user("v")], "b")
    turn = session.turn([*second.stored_messages(), toys.user("w")])
    assert turn.parent is second


def test_concurrent_turns_become_siblings(toys: Any) -> None:
    session = toys.Session("v2")
    root = session.say([toys.user("u")], "a")
    turns = [session.turn([*root.stored_messages(), toys.user("v")], in_flight=at) for at in range(64)]
    nodes = [session.commit(turn, toys.reply(f"b{at}")) for at, turn in enumerate(turns)]
    assert [node.parent for node in nodes] == [root] * 64
    assert session.trajectory.leaves() == nodes


def test_a_tie_goes_to_the_latest(toys: Any) -> None:
    session = toys.Session("v2")
    one, two = (session.commit(turn, toys.reply("same")) for turn in [session.turn([toys.user("u")])] * 2)
    assert one.stored_messages() == two.stored_messages()
    assert session.turn([*one.stored_messages(), toys.user("v")]).parent is two


def test_more_messages_win_over_a_later_node(toys: Any) -> None:
    session = toys.Session("v2")
    root = session.say([toys.user("u")], "a")
    deep = session.say([*root.stored_messages(), toys.user("v")], "b")
    session.commit(session.turn([toys.user("u")]), toys.reply("a"))
    assert session.turn([*deep.stored_messages(), toys.user("w")]).parent is deep


def test_a_branch_leaves_in_mid_path(toys: Any) -> None:
    session = toys.Session("v2")
    root = session.say([toys.user("u")], "a")
    session.say([*root.stored_messages(), toys.user("v")], "b")
    branch = session.say([*root.stored_messages(), toys.user("w")], "c")
    assert branch.parent is root
    assert session.trajectory.path() == [root, branch]


def test_a_long_path_is_gone_on_from(toys: Any) -> None:
    session = toys.Session("v2")
    root = session.say([toys.user(str(at)) for at in range(300)], "a")
    assert session.turn([*root.stored_messages(), toys.user("v")]).parent is root


def test_the_reply_to_a_path_that_was_sent_again_is_matched_too(toys: Any) -> None:
    session = toys.Session("v2")
    root = session.say([toys.user("u")], "a")
    again = session.say(root.stored_messages(), "b")
    assert (again.parent, len(again.messages)) == (root, 1)
    assert session.turn([*root.stored_messages(), toys.user("v")]).parent is root
    assert session.turn([*again.stored_messages(), toys.user("v")]).parent is again


def test_an_unknown_beginning_is_a_new_root(toys: Any) -> None:
    session = toys.Session("v2")
    session.say([toys.user("u")], "a")
    assert session.say([toys.user("other")], "b").parent is None
    assert session.say([toys.user("u")], "again").parent is None
    assert len(session.trajectory.leaves()) == 3


def test_a_truncated_generation_cannot_be_extended(toys: Any) -> None:
    session = toys.Session("v2")
    root = session.say([toys.user("u")], "a", finish_reason="length")
    with pytest.raises(TruncatedGenerationError) as caught:
        session.turn([*root.stored_messages(), toys.user("v")])
    assert caught.value.status_code == 409
    assert session.turn([toys.user("u")]).parent is None


def test_the_forest_has_a_limit(toys: Any) -> None:
    session = toys.Session("v2", max_nodes=2)
    session.say([toys.user("u")], "a")
    session.say([toys.user("v")], "b")
    with pytest.raises(MessageValidationError, match="does not replay its history verbatim"):
        session.turn([toys.user("w")])


def test_turns_in_flight_count_to_the_limit(toys: Any) -> None:
    session = toys.Session("v2", max_nodes=2)
    session.say([toys.user("u")], "a")
    session.turn([toys.user("v")], in_flight=0)
    with pytest.raises(MessageValidationError, match="1 nodes and 1 turns in flight"):
        session.turn([toys.user("w")], in_flight=1)


def test_a_carried_assistant_is_spliced(toys: Any) -> None:
    session = toys.Session("v2")
    root = session.say([toys.user("u")], "a")
    turn = session.turn([*root.stored_messages(), toys.assistant("summary"), toys.user("v")])
    assert turn.parent is root
    assert turn.shared == root.record.end
    assert session.settings.decode(turn.tail) == (
        "<|begin|>assistant:summary<|end|><|begin|>user:v<|end|><|begin|>assistant:"
    )


def test_a_splice_that_does_not_fit_is_a_new_root(toys: Any, caplog: pytest.LogCaptureFixture) -> None:
    session = toys.Session("v2")
    # The model said something else than its parsed message renders to.
    root = session.say([toys.user("u")], "a", ids=[*b"other", 256])
    with caplog.at_level(logging.WARNING):
        node = session.say([*root.stored_messages(), toys.assistant("summary"), toys.user("v")], "b")
    assert "new root" in caplog.text
    assert node.parent is None
    assert node.record.shared == 0
    assert len(node.messages) == 5
    # Both paths are there; the new root has the most messages.
    assert session.turn([*node.stored_messages(), toys.user("w")]).parent is node


class TestAppendOnly:
    def test_the_leaf_is_extended(self, toys: Any) -> None:
        session = toys.Session("v2", strict_append_only=True)
        root = session.say([toys.user("u")], "a")
        assert session.turn([*root.stored_messages(), toys.user("v")]).parent is root
        assert session.turn(root.stored_messages()).parent is root

    @pytest.mark.parametrize(("content", "overlap"), [("u", 1), ("other", 0)])
    def test_a_second_root_is_refused(self, toys: Any, content: str, overlap: int) -> None:
        session = toys.Session("v2", strict_append_only=True)
        session.say([toys.user("u")], "a")
        with pytest.raises(
            MessageValidationError, match=f"0 messages matched, best overlap {overlap}, request length 1"
        ):
            session.turn([toys.user(content)])

    def test_messages_behind_one_that_differs_are_no_overlap(self, toys: Any) -> None:
        session = toys.Session("v2", strict_append_only=True)
        session.say([toys.user("u"), toys.user("v")], "a")
        with pytest.raises(MessageValidationError, match="0 messages matched, best overlap 0, request length 2"):
            session.turn([toys.user("v"), toys.user("w")])

    def test_a_sibling_is_refused(self, toys: Any) -> None:
        session = toys.Session("v2", strict_append_only=True)
        root = session.say([toys.user("u")], "a")
        session.say([*root.stored_messages(), toys.user("v")], "b")
        with pytest.raises(MessageValidationError) as caught:
            session.turn([*root.stored_messages(), toys.user("v"), toys.user("w")])
        assert "attaches to node 0: 2 messages matched, best overlap 3, request length 4" in str(caught.value)

    def test_a_leaf_that_moved_takes_no_commit(self, toys: Any) -> None:
        session = toys.Session("v2", strict_append_only=True)
        first, second = session.turn([toys.user("u")]), session.turn([toys.user("v")])
        assert session.commit(first, toys.reply("a")) is not None
        assert session.commit(second, toys.reply("b")) is None

    def test_a_splice_that_does_not_fit_is_refused(self, toys: Any) -> None:
        session = toys.Session("v2", strict_append_only=True)
        root = session.say([toys.user("u")], "a", ids=[*b"other", 256])
        with pytest.raises(MessageValidationError) as caught:
            session.turn([*root.stored_messages(), toys.assistant("summary")])
        assert "cannot be joined to the tokens of node 0" in str(caught.value)
        assert "attaches to node 0: 2 messages matched, best overlap 2, request length 3" in str(caught.value)


def test_spellings_do_not_matter_where_a_request_attaches(toys: Any) -> None:
    """The search by text and the search by the matcher agree, whatever was spelled how."""
    spellings = (lambda message: message, lambda message: dict(reversed(message.items())), lambda m: {**m, "extra": 1})
    for order in itertools.product(range(3), repeat=3):
        session = toys.Session("v2")
        messages: list[Any] = []
        node = None
        for turn, spelling in enumerate(order):
            messages.append(toys.user(f"u{turn}"))
            sent = [spellings[spelling](message) for message in messages]
            planned = session.turn(sent)
            assert planned.parent is node
            node = session.commit(planned, toys.reply(f"a{turn}"))
            messages.append(node.messages[-1])
        assert [one.seq for one in node.path()] == [0, 1, 2]
        sibling = session.turn([*[spellings[1](m) for m in messages[:4]], toys.user("branch")])
        assert sibling.parent is node.parent
