"""Data files that are shipped with the package."""

from __future__ import annotations

from pathlib import Path

_TOKENIZERS = Path(__file__).parent / "tokenizers"


def tokenizer_names() -> list[str]:
    """Names of the shipped tokenizer folders, sorted."""
    return sorted(path.parent.name for path in _TOKENIZERS.glob("*/tokenizer.json"))


def tokenizer_path(name: str) -> Path:
    """Folder of a shipped tokenizer. Raises KeyError with the choices for a name that is not shipped."""
    if name not in tokenizer_names():
        raise KeyError(f"no shipped tokenizer {name!r}; there are {', '.join(tokenizer_names())}")
    return _TOKENIZERS / name
