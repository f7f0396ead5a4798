"""Tests talk to loopback only: the libraries shall not ask a model hub. The kit's plugin comes by its entry point."""

import os
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

# And without TLS: the hundreds of processes that the tests start shall not each read the system's many authorities, as
# aiohttp does when it is imported. The only one here is of a key that nobody has.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "tests" / "authority.pem")

_COLLECTED = pytest.StashKey[frozenset[str]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note what collecting has imported: every xdist worker collects everything."""
    session.config.stash[_COLLECTED] = frozenset(sys.modules)


@pytest.fixture
def modules_after_collecting(request: pytest.FixtureRequest) -> frozenset[str]:
    """Names of the modules that were there when all tests were collected."""
    return request.config.stash[_COLLECTED]
