"""Modules that a test file needs to run, and not to be collected."""

from __future__ import annotations

import importlib
from typing import Any


class Deferred:
    """A module that is imported when a public name of it is first asked for.

    Every xdist worker collects every test file, and few run those that need torch: an import of it at the top of a
    file would be paid by all. Private names are none, because pytest asks for some while it collects.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{self._name}: the private name {name!r} cannot be deferred; import it in the test")
        return getattr(importlib.import_module(self._name), name)
