"""What a request's body must be, and what is parsed of it (session-http.md, A turn)."""

import json

import pytest

from miles_ref.errors import MessageValidationError
from miles_ref.limits import MAX_DEPTH
from miles_ref.trajectory.request import ChatRequest, MessageList, Seen

MESSAGES = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "zwei ü"}, {"role": "user"}]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"garbage",
        b'{"messages": [{"role": "user"}]',
        b"[1]",
        b"null",
        b"{}",
        b'{"messages": null}',
        b'{"messages": []}',
        b'{"messages": [ ]}',
        b'{"messages": {"0": {}}}',
        b'{"messages": "text"}',
        b'{"messages": ["text"]}',
        b'{"messages": [{"role": "user"}, null]}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\\udc00 x"}]}',
        b'{"messages": [{"role": "user"}], "user": "\\ud83d"}',
        b'{"messages": [{"role": "user"}], "user": "\xc3"}',
        b'{"messages": [{"role": "user", "weight": NaN}]}',
        b'{"messages": [{"role": "user"}], "temperature": Infinity}',
        b'{"messages": [{"role": "user"}], "n": 2}',
        b'{"messages": [{"role": "user"}], "n": true}',
        b'{"messages": [{"role": "user"}], "n": "1"}',
        b'{"messages": [{"role": "user"}]} trailing',
        b"\xef\xbb\xbf" + b'{"messages": [{"role": "user"}]}',
        b'{"messages": [{"role": "user", "deep": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}]}",
        b"[" * 100_000,
    ],
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(MessageValidationError) as caught:
        len(ChatRequest(body).messages)
    assert caught.value.status_code == 400


@pytest.mark.parametrize("messages", ['"%s"', '["%s"]'])
def test_what_is_no_message_is_shown_in_part(messages: str) -> None:
    body = b'{"messages": %s}' % (messages % ("x" * 200)).encode()
    with pytest.raises(MessageValidationError, match=r'not "x{99}$'):
        len(ChatRequest(body).messages)


@pytest.mark.parametrize("n", [None, 1])
def test_one_choice_may_be_asked_for(n: int | None) -> None:
    assert ChatRequest(json.dumps({"messages": MESSAGES, "n": n}).encode()).members["n"] == json.dumps(n).encode()


def test_members_keep_their_text_and_the_last_duplicate_wins() -> None:
    request = ChatRequest(b'{"a": 1.50,"big":123456789012345678901234567890, "a": [1 ,2], "messages":[{}]}')
    assert request.members == {"a": b"[1 ,2]", "big": b"123456789012345678901234567890"}
    assert request.value("big") == 123456789012345678901234567890


@pytest.mark.parametrize(("stream", "streams"), [("true", True), ("false", False), ("null", False), ("1", False)])
def test_only_true_streams(stream: str, streams: bool) -> None:
    assert ChatRequest(f'{{"messages": [{{}}], "stream": {stream}}}'.encode()).stream is streams


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n", ":\t")])
@pytest.mark.parametrize("known", [0, 1, 2, 3])
def test_known_messages_are_read_all_the_same(separators: tuple[str, str], known: int) -> None:
    text = json.dumps(MESSAGES, separators=separators, ensure_ascii=False)
    all_ends = MessageList(text.encode()).ends(0)
    messages = MessageList(f"{text[:-1]} \n]".encode())
    messages.know(all_ends[:known])
    assert len(messages) == 3
    assert list(messages) == MESSAGES
    assert messages[-1] == MESSAGES[-1]
    assert messages.ends(0) == all_ends
    for after in range(all_ends[-1] + 2):
        assert messages.ends(after) == tuple(end for end in all_ends if end > after)


def test_ends_are_where_a_message_ends() -> None:
    text = b'[ {"a": 1 } , {"b":2}]'
    ends = MessageList(text).ends(0)
    assert [text[: ends[0]], text[ends[0] : ends[1]]] == [b'[ {"a": 1 }', b' , {"b":2}']


EARLIER = b'{"model": "m", "messages": [{"role": "user", "content": "\xc3\xa9"} ], "n": 1}'
HEAD, TEXT = b'{"model": "m", "messages": ', b'[{"role": "user", "content": "\xc3\xa9"}'
MARK = b'["miles-ref:seen"'


@pytest.mark.parametrize(
    "body",
    [
        EARLIER,
        HEAD + TEXT + b"]}",
        HEAD + TEXT + b' , {"role": "tool"} ] , "a": [1]}',
        HEAD + TEXT + b', {"role": "tool"}], "model": "other", "model": "last"}',
        HEAD + TEXT + b'], "messages": [{"role": "system"}]}',
        HEAD + TEXT + b'], "mess\\u0061ges": [{"role": "system"}]}',
        HEAD + TEXT + b'], "messages": ' + MARK + b"]}",
        HEAD + TEXT + b', {"content": "' + MARK.replace(b'"', b'\\"') + b'"}]}',
        HEAD + TEXT + b', {"content": ' + MARK + b"]}]}",
        HEAD + TEXT + b'], "messages": null}',
        HEAD + TEXT + b', null], "n": 1}',
        HEAD + TEXT + b', {"role": "\xff"}]}',
        HEAD + TEXT + b', {"role": "\xc3"}]}',
        HEAD + TEXT + b".5]}",
        HEAD + TEXT + b"",
        HEAD + TEXT + b"]",
        HEAD + TEXT + b"]} trailing",
        HEAD + TEXT + b'], "n": 2}',
        HEAD + TEXT[:-1] + b', "name": "b"}]}',
        HEAD.replace(b"m", b"M", 1) + TEXT + b"]}",
        b'{"messages": [], ' + HEAD[1:] + TEXT + b"]}",
        b"",
    ],
)
def test_what_was_seen_changes_nothing(body: bytes) -> None:
    """A request reads the same, or is refused the same, whatever an earlier one of the session began with."""
    seen = ChatRequest(EARLIER).as_seen(7)
    assert seen == Seen(HEAD, TEXT, 7)
    assert _outcome(body, seen) == _outcome(body, None)


@pytest.mark.parametrize("rest", [b"]}", b', {"role": "tool", "content": "x"}], "a": 1}'])
def test_a_request_that_goes_on_is_known_to(rest: bytes) -> None:
    request = ChatRequest(HEAD + TEXT + rest, ChatRequest(EARLIER).as_seen(7))
    assert request.messages.begins_with == 7
    assert request.as_seen(8).head == HEAD
    assert ChatRequest(HEAD + TEXT + rest).messages.begins_with is None


def test_a_text_whose_beginning_stands_earlier_is_a_hint_that_helps_nobody() -> None:
    long = b'[{"role": "user", "content": "' + b"x" * 100
    body = b'{"before": ' + long + b'"}], "messages": ' + long + b'y"}]}'
    seen = ChatRequest(body).as_seen(0)
    assert ChatRequest(body, seen).messages.begins_with is None


def _outcome(body: bytes, seen: Seen | None) -> object:
    try:
        request = ChatRequest(body, seen)
        messages = list(request.messages)
    except MessageValidationError as error:
        return str(error)
    return request.messages.text, messages, request.messages.ends(0), request.members, request.stream
