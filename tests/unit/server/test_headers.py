"""Which headers go on and which come back (session-http.md, A turn)."""

import pytest

from miles_ref.server.headers import copied_back, decodable, forwarded


def test_the_routing_key_is_the_servers() -> None:
    headers = forwarded([("x-smg-routing-key", "spoofed"), ("X-SMG-Routing-Key", "again")], "id")
    assert headers.getall("X-SMG-Routing-Key") == ["id"]


def test_repeated_headers_stay_repeated() -> None:
    assert forwarded([("X-A", "1"), ("x-a", "2")], "id").getall("x-a") == ["1", "2"]
    assert copied_back([("Set-Cookie", "a"), ("set-cookie", "b")]).getall("set-cookie") == ["a", "b"]


@pytest.mark.parametrize(
    ("accepted", "sent"),
    [
        ("gzip, deflate, br, zstd", "gzip, deflate"),
        ("br", "identity"),
        ("", "identity"),
        ("*", "identity"),
        ("GZIP;q=0.2", "GZIP;q=0.2"),
    ],
)
def test_only_codings_that_can_be_undone_are_asked_for(accepted: str, sent: str) -> None:
    assert decodable(accepted) == sent
