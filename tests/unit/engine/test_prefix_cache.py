from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from miles_ref.engine.prefix_cache import PrefixCache


@dataclass(frozen=True)
class Run:
    """A piece that is the tokens themselves."""

    tokens: tuple[int, ...]

    def cut(self, start: int, stop: int) -> Run:
        return Run(self.tokens[start:stop])


class Cache:
    """A prefix cache of `Run`s that notes what it was asked to keep anew."""

    def __init__(self, budget: int) -> None:
        self.inner: PrefixCache[Run] = PrefixCache(budget)
        self.made: list[tuple[int, int]] = []

    def insert(self, *tokens: int) -> None:
        def piece(start: int, stop: int) -> Run:
            self.made.append((start, stop))
            return Run(tokens[start:stop])

        self.inner.insert(np.array(tokens), piece)

    def match(self, *tokens: int) -> int:
        length, pieces = self.inner.match(np.array(tokens, dtype=np.int64))
        assert [token for piece in pieces for token in piece.tokens] == list(tokens[:length])
        return length


def test_the_longest_prefix_is_found() -> None:
    cache = Cache(100)
    assert cache.match(1, 2, 3) == 0
    cache.insert(1, 2, 3, 4)
    assert cache.match(1, 2, 3, 4, 5) == 4
    assert cache.match(1, 2, 9) == 2
    assert cache.match(2, 2) == 0
    assert cache.match() == 0


def test_only_what_is_new_is_kept() -> None:
    cache = Cache(100)
    cache.insert(1, 2, 3)
    cache.insert(1, 2, 3, 4, 5)
    cache.insert(1, 2, 9)
    cache.insert(1, 2)
    cache.insert(1, 2, 3, 4, 5)
    assert cache.made == [(0, 3), (3, 5), (2, 3)]
    assert cache.inner.tokens == 6
    assert [cache.match(1, 2, 3, 4, 5), cache.match(1, 2, 9, 9)] == [5, 3]


def test_the_least_recently_used_goes_first() -> None:
    cache = Cache(8)
    cache.insert(1, 1, 1, 1)
    cache.insert(2, 2, 2, 2)
    cache.match(1, 1)
    cache.insert(3, 3)
    assert [cache.match(1, 1, 1, 1), cache.match(2, 2, 2, 2), cache.match(3, 3)] == [4, 0, 2]
    assert cache.inner.tokens == 6


def test_a_shared_prefix_outlives_its_branches() -> None:
    cache = Cache(8)
    cache.insert(1, 1, 1, 2, 2)
    cache.insert(1, 1, 1, 3, 3)
    cache.insert(1, 1, 1, 4, 4)
    assert [cache.match(1, 1, 1, 2, 2), cache.match(1, 1, 1, 3, 3), cache.match(1, 1, 1, 4, 4)] == [3, 5, 5]


def test_what_exceeds_the_budget_is_not_kept() -> None:
    cache = Cache(3)
    cache.insert(1, 2, 3, 4)
    assert cache.match(1, 2, 3, 4) == 0
    assert Cache(0).match(1) == 0


def common(left: list[int], right: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)


@given(SEQUENCES, st.lists(st.integers(0, 2), max_size=8))
def test_matches_a_plain_search_while_all_fits(sequences: list[list[int]], wanted: list[int]) -> None:
    cache = Cache(1000)
    for sequence in sequences:
        cache.insert(*sequence)
    assert cache.match(*wanted) == max(common(wanted, sequence) for sequence in sequences)
    ordered = sorted(map(tuple, sequences))
    fresh = [len(b) - common(list(a), list(b)) for a, b in pairwise([(), *ordered])]
    assert cache.inner.tokens == sum(fresh)


@given(SEQUENCES, st.integers(0, 12))
def test_the_budget_holds(sequences: list[list[int]], budget: int) -> None:
    cache = Cache(budget)
    for sequence in sequences:
        cache.insert(*sequence)
        assert cache.inner.tokens <= budget
        assert cache.match(*sequence) == len(sequence) or len(sequence) > budget
