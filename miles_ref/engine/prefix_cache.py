"""A radix tree of token sequences: what was computed for a prefix is computed once, whoever continues it.

Each node holds the ids that it adds to its parent and what the model kept for them, so that sequences that share a
prefix share its memory. The least recently used leaves are given up when the budget, in tokens, is exceeded.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Generic, Protocol, Self, TypeVar

import numpy as np

from miles_ref.records import IntArray


class Piece(Protocol):
    """What a model kept for a run of tokens; one entry for each token."""

    def cut(self, start: int, stop: int) -> Self:
        """The part for the tokens `start` up to `stop` of the run, as a copy that does not hold on to the whole."""
        ...


P = TypeVar("P", bound=Piece)


class _Node(Generic[P]):
    __slots__ = ("children", "ids", "parent", "piece", "used")

    def __init__(self, ids: IntArray, piece: P, parent: _Node[P] | None) -> None:
        self.ids = ids
        self.piece = piece
        self.parent = parent
        self.children: dict[int, _Node[P]] = {}
        self.used = 0


class PrefixCache(Generic[P]):
    """Pieces by token prefix. `budget` is the number of tokens that may be kept; 0 keeps nothing. Not thread-safe."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.tokens = 0
        self._roots: dict[int, _Node[P]] = {}
        self._clock = count(1)

    def match(self, ids: IntArray) -> tuple[int, list[P]]:
        """The length of the longest known prefix of `ids`, and its pieces in order."""
        path, length = self._walk(ids)
        now = next(self._clock)
        pieces: list[P] = []
        left = length
        for node in path:
            node.used = now
            taken = min(left, len(node.ids))
            pieces.append(node.piece if taken == len(node.ids) else node.piece.cut(0, taken))
            left -= taken
        return length, pieces

    def insert(self, ids: IntArray, piece_of: Callable[[int, int], P]) -> None:
        """Remember `ids`; `piece_of(start, stop)` is asked once, for the tokens that are not known yet."""
        if len(ids) > self.budget:
            return
        path, length = self._walk(ids)
        parent = path[-1] if path else None
        if parent is not None and length < len(ids):
            inside = length - sum(len(node.ids) for node in path[:-1])
            if inside < len(parent.ids):
                self._split(parent, inside)
        now = next(self._clock)
        for node in path:
            node.used = now
        if length == len(ids):
            return
        new: _Node[P] = _Node(ids[length:].copy(), piece_of(length, len(ids)), parent)
        new.used = now
        self._siblings(parent)[int(new.ids[0])] = new
        self.tokens += len(new.ids)
        self._shrink(keep=new)

    def _siblings(self, parent: _Node[P] | None) -> dict[int, _Node[P]]:
        return self._roots if parent is None else parent.children

    def _walk(self, ids: IntArray) -> tuple[list[_Node[P]], int]:
        """The nodes that `ids` runs through (the last one perhaps in part), and how many ids they account for."""
        path: list[_Node[P]] = []
        at = 0
        children = self._roots
        while at < len(ids) and (node := children.get(int(ids[at]))) is not None:
            size = min(len(node.ids), len(ids) - at)
            differing = np.flatnonzero(node.ids[:size] != ids[at : at + size])
            same = int(differing[0]) if len(differing) else size
            path.append(node)
            at += same
            if same < len(node.ids):
                break
            children = node.children
        return path, at

    def _split(self, node: _Node[P], at: int) -> None:
        """Make `node` end after `at` ids; a child takes over the rest."""
        rest: _Node[P] = _Node(node.ids[at:], node.piece.cut(at, len(node.ids)), node)
        rest.children, rest.used = node.children, node.used
        for child in rest.children.values():
            child.parent = rest
        node.piece = node.piece.cut(0, at)
        node.ids = node.ids[:at]
        node.children = {int(rest.ids[0]): rest}

    def _shrink(self, keep: _Node[P]) -> None:
        while self.tokens > self.budget:
            oldest = min((leaf for leaf in self._leaves() if leaf is not keep), key=lambda leaf: leaf.used)
            del self._siblings(oldest.parent)[int(oldest.ids[0])]
            self.tokens -= len(oldest.ids)

    def _leaves(self) -> list[_Node[P]]:
        leaves: list[_Node[P]] = []
        open_nodes = list(self._roots.values())
        while open_nodes:
            node = open_nodes.pop()
            if node.children:
                open_nodes.extend(node.children.values())
            else:
                leaves.append(node)
        return leaves
