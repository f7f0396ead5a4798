"""What a picker or merger of somebody else can do wrong, and that the session outlives it (pipeline.md, v2)."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Callable
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest

from miles_ref.errors import AssemblyError, EncodeError, PluginError
from miles_ref.plugins import Catalogue, Pipeline, Plugin
from miles_ref.plugins.guard import Implementation, Origin, implementations
from miles_ref.sample import Sample
from miles_ref.wire import SAMPLES_VALUE_SPEC_V2, decode_samples_and_merge_input_sample

PluginFile = Callable[[str], str]


def decoded(payload: bytes) -> Any:
    return decode_samples_and_merge_input_sample(payload, Sample(), fields=SAMPLES_VALUE_SPEC_V2)


def chosen(payload: bytes) -> list[int]:
    return [sample.metadata["leaf"]["node_id"] for sample in decoded(payload).samples]


BAD_RESULTS = {
    "raises": ("raise ValueError('no good')", "raised ValueError: no good"),
    "exits": ("raise SystemExit(3)", "raised SystemExit: 3"),
    "interrupts": ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
    "raises-what-cannot-be-shown": (
        "class E(Exception):\n        def __str__(self): raise RuntimeError\n    raise E",
        "raised E: an error that cannot be shown",
    ),
    "exits-when-shown": (
        "class E(Exception):\n        def __str__(self): raise SystemExit\n    raise E",
        "raised E: an error that cannot be shown",
    ),
    "repr-exits": (
        "class R:\n        def __repr__(self): raise SystemExit\n    return R()",
        "returned R; return a list",
    ),
    "recurses": ("return hook(leaf_samples)", "raised RecursionError"),
    "none": ("pass", "returned None; return a list, an empty one"),
    "awaitable": ("async def later(): return leaf_samples\n    return later()", r"returned an awaitable \(coroutine\)"),
    "generator": ("return (sample for sample in leaf_samples)", r"returned a generator \(generator\)"),
    "iterator": ("return iter(leaf_samples)", "returned list_iterator"),
    "text": ("return 'all'", "returned str 'all'"),
    "dict": ("return {0: leaf_samples[0]}", "returned dict"),
    "single-sample": ("return leaf_samples[0]", "returned Sample"),
    "repr-raises": (
        "class R:\n        def __repr__(self): raise RuntimeError\n    return R()",
        "returned R; return a list",
    ),
    "repeat": ("return [leaf_samples[0], leaf_samples[1], leaf_samples[0]]", "twice"),
    "number": ("return [leaf_samples[0], 3]", "int"),
}
BAD_CHOICES = {
    "copy": ("import copy\n    return [copy.copy(leaf_samples[0])]", r"stranger at index 0 \(Sample\)"),
    "rewrites-a-token": ("leaf_samples[1].tokens[0] = 9\n    return leaf_samples[:1]", "changed tokens of leaf r2"),
    "rewrites-a-mask": ("leaf_samples[0].loss_mask[-1] = 0\n    return leaf_samples", "changed loss_mask of leaf r1"),
    "rewrites-metadata": (
        "leaf_samples[0].metadata['leaf']['parent'] = 5\n    return leaf_samples",
        "changed metadata",
    ),
    "sets-a-reward": ("leaf_samples[0].reward = 1.0\n    return leaf_samples", "changed reward of leaf r1"),
    "replaces-rows": (
        "s = leaf_samples[0]\n    s.rollout_routed_experts = s.rollout_routed_experts + 1\n    return leaf_samples",
        "changed rollout_routed_experts",
    ),
    "writes-rows": ("leaf_samples[0].rollout_routed_experts[0] = 1\n    return leaf_samples", "read-only"),
    "puts-a-stranger-in-a-field": (
        "class X:\n        def __eq__(self, o): raise RuntimeError\n"
        "    leaf_samples[0].label = X()\n    return leaf_samples",
        "changed label",
    ),
    "puts-in-a-field-what-exits": (
        "class X:\n        def __eq__(self, o): raise SystemExit\n"
        "    leaf_samples[0].label = X()\n    return leaf_samples",
        "changed label",
    ),
    "rewrites-the-session": (
        "session_metadata['tree']['nodes'].pop()\n    return leaf_samples",
        "changed session_metadata",
    ),
}


def hook_file(plugin_file: PluginFile, body: str) -> str:
    return plugin_file(f"def hook(leaf_samples, session_metadata=None):\n    {body}\n".replace("=None", "")) + ":hook"


@pytest.mark.parametrize(
    ("body", "said"), [*BAD_RESULTS.values(), *BAD_CHOICES.values()], ids=[*BAD_RESULTS, *BAD_CHOICES]
)
def test_a_picker_that_does_not_select_is_422_and_the_session_stays(
    session: Any, plugin_file: PluginFile, body: str, said: str
) -> None:
    before = session.collect(Pipeline("v2"))
    path = hook_file(plugin_file, body.replace("hook(leaf_samples)", "hook(leaf_samples, session_metadata)"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a coroutine that nobody closed
        with pytest.raises(PluginError, match=rf"plugin {path}, hook pick \(.*plugin\.py:2\): .*{said}") as error:
            session.collect(Pipeline("v2", picker=path))
    assert error.value.status_code == 422
    assert "can be collected again" in str(error.value)
    assert session.collect(Pipeline("v2")) == before


@pytest.mark.parametrize(("body", "said"), BAD_RESULTS.values(), ids=BAD_RESULTS)
def test_a_merger_that_gives_no_samples_is_422_and_the_session_stays(
    session: Any, plugin_file: PluginFile, body: str, said: str
) -> None:
    before = session.collect(Pipeline("v2", picker="keep-all"))
    path = hook_file(plugin_file, body.replace("hook(leaf_samples)", "hook(leaf_samples, session_metadata)"))
    with pytest.raises(PluginError, match=rf"plugin {path}, hook merge .*{said}"):
        session.collect(Pipeline("v2", picker="keep-all", merger=path))
    assert session.collect(Pipeline("v2", picker="keep-all")) == before


@pytest.mark.parametrize("hook", ["pick", "merge"])
def test_what_a_built_in_raises_is_422_too(hook: str) -> None:
    def built_in(leaf_samples: Any, session_metadata: Any) -> Any:
        raise session_metadata["error"]

    implementation = Implementation.of(Origin("built-in"), hook, built_in, trusted=True)

    def call(error: BaseException) -> Any:
        arguments = {"leaf_samples": [], "session_metadata": {"error": error}}
        return implementation.call(arguments, lambda: 0.0, 1.0)

    with pytest.raises(PluginError, match=rf"built-in.*hook {hook}.*raised OverflowError: too large") as raised:
        call(OverflowError("too large"))
    assert raised.value.status_code == 422
    with pytest.raises(PluginError, match=rf"^plugin built-in, hook {hook}: rewards is no object$"):
        call(AssemblyError("rewards is no object"))
    with pytest.raises(KeyboardInterrupt):
        call(KeyboardInterrupt())


@pytest.mark.parametrize(
    ("choice", "rewards", "said"),
    [
        (
            {"merger": "tree-advantage"},
            {"r2": 10**400},
            r"plugin tree-advantage \(.*\), hook merge: the reward of r2 is 1000",
        ),
        ({"picker": "best-reward"}, {}, r"plugin best-reward \(.*\), hook pick: no leaf has a reward"),
        ({}, [1], r"plugin v2 \(.*\), hook merge: .*rewards is \[1\], not an object"),
    ],
)
def test_rewards_that_cannot_be_used_are_refused_by_who_cannot(
    session: Any, choice: dict[str, str], rewards: Any, said: str
) -> None:
    metadata = {**session.metadata, "agent": {"rewards": rewards}}
    with pytest.raises(PluginError, match=said):
        Pipeline("v2", **choice).collect(session.chains, metadata, None, session.settings)


def test_a_merger_may_change_and_replace_but_not_break(session: Any, plugin_file: PluginFile) -> None:
    path = plugin_file(
        """
        import copy

        def merge(leaf_samples):
            first = leaf_samples[0]
            first.tokens.append(7)
            first.loss_mask.append(1)
            first.rollout_log_probs.append(-1.5)
            first.response_length += 1
            other = copy.deepcopy(first)
            other.reward = {"acc": 1}
            return [other, first]

        def broken(leaf_samples):
            leaf_samples[0].loss_mask.pop()
            return leaf_samples
        """
    )
    reply = decoded(session.collect(Pipeline("v2", picker="keep-all", merger=f"{path}:merge")))
    assert [sample.tokens[-1] for sample in reply.samples] == [7, 7]
    assert [sample.reward for sample in reply.samples] == [{"acc": 1}, None]
    with pytest.raises(EncodeError, match="sample 0: loss_mask has 11 entries"):
        session.collect(Pipeline("v2", merger=f"{path}:broken", picker="keep-all"))


@pytest.mark.parametrize("hook", ["picker", "merger"])
def test_choosing_nothing_is_an_empty_reply(session: Any, plugin_file: PluginFile, hook: str) -> None:
    path = hook_file(plugin_file, "return []")
    reply = decoded(session.collect(Pipeline("v2", **{hook: path})))  # type: ignore[arg-type]
    assert (reply.samples, reply.empty_reason) == ([], "all_truncated")
    assert len(reply.session_metadata["tree"]["nodes"]) == 3


def test_a_picker_may_drop_and_reorder_in_place(session: Any, plugin_file: PluginFile) -> None:
    reverse = hook_file(plugin_file, "leaf_samples.reverse()\n    return leaf_samples")
    assert chosen(session.collect(Pipeline("v2", picker=reverse))) == [2, 1]


def test_authors_meet_plain_python(session: Any, plugin_file: PluginFile) -> None:
    path = plugin_file(
        """
        import numpy as np

        def pick(leaf_samples, session_metadata):
            for sample in leaf_samples:
                for values in (sample.tokens, sample.loss_mask, sample.rollout_log_probs):
                    assert type(values) is list, values
                    assert {type(value) for value in values} <= {int, float}, values
                rows = sample.rollout_routed_experts
                assert type(rows) is np.ndarray and rows.dtype == np.int32
                assert rows.shape == (len(sample.tokens) - 1, 1, 1)
                assert type(sample.metadata["accumulated_token_ids"]) is list
            assert type(session_metadata["accumulated_token_ids"]) is list
            return leaf_samples
        """
    )
    kept = session.collect(Pipeline("v2", picker=f"{path}:pick"))
    assert kept == session.collect(Pipeline("v2", picker="keep-all"))


def test_cancellation_passes(session: Any, plugin_file: PluginFile) -> None:
    path = hook_file(plugin_file, "import asyncio\n    raise asyncio.CancelledError")
    with pytest.raises(asyncio.CancelledError):
        session.collect(Pipeline("v2", picker=path))


def test_a_slow_hook_is_logged_with_its_name_and_seconds(
    session: Any, plugin_file: PluginFile, caplog: pytest.LogCaptureFixture
) -> None:
    path = hook_file(plugin_file, "return leaf_samples")
    times = iter([10.0, 12.5])
    with caplog.at_level(logging.WARNING, "miles_ref.plugins"):
        session.collect(Pipeline("v2", picker=path, clock=lambda: next(times)))
    assert [record.getMessage() for record in caplog.records] == [
        f"plugin {path}, hook pick ({path.removesuffix(':hook')}:2) took 2.50 s; the server answers nobody meanwhile"
    ]


SET = """
from miles_ref.plugins import v2


@hookimpl
def compute(chain, settings):
    return {compute}


@hookimpl
def truncate(turns, max_seq_len, settings):
    return {truncate}


@hookimpl
def encode(samples, session_metadata, empty_reason):
    return {encode}
"""
GOOD_SET = {
    "compute": "v2.compute(chain, settings)",
    "truncate": "v2.truncate(turns, max_seq_len, settings)",
    "encode": "v2.encode(samples, session_metadata, empty_reason)",
}


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"compute": "None"}, "hook compute .*returned None"),
        ({"compute": "v2.compute(chain, settings)[:1]"}, "returned 1 turns for 2 records"),
        ({"compute": "[1, 2]"}, "returned int at index 0"),
        ({"truncate": "None"}, "hook truncate .*returned None"),
        ({"truncate": "[turns[0], turns[0]]"}, "the same sample twice"),
        ({"encode": "'text'"}, "hook encode .*returned str"),
        ({"encode": "None"}, "hook encode .*returned NoneType"),
    ],
)
def test_the_other_hooks_are_guarded_too(
    session: Any, plugin_file: PluginFile, broken: dict[str, str], said: str
) -> None:
    good = installed_set(plugin_file(SET.format(**GOOD_SET)))
    assert session.collect(good) == session.collect(Pipeline("v2"))
    with pytest.raises(PluginError, match=said):
        session.collect(installed_set(plugin_file(SET.format(**GOOD_SET | broken))))


def installed_set(path: str) -> Pipeline:
    """A pipeline with a file's hooks as the plugin set "mine"."""
    origin = Origin("mine", "my-package", "1")
    found = Plugin(origin, implementations(origin, SimpleNamespace(**run_path(path))))

    class WithMine(Catalogue):
        def plugin_set(self, name: str) -> Plugin:
            return found if name == "mine" else super().plugin_set(name)

    return Pipeline("v2", plugin_set="mine", catalogue=WithMine([]))
