"""Prove samples: the model, run once over the merged tokens without any cache, gives the recorded log probs.

The controls show that the proof can fail: samples with one token changed, with one log prob changed, and with the mask
shifted by one are proven too, and each must miss the tolerance.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from miles_ref.engine.model import LanguageModel
from miles_ref.engine.settings import EngineSettings
from miles_ref.errors import UsageError
from miles_ref.sample import Sample
from miles_ref.wire import SAMPLES_VALUE_SPEC, decode_samples_and_merge_input_sample

TOLERANCE = 1e-4
"""Largest difference of a recomputed log prob (natural logarithm) from the recorded one."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a sample claims, as arrays: `tokens` int64; `mask` (0 or 1) and `log_probs` (float64) for its last tokens.

    Raises ValueError where the lengths contradict each other, or where the first token of all is claimed as trained.
    """

    tokens: npt.NDArray[np.int64]
    mask: npt.NDArray[np.int64]
    log_probs: npt.NDArray[np.float64]

    def __post_init__(self) -> None:
        if not len(self.mask) == len(self.log_probs) <= len(self.tokens):
            raise ValueError(
                f"{len(self.tokens)} tokens, {len(self.mask)} mask entries and {len(self.log_probs)} log probs "
                "do not belong together"
            )
        if len(self.trained) and self.trained[0] == 0:
            raise ValueError(
                "the first token is trained, but no token before it predicts it; set its loss_mask entry to 0"
            )

    @classmethod
    def of(cls, tokens: Any, response_length: int, loss_mask: Any, rollout_log_probs: Any) -> Claim:
        """From a sample's fields. The mask of an empty response may be null, log probs where nothing is trained."""
        if loss_mask is None and response_length:
            raise ValueError(
                "loss_mask is null, so that nobody knows which tokens are trained; give the sample its mask"
            )
        mask = np.asarray([] if loss_mask is None else loss_mask, dtype=np.int64)
        if len(mask) != response_length:
            raise ValueError(f"loss_mask has {len(mask)} entries, but response_length is {response_length}")
        if rollout_log_probs is None and mask.any():
            raise ValueError(
                "rollout_log_probs is null, so that there is nothing to compare; collect the sample with log probs, "
                "or set its loss_mask to 0"
            )
        log_probs = np.zeros(len(mask)) if rollout_log_probs is None else np.asarray(rollout_log_probs, np.float64)
        return cls(np.asarray([] if tokens is None else tokens, dtype=np.int64), mask, log_probs)

    @property
    def trained(self) -> npt.NDArray[np.int64]:
        """Positions of the trained tokens in `tokens`, rising."""
        return np.flatnonzero(self.mask) + (len(self.tokens) - len(self.mask))

    def check_ids(self, vocabulary: int) -> None:
        """Raises ValueError for a token id that a model with `vocabulary` ids cannot read."""
        outside = np.flatnonzero((self.tokens < 0) | (self.tokens >= vocabulary))
        if len(outside):
            raise ValueError(
                f"tokens[{outside[0]}] is {self.tokens[outside[0]]}, but the model's vocabulary has {vocabulary} ids; "
                "prove it with the model that said it (--model, --tokenizer)"
            )

    def error(self, model: LanguageModel) -> float:
        """The largest difference of a trained token's recomputed log prob from the recorded one; 0.0 without any.

        Infinite where a log prob is not finite. The ids must be the model's (`check_ids`).
        """
        trained = self.trained
        if not len(trained):
            return 0.0
        log_probs, _ = model.read_once(self.tokens.tolist(), (trained - 1).tolist())
        said = torch.from_numpy(self.tokens[trained])
        recomputed = log_probs.gather(1, said[:, None])[:, 0].double().numpy()
        differences = np.abs(recomputed - self.log_probs[np.flatnonzero(self.mask)])
        return float(differences.max()) if np.isfinite(differences).all() else math.inf


def prove(tokens: Any, response_length: int, loss_mask: Any, rollout_log_probs: Any, model: LanguageModel) -> float:
    """The largest error of a recorded log prob, over the trained tokens (inf where one is not finite).

    The arguments are a sample's fields: token ids, and mask and log probs of its last `response_length` tokens.
    """
    return Claim.of(tokens, response_length, loss_mask, rollout_log_probs).error(model)


def change_token(claim: Claim, vocabulary: int) -> Claim:
    """Control: another id in place of the trained token in the middle."""
    tokens = claim.tokens.copy()
    at = claim.trained[len(claim.trained) // 2]
    tokens[at] = (tokens[at] + 1) % vocabulary
    return replace(claim, tokens=tokens)


def change_log_prob(claim: Claim) -> Claim:
    """Control: the log prob of the trained token in the middle is off by ten times the tolerance."""
    log_probs = claim.log_probs.copy()
    trained = np.flatnonzero(claim.mask)
    log_probs[trained[len(trained) // 2]] -= 10 * TOLERANCE
    return replace(claim, log_probs=log_probs)


def shift_mask(claim: Claim) -> Claim:
    """Control: each run of trained tokens begins and ends one token earlier, where no log prob was recorded.

    A prompt of a single token leaves no room for it: the first token of all cannot be trained.
    """
    # One more token than the response, for a run at its very beginning; never the first token of all.
    size = min(len(claim.mask) + 1, len(claim.tokens) - 1)
    log_probs, mask = np.zeros(size), np.zeros(size + 1, dtype=np.int64)
    log_probs[-len(claim.mask) :] = claim.log_probs
    mask[-len(claim.mask) - 1 : -1] = claim.mask
    return Claim(claim.tokens, mask[-size:], log_probs)


@dataclass(frozen=True, slots=True)
class Report:
    """What a proof found. `controls` are the errors of the changed samples, by the control's name.

    `controls_failed` counts the controls that failed the proof, as all three must.
    """

    samples: int
    tokens: int
    trained_tokens: int
    max_logprob_error: float
    controls: dict[str, float]
    tolerance: float = TOLERANCE

    @property
    def controls_failed(self) -> int:
        """How many controls missed the tolerance."""
        return sum(not error <= self.tolerance for error in self.controls.values())

    @property
    def proven(self) -> bool:
        """Whether there was something to prove, all of it holds, and no control passed."""
        holds = self.trained_tokens > 0 and self.max_logprob_error <= self.tolerance
        return holds and len(self.controls) > 0 and self.controls_failed == len(self.controls)

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object; an infinite error is the text "inf", because JSON has no such number."""
        return {
            **asdict(self),
            "max_logprob_error": _json_number(self.max_logprob_error),
            "controls": {name: _json_number(error) for name, error in self.controls.items()},
            "controls_failed": self.controls_failed,
            "proven": self.proven,
        }


def _json_number(error: float) -> float | str:
    return error if math.isfinite(error) else str(error)


def prove_claims(claims: Iterable[Claim], model: LanguageModel) -> Report:
    """Prove every claim, and try the controls on the first one that has trained tokens."""
    claims = list(claims)
    subject = next((claim for claim in claims if len(claim.trained)), None)
    controls: dict[str, Callable[[Claim], Claim]] = {
        "token_changed": lambda claim: change_token(claim, model.vocabulary),
        "log_prob_changed": change_log_prob,
        "mask_shifted": shift_mask,
    }
    return Report(
        samples=len(claims),
        tokens=sum(len(claim.tokens) for claim in claims),
        trained_tokens=sum(len(claim.trained) for claim in claims),
        max_logprob_error=max((claim.error(model) for claim in claims), default=0.0),
        controls={} if subject is None else {name: make(subject).error(model) for name, make in controls.items()},
    )


def prove_payload(path: str | Path, settings: EngineSettings) -> Report:
    """Prove the samples of a payload file (wire.md) with the model of `settings`.

    Raises DecodeError, and UsageError for a model that cannot be used and for a sample that cannot be proven with it.
    """
    # The fields of v1 are in every payload, and they are all that a proof needs.
    reply = decode_samples_and_merge_input_sample(Path(path).read_bytes(), Sample(), fields=SAMPLES_VALUE_SPEC)
    claims = []
    for at, sample in enumerate(reply.samples):
        with _naming(at):
            claims.append(Claim.of(sample.tokens, sample.response_length, sample.loss_mask, sample.rollout_log_probs))
    model, _ = LanguageModel.load(settings)
    for at, claim in enumerate(claims):
        with _naming(at):
            claim.check_ids(model.vocabulary)
    return prove_claims(claims, model)


@contextlib.contextmanager
def _naming(at: int) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise UsageError(f"sample {at}: {error}") from error
