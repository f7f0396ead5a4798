"""The example packages as their users get them: built wheels in a fresh environment, chosen by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PACKAGES = [REPO, REPO / "examples" / "miles-ref-picker-example", REPO / "examples" / "miles-ref-merger-example"]

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(300), pytest.mark.xdist_group("wheels")]


def run(*argv: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command that must succeed; what it said is in the error."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in argv], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{argv}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment that holds this package and the examples as wheels; its Python.

    The third-party dependencies are this environment's own, reached by their path: what is installed from the
    repository here is not seen through it.
    """
    folder = tmp_path_factory.mktemp("fresh")
    wheels = folder / "wheels"
    for package in PACKAGES:
        run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", wheels, package, cwd=folder)
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).stdout.strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    run(*install, "--ignore-installed", *sorted(wheels.glob("*.whl")), cwd=folder)
    return python


def test_the_environment_runs_the_wheel(environment: Path, tmp_path: Path) -> None:
    done = run(environment, "-c", "import miles_ref; print(miles_ref.__file__)", cwd=tmp_path)
    assert Path(done.stdout.strip()).is_relative_to(environment.parents[1])


def test_both_are_listed_with_their_distribution(environment: Path, tmp_path: Path) -> None:
    done = run(environment, "-m", "miles_ref", "plugins", "list", "--json", cwd=tmp_path)
    assert "densest-leaf" in done.stdout
    assert "length-normalized-reward" in done.stdout
    assert "miles-ref-merger-example" in done.stdout
    json.loads(done.stdout)


@pytest.mark.parametrize(("flag", "name"), [("--picker", "densest-leaf"), ("--merger", "length-normalized-reward")])
def test_the_corpus_in_the_wheel_judges_them(environment: Path, tmp_path: Path, flag: str, name: str) -> None:
    done = run(environment, "-m", "miles_ref", "check", flag, name, cwd=tmp_path)
    assert f"{name} holds in all" in done.stdout


@pytest.mark.parametrize("package", PACKAGES[1:], ids=lambda package: package.name)
def test_their_own_tests_pass(environment: Path, tmp_path: Path, package: Path) -> None:
    run(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", package / "tests", cwd=tmp_path)
