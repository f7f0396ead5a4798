"""The documentation keeps its promises: links lead somewhere, commands, flags and targets exist, examples run."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from miles_ref.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
INDENTED = re.compile(r"^ {4}(.+)$", re.MULTILINE)
COMMAND = re.compile(r"(?:^|[\s;&|])(?:python -m miles_ref|miles-ref) ([a-z][^#|;&`]*)")
MAKE = re.compile(r"(?:^|[\s;&|`])make ([a-z][a-z-]*)")
QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")
FLAG = re.compile(r"(?<!\S)(--[a-z][a-z-]*)")


def pages() -> Any:
    return pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def code(page: Path) -> list[str]:
    """Lines of code of a page: indented ones, those of shell fences, and inline code; continued lines are joined."""
    text = page.read_text().replace("\\\n", " ")
    shell = [body for language, body in FENCE.findall(text) if language in ("", "sh", "bash", "console")]
    without_fences = FENCE.sub("", text)
    return [*INDENTED.findall(without_fences), *INLINE.findall(without_fences), *"\n".join(shell).splitlines()]


def anchor(heading: str) -> str:
    return "#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def flags_of(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


def invocations(page: Path) -> Iterator[tuple[str, list[str]]]:
    for line in code(page):
        for found in COMMAND.findall(QUOTED.sub("TEXT", line)):
            yield line, found.split()


@pages()
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = page.read_text()
    for target, fragment in LINK.findall(text) + [("", found) for found in re.findall(r"\]\((#[^)\s]+)\)", text)]:
        if "://" in target:
            continue
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), f"{page.name} links to {target}, which is not there"
        if fragment:
            anchors = [anchor(heading) for heading in HEADING.findall(linked.read_text())]
            assert fragment in anchors, f"{page.name} links to {target}{fragment}; there is {anchors}"


@pages()
def test_commands_and_their_flags_exist(page: Path) -> None:
    context = click.Context(main)
    commands = main.list_commands(context)
    for line, words in invocations(page):
        assert words[0] in commands, f"{page.name}: {line!r} names no command of {commands}"
        command = main.get_command(context, words[0])
        assert command is not None
        if isinstance(command, click.Group) and len(words) > 1:
            command = command.get_command(click.Context(command), words[1])
            assert command is not None, f"{page.name}: {line!r} names no command of miles-ref {words[0]}"
        unknown = set(FLAG.findall(" ".join(words))) - flags_of(command)
        assert not unknown, f"{page.name}: {line!r} has unknown flags {unknown}"


@pages()
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in code(page):
        for found in MAKE.findall(line):
            assert found in targets, f"{page.name}: {line!r} names no target of {sorted(targets)}"


@pages()
def test_python_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "example"}
    for body in (body for language, body in FENCE.findall(page.read_text()) if language == "python"):
        compiled = compile(body, str(page), "exec", flags=0x2000)  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        pending = eval(compiled, names)
        if pending is not None:
            asyncio.run(pending)


def test_the_patterns_find_something() -> None:
    """Without this a change of style would make the tests above empty."""
    found = [words[0] for page in PAGES for _, words in invocations(page)]
    assert {"serve", "check", "demo"} <= set(found)
    assert any(MAKE.search(line) for line in code(ROOT / "README.md"))
    assert any(language == "python" for language, _ in FENCE.findall((ROOT / "README.md").read_text()))
