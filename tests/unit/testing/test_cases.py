"""Cases: the closed format, the exact comparison, and `miles-ref case run` (cases.md)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from miles_ref.errors import CaseError
from miles_ref.sample import Sample
from miles_ref.testing.cases import CONFIG_DEFAULTS, load_cases, load_sound_cases, parse_case
from miles_ref.testing.command import case as case_group
from miles_ref.testing.compare import expectation_difference, first_difference
from miles_ref.testing.kinds.codec import encode, sample_of

STORED = {"role": "user", "content": "a"}


def match_case(case_id: str = "match/a", matches: bool = True, **changed: Any) -> dict[str, Any]:
    case = {
        "id": case_id,
        "kind": "match",
        "input": {"stored": STORED, "replayed": STORED, "matcher": "strict"},
        "expect": {"match": matches},
    }
    return case | changed


def test_what_a_case_leaves_out_are_the_defaults() -> None:
    case = parse_case(match_case(config={"max_nodes": 3}))
    assert (case.version, case.why, case.tags) == ("v1", "", ())
    assert case.config == {**CONFIG_DEFAULTS, "max_nodes": 3}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ([], "a case is an object"),
        ({}, "a case has no id"),
        (match_case(surprise=1), "match/a: unknown key 'surprise'"),
        (match_case(kind="guess"), "kind is 'guess'"),
        (match_case(version="v3"), "version is 'v3'"),
        (match_case(why=3), "why is 3"),
        (match_case(tags="a"), "tags is 'a'"),
        (match_case(kills=[1]), r"kills\[0\] is 1"),
        (match_case(config={"tokeniser": "bytes"}), "config: unknown key 'tokeniser'"),
        (match_case(config=None), "config is None"),
        (match_case(input={"stored": STORED}), "input has no replayed"),
        (match_case(input={**match_case()["input"], "note": 1}), "input: unknown key 'note'"),
        (match_case(input=[]), r"input is \[\]"),
        (match_case(expect={}), "expect has no match"),
        (match_case(expect={"match": True, "error": 1}), "expect: unknown key 'error'"),
        (match_case(expect={"match": "yes"}), "expect.match is 'yes', not true or false"),
        (match_case(expect=None), "expect is None"),
        (match_case(config=3), "config is 3, not an object"),
        (match_case(config={"max_nodes": "3"}), "config.max_nodes is '3', not a whole number"),
        (match_case(config={"speculative": 1}), "config.speculative is 1, not true or false"),
        (match_case(config={"flags": "--x"}), "config.flags is '--x', not a list"),
        (match_case(Kills=["x"]), "unknown key 'Kills'; did you mean 'kills'"),
        (match_case(kind="assemble", version="v1", input={"nodes": []}), "unknown key 'nodes'"),
        (match_case(kind="assemble", version="v2", input={"records": []}), "unknown key 'records'"),
    ],
)
def test_what_is_not_of_the_format_is_an_error_that_names_the_case_and_the_key(raw: Any, said: str) -> None:
    with pytest.raises(CaseError, match=said):
        parse_case(raw)


def data_case(kind: str, version: str, given: Any, expect: Any) -> dict[str, Any]:
    return {"id": "a/b", "kind": kind, "version": version, "input": given, "expect": expect}


def node(**changed: Any) -> dict[str, Any]:
    return {"parent": None, "messages": [], "token_ids": [1], "record": {}} | changed


NONE = {"samples": [], "empty_reason": "no_records"}


@pytest.mark.parametrize(
    ("kind", "version", "given", "expect", "said"),
    [
        ("assemble", "v1", {"records": []}, {"error": 422, "mentions": "etr"}, "expect.mentions is 'etr', not a list"),
        ("assemble", "v1", {"records": []}, {"error": 422, "mentions": [3]}, r"expect.mentions\[0\] is 3, not a text"),
        ("assemble", "v1", {"records": []}, {}, "expect has no samples"),
        ("assemble", "v1", {"records": []}, {"eror": 422, "mentions": []}, "key 'eror'; did you mean 'error'"),
        ("assemble", "v1", {"records": []}, {"error": 500, "mentions": []}, "expect.error is 500; known are 422"),
        ("assemble", "v2", {"nodes": []}, {"laws": "total"}, "expect.laws is 'total', not a list"),
        ("assemble", "v2", {"nodes": []}, {"laws": []}, "expect.laws is a list of 0"),
        ("assemble", "v2", {"nodes": []}, {"laws": ["totl"]}, "is 'totl'; did you mean 'total'"),
        ("assemble", "v1", {"records": {}}, NONE, "input.records is {}, not a list"),
        ("assemble", "v1", {"records": ["x"]}, NONE, r"input.records\[0\] is 'x', not an object"),
        ("assemble", "v1", {"records": [{"reqest": {}}]}, NONE, "key 'reqest'; did you mean 'request'"),
        ("assemble", "v1", {"records": [], "max_seq_len": "5"}, NONE, "input.max_seq_len is '5', not a whole"),
        ("assemble", "v1", {"records": [], "accumulated_token_ids": "ab"}, NONE, "token_ids is 'ab', not a list"),
        ("assemble", "v2", {"nodes": [node(parent=3)]}, NONE, r"input.nodes\[0\].parent is 3, not null or the index"),
        ("assemble", "v2", {"nodes": [node(parent=0)]}, NONE, r"input.nodes\[0\].parent is 0"),
        ("assemble", "v2", {"nodes": [node(parent=-1)]}, NONE, r"input.nodes\[0\].parent is -1, less than 0"),
        ("assemble", "v2", {"nodes": [node(parent=True)]}, NONE, r"input.nodes\[0\].parent is True"),
        ("assemble", "v2", {"nodes": [node(token_ids="ab")]}, NONE, "token_ids is 'ab', not a list"),
        ("assemble", "v2", {"nodes": [{}]}, NONE, r"input.nodes\[0\] has no parent"),
        ("assemble", "v2", {"nodes": [], "agent": []}, NONE, "input.agent is"),
        ("encode", "v1", {"samples": [3], "session_metadata": {}}, {"payload": ""}, r"input.samples\[0\] is 3"),
        ("decode", "v1", {"payload": 3}, {"error": "refused", "mentions": []}, "input.payload is 3, not a text"),
    ],
)
def test_every_value_has_its_type(kind: str, version: str, given: Any, expect: Any, said: str) -> None:
    with pytest.raises(CaseError, match=f"^f.json: a/b: .*{said}"):
        parse_case(data_case(kind, version, given, expect), "f.json: ")


def test_integral_floats_are_integers_where_the_schema_says_integer() -> None:
    record = {"timestamp": 2.0, "request": {"input_ids": [1.0]}}
    given = {"nodes": [node(record=record), node(parent=0.0, token_ids=[1.0, 2])], "max_seq_len": 20.0}
    config = {"num_layers": 2.0, "moe_router_topk": 1.0, "max_trim_tokens": 1.0, "max_nodes": 5.0}
    case = parse_case({**data_case("assemble", "v2", given, NONE), "config": config})
    first, second = case.input["nodes"]
    found = [case.input["max_seq_len"], second["parent"], *second["token_ids"], *(case.config[key] for key in config)]
    assert (found, {type(one) for one in found}) == ([20, 0, 1, 2, 2, 1, 1, 5], {int})
    assert (type(first["record"]["timestamp"]), type(first["record"]["request"]["input_ids"][0])) == (float, float)
    with pytest.raises(CaseError, match=r"input\.max_seq_len is 20\.5, not a whole number"):
        parse_case(data_case("assemble", "v2", {**given, "max_seq_len": 20.5}, NONE))


def rows_of(dtype: str, second: Any) -> Sample:
    data = [True if dtype == "bool" else 1, second]
    return sample_of({"rollout_routed_experts": {"dtype": dtype, "shape": [2, 1, 1], "data": data}})


@pytest.mark.parametrize(
    ("dtype", "second"),
    [
        *(("int32", second) for second in (0.5, True, "2", None, 2**31)),
        *(("float32", second) for second in (True, 0.1)),
        ("float64", None),
        ("bool", 1),
    ],
)
def test_an_array_that_does_not_hold_its_data_unchanged_is_no_case(dtype: str, second: Any) -> None:
    with pytest.raises(CaseError, match=r"rollout_routed_experts is no array: (data\[1\]|.*(None|out of bounds))"):
        rows_of(dtype, second)


@pytest.mark.parametrize(
    ("dtype", "second"), [("int32", 2.0), ("float32", 0.5), ("bool", True), ("float64", "-inf"), ("float64", "nan")]
)
def test_an_array_holds_what_its_dtype_can(dtype: str, second: Any) -> None:
    assert rows_of(dtype, second).rollout_routed_experts.dtype == dtype


def test_integral_floats_are_integers_in_shapes_and_flags_but_not_in_bodies() -> None:
    array = {"dtype": "int32", "shape": [2.0, 1, 1], "data": [1, 2]}
    sample = {"rollout_routed_experts": array, "metadata": {"shape": [2.0]}}
    for kind, given in (
        ("encode", {"samples": [sample], "session_metadata": {}}),
        ("decode", {"payload": "", "input_sample": sample}),
    ):
        case = parse_case(data_case(kind, "v1", given, {"error": "refused"}))
        read = case.input["samples"][0] if kind == "encode" else case.input["input_sample"]
        assert type(read["rollout_routed_experts"]["shape"][0]) is int
        assert type(read["metadata"]["shape"][0]) is float
    backend = {"status": 200.0, "body": {"status": 2.0}}
    chat = {"do": "chat", "session": "s", "body": {"n": 1.0}, "backend": backend, "expect": {"status": 200.0}}
    (step,) = parse_case(data_case("http", "v1", {"steps": [chat]}, {})).input["steps"]
    assert [type(one) for one in (step["backend"]["status"], step["backend"]["body"]["status"])] == [int, float]
    assert type(step["body"]["n"]) is float
    health = {"do": "health", "expect": {"status": 200}}
    case = parse_case(data_case("worker", "v1", {"config": {"max_calls": 2.0}, "steps": [health]}, {}))
    assert str(case.input["config"]["max_calls"]) == "2"


def assemble_case(case_id: str, given: Any, expect: Any = NONE, **more: Any) -> dict[str, Any]:
    return {"id": case_id, "kind": "assemble", "input": given, "expect": expect, **more}


@pytest.mark.parametrize(
    ("case", "version"),
    [
        (assemble_case("v2/fold/a", {"nodes": []}), "v2"),
        (assemble_case("v1/fold/a", {"records": []}), "v1"),
        (assemble_case("fold/a", {"nodes": []}), "v2"),
        (assemble_case("fold/a", {"records": []}), "v1"),
        (assemble_case("v2", {"records": []}), "v1"),
        (assemble_case("v2/fold/a", {"records": []}, version="v1"), "v1"),
        ({"id": "v2/wire/a", "kind": "decode", "input": {"payload": ""}, "expect": {"error": "refused"}}, "v2"),
    ],
)
def test_an_absent_version_is_that_of_the_id_or_of_the_input(case: Any, version: str) -> None:
    assert parse_case(case).version == version
    assert parse_case(case).raw["version"] == version


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (assemble_case("v2/a", {"records": []}), "unknown key 'records'.*taken for v2, as the id begins with v2"),
        (assemble_case("v1/a", {"nodes": []}), "unknown key 'nodes'.*taken for v1, as the id begins with v1"),
        (assemble_case("a", {"nodes": [3]}), "taken for v2, as input has nodes"),
        (assemble_case("a", {"recrds": []}), "taken for v1, as neither the id nor input says otherwise"),
    ],
)
def test_a_fault_says_which_version_was_taken(case: Any, said: str) -> None:
    with pytest.raises(CaseError, match=said):
        parse_case(case)
    with pytest.raises(CaseError) as told:
        parse_case({**case, "version": "v1", "input": {"recrds": []}})
    assert "taken for" not in str(told.value)


def test_what_is_left_out_of_input_and_expect_is_filled_in() -> None:
    match = match_case(input={"stored": STORED, "replayed": STORED}, config={"matcher": "role_content_only"})
    assert parse_case(match).input["matcher"] == "role_content_only"
    assert parse_case({**match, "config": {}}).input["matcher"] == "strict"
    assert parse_case(match_case(config={"matcher": "role_content_only"})).input["matcher"] == "strict"
    encoded = parse_case(data_case("encode", "v1", {"samples": []}, {"error": "refused"}))
    assert (encoded.input["session_metadata"], encoded.input["empty_reason"]) == ({}, None)
    assert encoded.expect == {"error": "refused", "mentions": []}
    refused = parse_case(data_case("assemble", "v1", {"records": []}, {"error": 422}))
    assert refused.expect == {"error": 422, "mentions": []}
    some = parse_case(data_case("assemble", "v1", {"records": []}, {"samples": []}))
    assert some.expect == {"samples": [], "empty_reason": None}


@pytest.mark.parametrize(("family", "own"), [("default", 0), ("qwen3", 0), ("glm47", 1)])
def test_the_trim_of_a_server_is_its_familys(family: str, own: int) -> None:
    steps = {"steps": [{"do": "health", "expect": {"status": 200}}]}
    case = data_case("http", "v1", steps, {})
    for same in (float(own), 0):  # 0 is the default of the format: as if it were absent
        read = parse_case({**case, "config": {"family": family, "max_trim_tokens": same}})
        assert read.config == parse_case({**case, "config": {"family": family}}).config
    for other in {1, 2} - {own}:
        with pytest.raises(CaseError, match=f"max_trim_tokens is {other}, .*'{family}', {own}; write {own}"):
            parse_case({**case, "config": {"family": family, "max_trim_tokens": other}})


def test_the_faults_of_all_files_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([match_case("a", surprise=1), match_case("b"), match_case("c", why=3)]))
    (tmp_path / "b.json").write_text("{")
    (tmp_path / "c.json").write_text(json.dumps(match_case("b")))
    with pytest.raises(CaseError) as told:
        load_cases([tmp_path, tmp_path / "missing"])
    lines = str(told.value).splitlines()
    words = ("b.json: cannot be read", "no such", "a.json: a: unknown key", "a.json: c: why is 3", "'b' is used twice")
    assert [word in line for word, line in zip(words, lines, strict=True)] == [True] * 5
    (tmp_path / "a.json").write_text(json.dumps([match_case(f"a{at}", why=at) for at in range(23)]))
    with pytest.raises(CaseError) as told:
        load_cases([tmp_path / "a.json"])
    lines = str(told.value).splitlines()
    assert (len(lines), lines[-1]) == (21, "and 3 more")


def test_what_is_no_case_does_not_stop_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([match_case("a", surprise=1), match_case("b")]))
    cases, faults = load_sound_cases([tmp_path])
    assert [case.id for case in cases] == ["b"]
    assert [("a.json: a: unknown key" in fault) for fault in faults] == [True]
    (tmp_path / "a.json").write_text(json.dumps([match_case("a", surprise=1)]))
    with pytest.raises(CaseError, match="unknown key"):
        load_sound_cases([tmp_path])
    (tmp_path / "b.json").write_text(json.dumps(match_case("b")))
    with pytest.raises(CaseError, match="no such file"):
        load_sound_cases([tmp_path / "b.json", tmp_path / "missing"])


def test_a_field_of_a_counter_that_does_not_exist_is_an_error_that_names_it() -> None:
    given = {"samples": [{"spec_info": {"spec_accept": 1}}], "session_metadata": {}}
    with pytest.raises(CaseError, match="spec_info has no field 'spec_accept'; known are"):
        encode(parse_case(data_case("encode", "v1", given, {"payload": ""})))


@pytest.mark.parametrize(
    "text", ['{"id": "a", "id": "b"}', '[{"id": "a", "input": {"steps": [{"id": 1, "b": 2, "id": 1}]}}]']
)
def test_a_key_that_stands_twice_is_an_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "twice.json"
    file.write_text(text)
    with pytest.raises(CaseError, match=r"twice\.json.*the key 'id' stands twice"):
        load_cases([file])


def test_an_empty_list_is_no_file_of_cases(tmp_path: Path) -> None:
    file = tmp_path / "none.json"
    file.write_text("[]")
    with pytest.raises(CaseError, match=r"none\.json: holds no case"):
        load_cases([file])


def test_files_hold_one_case_or_a_list_also_packed(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(match_case("match/one")))
    (tmp_path / "more").mkdir()
    packed = gzip.compress(json.dumps([match_case("match/two"), match_case("match/three")]).encode())
    (tmp_path / "more" / "packed.json.gz").write_bytes(packed)
    (tmp_path / "README.md").write_text("no case")
    assert [case.id for case in load_cases([tmp_path])] == ["match/two", "match/three", "match/one"]
    with pytest.raises(CaseError, match="'match/one' is used twice"):
        load_cases([tmp_path, tmp_path / "one.json"])


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[1]", b"[" * 100_000])
def test_a_file_that_holds_no_cases_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.json"
    file.write_bytes(content)
    with pytest.raises(CaseError, match=r"broken\.json"):
        load_cases([file])
    with pytest.raises(CaseError, match="no such file"):
        load_cases([tmp_path / "missing.json"])


@pytest.mark.parametrize(
    ("expected", "observed"),
    [(0, 0.0), (2**53, float(2**53)), (None, None), ("a", "a"), ([], []), ({"a": 1, "b": 2}, {"b": 2, "a": 1.0})],
)
def test_numbers_compare_by_value_and_keys_in_any_order(expected: Any, observed: Any) -> None:
    assert first_difference(expected, observed) is None


@pytest.mark.parametrize(
    ("expected", "observed", "said"),
    [
        (1, True, "the whole: expected 1, got true"),
        (0, False, "expected 0, got false"),
        (None, 0, "expected null, got 0"),
        ("1", 1, 'expected "1", got 1'),
        (2**53 + 1, float(2**53), "expected 9007199254740993"),
        ({"a": None}, {}, "a: missing, expected null"),
        ({}, {"a": None}, "a: unexpected, got null"),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, "a[1].b: expected 2, got 3"),
        ([1, 2], [1], "expected 2 entries, got 1"),
        ([1], {"0": 1}, "expected [1], got"),
    ],
)
def test_the_first_difference_is_named_with_its_path(expected: Any, observed: Any, said: str) -> None:
    found = first_difference(expected, observed)
    assert found is not None
    assert said in found


def test_a_refusal_must_be_of_its_kind_and_mention_what_it_must() -> None:
    refusal = {"error": 422, "message": "turn 3: trim 2, allowed 1"}
    assert expectation_difference({"error": 422, "mentions": ["trim 2", "allowed"]}, refusal) is None
    for expected, said in (
        ({"error": 422, "mentions": ["Trim"]}, "does not mention ['Trim']"),
        ({"error": "refused", "mentions": []}, "expected refused, got 422"),
        ({"match": True}, "refused (422): turn 3"),
    ):
        found = expectation_difference(expected, refusal)
        assert found is not None
        assert said in found
    found = expectation_difference({"error": 422, "mentions": []}, {"match": True})
    assert found is not None
    assert "expected a refusal (422)" in found


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(case_group, ["run", *map(str, arguments)])


def test_the_command_prints_a_line_a_failure_and_the_count(tmp_path: Path) -> None:
    file = tmp_path / "cases.json"
    file.write_text(
        json.dumps([match_case("match/a"), match_case("match/b", matches=False, why="Equal messages differ.")])
    )
    result = run(file)
    assert result.exit_code == 1
    assert result.stdout == "match/b: Equal messages differ. match: expected false, got true\n1 passed, 1 failed\n"
    file.write_text(json.dumps([match_case("match/a")]))
    assert (run(file).exit_code, run(file).stdout) == (0, "1 passed, 0 failed\n")


def test_the_command_speaks_json(tmp_path: Path) -> None:
    file = tmp_path / "cases.json"
    file.write_text(json.dumps([match_case("match/a", matches=False)]))
    verdict, counts = (json.loads(line) for line in run(file, "--json").stdout.splitlines())
    assert (verdict["id"], verdict["outcome"]) == ("match/a", "failed")
    assert counts == {"passed": 0, "failed": 1}


def test_no_case_at_all_is_no_success(tmp_path: Path) -> None:
    assert (run(tmp_path).exit_code, run(tmp_path).stdout) == (1, "0 passed, 0 failed\n")
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(match_case(surprise=1)))
    result = run(file)
    assert result.exit_code == 2
    assert "unknown key 'surprise'" in result.stderr
