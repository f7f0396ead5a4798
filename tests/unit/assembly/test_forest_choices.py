"""The built-in pickers and mergers beside the defaults, on one forest that a person can hold in mind.

#0 root (4 + 2) -+- #1 (8 + 2), given up: #3 is its later sibling
                 +- #3 (8 + 3) --- #4 (14 + 1)
#2 root (3 + 9)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from miles_ref.assembly.advantage import tree_advantage
from miles_ref.assembly.merge import completion_spans, merge
from miles_ref.assembly.pick import Forest, pick
from miles_ref.assembly.pickers import best_reward, drop_retries, keep_all, longest
from miles_ref.assembly.story import finish_reasons_of, linear_metadata, tell
from miles_ref.errors import AssemblyError
from miles_ref.sample import Sample

SPANS = [(4, 6), (8, 10), (3, 12), (8, 11), (14, 15)]
PARENTS = [None, 0, None, 0, 3]
PATHS = {1: [0, 1], 2: [2], 4: [0, 3, 4]}


def tree(spans: list[tuple[int, int]]) -> dict[str, Any]:
    nodes = [
        {
            "id": at,
            "parent": parent,
            "seq": at,
            "truncated": False,
            "committed_at": 0.0,
            "completion_span": list(span),
            "num_tokens": span[1],
            "response_id": f"r{at}",
        }
        for at, (parent, span) in enumerate(zip(PARENTS, spans, strict=True))
    ]
    return {"nodes": nodes, "leaves": [{"node_id": leaf, "path_node_ids": path} for leaf, path in PATHS.items()]}


def leaf_sample(leaf: int, spans: list[tuple[int, int]] = SPANS) -> Sample:
    path = PATHS[leaf]
    start, length = spans[path[0]][0], spans[leaf][1]
    mask = np.zeros(length - start, dtype=np.uint8)
    for node_id in path:
        low, high = spans[node_id]
        mask[low - start : high - start] = 1
    where = {"node_id": leaf, "parent": PARENTS[leaf], "path_node_ids": path, "response_id": f"r{leaf}"}
    return Sample(
        tokens=np.arange(length),
        response_length=length - start,
        loss_mask=mask,
        rollout_log_probs=np.zeros(length - start),
        metadata={"fold": 1, "accumulated_token_ids": list(range(length)), "leaf": where},
    )


@pytest.fixture
def samples() -> list[Sample]:
    """A leaf sample for each leaf, in commit order."""
    return [leaf_sample(leaf) for leaf in PATHS]


@pytest.fixture
def session() -> dict[str, Any]:
    """The session's metadata, with rewards for two of three leaves."""
    return {"tree": tree(SPANS), "agent": {"rewards": {"r1": 3.0, "r4": 1.0}, "who": "agent"}}


Picker = Callable[[list[Sample], dict[str, Any]], list[Sample]]


@pytest.mark.parametrize(
    ("picker", "chosen"),
    [(pick, [2, 4]), (keep_all, [1, 2, 4]), (drop_retries, [4, 2]), (longest, [4]), (best_reward, [1])],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_pickers_choose(samples: list[Sample], session: dict[str, Any], picker: Picker, chosen: list[int]) -> None:
    assert [sample.metadata["leaf"]["node_id"] for sample in picker(samples, session)] == chosen
    assert len(samples) == 3


def test_the_default_refuses_what_is_not_shaped_like_retries_and_drop_retries_does_not() -> None:
    spans = [*SPANS[:1], (8, 16), *SPANS[2:]]
    session = {"tree": tree(spans)}
    samples = [leaf_sample(leaf, spans) for leaf in PATHS]
    with pytest.raises(AssemblyError, match=r"r1 \(seq 1\) has 16 tokens, more than the 15 of the longest"):
        pick(samples, session)
    assert len(drop_retries(samples, session)) == 2


def test_equally_good_leaves_are_told_apart_by_their_commit(samples: list[Sample], session: dict[str, Any]) -> None:
    session["agent"]["rewards"] = {"r1": 2, "r2": 2.0, "r4": 2}
    assert best_reward(samples[::-1], session) == [samples[0]]


@pytest.mark.parametrize("chooser", [best_reward, tree_advantage])
@pytest.mark.parametrize(
    ("agent", "said"),
    [
        (None, "no leaf has a reward"),
        ({}, "no leaf has a reward"),
        ({"rewards": None}, "no leaf has a reward"),
        ({"rewards": {"other": 1}}, "no leaf has a reward"),
        ({"rewards": {"r1": {"acc": 1}}}, "the reward of r1 is .*not a number"),
        ({"rewards": {"r1": True}}, "the reward of r1 is True"),
        ({"rewards": {"r1": 10**400}}, "the reward of r1 is 1000.*not a number"),
        ({"rewards": [1]}, "rewards is .*not an object"),
        ([], "agent metadata is .*not an object"),
    ],
)
def test_choosing_by_reward_without_rewards_is_refused(
    samples: list[Sample], session: dict[str, Any], chooser: Picker, agent: Any, said: str
) -> None:
    session["agent"] = agent
    with pytest.raises(AssemblyError, match=said):
        chooser(samples, session)


def masks(samples: list[Sample]) -> dict[int, list[int]]:
    return {one.metadata["leaf"]["node_id"]: np.asarray(one.loss_mask).tolist() for one in samples}


def test_merge_trains_the_shared_root_in_the_earliest_survivor(samples: list[Sample], session: dict[str, Any]) -> None:
    merged = merge(samples[::-1], session)
    assert [one.metadata["leaf"]["node_id"] for one in merged] == [4, 2, 1]
    assert masks(merged) == {1: [1, 1, 0, 0, 1, 1], 2: [1] * 9, 4: [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1]}
    assert [one.reward for one in merged] == [1.0, None, 3.0]
    assert merged[0].metadata["who"] == "agent"
    assert "rewards" not in merged[0].metadata


def test_a_response_that_begins_inside_a_completion_owns_from_there_on() -> None:
    """As a compute of somebody else may give it, which trains the end of a path only."""
    spans = [(2, 8), (9, 11), (3, 12), (10, 13), (14, 15)]
    first, second = leaf_sample(1, spans), leaf_sample(4, spans)
    first.response_length = 11 - 7
    first.loss_mask = [1, 0, 1, 1]
    merge([first, second], {"tree": tree(spans)})
    assert first.loss_mask == [1, 0, 1, 1]
    assert second.loss_mask.tolist() == [1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 1]


def test_a_mask_stays_what_it_was_and_the_callers_array_is_not_written_to(session: dict[str, Any]) -> None:
    first, second = leaf_sample(1), leaf_sample(4)
    kept = second.loss_mask
    kept.flags.writeable = False
    first.loss_mask = first.loss_mask.tolist()
    merge([first, second], session)
    assert first.loss_mask == [1, 1, 0, 0, 1, 1]
    assert isinstance(second.loss_mask, np.ndarray)
    assert kept[0] == 1
    assert second.loss_mask[0] == 0


def test_a_sample_without_a_mask_cannot_be_merged(samples: list[Sample], session: dict[str, Any]) -> None:
    samples[1].loss_mask = None
    with pytest.raises(AssemblyError, match="leaf 2 has no loss_mask"):
        merge(samples, session)


def test_tree_advantage_credits_nodes_and_lets_the_best_leaf_own_what_is_shared(
    samples: list[Sample], session: dict[str, Any]
) -> None:
    session["agent"]["rewards"] = {"r1": 1.0, "r2": 0.0, "r4": 5.0}
    merged = tree_advantage(samples, session)
    assert [one.reward for one in merged] == [-1.0, -2.0, 3.0]
    assert masks(merged)[4][:2] == [1, 1]
    assert masks(merged)[1][:2] == [0, 0]
    assert merged[2].metadata["tree_advantage"] == {"advantage": 3.0, "nodes": {"0": 1.0, "3": 3.0, "4": 3.0}}
    assert merged[2].metadata["who"] == "agent"


def test_a_leaf_without_a_reward_gets_no_advantage(samples: list[Sample], session: dict[str, Any]) -> None:
    merged = tree_advantage(samples, session)
    assert [one.reward for one in merged] == [1.0, None, -1.0]
    assert merged[1].metadata["tree_advantage"] == {"advantage": None, "nodes": {}}


def test_the_forest_knows_its_shape() -> None:
    forest = Forest(tree(SPANS))
    assert forest.later_siblings(1) == [3]
    assert forest.later_siblings(0) == []
    assert [forest.is_superseded(node_id) for node_id in range(5)] == [False, True, False, False, False]
    assert forest.longest_later(1) == 15


def test_the_story_of_a_dump_and_of_a_reply(samples: list[Sample], session: dict[str, Any]) -> None:
    told = tell(session, finish_reasons={"r4": "stop"})
    assert [story.survives for story in told] == [False, False, True, False, True]
    assert told[1].fate is not None
    assert "its sibling #3 was committed later" in told[1].fate
    assert [story.trained for story in told] == [{4: 2}, {}, {2: 9}, {4: 3}, {4: 1}]
    assert [story.ending for story in told][-2:] == ["complete", "stop"]
    chosen = tell(session, merge([samples[0], samples[2]], session))
    assert [story.trained for story in chosen] == [{1: 2}, {1: 2}, {}, {4: 3}, {4: 1}]
    assert chosen[2].fate == "dropped: truncated away, or not picked"


def test_the_story_says_where_the_default_picker_refuses_and_what_a_reply_shows_was_not_refused() -> None:
    fates = {}
    for end in (14, 15, 16):
        spans = [*SPANS[:1], (8, end), *SPANS[2:]]
        session = {"tree": tree(spans)}
        fates[end] = tell(session)[1].fate
        chosen = tell(session, drop_retries([leaf_sample(leaf, spans) for leaf in PATHS], session))
        assert chosen[1].fate == "dropped: given up by a retry: its sibling #3 was committed later"
    assert fates[14] == fates[15] == "dropped: given up by a retry: its sibling #3 was committed later"
    assert fates[16] == f"{fates[15]}, but it is longer (16 tokens) than what follows (15): 422"


def test_the_story_of_a_response_that_begins_inside_a_completion(session: dict[str, Any]) -> None:
    """As a merger of somebody else may leave it, which trains the end of a path only."""
    cut = leaf_sample(4)
    cut.response_length = 15 - 9
    cut.loss_mask = [1] * cut.response_length
    assert [story.trained for story in tell(session, [cut])] == [{}, {}, {}, {4: 2}, {4: 1}]


def test_the_story_of_a_linear_session() -> None:
    """A dump of v1 has no tree; its records are one chain."""
    lengths, reasons = [(4, 2), (8, 3), (12, 0)], ["tool_calls", "stop", "length"]
    records = [
        {
            "timestamp": 10.0 + at,
            "request": {"input_ids": [0] * prompt},
            "response": {
                "id": f"r{at}",
                "choices": [{"finish_reason": reason, "meta_info": {"output_token_logprobs": [[-0.5, 1]] * output}}],
            },
        }
        for at, ((prompt, output), reason) in enumerate(zip(lengths, reasons, strict=True))
    ]
    del records[1]["response"]["id"]  # type: ignore[attr-defined]
    metadata = linear_metadata(records)
    nodes = metadata["tree"]["nodes"]
    assert nodes[1] == {
        "id": 1,
        "parent": 0,
        "seq": 1,
        "truncated": False,
        "committed_at": 11.0,
        "completion_span": [8, 11],
        "num_tokens": 11,
        "response_id": None,
    }
    assert [(node["parent"], node["truncated"]) for node in nodes] == [(None, False), (0, False), (1, True)]
    assert metadata["tree"]["leaves"] == [{"node_id": 2, "path_node_ids": [0, 1, 2]}]
    assert linear_metadata([]) == {"tree": {"nodes": [], "leaves": []}}
    assert finish_reasons_of(records) == {"r0": "tool_calls", "r2": "length"}
    told = tell(metadata, finish_reasons=finish_reasons_of(records))
    assert [story.ending for story in told] == ["tool_calls", "complete", "length"]
    assert [(story.prompt_tokens, story.completion_tokens) for story in told] == lengths
    assert [story.survives for story in told] == [False, False, True]
    assert [story.trained for story in told] == [{2: 2}, {2: 3}, {}]


def test_a_span_that_a_sample_is_cut_before_has_no_part_in_it() -> None:
    spans = {0: (300, 400), 1: (500, 600), 2: (700, 800)}
    for length, parts in {
        300: [],
        301: [(0, 300, 301)],
        450: [(0, 300, 400)],
        600: [(0, 300, 400), (1, 500, 600)],
    }.items():
        assert list(completion_spans([0, 1, 2], spans, length)) == parts
    assert list(completion_spans([0, 1], {0: (300, 400), 1: (350, 600)}, 700)) == [(0, 300, 350), (1, 350, 600)]
