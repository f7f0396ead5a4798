"""The facade: from chains to bytes, each hook called as specified, and the examples of the specification run."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest

from miles_ref import hookspecs
from miles_ref.errors import AssemblyError
from miles_ref.hookspecs import HookSpecs
from miles_ref.plugins import Pipeline
from miles_ref.plugins.guard import HOOKS, Origin, implementations
from miles_ref.records import Chain, int_array
from miles_ref.sample import Sample
from miles_ref.wire import SAMPLES_VALUE_SPEC, SAMPLES_VALUE_SPEC_V2, decode_samples_and_merge_input_sample


def test_a_session_without_a_record_is_empty(session: Any) -> None:
    for version in ("v1", "v2"):
        assembly = Pipeline(version).assemble([], {"max_trim_tokens": 0}, None, session.settings)
        assert (assembly.samples, assembly.empty_reason) == ([], "no_records")


def test_a_budget_that_leaves_nothing_is_all_truncated_and_picks_nothing(session: Any, plugin_file: Any) -> None:
    path = plugin_file("def pick(leaf_samples):\n    raise AssertionError('asked')\n")
    assembly = Pipeline("v2", picker=f"{path}:pick").assemble(session.chains, session.metadata, 4, session.settings)
    assert (assembly.samples, assembly.empty_reason) == ([], "all_truncated")


def test_all_turns_are_computed_before_any_is_truncated(session: Any) -> None:
    first, second = session.chains
    broken = Chain(second.records, int_array([1, 2, 3]), second.leaf)
    with pytest.raises(AssemblyError, match="turn 0"):
        Pipeline("v2").assemble([first, broken], session.metadata, 1, session.settings)


def test_the_leafs_metadata_is_the_servers(session: Any) -> None:
    session.chains[0].mismatch = [{"type": "assistant_text"}]
    first, second = (
        Pipeline("v2", picker="keep-all").assemble(session.chains, session.metadata, None, session.settings).samples
    )
    assert first.metadata["leaf"] == {"node_id": 1, "parent": 0, "path_node_ids": [0, 1], "response_id": "r1"}
    assert bytes(second.metadata["accumulated_token_ids"].tolist()) == b"ask one two right"
    assert first.metadata["tito_session_mismatch"] == [{"type": "assistant_text"}]
    assert "tito_session_mismatch" not in second.metadata


def test_the_same_session_is_collected_again_with_another_budget(session: Any) -> None:
    pipeline = Pipeline("v2", picker="keep-all")
    whole = session.collect(pipeline)
    assert session.collect(pipeline, 14) != whole
    assert session.collect(pipeline) == whole


def test_each_version_writes_its_own_fields(session: Any) -> None:
    v1 = Pipeline("v1").collect(session.chains[:1], {"x": 1}, None, session.settings)
    v2 = session.collect(Pipeline("v2", picker="keep-all"))
    assert b'"reward"' not in v1
    (sample,) = decode_samples_and_merge_input_sample(v1, Sample(), fields=SAMPLES_VALUE_SPEC).samples
    assert len(decode_samples_and_merge_input_sample(v2, Sample(), fields=SAMPLES_VALUE_SPEC_V2).samples) == 2
    assert sample.loss_mask == [1] * 4 + [0] * 4 + [1] * 4
    np.testing.assert_array_equal(sample.rollout_routed_experts.ravel(), np.arange(15))


def test_pipelines_do_not_know_of_each_other(session: Any) -> None:
    before = session.collect(Pipeline("v2"))
    Pipeline("v2", picker="longest", merger="tree-advantage")
    assert session.collect(Pipeline("v2")) == before


def examples() -> dict[str, str]:
    """The example in each hook's docstring."""
    parser = doctest.DocTestParser()
    return {
        hook: "".join(example.source for example in parser.get_examples(getattr(HookSpecs, hook).__doc__ or ""))
        for hook in HOOKS
    }


def example_plugin(hook: str) -> Any:
    class Sandboxes:
        def __init__(self) -> None:
            self.closed: list[Any] = []

        async def close(self, scope: Any) -> None:
            self.closed.append(scope)

    names: dict[str, Any] = {"hookimpl": hookspecs.hookimpl, "Sample": Sample, "my_sandboxes": Sandboxes()}
    exec(compile(examples()[hook], f"{hook} example", "exec"), names)
    return type("Example", (), {"names": names, hook: staticmethod(names[hook])})


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook != "abort"])
def test_the_example_of_each_hook_is_a_plugin_that_works(session: Any, hook: str) -> None:
    one = implementations(Origin("example"), example_plugin(hook))[hook]
    pipeline = Pipeline("v2", picker="keep-all")
    pipeline._register({hook: one})
    payload = session.collect(pipeline)
    fields = SAMPLES_VALUE_SPEC if hook == "encode" else SAMPLES_VALUE_SPEC_V2
    reply = decode_samples_and_merge_input_sample(payload, Sample(), fields=fields)
    assert len(reply.samples) == (1 if hook == "pick" else 2)
    assert all(len(sample.tokens) >= sample.response_length > 0 for sample in reply.samples)


async def test_the_example_of_abort_works() -> None:
    plugin = example_plugin("abort")
    one = implementations(Origin("example"), plugin)["abort"]
    for every_scope in (False, True):
        await one.function(scope="s", every_scope=every_scope)
    assert plugin.names["my_sandboxes"].closed == ["s", None]
