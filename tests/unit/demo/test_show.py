"""What the demo shows of an episode, and when it counts as proven."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from miles_ref.demo.episode import Episode
from miles_ref.demo.show import show
from miles_ref.sample import Sample, Status
from miles_ref.tokens.tokenizer import load_tokenizer

PROOF = {
    "max_logprob_error": 1e-12,
    "controls_failed": 3,
    "controls": {"token_changed": 0.5, "log_prob_changed": 0.001, "mask_shifted": 9.0},
    "tolerance": 1e-4,
    "proven": True,
}


@pytest.fixture
def episode(tmp_path: Path) -> Episode:
    tokenizer = load_tokenizer("tiny-chatml")
    prompt, said, seen, said_again = (tokenizer.encode(text) for text in ("ask ", "one", " tool ", "two"))
    mask = [1] * len(said) + [0] * len(seen) + [1] * len(said_again)
    sample = Sample(
        tokens=[*prompt, *said, *seen, *said_again],
        response_length=len(mask),
        loss_mask=mask,
        rollout_log_probs=[-1.0] * len(mask),
        status=Status.COMPLETED,
        reward=1.0,
        metadata={"leaf": {"node_id": 1}},
    )
    record: dict[str, Any] = {
        "request": {"input_ids": prompt},
        "response": {
            "choices": [
                {
                    "finish_reason": "stop",
                    "meta_info": {"output_token_logprobs": [[-1.0, 5, None], ["-inf", 6, None]], "cached_tokens": 3},
                }
            ]
        },
    }
    dump = {"session_id": "abc", "records": [record], "metadata": {}}
    payload_file, records_file = tmp_path / "payload", tmp_path / "records"
    payload_file.write_bytes(b"x" * 10)
    records_file.write_text(json.dumps(dump))
    return Episode([sample], dump, payload_file, records_file, dict(PROOF), 1.25)


def shown(episode: Episode, *, terminal: bool = False) -> str:
    console = Console(
        file=io.StringIO(), force_terminal=terminal, width=200, color_system="truecolor" if terminal else None
    )
    show(episode, console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_plain_text_marks_what_is_trained(episode: Episode) -> None:
    text = shown(episode)
    assert "ask «one» tool «two»" in text
    assert "\x1b" not in text


def test_a_terminal_gets_colours_instead(episode: Episode) -> None:
    text = shown(episode, terminal=True)
    assert "«" not in text
    assert "\x1b[1;32mone\x1b[0m" in text


def test_the_result_names_the_controls(episode: Episode) -> None:
    text = shown(episode)
    assert "control token changed" in text
    assert "PASSES" not in text
    assert text.split()[-2:] == ["proven", "yes"]


def test_a_control_that_passes_is_no_proof(episode: Episode) -> None:
    episode.proof |= {"controls": PROOF["controls"] | {"mask_shifted": 0.0}, "proven": False, "controls_failed": 2}  # type: ignore[operator]
    text = shown(episode)
    assert "PASSES, which it must not" in text
    assert text.split()[-2:] == ["proven", "NO"]


def test_an_infinite_error_is_shown(episode: Episode) -> None:
    controls = PROOF["controls"] | {"log_prob_changed": "inf"}  # type: ignore[operator]
    episode.proof |= {"max_logprob_error": "inf", "controls": controls, "proven": False}
    text = shown(episode)
    assert "largest error inf" in text
    assert "error inf: fails, as it must" in text


def test_the_turns_of_a_tree_are_its_nodes(episode: Episode) -> None:
    episode.dump["metadata"]["tree"] = {"nodes": [{}, {}, {}], "leaves": []}
    assert episode.turns == 3


def test_figures_without_a_proof_are_no_figures(episode: Episode) -> None:
    episode.proof = {}
    assert not episode.proven
    with pytest.raises(KeyError):
        episode.figures()
