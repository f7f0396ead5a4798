"""The plugin's rule on small forests, and the kit's laws for every picker."""

from __future__ import annotations

from miles_ref_picker_example import generated_share, pick

from miles_ref.sample import Sample


def leaf(node_id: int, path: list[int], mask: list[int]) -> Sample:
    tokens = [1, *range(10, 10 + len(mask))]
    metadata = {"leaf": {"node_id": node_id, "parent": path[-2] if len(path) > 1 else None, "path_node_ids": path}}
    return Sample(tokens=tokens, response_length=len(mask), loss_mask=mask, metadata=metadata)


def test_the_densest_leaf_of_each_root_survives() -> None:
    sparse, dense, other = leaf(1, [0, 1], [1, 0, 0, 1]), leaf(2, [0, 2], [1, 1, 0, 1]), leaf(3, [3], [0, 0, 1])
    assert pick([sparse, dense, other]) == [dense, other]


def test_a_tie_goes_to_the_leaf_committed_first_whatever_the_order() -> None:
    first, second = leaf(1, [0, 1], [1, 0]), leaf(2, [0, 2], [0, 1])
    assert pick([second, first])[0] is first


def test_an_empty_response_has_no_share() -> None:
    assert generated_share(leaf(0, [0], [])) == 0.0
