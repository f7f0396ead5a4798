"""Programs that a run starts: the ports that they are given."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from miles_ref.testing import programs
from miles_ref.testing.programs import ProgramError, free_port

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_a_port_is_free_and_is_not_given_to_a_connection_meanwhile() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        if RANGE.exists():
            assert 10_000 <= port < int(RANGE.read_text().split()[0])


def test_where_the_system_does_not_say_which_it_gives_away_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_first_given_away", lambda: 0)
    with socket.create_server(("127.0.0.1", free_port())):
        pass


def test_ports_that_are_taken_are_an_error_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(programs, "_first_given_away", lambda: 60_000)
        monkeypatch.setattr(programs.secrets, "randbelow", lambda _: taken.getsockname()[1] - 10_000)
        with pytest.raises(ProgramError, match="no free port among a hundred"):
            free_port()
