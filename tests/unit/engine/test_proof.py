from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner

from miles_ref.engine.command import prove_command
from miles_ref.sample import Sample, Status
from miles_ref.wire import SAMPLES_VALUE_SPEC, SAMPLES_VALUE_SPEC_V2, encode_samples
from tests.deferred import Deferred

if TYPE_CHECKING:
    from miles_ref.engine.model import LanguageModel

proof = Deferred("miles_ref.engine.proof")
pytestmark = pytest.mark.xdist_group("torch")  # one worker loads torch for all of them


def sample(model: LanguageModel, prompt: int, parts: list[tuple[int, int]]) -> proof.Claim:
    """A true claim: random tokens, `parts` = runs of (mask, length) after `prompt` tokens."""
    mask = np.repeat([bit for bit, _ in parts], [length for _, length in parts]).astype(np.int64)
    tokens = np.random.default_rng(0).integers(0, model.vocabulary, prompt + len(mask))
    log_probs, _ = model.read_once(tokens.tolist(), range(prompt - 1, len(tokens) - 1))
    said = log_probs[np.arange(len(mask)), tokens[prompt:]].double().numpy()
    return proof.Claim(tokens, mask, np.where(mask, said, 0.0))


SHAPES = [
    (5, [(1, 6), (0, 4), (1, 7)]),
    (5, [(1, 6)]),
    (2, [(1, 1)]),
    (4, [(0, 3), (1, 2), (0, 2)]),
]


@pytest.mark.parametrize(("prompt", "parts"), SHAPES)
def test_a_true_sample_is_proven_and_its_controls_fail(
    tiny_moe: LanguageModel, prompt: int, parts: list[tuple[int, int]]
) -> None:
    claim = sample(tiny_moe, prompt, parts)
    assert (
        proof.prove(claim.tokens.tolist(), len(claim.mask), claim.mask.tolist(), claim.log_probs.tolist(), tiny_moe)
        < 1e-9
    )
    report = proof.prove_claims([claim], tiny_moe)
    assert report.proven
    assert report.controls_failed == 3
    assert report.trained_tokens == claim.mask.sum()
    assert report.to_json()["proven"] is True


def test_every_trained_token_is_looked_at(tiny_moe: LanguageModel) -> None:
    claim = sample(tiny_moe, *SHAPES[0])
    for at in range(len(claim.mask)):
        log_probs = claim.log_probs.copy()
        log_probs[at] -= 2e-4
        error = proof.Claim(claim.tokens, claim.mask, log_probs).error(tiny_moe)
        assert (error > 1e-4) == bool(claim.mask[at])


def test_log_probs_that_are_not_finite_prove_nothing(tiny_moe: LanguageModel) -> None:
    claim = sample(tiny_moe, *SHAPES[1])
    for value in (math.nan, -math.inf):
        log_probs = claim.log_probs.copy()
        log_probs[0] = value
        assert proof.Claim(claim.tokens, claim.mask, log_probs).error(tiny_moe) == math.inf


def test_nothing_trained_is_nothing_proven(tiny_moe: LanguageModel) -> None:
    untrained = proof.Claim.of([1, 2, 3], 0, None, None)
    assert untrained.error(tiny_moe) == 0.0
    assert not proof.prove_claims([untrained], tiny_moe).proven
    assert not proof.prove_claims([], tiny_moe).proven
    true = sample(tiny_moe, *SHAPES[1])
    assert proof.prove_claims([untrained, true], tiny_moe).proven


def test_one_false_sample_among_others_is_found(tiny_moe: LanguageModel) -> None:
    true = sample(tiny_moe, *SHAPES[0])
    false = proof.change_token(true, tiny_moe.vocabulary)
    report = proof.prove_claims([true, false], tiny_moe)
    assert report.max_logprob_error > 1e-4
    assert not report.proven


def test_the_shifted_mask_is_one_token_earlier() -> None:
    claim = proof.Claim(np.arange(8), np.array([1, 1, 0, 0, 1]), np.array([-1.0, -2.0, 0.0, 0.0, -3.0]))
    assert claim.trained.tolist() == [3, 4, 7]
    shifted = proof.shift_mask(claim)
    assert shifted.trained.tolist() == [2, 3, 6]
    assert shifted.log_probs.tolist() == [0.0, -1.0, -2.0, 0.0, 0.0, -3.0]


@pytest.mark.parametrize("fields", [SAMPLES_VALUE_SPEC, SAMPLES_VALUE_SPEC_V2])
def test_a_payload_is_proven_from_its_file(tiny_moe: LanguageModel, tmp_path: Path, fields: Any) -> None:
    claim = sample(tiny_moe, *SHAPES[0])
    values = {"response_length": len(claim.mask), "loss_mask": claim.mask, "rollout_log_probs": claim.log_probs}
    true = Sample(tokens=claim.tokens, status=Status.COMPLETED, **values)
    file = tmp_path / "samples.safetensors"

    def proven(seed: int) -> tuple[int, dict[str, Any]]:
        result = CliRunner().invoke(prove_command, [str(file), "--seed", str(seed)])
        return result.exit_code, json.loads(result.stdout)

    file.write_bytes(encode_samples([true, true], {}, fields=fields))
    status, report = proven(0)
    assert (status, report["proven"], report["controls_failed"], report["samples"]) == (0, True, 3, 2)
    status, report = proven(1)  # another model did not say this
    assert (status, report["proven"]) == (1, False)
    assert report["max_logprob_error"] > 1


def written(file: Path, *changes: dict[str, Any]) -> str:
    """The path of a payload with a sample of three tokens for each of `changes`."""
    sound: dict[str, Any] = {"tokens": [1, 2, 3], "loss_mask": [1], "rollout_log_probs": [-1.0], "response_length": 1}
    samples = [Sample(status=Status.COMPLETED, response="x", **(sound | change)) for change in changes]
    file.write_bytes(encode_samples(samples, {}, fields=SAMPLES_VALUE_SPEC))
    return str(file)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": [1, 2, 999_999]}, "tokens[2] is 999999, but the model's vocabulary has 2052 ids"),
        ({"tokens": [1, -1, 2]}, "tokens[1] is -1"),
        ({"rollout_log_probs": None}, "rollout_log_probs is null"),
        ({"loss_mask": None}, "loss_mask is null"),
        ({"response_length": 3, "loss_mask": [1, 0, 1], "rollout_log_probs": [-1.0] * 3}, "first token is trained"),
    ],
)
def test_a_sample_that_cannot_be_proven_is_named(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    result = CliRunner().invoke(prove_command, [written(tmp_path / "payload", {}, change)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: sample 1: ")
    assert named in result.stderr


def test_an_infinite_error_is_a_text_in_json(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    result = CliRunner().invoke(prove_command, [written(tmp_path / "payload", {"rollout_log_probs": [-math.inf]})])
    report = json.loads(result.stdout, parse_constant=refuse)
    assert (result.exit_code, report["proven"], report["max_logprob_error"]) == (1, False, "inf")
    assert report["controls"]["log_prob_changed"] == "inf"


def test_what_is_not_trained_needs_no_log_probs() -> None:
    assert proof.Claim.of([1, 2, 3], 2, [0, 0], None).log_probs.tolist() == [0.0, 0.0]


def test_a_file_that_is_no_payload_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"nothing")
    result = CliRunner().invoke(prove_command, [str(tmp_path / "x")])
    assert result.exit_code == 1
    assert "Error" in result.stderr


def test_lengths_that_contradict_are_refused() -> None:
    with pytest.raises(ValueError, match="response_length is 2"):
        proof.Claim.of([1, 2, 3], 2, [1], [-1.0])
    with pytest.raises(ValueError, match="do not belong together"):
        proof.Claim.of([1, 2, 3], 1, [1], [-1.0, -2.0])
    with pytest.raises(ValueError, match="do not belong together"):
        proof.Claim.of([1], 2, [1, 1], [-1.0, -2.0])
    with pytest.raises(ValueError, match="first token"):
        proof.Claim.of([1, 2], 2, [1, 1], [-1.0, -2.0])
