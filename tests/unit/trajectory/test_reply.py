"""What is read of a backend's reply, and what of it is kept (session-http.md, A turn)."""

import base64
import json
from typing import Any

import pytest

from miles_ref.errors import GenerationAbortedError, UpstreamResponseError
from miles_ref.trajectory import raw_json
from miles_ref.trajectory import reply as reply_module
from miles_ref.trajectory.reply import read_reply


def recorded(reply: Any) -> bytes:
    """The record's form of a reply."""
    texts = {name: base64.b64encode(data) for name, data in reply.payloads.items()}
    return b"".join(piece if isinstance(piece, bytes) else texts[piece] for piece in reply.pieces)


def test_a_reply_without_payloads_goes_on_as_it_is(toys: Any) -> None:
    body = json.dumps(toys.reply("ü"), indent=2).encode()
    reply = read_reply(body)
    assert reply.client_body == body
    assert json.loads(recorded(reply)) == toys.reply("ü")


def test_payloads_are_decoded_and_put_back(toys: Any) -> None:
    text = base64.b64encode(b"rows").decode()
    body = toys.reply("a", routed_experts=text, indexer_topk=text, other={"routed_experts": "kept"})
    reply = read_reply(json.dumps(body).encode())
    assert reply.payloads == {"routed_experts": b"rows", "indexer_topk": b"rows"}
    assert b"rows" not in b"".join(piece for piece in reply.pieces if isinstance(piece, bytes))
    assert json.loads(recorded(reply)) == body
    client = json.loads(reply.client_body)
    meta = body["choices"][0]["meta_info"]
    del meta["routed_experts"], meta["indexer_topk"]
    assert client == body


@pytest.mark.parametrize("other", [None, "QU\\/D", "QUJD"])
def test_long_payload_texts_are_taken_out_before_a_reply_is_parsed(
    toys: Any, monkeypatch: pytest.MonkeyPatch, other: str | None
) -> None:
    parsed: list[bytes] = []

    def parse(text: Any) -> Any:
        parsed.append(bytes(memoryview(text)))
        return raw_json.parse(text)

    monkeypatch.setattr(reply_module, "parse", parse)
    body = json.dumps(toys.reply("a", routed_experts=other, indexer_topk="Um93" * 100)).replace("\\\\/", "\\/")
    assert read_reply(body.encode()).payloads["indexer_topk"] == b"Row" * 100
    assert parsed
    assert not any(b"Um93" in text for text in parsed)


@pytest.mark.parametrize("place", ["top", "other choice", "message", "nested", "nested before the payload"])
def test_a_text_of_the_name_that_stands_elsewhere_is_no_payload(toys: Any, place: str) -> None:
    reply = toys.reply("a", nested={})
    choice = reply["choices"][0]
    reply["choices"].append({"meta_info": {}})
    if place == "nested before the payload":
        choice["meta_info"]["routed_experts"] = "QUJD"
    place_of = {"top": reply, "other choice": reply["choices"][1]["meta_info"], "message": choice["message"]}
    place_of.get(place, choice["meta_info"]["nested"])["routed_experts"] = "kept"
    read = read_reply(json.dumps(reply).encode())
    assert read.payloads == ({"routed_experts": b"ABC"} if place == "nested before the payload" else {})
    assert json.loads(recorded(read)) == reply
    choice["meta_info"].pop("routed_experts", None)
    assert json.loads(read.client_body) == reply


@pytest.mark.parametrize("text", ["miles-ref:payload:routed_experts", "a\\/b"])
def test_a_payload_may_be_spelled_in_odd_ways(toys: Any, text: str) -> None:
    body = json.dumps(toys.reply("a", routed_experts="QUJD", note=text)).replace('"QUJD"', '"QU\\u004aD"').encode()
    reply = read_reply(body)
    assert reply.payloads == {"routed_experts": b"ABC"}
    assert json.loads(recorded(reply))["choices"][0]["meta_info"]["routed_experts"] == "QUJD"


def test_a_text_that_looks_like_a_lifted_payload_is_none(toys: Any) -> None:
    body = toys.reply("a", other={"routed_experts": "QUJD"}, routed_experts="miles-ref:payload:routed_experts")
    reply = read_reply(json.dumps(body).encode())
    assert reply.payloads == {}
    assert "is not base64" in reply.refused_payloads["routed_experts"]
    assert json.loads(recorded(reply)) == body


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("long", [True, False])
@pytest.mark.parametrize("note", ["", "miles-ref:payload:indexer_topk"])
def test_a_payload_of_any_size_is_taken_unless_its_end_has_stray_bits(
    toys: Any, size: int, long: bool, note: str
) -> None:
    def read(text: str) -> Any:
        return read_reply(json.dumps(toys.reply("a", note=note, indexer_topk=text)).encode())

    data = bytes(range(size)) + b"\0" * 96 * long
    text = base64.b64encode(data).decode()
    assert read(text).payloads == {"indexer_topk": data}
    letters = text.rstrip("=")
    if len(letters) < len(text):
        # A last letter of A, Q, g or w says nothing of the byte that is not there; the next one does.
        # So does "/", which stands before them in ASCII.
        for stray in (chr(ord(letters[-1]) + 1), "/"):
            read_stray = read(letters[:-1] + stray + "=" * (len(text) - len(letters)))
            assert "stray bits" in read_stray.refused_payloads["indexer_topk"]


def test_beside_a_payload_that_is_none_numbers_keep_their_spelling(toys: Any) -> None:
    body = json.dumps(toys.reply("a", routed_experts='AA"AA', note=1.5)).replace("1.5", "1.50").encode()
    reply = read_reply(body)
    assert (reply.payloads, reply.refused_payloads.keys()) == ({}, {"routed_experts"})
    assert b'"note":1.50' in recorded(reply)
    assert b'"note":1.50' in reply.client_body
    assert json.loads(recorded(reply)) == json.loads(body)


def test_a_duplicate_key_counts_once(toys: Any) -> None:
    body = (
        json.dumps(toys.reply("a"))
        .replace('"completion_tokens"', '"routed_experts": "AAAA", "routed_experts"')
        .encode()
    )
    with pytest.raises(UpstreamResponseError, match="completion_tokens"):
        read_reply(body)


@pytest.mark.parametrize("raw", [b"\xff", b"\xc3", b"\xed\xa0\x80"])
@pytest.mark.parametrize("place", [b'"note"', b'"index"'])
def test_what_is_not_utf8_is_refused_also_where_nobody_reads(toys: Any, place: bytes, raw: bytes) -> None:
    body = json.dumps(toys.reply("a", note="x")).encode().replace(place + b": ", place + b': "' + raw + b'", "other": ')
    with pytest.raises(UpstreamResponseError, match="cannot be read"):
        read_reply(body)


def test_numbers_of_any_size_survive(toys: Any) -> None:
    body = json.dumps(toys.reply("a", big=2**100)).encode()
    assert str(2**100).encode() in recorded(read_reply(body))


def test_infinities_are_texts_in_the_record_only(toys: Any) -> None:
    body = toys.reply("ü", ids=[97], routed_experts="QUJD", input_token_logprobs=[[float("-inf"), 5]])
    body["choices"][0]["meta_info"]["output_token_logprobs"][0][0] = float("-inf")
    reply = read_reply(json.dumps(body).encode())
    meta = json.loads(recorded(reply))["choices"][0]["meta_info"]
    assert meta["output_token_logprobs"][0][0] == "-inf"
    assert meta["input_token_logprobs"] == [["-inf", 5]]
    assert meta["routed_experts"] == "QUJD"
    client = json.loads(reply.client_body)["choices"][0]["meta_info"]
    assert client["output_token_logprobs"][0][0] == float("-inf")
    assert "routed_experts" not in client
    assert "ü".encode() in reply.client_body


def test_an_abort_needs_nothing_else() -> None:
    with pytest.raises(GenerationAbortedError):
        read_reply(b'{"choices": [{"finish_reason": "abort"}]}')


@pytest.mark.parametrize("calls", [None, [], [{"id": "c"}, "odd"]])
def test_the_event_has_an_index_in_each_call(toys: Any, calls: Any) -> None:
    reply = read_reply(json.dumps(toys.reply("a", message={"tool_calls": calls})).encode())
    event = json.loads(reply.event_stream().split(b"\n\n")[0].removeprefix(b"data: "))
    delta = event["choices"][0]["delta"]
    assert delta.get("tool_calls") == ([{"id": "c", "index": 0}, "odd"] if calls else None)


@pytest.mark.parametrize("own", ["r0", 5, 2**70, None, [1], {"a": None}])
def test_the_event_has_the_replys_own_id(toys: Any, own: Any) -> None:
    reply = read_reply(json.dumps({**toys.reply("a"), "id": own}).encode())
    event = json.loads(reply.event_stream().split(b"\n\n")[0].removeprefix(b"data: "))
    assert event["id"] == own
    assert reply.response_id == (own if isinstance(own, str) else None)
