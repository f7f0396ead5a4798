"""The demo's options."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from miles_ref.demo import MOST_TURNS
from miles_ref.demo.command import demo_command


@pytest.mark.parametrize("steps", [4, MOST_TURNS])
def test_a_task_that_has_no_episode_is_refused(steps: int) -> None:
    result = CliRunner().invoke(demo_command, ["--steps", str(steps)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"5<=x<={MOST_TURNS - 1}" in result.stderr


def test_the_longest_task_is_taken() -> None:
    context = demo_command.make_context("demo", ["--steps", str(MOST_TURNS - 1)])
    assert context.params["steps"] == MOST_TURNS - 1
