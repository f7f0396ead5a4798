"""v1: where a request attaches, and what a commit changes (session-http.md, v1: linear)."""

from typing import Any

import pytest

from miles_ref.errors import MatcherError, MessageValidationError


def talk(toys: Any, session: Any, turns: int) -> list[Any]:
    """So many turns; the messages of the whole conversation."""
    messages = []
    for turn in range(turns):
        messages.append(toys.user(f"u{turn}"))
        messages.append(session.say(messages, f"a{turn}").messages[-1])
    return messages


def test_a_conversation_goes_on(toys: Any) -> None:
    session = toys.Session()
    messages = talk(toys, session, 3)
    path = session.trajectory.path()
    assert [node.parent for node in path] == [None, path[0], path[1]]
    assert [node.seq for node in path] == [0, 1, 2]
    assert path[2].stored_messages() == messages
    assert session.settings.decode(path[2].tokens()) == (
        "<|begin|>user:u0<|end|><|begin|>assistant:a0<|end|>"
        "<|begin|>user:u1<|end|><|begin|>assistant:a1<|end|>"
        "<|begin|>user:u2<|end|><|begin|>assistant:a2<|end|>"
    )


def test_a_first_turn_may_carry_any_messages(toys: Any) -> None:
    session = toys.Session()
    node = session.say([toys.user("u"), toys.assistant("few shot"), {"role": "critic", "content": "x"}], "a")
    assert node.parent is None
    assert len(node.messages) == 4


def test_a_role_that_may_not_be_appended_is_refused(toys: Any) -> None:
    session = toys.Session()
    messages = talk(toys, session, 1)
    with pytest.raises(MessageValidationError, match="message 3 has role 'critic'"):
        session.turn([*messages, toys.user("u"), {"role": "critic", "content": "x"}])


def test_answers_of_tools_are_rendered_after_the_call_that_asked_for_them(toys: Any) -> None:
    session = toys.Session()
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = talk(toys, session, 1)
    messages.append(toys.user("u1"))
    messages.append(session.say(messages, "", message={"tool_calls": [call]}).messages[-1])
    turn = session.turn([*messages, {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}])
    assert session.settings.decode(turn.tail) == "<|begin|>tool:1<|end|><|begin|>tool:2<|end|><|begin|>assistant:"
    with pytest.raises(MessageValidationError, match="no call before"):
        session.turn([*messages[:2], {"role": "tool", "content": "1"}])


def test_the_whole_path_again_appends_the_generation_prompt(toys: Any) -> None:
    session = toys.Session()
    messages = talk(toys, session, 1)
    turn = session.turn(messages)
    assert turn.messages == ()
    assert session.settings.decode(turn.tail) == "<|begin|>assistant:"


def test_the_last_turn_can_be_retried(toys: Any) -> None:
    session = toys.Session()
    messages = talk(toys, session, 3)
    node = session.say([*messages[:4], toys.user("other")], "b")
    assert [one.messages[-1]["content"] for one in session.trajectory.path()] == ["a0", "a1", "b"]
    assert node.parent is session.trajectory.path()[1]
    assert "u2" not in session.settings.decode(node.tokens())


def test_a_retry_of_the_first_turn_begins_anew(toys: Any) -> None:
    session = toys.Session()
    talk(toys, session, 1)
    node = session.say([toys.user("other")], "b")
    assert node.parent is None
    assert session.trajectory.path() == [node]


@pytest.mark.parametrize(("kept", "dropped"), [(0, 3), (1, 3), (2, 2), (3, 2)])
def test_going_back_over_two_turns_is_refused(toys: Any, kept: int, dropped: int) -> None:
    session = toys.Session()
    messages = talk(toys, session, 3)
    with pytest.raises(MessageValidationError) as caught:
        session.turn([*messages[:kept], toys.user("other")])
    assert f"message {kept} differs" in str(caught.value)
    assert f"would drop {dropped} generated turns" in str(caught.value)


def test_a_request_that_ends_too_early_is_refused(toys: Any) -> None:
    session = toys.Session()
    messages = talk(toys, session, 3)
    with pytest.raises(MessageValidationError, match="ends after message 2"):
        session.turn(messages[:3])


def test_a_retry_may_end_with_the_checkpoint_itself(toys: Any) -> None:
    session = toys.Session()
    messages = talk(toys, session, 2)
    turn = session.turn(messages[:2])
    assert turn.parent is session.trajectory.path()[0]
    assert turn.messages == ()


def test_a_clients_assistant_is_no_checkpoint(toys: Any) -> None:
    session = toys.Session()
    messages = [toys.user("u"), toys.assistant("mine"), toys.user("v")]
    messages.append(session.say(messages, "a").messages[-1])
    # Only one generated turn is dropped, though two assistants are.
    assert session.turn([toys.user("other")]).parent is None


def test_nothing_changes_before_the_commit(toys: Any) -> None:
    session = toys.Session()
    messages = talk(toys, session, 2)
    before = session.trajectory.path()
    turn = session.turn([*messages[:2], toys.user("retry")])
    assert session.trajectory.path() == before
    session.commit(turn, toys.reply("b"))
    assert [node.messages[-1]["content"] for node in session.trajectory.path()] == ["a0", "b"]


def test_a_session_that_moved_on_takes_no_commit(toys: Any) -> None:
    session = toys.Session()
    messages = talk(toys, session, 1)
    turn = session.turn([*messages, toys.user("u1")])
    session.say([*messages, toys.user("x")], "b")
    assert session.commit(turn, toys.reply("late")) is None


def test_away_and_back_again_is_moved_on_too(toys: Any) -> None:
    session = toys.Session()
    messages = talk(toys, session, 1)
    turn = session.turn([*messages, toys.user("u1")])
    session.say([*messages, toys.user("x")], "b")
    session.say([*messages, toys.user("u1")], "c")
    assert [node.messages[-1]["content"] for node in session.trajectory.path()] == ["a0", "c"]
    assert session.commit(turn, toys.reply("late")) is None
    assert session.trajectory.path()[-1].messages[-1]["content"] == "c"


@pytest.mark.parametrize(
    "spelled", [{"content": "a0", "role": "assistant"}, {"role": "assistant", "content": "a0", "x": 1}]
)
def test_another_spelling_of_the_reply_matches(toys: Any, spelled: dict[str, Any]) -> None:
    session = toys.Session()
    messages = talk(toys, session, 1)
    messages[1] = spelled
    for turn in range(1, 4):
        messages.append(toys.user(f"u{turn}"))
        messages.append(session.say(messages, f"a{turn}").messages[-1])
    assert len(session.trajectory.path()) == 4
    assert session.trajectory.path()[-1].stored_messages()[1] == toys.assistant("a0")


def test_a_marker_that_moves_is_matched_and_stored_once(toys: Any) -> None:
    session = toys.Session()
    filler = "x" * 1000
    messages: list[Any] = []
    for turn in range(30):
        messages.append(toys.user(f"{turn} {filler}"))
        sent = [*messages[:-1], {**messages[-1], "cache_control": {"type": "ephemeral"}}]
        messages.append(session.say(sent, f"a{turn}").messages[-1])
    path = session.trajectory.path()
    assert len(path) == 30
    assert sum(len(node.text.tail) for node in path) < 30 * 2500


def test_a_custom_matcher_is_asked_about_every_message(toys: Any) -> None:
    asked = []

    def matcher(stored: Any, replayed: Any) -> bool:
        asked.append((stored["content"], replayed["content"]))
        return True

    session = toys.Session(matcher=matcher)
    messages = talk(toys, session, 2)
    asked.clear()
    session.turn([*messages, toys.user("u2")])
    assert asked == [("u0", "u0"), ("a0", "a0"), ("u1", "u1"), ("a1", "a1")]


def test_a_failing_matcher_changes_nothing(toys: Any) -> None:
    def matcher(stored: Any, replayed: Any) -> bool:
        raise MatcherError("matcher m.f raised")

    session = toys.Session(matcher=matcher)
    messages = talk(toys, session, 1)
    with pytest.raises(MatcherError):
        session.turn([*messages, toys.user("u1")])
    assert len(session.trajectory.path()) == 1
