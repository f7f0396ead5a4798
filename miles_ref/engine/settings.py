"""What an engine is made of, and what a generation is asked for: plain values, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from miles_ref.errors import UsageError

DEFAULT_TOKENIZER = "tiny-chatml"
DTYPES = ("float64", "float32", "bfloat16")
POLICIES = ("calculator", "sample")
DEFAULT_CACHE_TOKENS = 1 << 16  # 2 KB each with the built-in model
SEEDS = (-(1 << 63), (1 << 64) - 1)
"""Least and greatest seed that torch takes."""
CHUNK = 256
"""Tokens of one forward pass: what runs between two looks at whether a generation was aborted."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The model and what speaks through it.

    `model` is a local Hugging Face folder; None is the built-in mixture-of-experts, whose weights come from `seed`.
    `tokenizer` None is the model folder's own, or the shipped tiny-chatml. With `policy` "calculator" the replies are
    scripted (the seed chooses the words), with "sample" the model speaks. `context_length` (tokens) can only shorten
    the model's own; `cache_tokens` is the budget of the prefix cache, 0 for none.
    """

    model: str | None = None
    tokenizer: str | None = None
    seed: int = 0
    dtype: str = "float64"
    policy: str = "calculator"
    context_length: int | None = None
    cache_tokens: int = DEFAULT_CACHE_TOKENS
    threads: int = 1
    weight_version: str = "default"

    def check_model(self) -> None:
        """Raises UsageError for a folder that holds no model, before anything heavy is imported to read it."""
        if self.model is not None and not (Path(self.model) / "config.json").is_file():
            raise UsageError(
                f"no model in {self.model}: give the folder of a local Hugging Face model (with config.json)"
            )


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. `temperature` 0 takes the most likely one; `top_k` 0 or less means all."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """When a generation ends: at a stop id (not before `min_tokens`), at a stop text, or after `max_tokens`."""

    max_tokens: int
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()
