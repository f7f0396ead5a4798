from __future__ import annotations

import pytest

from miles_ref.engine.settings import EngineSettings


@pytest.fixture(scope="session")
def tiny_moe():
    """The built-in model; tests share it, since it keeps nothing between two contexts."""
    from miles_ref.engine.model import LanguageModel

    model, _ = LanguageModel.load(EngineSettings())
    return model
