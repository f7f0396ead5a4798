"""Tests talk to loopback only: the libraries shall not ask a model hub. The kit's plugin comes by its entry point."""

import os
import sys

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

_COLLECTED = pytest.StashKey[frozenset[str]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note what collecting has imported: every xdist worker collects everything."""
    session.config.stash[_COLLECTED] = frozenset(sys.modules)


@pytest.fixture
def modules_after_collecting(request: pytest.FixtureRequest) -> frozenset[str]:
    """Names of the modules that were there when all tests were collected."""
    return request.config.stash[_COLLECTED]
