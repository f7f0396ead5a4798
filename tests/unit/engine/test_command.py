"""What the commands say before anything heavy is imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from miles_ref.cli import main
from miles_ref.engine.settings import SEEDS


@pytest.mark.parametrize("command", ["engine", "prove"])
def test_a_folder_without_a_model_is_named_before_torch_is_imported(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "payload").write_bytes(b"")
    for module in ("torch", "miles_ref.engine.service", "miles_ref.engine.proof"):
        monkeypatch.setitem(sys.modules, module, None)  # an import of it fails
    argv = [command, *([str(tmp_path / "payload")] if command == "prove" else []), "--tokenizer", "tiny-glm"]
    wrong = CliRunner().invoke(main, [*argv, "--model", str(tmp_path)])
    assert wrong.exit_code == 1
    assert "config.json" in wrong.stderr
    right = CliRunner().invoke(main, argv)
    assert right.exit_code == 1
    assert "pip install 'miles-ref[engine]'" in right.stderr


@pytest.mark.parametrize("command", ["engine", "prove", "demo"])
def test_a_seed_that_torch_does_not_take_is_refused(command: str) -> None:
    argv = [command, *([__file__] if command == "prove" else []), "--seed", str(SEEDS[1] + 1)]
    result = CliRunner().invoke(main, argv)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--seed" in result.stderr
