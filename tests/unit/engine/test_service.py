from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.deferred import Deferred

service = Deferred("miles_ref.engine.service")
pytestmark = pytest.mark.xdist_group("torch")  # one worker loads torch for all of them


@pytest.mark.parametrize("name", ["file", os.devnull])
async def test_the_end_of_what_epoll_does_not_take_is_seen(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10_000)
    ended = asyncio.Event()
    with open(tmp_path / name, "rb") as file:  # noqa: ASYNC230 - it is opened, not read
        service.call_at_eof(file.fileno(), ended.set)
        await ended.wait()


async def test_a_pipe_ends_when_it_is_closed_and_not_before() -> None:
    ended = asyncio.Event()
    reading, writing = os.pipe()
    try:
        os.write(writing, b"x")
        service.call_at_eof(reading, ended.set)
        for _ in range(3):  # turns of the loop, in which the byte is read
            await asyncio.sleep(0)
        assert not ended.is_set()
        os.close(writing)
        await ended.wait()
    finally:
        os.close(reading)
