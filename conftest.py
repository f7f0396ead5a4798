"""Tests talk to loopback only: the libraries shall not ask a model hub. The kit's plugin comes by its entry point."""

import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

# And without TLS: the hundreds of processes that the tests start shall not each read the system's many authorities, as
# aiohttp does when it is imported. The only one here is of a key that nobody has.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "tests" / "authority.pem")

_COLLECTED = pytest.StashKey[frozenset[str]]()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect without collecting garbage, and note what that has imported: every xdist worker collects everything.

    What is there afterwards stays to the end, so the garbage collector need not look at it again and again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        session.config.stash[_COLLECTED] = frozenset(sys.modules)


@pytest.fixture
def modules_after_collecting(request: pytest.FixtureRequest) -> frozenset[str]:
    """Names of the modules that were there when all tests were collected."""
    return request.config.stash[_COLLECTED]
