"""What a plain import may pull in: a training process or a small worker host pays for nothing that it does not use."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "tokenizers", "sglang", "ray"}


def modules_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after `statement`."""
    code = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "miles_ref",
        "miles_ref.worker",
        "miles_ref.agents",
        "miles_ref.cli",
        "miles_ref.driver.generate",
        "miles_ref.plugins.pipeline",
        "miles_ref.server.app",
        "miles_ref.testing.pytest_plugin",
        "miles_ref.wire",
    ],
)
def test_nothing_heavy_is_imported(module: str) -> None:
    assert not HEAVY & modules_after(f"import {module}")


def test_the_worker_needs_aiohttp_and_the_standard_library_only() -> None:
    third_party = {"numpy", "orjson", "msgspec", "pluggy", "safetensors", "click", "rich", "psutil"}
    assert not third_party & modules_after("import miles_ref.worker")


def test_a_heavy_import_would_be_seen() -> None:
    assert modules_after("import miles_ref.tokens.tokenizer, tokenizers") & HEAVY == {"tokenizers"}


def test_collecting_the_tests_imports_no_torch(modules_after_collecting: frozenset[str]) -> None:
    assert not {"torch", "transformers", "openai"} & modules_after_collecting
    assert "pytest" in modules_after_collecting
