"""Limits that several rooms share: what one writes, another has to read."""

from __future__ import annotations

MAX_DEPTH = 200
"""Levels of lists and objects in a JSON value that is taken in or handed on: requests, replies, an agent's values."""
