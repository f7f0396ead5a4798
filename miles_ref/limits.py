"""Limits that several rooms share: what one writes, another has to read."""

from __future__ import annotations

MAX_DEPTH = 200
"""Levels of lists and objects in a JSON value that is taken in or handed on: requests, replies, an agent's values."""

MAX_ARRAY_BYTES = 2**63 - 1
"""No array has a shape of more bytes, dimensions of 0 set aside: what is encoded must have one that can be decoded."""

MAX_LINE_BYTES = 64 << 10
"""The longest request line and the longest header that the servers read. aiohttp answers longer ones by itself."""
