"""Small samples to encode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from miles_ref.sample import Sample, Status


@pytest.fixture
def sample() -> Callable[..., Sample]:
    """Makes a valid sample of 3 tokens, 2 of them response, with some fields replaced."""

    def make(**changed: Any) -> Sample:
        values = {
            "tokens": [1, 2, 3],
            "response": "ok",
            "response_length": 2,
            "loss_mask": [1, 1],
            "rollout_log_probs": [-0.5, -0.25],
            "status": Status.COMPLETED,
        }
        return Sample(**{**values, **changed})

    return make
