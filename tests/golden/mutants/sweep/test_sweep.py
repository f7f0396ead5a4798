"""The sweep's own logic: what is left out, what is drawn, what a score is, which survivor an entry explains."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.golden.mutants import GOLDEN
from tests.golden.mutants.sweep import __main__ as program
from tests.golden.mutants.sweep import forkserver, survivors
from tests.golden.mutants.sweep.filters import left_out, reason_for
from tests.golden.mutants.sweep.mutations import Mutation, all_mutations, differs, drawn, made, make, numbered
from tests.golden.mutants.sweep.score import KILLED, SURVIVED, TIMED_OUT, Result, Score, Sweep, score
from tests.golden.mutants.sweep.workers import UNIT, WorkerError, unit_tests

SURVIVORS = survivors.read()

REPOSITORY = GOLDEN.parent.parent
SOURCE = '''\
"""1 + 1."""
from __future__ import annotations
from typing import TYPE_CHECKING, overload
if TYPE_CHECKING:
    from a import b  # in = 3
Payload = bytes | memoryview
LIMITS = {1} | {2}
__all__ = ["f" + "g"]
def f(é: int | None, at: int = 4) -> str | None:
    "5"
    width: int | float = "é" + at
    if at == 6:
        raise ValueError(f"é {at + 7}", at + 8)
    logger.warning("more than %d", at + 9)
    return f"{at + 10:.11}"
@lru_cache(maxsize=12)
def g(): return say("é", 13)
@overload
def h(x: int = 14): ...
@dataclass(frozen=True, slots=True)
class C: ...
def i(first=15 * 16, *, named=17 * 18): ...
def j(*, named): ...
class P(Protocol):
    @property
    def k(self) -> int: ...
'''


def place_of(text: str, nth: int = 0) -> tuple[int, int]:
    """Line and column of the nth occurrence of a text in SOURCE."""
    at = -1
    for _ in range(nth + 1):
        at = SOURCE.index(text, at + 1)
    return SOURCE.count("\n", 0, at) + 1, at - SOURCE.rfind("\n", 0, at) - 1


@pytest.mark.parametrize(
    ("text", "nth", "operator", "reason"),
    [
        ("1 + 1", 0, "NumberReplacer", "text"),
        ("| memoryview", 0, "ReplaceBinaryOperator_BitOr_Add", "annotation"),
        ("| {2}", 0, "ReplaceBinaryOperator_BitOr_Add", None),
        ('+ "g"', 0, "ReplaceBinaryOperator_Add_Sub", "declaration"),
        ("| None", 0, "ReplaceBinaryOperator_BitOr_Add", "annotation"),
        ("| None", 1, "ReplaceBinaryOperator_BitOr_Add", "annotation"),
        ("4", 0, "NumberReplacer", None),
        ("| float", 0, "ReplaceBinaryOperator_BitOr_Add", "annotation"),
        ("+ at", 0, "ReplaceBinaryOperator_Add_Sub", None),
        ("== 6", 0, "ReplaceComparisonOperator_Eq_Lt", None),
        ("== 6", 0, "ReplaceComparisonOperator_Eq_Is", "identity"),
        ("7", 0, "NumberReplacer", "message"),
        ("+ 7", 0, "ReplaceBinaryOperator_Add_Sub", "message"),
        ("8", 0, "NumberReplacer", None),
        ("+ 9", 0, "ReplaceBinaryOperator_Add_Sub", "message"),
        ("* 16", 0, "ReplaceBinaryOperator_Mul_Div", None),
        ("*, named=", 0, "ReplaceBinaryOperator_Mul_Div", "declaration"),
        ("* 18", 0, "ReplaceBinaryOperator_Mul_Div", None),
        ("*, named)", 0, "ReplaceBinaryOperator_Mul_Div", "declaration"),
        ("@property", 0, "RemoveDecorator", "declaration"),
        ("10", 0, "NumberReplacer", "text"),
        ("+ 10", 0, "ReplaceBinaryOperator_Add_Sub", None),
        ("@lru_cache", 0, "RemoveDecorator", "speed"),
        ("12", 0, "NumberReplacer", "speed"),
        ("13", 0, "NumberReplacer", None),
        ("@overload", 0, "RemoveDecorator", "declaration"),
        ("14", 0, "NumberReplacer", "declaration"),
        ("@dataclass", 0, "RemoveDecorator", None),
        ("True", 0, "ReplaceTrueWithFalse", None),
        ("True", 1, "ReplaceTrueWithFalse", "speed"),
    ],
)
def test_what_cannot_mean_anything_is_left_out(text: str, nth: int, operator: str, reason: str | None) -> None:
    assert reason_for(left_out(SOURCE), place_of(text, nth), operator) == reason


@pytest.mark.parametrize(
    ("mutated", "another"),
    [
        ("x = 1e16\n", False),
        ("x = (1e16 + 0.0)\n", True),
        ("x = +\n", False),
        ("x =  1e+16\n", False),
        ("x = 1 is 1\n", True),
    ],
)
def test_only_what_compiles_to_another_program_is_a_mutant(mutated: str, another: bool) -> None:
    assert differs("x = 1e16\n", mutated) is another


def mutations() -> list[Mutation]:
    """Ten sites on as many lines: at each eleven mutants of one operator and two of another."""
    found = []
    for at in range(10):
        for other in range(11):
            found.append(Mutation("miles_ref/wire/a.py", f"Replace_{other}", at, (at + 1, 4), f"x{at} + 1"))
        found += [Mutation("miles_ref/wire/a.py", "Number", 2 * at + n, (at + 1, 6), f"x{at} + 1") for n in range(2)]
    return numbered(found)


def test_an_exception_that_an_operator_cannot_replace_is_no_mutant() -> None:
    pytest.importorskip("cosmic_ray", reason="of the extra mutation")
    source = "import json\ntry: ...\nexcept (json.JSONDecodeError, ValueError): ...\n"
    found = [one for one in all_mutations(source, "miles_ref/wire/m.py") if one.operator == "ExceptionReplacer"]
    assert [make(one, source) is None for one in found] == [True, False]


def test_a_sample_is_decided_by_the_seed() -> None:
    whole = drawn(mutations(), 7)
    assert whole == drawn(reversed(mutations()), 7)
    assert sorted(whole, key=repr) == sorted(mutations(), key=repr)
    assert whole[:20] != drawn(mutations(), 8)[:20]


def test_each_site_gives_one_before_any_gives_a_second() -> None:
    whole = drawn(mutations(), 7)
    first, second = whole[:20], whole[20:40]
    assert len({(one.family, one.start) for one in first}) == 20
    assert len({(one.family, one.start) for one in second}) == 20
    # In no order that follows the source.
    assert [one.start for one in first] != sorted(one.start for one in first)


def test_an_edit_elsewhere_changes_no_place() -> None:
    moved = [replace(one, start=(one.start[0] + 5, one.start[1]), occurrence=one.occurrence + 3) for one in mutations()]
    names = [[(one.text, one.operator, one.nth) for one in drawn(of, 7)] for of in (mutations(), moved)]
    assert names[0] == names[1]


def result(outcome: str, file: str = "miles_ref/wire/a.py", why: str | None = None) -> Result:
    diff = made(file, "x = 1\n", "x = 2\n").diff
    return Result(file, 1, "NumberReplacer", "x = 1", "x = 2", diff, outcome, stage="unit tests", why=why)


def test_a_time_out_counts_as_killed_and_an_explained_survivor_against_nothing() -> None:
    found = score([result(KILLED), result(TIMED_OUT), result(SURVIVED), result(SURVIVED, why="They are equal.")])
    assert found == Score(run=4, killed=1, timed_out=1, survived=2, explained=1)
    assert found.raw == 50.0
    assert found.without_explained == 66.67
    assert score([]).raw is None
    assert score([result(SURVIVED, why="They are equal.")]).without_explained is None
    with pytest.raises(ValueError, match="no outcome of a mutant: skipped"):
        score([result("skipped")])


def test_a_summary_has_each_room_and_each_survivor_with_its_difference() -> None:
    results = [result(KILLED), result(SURVIVED), result(KILLED, "miles_ref/tokens/b.py")]
    sweep = Sweep(1, 9, 20, {"text": 2}, 1, 60.0, {}, {}, results, stale=["an entry"])
    assert {room: one.raw for room, one in sweep.by_room().items()} == {"tokens": 100.0, "wire": 50.0, "total": 66.67}
    text = sweep.to_markdown()
    assert "3 of the 9 mutants of the sample ran" in text
    assert "| wire | 2 | 1 | 0 | 1 | 0 | 50.0 % | 50.0 % |" in text
    assert "miles_ref/wire/a.py:1 NumberReplacer\n\n```diff\n@@ -1 +1 @@\n-x = 1\n+x = 2\n```" in text
    assert "- an entry" in text
    saved = sweep.to_json()
    assert saved["sample"] == {"asked": 9, "run": 3, "discarded": 1}
    assert [one["outcome"] for one in saved["mutants"]] == [KILLED, SURVIVED, KILLED]
    assert saved["score"]["total"]["raw"] == 66.67


def entry(**changed: str) -> survivors.Explained:
    values = {"file": "miles_ref/wire/a.py", "operator": "Number", "line": "x3 + 1", "why": "It is the same."}
    return survivors.Explained(**{**values, **changed})


def test_an_entry_is_found_by_its_line_wherever_that_stands() -> None:
    mutation = Mutation("miles_ref/wire/a.py", "Number", 5, (77, 6), "x3 + 1")
    assert survivors.explanation([entry()], mutation, "x3 + 2") == entry()
    assert survivors.explanation([entry(becomes="x3 + 2")], mutation, "x3 + 2")
    assert survivors.explanation([entry(becomes="x3 + 0")], mutation, "x3 + 2") is None
    for changed in ({"line": "x4 + 1"}, {"operator": "AddNot"}, {"file": "miles_ref/tokens/a.py"}):
        assert survivors.explanation([entry(**changed)], mutation, "x3 + 2") is None


def test_an_entry_that_fits_no_mutant_is_stale() -> None:
    fits, other_line, other_change = entry(becomes="x3 + 2"), entry(line="x11 + 1"), entry(becomes="x3 + 7")
    carried_out = {0: "x3 + 2", 1: None}
    found = survivors.stale([fits, other_line, other_change], mutations(), lambda one: carried_out[one.nth])
    assert found == [other_line, other_change]


def test_the_lines_that_survivors_name_are_in_the_source() -> None:
    # A sweep finds the other stale entries, half an hour later.
    root = GOLDEN.parents[1]
    sources = {one.file: {line.strip() for line in (root / one.file).read_text().splitlines()} for one in SURVIVORS}
    assert [str(one) for one in SURVIVORS if one.line not in sources[one.file]] == []


def test_a_file_of_survivors_gives_reasons(tmp_path: Path) -> None:
    file = tmp_path / "survivors.toml"
    text = '[[survivor]]\nfile = "a/b/c.py"\noperator = "AddNot"\nline = "if x:"\nwhy = "{}"\n'
    file.write_text(text.format("x is always true."), encoding="utf-8")
    assert survivors.read(file) == [survivors.Explained("a/b/c.py", "AddNot", "if x:", "x is always true.")]
    file.write_text(text.format(" "), encoding="utf-8")
    with pytest.raises(ValueError, match="why is empty"):
        survivors.read(file)
    file.write_text(text.format("So.") + "lines = 3\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"unknown keys \['lines'\]"):
        survivors.read(file)


def test_every_entry_names_a_line_of_the_package() -> None:
    entries = survivors.read()
    gone = []
    for one in entries:
        file = REPOSITORY / one.file
        lines = file.read_text(encoding="utf-8").split("\n") if file.is_file() else []
        if one.line not in [line.strip() for line in lines]:
            gone.append(str(one))
    assert gone == []
    assert len(set(entries)) == len(entries)


@pytest.mark.parametrize("room", UNIT)
def test_the_tests_named_after_the_mutated_file_come_first(room: str) -> None:
    tests = unit_tests(REPOSITORY, room)
    assert tests
    last = tests[-1]
    module = Path(last).stem.removeprefix("test_")
    ordered = unit_tests(REPOSITORY, room, f"miles_ref/{room}/{module}.py")
    assert ordered[0] == last
    assert sorted(ordered) == sorted(tests)


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> program.Sample:
    """Of three mutants; those of Replace_0 do not compile, one of Replace_1 is explained."""
    (tmp_path / "tests" / "unit" / "wire").mkdir(parents=True)
    (tmp_path / "miles_ref" / "wire").mkdir(parents=True)
    (tmp_path / "miles_ref" / "wire" / "a.py").write_text("x = 1\n", encoding="utf-8")

    def make(mutation: Mutation, source: str) -> Any:
        return None if mutation.operator == "Replace_0" else made(mutation.file, source, f"x = {mutation.operator!r}\n")

    monkeypatch.setattr(program, "make", make)
    explained = [entry(operator="Replace_1", line="x0 + 1", becomes="x = 'Replace_1'")]
    seconds = {"wire": {"data cases": 2.0}}
    return program.Sample(tmp_path, mutations(), explained, seconds, 10.0, size=3)


def answer(outcome: str, **more: str) -> dict[str, Any]:
    return {"outcome": outcome, "stage": "data cases", "by": "", "detail": "", "stages": {"data cases": 1.5}, **more}


def test_a_sample_has_its_size_in_mutants_that_compile(sample: program.Sample) -> None:
    jobs = list(sample.jobs())
    assert [mutation.operator for (mutation, _), _ in jobs] == ["Replace_1", "Replace_2", "Replace_3"]
    assert sample.discarded == 1
    assert jobs[0][1].source == "x = 'Replace_1'\n"
    assert jobs[0][1].limits["data cases"] == 18.0
    assert jobs[0][1].limits["http cases"] == 10.0


def test_no_mutant_begins_after_the_end(sample: program.Sample) -> None:
    sample.end = time.monotonic() + 3600
    jobs = sample.jobs()
    sample.done(next(jobs)[0], answer(KILLED, by="v1/fold/a"))
    sample.end = time.monotonic() - 1
    assert list(jobs) == []
    assert [(one.outcome, one.by, one.seconds) for one in sample.results] == [(KILLED, "v1/fold/a", 1.5)]


def test_an_explanation_counts_for_a_survivor_and_is_wrong_for_a_killed_one(sample: program.Sample) -> None:
    first, second, _ = [judged for judged, _ in sample.jobs()]
    sample.done(first, answer(SURVIVED))
    sample.done(second, answer(SURVIVED))
    assert [one.why for one in sample.results] == ["It is the same.", None]
    assert sample.wrong == []
    sample.done(first, answer(TIMED_OUT))
    assert sample.results[-1].why is None
    (wrong,) = sample.wrong
    assert wrong == "miles_ref/wire/a.py: Replace_1 on 'x0 + 1' to \"x = 'Replace_1'\": timed out"


def test_what_is_not_the_mutants_doing_ends_the_run(sample: program.Sample) -> None:
    judged, _ = next(sample.jobs())
    with pytest.raises(WorkerError, match=r"miles_ref/wire/a\.py: imported from elsewhere"):
        sample.done(judged, answer("error", detail="imported from elsewhere"))
    assert sample.results == []


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """The reading and the writing end of a pipe."""
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


def awaited(messages: list[dict[str, str]], limits: dict[str, float], asking: int) -> dict[str, Any]:
    """What the fork server makes of the messages of a child that then ends."""
    read, write = os.pipe()
    for message in messages:
        os.write(write, json.dumps(message).encode() + b"\n")
    os.close(write)
    try:
        return forkserver._awaited(read, limits, asking)
    finally:
        os.close(read)


def test_a_child_says_what_killed_it_or_dies(pipe: tuple[int, int]) -> None:
    limits = {"start": 60.0, "unit tests": 60.0}
    begin = {"begin": "unit tests"}
    found = awaited([begin, {"outcome": KILLED, "by": "test_a.py::test_b", "detail": "1 != 2"}], limits, pipe[0])
    assert found.pop("stages").keys() == {"start", "unit tests"}
    assert found == {"outcome": KILLED, "stage": "unit tests", "by": "test_a.py::test_b", "detail": "1 != 2"}
    found = awaited([begin], limits, pipe[0])
    assert (found["outcome"], found["stage"], found["by"]) == (KILLED, "unit tests", "crash")


def test_a_child_that_says_nothing_in_time_is_timed_out(pipe: tuple[int, int]) -> None:
    found = forkserver._awaited(pipe[0], {"start": 0.0}, pipe[0])
    assert (found["outcome"], found["stage"]) == (TIMED_OUT, "start")


def test_hand_made_cases_come_first_and_each_kind_has_its_stage() -> None:
    data, http = forkserver.read_cases(GOLDEN)
    assert {case["kind"] for case in data} == forkserver.DATA_KINDS
    assert {case["kind"] for case in http} == {"http"}
    for cases in (data, http):
        by_hand = [case.get("provenance") == "hand" for case in cases]
        assert by_hand == sorted(by_hand, reverse=True)
        assert True in by_hand
