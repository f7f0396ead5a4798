"""HTTP clients that send every request once."""

from __future__ import annotations

from typing import Any

import aiohttp


def client_session(**options: Any) -> aiohttp.ClientSession:
    """An aiohttp session (`options` are its own) that never repeats a request.

    After a lost connection aiohttp sends GET, HEAD, OPTIONS, PUT, DELETE and TRACE once more, although the other side
    may have been at work on the first. There is no public switch; tests of the clients pin that this one works.
    """
    session = aiohttp.ClientSession(**options)
    session._retry_connection = False
    return session
