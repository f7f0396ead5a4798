"""What a commit keeps and refuses, and that what was kept can be dumped (session-http.md; tokens.md, Commit check)."""

import json
from typing import Any

import numpy as np
import pytest

from miles_ref.errors import MessageValidationError, TokenizationError
from miles_ref.tokens.families import Family
from miles_ref.trajectory.dump import dump_json, record_json
from miles_ref.trajectory.turn import ForwardSettings

END = 256


class DropTwo(Family):
    """A family that drops more than it may."""

    name = "drop-two"
    max_trim_tokens = 1

    def join(self, snapshot: Any, suffix: Any, ids: Any) -> Any:
        return len(snapshot) - 2, suffix


class WriteAgain(Family):
    """A family that drops what it writes again, which is allowed."""

    name = "write-again"

    def join(self, snapshot: Any, suffix: Any, ids: Any) -> Any:
        return len(snapshot) - 1, np.concatenate((snapshot[-1:], suffix))


class AddNothing(Family):
    """A family that eats the suffix, drops the snapshot's last tokens and writes some of them again."""

    name = "add-nothing"

    def __init__(self, dropped: int, written: int) -> None:
        self.dropped, self.written = dropped, written

    def join(self, snapshot: Any, suffix: Any, ids: Any) -> Any:
        kept = len(snapshot) - self.dropped
        return kept, snapshot[kept : kept + self.written].copy()


class DropThree(Family):
    """A family that drops three tokens, of which it may drop none, and adds nothing."""

    name = "drop-three"

    def join(self, snapshot: Any, suffix: Any, ids: Any) -> Any:
        return len(snapshot) - 3, suffix[:0]


def dumped(session: Any) -> list[Any]:
    path = session.trajectory.path()
    return list(json.loads(dump_json("s", [record_json(node) for node in path], b"{}"))["records"])


def test_a_trimmed_stop_token(toys: Any) -> None:
    session = toys.Session(family=toys.TrimFamily())
    first = session.say([toys.user("u")], "a")
    second = session.say([*first.stored_messages(), toys.user("v")], "b")
    assert second.record.shared == first.record.end - 1
    sent = [record["request"]["input_ids"] for record in dumped(session)]
    assert sent[1][: first.record.end - 1] == first.tokens()[:-1].tolist()
    assert sent[1] == second.tokens()[: second.record.start].tolist()


def test_a_prompt_that_drops_too_much_is_refused(toys: Any) -> None:
    session = toys.Session(family=DropTwo())
    first = session.say([toys.user("u")], "abc")
    with pytest.raises(TokenizationError, match=f"first differing index is {first.record.end - 2}"):
        session.say([*first.stored_messages(), toys.user("v")], "b")
    assert session.trajectory.path() == [first]


def test_what_is_dropped_may_be_written_again(toys: Any) -> None:
    session = toys.Session(family=WriteAgain())
    first = session.say([toys.user("u")], "abc")
    second = session.say([*first.stored_messages(), toys.user("v")], "b")
    assert second.tokens()[: first.record.end].tolist() == first.tokens().tolist()
    assert dumped(session)[1]["request"]["input_ids"] == second.tokens()[: second.record.start].tolist()


@pytest.mark.parametrize(("output", "differing"), [([], 0), ([97], 1), ([97, 96, 97], 1), ([97, 97, 98, 97], 2)])
def test_an_output_does_not_make_up_for_what_a_prompt_dropped(toys: Any, output: list[int], differing: int) -> None:
    session = toys.Session(family=DropThree())
    first = session.say([toys.user("u")], "a", ids=[97, 97, 97], finish_reason="length")
    place = first.record.start + differing
    with pytest.raises(TokenizationError, match=f"first differing index is {place}$"):
        session.say([*first.stored_messages(), toys.user("v")], "b", ids=output)
    assert session.trajectory.path() == [first]


@pytest.mark.parametrize(("dropped", "written"), [(0, 0), (1, 1), (2, 2), (3, 2), (2, 0)])
def test_a_prompt_that_adds_nothing_is_refused_before_the_backend_is_called(
    toys: Any, dropped: int, written: int
) -> None:
    session = toys.Session(family=AddNothing(dropped, written))
    first = session.say([toys.user("u")], "abc")
    with pytest.raises(MessageValidationError, match="adds no token"):
        session.turn([*first.stored_messages(), toys.user("v")])


def test_what_is_stored_is_linear(toys: Any) -> None:
    """Twice the turns store twice the bytes, tools and texts that are sent again included."""

    def stored(turns: int) -> int:
        session = toys.Session()
        messages: list[Any] = []
        tools = [{"type": "function", "function": {"name": "f", "description": "d" * 5000}}]
        for turn in range(turns):
            messages.append(toys.user(f"{turn} " + "x" * 500))
            node = session.commit(session.turn(messages, tools=tools), toys.reply("a" * 200))
            messages.append(node.messages[-1])
        path = session.trajectory.path()
        assert len({id(node.members["tools"]) for node in path}) == 1
        assert sum(len(node.ids_text.tail) for node in path) < turns * 5000
        return sum(node.size for node in path)

    assert stored(40) < 2.2 * stored(20)


def test_a_dump_is_what_client_and_backend_sent(toys: Any) -> None:
    session = toys.Session(forward=ForwardSettings(routed_experts=True, indexer_topk=True, lora_path="l"))
    bodies = []
    messages: list[Any] = []
    for turn in range(3):
        messages.append(toys.user(f"u{turn} ü\n", extra=[1, {"a": None}]))
        planned = session.turn(messages, seed=2**80, temperature=1.0, stream=True)
        bodies.append(json.loads(planned.body()))
        node = session.commit(planned, toys.reply(f"a{turn}", e2e_latency=0.25, routed_experts="QUJD"))
        messages.append({"content": node.messages[-1]["content"], "role": "assistant"})
    records = dumped(session)
    assert [record["request"] for record in records] == bodies
    assert bodies[2]["messages"] == messages[:-1]
    assert bodies[0]["seed"] == 2**80
    assert bodies[0]["lora_path"] == "l"
    assert [record["response"] for record in records] == [
        toys.reply(f"a{turn}", e2e_latency=0.25, routed_experts="QUJD") for turn in range(3)
    ]
    chain = session.trajectory.path()[-1].chain()
    assert chain.records[2].messages() == [*messages[:-1], toys.assistant("a2")]


@pytest.mark.parametrize(
    ("configured", "asked"),
    [
        ({}, {}),
        ({"routed_experts": True}, {"return_routed_experts": True}),
        ({"indexer_topk": True}, {"return_indexer_topk": True}),
        ({"additional_r3": True}, {"routed_experts_start_len": 0}),
        ({"lora_path": "l"}, {"lora_path": "l"}),
    ],
)
def test_only_what_is_configured_is_asked_for(toys: Any, configured: dict[str, Any], asked: dict[str, Any]) -> None:
    turn = toys.Session(forward=ForwardSettings(**configured)).turn([toys.user("u")])
    sent = json.loads(turn.body())
    added = {key: value for key, value in sent.items() if key not in ("model", "messages", "input_ids")}
    assert added == {"logprobs": True, "return_meta_info": True, "no_stop_trim": False, **asked}


def test_the_first_record_of_a_chain_has_all_its_tokens(toys: Any) -> None:
    session = toys.Session("v2")
    root = session.say([toys.user("u")], "a")
    leaves = [session.say([*root.stored_messages(), toys.user(text)], "b") for text in ("v", "w")]
    for leaf in leaves:
        chain = leaf.chain(leaf=True)
        assert chain.leaf is not None
        assert chain.leaf.path_node_ids == (0, leaf.seq)
        for at, record in enumerate(chain.records):
            tokens = chain.tokens(at)
            assert tokens[record.start :].tolist() == record.output_ids.tolist()
            assert session.settings.decode(record.prompt_tail) == record.prompt_tail_text
            assert session.settings.decode(record.output_ids) == record.output_text
        assert chain.accumulated is not None
        assert chain.accumulated.tolist() == leaf.tokens().tolist()
