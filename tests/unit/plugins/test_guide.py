"""docs/plugins.md says what the hooks are: its table, its examples and its list of plugins are held to that."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from miles_ref.plugins.catalogue import Catalogue
from miles_ref.plugins.guard import HOOKS, Origin, implementations
from miles_ref.sample import Sample

GUIDE = (Path(__file__).parents[3] / "docs" / "plugins.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


def rows(first_cells: str) -> list[list[str]]:
    """The rows of the table whose header begins with `first_cells`, as cells without backquotes."""
    table = GUIDE[GUIDE.index(f"| {first_cells}") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in table]


def leaf(node_id: int, path: list[int], length: int) -> Sample:
    """A leaf sample with a prompt of one token; the rest is trained."""
    where = {"node_id": node_id, "parent": path[-2] if len(path) > 1 else None, "path_node_ids": path}
    return Sample(
        tokens=list(range(length)),
        response_length=length - 1,
        loss_mask=[1] * (length - 1),
        rollout_log_probs=[-0.5] * (length - 1),
        metadata={"leaf": {**where, "response_id": f"r{node_id}"}, "accumulated_token_ids": list(range(length))},
    )


def forest() -> tuple[list[Sample], dict[str, Any]]:
    """Two roots; the first went on to two leaves."""
    spans = {0: (1, 3), 1: (4, 6), 2: (4, 9), 3: (1, 4)}
    parents = {0: None, 1: 0, 2: 0, 3: None}
    nodes = [
        {"id": i, "parent": parents[i], "seq": i, "truncated": False, "committed_at": float(i),
         "completion_span": list(span), "num_tokens": span[1], "response_id": f"r{i}"}
        for i, span in spans.items()
    ]  # fmt: skip
    paths = {1: [0, 1], 2: [0, 2], 3: [3]}
    leaves = [{"node_id": node_id, "path_node_ids": path} for node_id, path in paths.items()]
    samples = [leaf(node_id, path, spans[node_id][1]) for node_id, path in paths.items()]
    return samples, {"tree": {"nodes": nodes, "leaves": leaves}}


def loaded(source: str) -> dict[str, Any]:
    """The hooks of an example, registered as a plugin's would be."""
    module = ModuleType("example")
    exec(compile(source, "docs/plugins.md", "exec"), module.__dict__)
    return implementations(Origin("example"), module)


def test_the_table_of_hooks_is_the_specification() -> None:
    assert {row[0]: tuple(row[1].split(", ")) for row in rows("hook | arguments")} == dict(HOOKS)


def test_the_built_in_plugins_are_those_of_the_catalogue() -> None:
    single = {plugin.name: list(plugin.hooks) for plugin in Catalogue([]).plugins() if len(plugin.hooks) == 1}
    assert {row[0]: [row[1]] for row in rows("name | hook")} == single


def test_there_is_an_example_of_a_picker_and_of_a_merger() -> None:
    assert [list(loaded(source)) for source in EXAMPLES] == [["pick"], ["merge"]]


def test_the_picker_keeps_the_longest_leaf_and_the_lone_root() -> None:
    samples, session_metadata = forest()
    pick = loaded(EXAMPLES[0])["pick"].function
    assert pick(samples, session_metadata) == [samples[2], samples[1]]


def test_the_merger_trains_once_and_counts_the_leaves() -> None:
    samples, session_metadata = forest()
    merged = loaded(EXAMPLES[1])["merge"].function(samples, session_metadata)
    assert [sample.metadata["leaves"] for sample in merged] == [3, 3, 3]
    assert list(merged[1].loss_mask[:2]) == [0, 0]  # the root's completion is trained by the first leaf


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_is_explained_by_the_contract(hook: str) -> None:
    from miles_ref.hookspecs import HookSpecs

    text = getattr(HookSpecs, hook).__doc__ or ""
    assert re.search(r"\.md", text), f"{hook} names no section of the contract"
    assert ">>> @hookimpl" in text, f"{hook} has no example"
