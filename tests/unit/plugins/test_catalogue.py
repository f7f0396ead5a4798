"""Who is there and how it is chosen: by name, by dotted path, by file; a broken package stops nobody."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, PathDistribution
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from miles_ref.errors import PluginLoadError, UsageError
from miles_ref.plugins import Catalogue, Pipeline
from miles_ref.plugins.command import plugins_group

PluginFile = Callable[..., str]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], EntryPoint]:
    """Makes an installed package of one module and gives its entry point, named as the module."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name: str, source: str) -> EntryPoint:
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        info = tmp_path / f"{name}-3.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.1\n")
        (info / "entry_points.txt").write_text(f"[miles_ref]\n{name} = {name}\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
        return next(iter(PathDistribution(info).entry_points))

    return make


GOOD = """
from miles_ref.hookspecs import hookimpl


@hookimpl
def pick(leaf_samples):
    return leaf_samples[-1:]
"""


def test_an_installed_plugin_is_chosen_by_its_name(session: Any, package: Any) -> None:
    catalogue = Catalogue([package("good_picker", GOOD)])
    assert catalogue.implementation("good_picker", "pick").origin.version == "3.1"
    assert b'"node_id":2' in session.collect(Pipeline("v2", picker="good_picker", catalogue=catalogue))


BROKEN = {
    "no_such_import": ("import nowhere_at_all", "ModuleNotFoundError"),
    "syntax_error": ("def", "SyntaxError"),
    "exits_on_import": ("raise SystemExit(1)", "SystemExit"),
    "no_hooks": ("x = 1", "implements no hook; mark its functions with"),
    "async_hook": (GOOD.replace("def pick", "async def pick"), "it is async"),
    "unknown_hook": (GOOD.replace("def pick", "def choose"), "there is no such hook"),
}


@pytest.mark.parametrize(("source", "said"), BROKEN.values(), ids=BROKEN)
def test_a_broken_package_is_a_warning_that_names_it_and_stops_nobody(
    package: Any, caplog: pytest.LogCaptureFixture, source: str, said: str
) -> None:
    catalogue = Catalogue([package("broken", source), package("good_picker", GOOD)])
    assert [plugin.name for plugin in catalogue.installed()] == ["good_picker"]
    (warning,) = catalogue.warnings
    assert "plugin broken (broken 3.1), entry point broken, is left out" in warning
    assert said in warning
    assert warning in caplog.text
    with pytest.raises(PluginLoadError, match=r"plugin 'broken' is not installed; choose .*good_picker") as error:
        catalogue.implementation("broken", "pick")
    assert said in str(error.value)


def test_a_name_that_is_taken_stays_with_its_owner(package: Any) -> None:
    renamed = package("impostor", GOOD)
    catalogue = Catalogue([EntryPoint("keep-all", renamed.value, "miles_ref")])
    assert catalogue.implementation("keep-all", "pick").trusted
    assert catalogue.installed() == []
    assert "the name is taken by plugin keep-all (miles-ref" in catalogue.warnings[0]


def test_what_is_installed_is_not_looked_at_unless_it_is_needed() -> None:
    def never() -> Any:
        raise AssertionError("looked at")
        yield

    Pipeline("v1", catalogue=Catalogue(never()))
    Pipeline("v2", picker="longest", merger="tree-advantage", catalogue=Catalogue(never()))


def test_functions_are_found_by_file_and_by_dotted_path(
    plugin_file: PluginFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = """
    def choose(leaf_samples):
        return leaf_samples

    class Plugin:
        @hookimpl
        def pick(self, leaf_samples):
            return leaf_samples

    plugin = Plugin()

    @hookimpl
    def merge(leaf_samples):
        return leaf_samples
    """
    path = plugin_file(source, "a_plugin_of_mine.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "a_plugin_of_mine", raising=False)
    catalogue = Catalogue([])
    for choice in (
        f"{path}:choose",
        "./a_plugin_of_mine.py:choose",
        "a_plugin_of_mine.py:Plugin",
        "a_plugin_of_mine.choose",
        "a_plugin_of_mine:choose",
        "a_plugin_of_mine.plugin",
        "a_plugin_of_mine:plugin.pick",
    ):
        one = catalogue.implementation(choice, "pick")
        assert (one.origin.name, one.trusted) == (choice, False)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("nothing-like-it", "is not installed; choose retry-trim, keep-all|is not installed; choose .*keep-all"),
        ("exactly-once", "plugin exactly-once .*does not implement pick; choose"),
        ("no.such.module", "cannot import it: ModuleNotFoundError"),
        ("json.no_such", "has no 'no_such'"),
        ("json.loads", "there is no argument s"),
        ("json.dumps", "argument"),
        ("json.__version__", "it is str .*, not a function; name a function for pick"),
        ("./missing.py:pick", "there is no file .*missing.py"),
        ("./plugin.py", "name its function too"),
        ("./plugin.py:", "name its function too"),
        ("./plugin.py:absent", "has no 'absent'"),
        ("./plugin.py:number", "it is int 3, not a function; name a function for pick"),
        ("./plugin.py:later", "it is async"),
        ("./plugin.py:Merger", "implements merge, not pick"),
        ("./plugin.py:Merger.merge", "marked with @hookimpl as merge, not pick; choose it for merge"),
        ("./plugin.py:mine", "marked with @hookimpl as merge, not pick; choose it for merge"),
        ("plugin:later", r"there is no module plugin, but a file: give \./plugin\.py:later"),
        ("./broken.py:pick", "cannot import it: ZeroDivisionError"),
    ],
)
def test_a_choice_that_cannot_be_used_says_why(
    plugin_file: PluginFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str, said: str
) -> None:
    source = """
    number = 3

    async def later(leaf_samples):
        return leaf_samples

    @hookimpl(specname="merge")
    def mine(leaf_samples):
        return leaf_samples

    class Merger:
        @hookimpl
        def merge(self, leaf_samples):
            return leaf_samples
    """
    plugin_file(source)
    plugin_file("1 / 0", "broken.py")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PluginLoadError, match=said):
        Pipeline("v2", picker=choice, catalogue=Catalogue([]))


def test_a_plugin_set_goes_by_its_name() -> None:
    with pytest.raises(PluginLoadError, match="a set goes by the name that it is installed under") as error:
        Catalogue([]).plugin_set("./plugin.py:pick")
    assert "choose" not in str(error.value)
    with pytest.raises(PluginLoadError, match=r"plugin 'nothing-like-it' is not installed; choose v1, v2$"):
        Catalogue([]).plugin_set("nothing-like-it")


def test_pickers_and_mergers_need_v2() -> None:
    for choice in ({"picker": "longest"}, {"merger": "exactly-once"}):
        with pytest.raises(UsageError, match="needs v2"):
            Pipeline("v1", **choice)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'v3' is unknown; choose v1 or v2"):
        Pipeline("v3")


def listed(*arguments: str) -> dict[str, dict[str, Any]]:
    result = CliRunner().invoke(plugins_group, ["list", "--json", *arguments])
    assert result.exit_code == 0, result.output
    return {row["name"]: row for row in json.loads(result.stdout)["plugins"]}


def test_the_list_shows_what_is_active(plugin_file: PluginFile) -> None:
    path = plugin_file("def pick(leaf_samples):\n    return leaf_samples\n") + ":pick"
    plugins = listed("--session-sample-picker-path", path, "--session-merge-function-path", "tree-advantage")
    assert plugins["v2"]["active"] == ["abort", "compute", "encode", "truncate"]
    assert plugins["tree-advantage"] == {
        "name": "tree-advantage",
        "distribution": "miles-ref",
        "version": plugins["v2"]["version"],
        "built_in": True,
        "hooks": ["merge"],
        "active": ["merge"],
    }
    assert (plugins[path]["active"], plugins[path]["built_in"]) == (["pick"], False)
    assert plugins["v1"]["active"] == []
    assert listed("--use-session-server", "v1")["v1"]["active"] == plugins["v1"]["hooks"]


def test_the_list_is_readable_and_a_bad_choice_is_an_error() -> None:
    result = CliRunner().invoke(plugins_group, ["list"])
    assert result.exit_code == 0
    assert "retry-trim" in result.stdout
    result = CliRunner().invoke(plugins_group, ["list", "--session-sample-picker-path", "nobody"])
    assert result.exit_code == 1
    assert "plugin 'nobody' is not installed" in result.stderr
