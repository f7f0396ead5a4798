"""The mutants that cosmic-ray's operators make of some rooms of the package, and the order in which they are drawn.

A *site* is a place and a family of operators: one `+` gives eleven mutants of the family ReplaceBinaryOperator, a
`True` gives one. Each site gives one mutant before any gives a second, so that arithmetic does not crowd out the rest.
"""

from __future__ import annotations

import ast
import difflib
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from .filters import Position, left_out, reason_for

ROOMS = ("assembly", "wire", "trajectory", "tokens")
NEED_ARGUMENTS = frozenset({"VariableReplacer", "VariableInserter"})
"""Operators that replace a variable that one names; the others need no choice."""


@dataclass(frozen=True)
class Mutation:
    """One change that an operator can make.

    `occurrence` is cosmic-ray's number of it in the file; `nth` numbers those of the same file, operator and line text,
    so that the five name it whatever is edited elsewhere.
    """

    file: str
    """Relative to the repository, with /."""
    operator: str
    """cosmic-ray's name without its provider."""
    occurrence: int
    start: Position
    text: str
    """The source line that it begins in, stripped."""
    nth: int = 0

    @property
    def room(self) -> str:
        return self.file.split("/")[1]

    @property
    def family(self) -> str:
        return self.operator.split("_")[0]

    def place_by(self, seed: int) -> str:
        """A place in a random order that an edit of other lines does not change."""
        return sha256(f"{seed}/{self.file}/{self.operator}/{self.text}/{self.nth}".encode()).hexdigest()


@dataclass(frozen=True)
class Made:
    """A mutation carried out: the whole mutated source, its difference, and the lines that it added, stripped."""

    source: str
    diff: str
    becomes: str


@dataclass(frozen=True)
class Population:
    """All mutations, and how many were left out, by reason."""

    mutations: list[Mutation]
    left_out: Counter[str]


def population(root: Path, rooms: Iterable[str] = ROOMS) -> Population:
    """The mutations of all modules of the rooms."""
    mutations: list[Mutation] = []
    skipped: Counter[str] = Counter()
    for room in rooms:
        for path in sorted((root / "miles_ref" / room).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            places = left_out(source)
            for mutation in all_mutations(source, path.relative_to(root).as_posix()):
                reason = reason_for(places, mutation.start, mutation.operator)
                skipped.update([reason] if reason is not None else [])
                mutations += [mutation] if reason is None else []
    return Population(numbered(mutations), skipped)


def all_mutations(source: str, file: str) -> Iterator[Mutation]:
    """What every operator can change in a source, in cosmic-ray's order."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.operators.provider import OperatorProvider

    provider = OperatorProvider()
    nodes = list(ast_nodes(get_ast(source)))
    lines = source.split("\n")
    for name in sorted(set(provider) - NEED_ARGUMENTS):
        operator = provider[name]()
        starts = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, start in enumerate(starts):
            yield Mutation(file, name, occurrence, start, lines[start[0] - 1].strip())


def make(mutation: Mutation, source: str) -> Made | None:
    """Carry a mutation out.

    None when the operator cannot, or the result does not compile, or is the same program (1e16 + 1 is 1e16).
    """
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.operators.provider import OperatorProvider

    try:
        mutated = mutate_code(source, OperatorProvider()[mutation.operator](), mutation.occurrence)
    except AttributeError:
        if mutation.operator != "ExceptionReplacer":
            raise
        return None  # it cannot replace the first name of `except (json.JSONDecodeError, ValueError)`
    return made(mutation.file, source, mutated) if mutated is not None and differs(source, mutated) else None


def differs(source: str, mutated: str) -> bool:
    """Whether a mutated source compiles, to another program than the source."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as: "is" with a literal
        try:
            compile(mutated, "<mutant>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            return False
    return ast.dump(ast.parse(source)) != ast.dump(ast.parse(mutated))


def made(file: str, source: str, mutated: str) -> Made:
    """The form of a mutated source with its difference."""
    lines = list(
        difflib.unified_diff(source.splitlines(), mutated.splitlines(), f"a/{file}", f"b/{file}", n=1, lineterm="")
    )
    added = [line[1:].strip() for line in lines[2:] if line.startswith("+")]
    return Made(mutated, "\n".join(lines), " ".join(added))


def numbered(mutations: Iterable[Mutation]) -> list[Mutation]:
    """The mutations with `nth` filled in."""
    seen: Counter[tuple[str, str, str]] = Counter()
    result = []
    for mutation in mutations:
        key = (mutation.file, mutation.operator, mutation.text)
        result.append(replace(mutation, nth=seen[key]))
        seen[key] += 1
    return result


def drawn(mutations: Iterable[Mutation], seed: int) -> list[Mutation]:
    """All mutations in a random order that the seed decides; every beginning of it is a sample.

    First one mutation of each site, then a second of those that have one, and so on.
    """
    sites: dict[tuple[str, str, Position], list[tuple[str, Mutation]]] = defaultdict(list)
    for mutation in mutations:
        sites[mutation.file, mutation.family, mutation.start].append((mutation.place_by(seed), mutation))
    ranked = []
    for site in sites.values():
        ranked += [(rank, place, one) for rank, (place, one) in enumerate(sorted(site, key=lambda pair: pair[0]))]
    return [mutation for _, _, mutation in sorted(ranked, key=lambda entry: entry[:2])]
