"""Every runner reports a case whose expectation was altered; targets, smoke and selection behave."""

from __future__ import annotations

import copy
import json
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from miles_ref.errors import CaseError, UsageError
from miles_ref.plugins import Catalogue
from miles_ref.testing.cases import Case, parse_case
from miles_ref.testing.check import check_provides, judge, run_all, select
from miles_ref.testing.check_command import check_command, report_command
from miles_ref.testing.command import case as case_commands
from miles_ref.testing.corpus import corpus_root
from miles_ref.testing.kinds.assemble import run_case
from miles_ref.testing.programs import ProgramError
from miles_ref.testing.propose import load_oracle
from miles_ref.testing.servers import command_line, server_flags
from miles_ref.testing.targets import PluginTarget, ProgramTarget, ReferenceTarget, choose_target
from miles_ref.testing.verdict import Outcome

ROOT = corpus_root()
DOUBLES = "miles_ref.testing.doubles"
LAWS = str(ROOT / "v2" / "laws")


def raw(file: str, case_id: str) -> dict[str, Any]:
    """A copy of one case of the corpus."""
    cases: list[dict[str, Any]] = json.loads((ROOT / file).read_text())
    return copy.deepcopy(next(case for case in cases if case["id"] == case_id))


@pytest.fixture(scope="module")
def reference() -> Iterator[ReferenceTarget]:
    target = ReferenceTarget()
    yield target
    target.close()


def altered(file: str, case_id: str, *path: Any, to: Any) -> Case:
    """A case of the corpus with one value of it replaced."""
    case = raw(file, case_id)
    holder: Any = case
    for key in path[:-1]:
        holder = holder[key]
    assert holder[path[-1]] != to
    holder[path[-1]] = to
    return parse_case(case)


ALTERED = {
    "assemble": ("v1/truncate/walk.json", None, ("expect", "empty_reason"), "altered"),
    "encode": ("wire/encode/values.json", None, None, None),
    "decode": ("wire/decode/fields.json", None, None, None),
    "match": ("tokens/match/calls.json", None, None, None),
}


@pytest.mark.parametrize("kind", ["assemble", "encode", "decode", "match"])
def test_an_altered_expectation_of_data_is_reported(kind: str, reference: ReferenceTarget) -> None:
    cases = json.loads((ROOT / "vectors" / ("assemble.json" if kind == "assemble" else "codec.json")).read_text())
    case = next(one for one in cases if one["kind"] == kind and "error" not in one["expect"])
    assert judge(parse_case(case), reference).outcome is Outcome.PASSED
    spoiled = copy.deepcopy(case)
    key = {"assemble": "empty_reason", "encode": "payload", "decode": "empty_reason", "match": "match"}[kind]
    others = {"assemble": "all_truncated", "match": not case["expect"].get("match")}
    spoiled["expect"][key] = others.get(kind, "altered")
    assert case["expect"][key] != spoiled["expect"][key]
    assert judge(parse_case(spoiled), reference).outcome is Outcome.FAILED
    if kind != "match":
        refused = {**case, "expect": {"error": 422 if kind == "assemble" else "refused", "mentions": []}}
        assert judge(parse_case(refused), reference).outcome is Outcome.FAILED


HTTP = ("v1/http/life.json", "v1/http/get-shows-the-record")


@pytest.mark.parametrize(
    ("step", "path", "value"),
    [
        (0, ("status",), 201),
        (1, ("status",), 204),
        (2, ("body", "session_id"), "other"),
        (2, ("body", "records", 0, "$exact", "status_code"), True),
        (2, ("body", "records", 0, "$exact", "request", "input_ids"), {"$ids": ["other"]}),
        (2, ("body", "metadata", "$exact", "max_trim_tokens"), 1),
        (2, ("headers",), {"content-type": None}),
        (2, ("text_mentions",), ["never said"]),
        (2, ("content_type",), "text/plain"),
        (1, ("backend_request",), None),
        (1, ("backend_request",), {"model": "other"}),
        (1, ("backend_request",), {"headers": {"x-smg-routing-key": None}}),
        (1, ("sse",), ["[DONE]"]),
        (1, ("samples",), {"samples": [], "empty_reason": None}),
    ],
)
def test_an_altered_expectation_of_http_is_reported(
    step: int, path: tuple[Any, ...], value: Any, reference: ReferenceTarget
) -> None:
    case = raw(*HTTP)
    holder = case["input"]["steps"][step]["expect"]
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    verdict = judge(parse_case(case), reference)
    assert verdict.outcome is Outcome.FAILED
    assert verdict.details[0].startswith(f"step {step} ")


def test_altered_samples_over_http_are_reported(reference: ReferenceTarget) -> None:
    case = raw("v1/http/samples.json", "v1/http/samples-null-budget")
    case["input"]["steps"][2]["expect"]["samples"]["samples"][0]["loss_mask"] = [1, 0]
    verdict = judge(parse_case(case), reference)
    assert verdict.outcome is Outcome.FAILED
    assert "loss_mask[1]" in verdict.details[0]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("status",), 201),
        (("body", "outcome"), {"$exact": {"kind": "ok", "value": "other"}}),
        (("text_mentions",), ["never said"]),
        (("headers",), {"content-type": "text/plain"}),
    ],
)
def test_an_altered_expectation_of_a_worker_is_reported(
    path: tuple[str, ...], value: Any, reference: ReferenceTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles_ref.testing.kinds.worker.UNTIL_TIMEOUT", 1.0)
    case = raw("worker/outcomes.json", "worker/outcomes/ok")
    holder = case["input"]["steps"][1]["step"]["expect"]
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    assert judge(parse_case(case), reference).outcome is Outcome.FAILED


LAW_BREAKERS = [
    ("picker", "repeating_picker", "selects-only"),
    ("picker", "inventing_picker", "selects-only"),
    ("picker", "rewriting_picker", "inputs-untouched"),
    ("picker", "raising_picker", "total"),
    ("merger", "short_mask_merger", "lengths-agree"),
    ("merger", "key_dropping_merger", "server-keys-kept"),
    ("merger", "train_all_merger", "exactly-once"),
    ("merger", "train_nothing_merger", "exactly-once"),
    ("merger", "counting_merger", "deterministic"),
    ("merger", "unwritable_merger", "encodable"),
]


def laws_of_details(details: tuple[str, ...]) -> list[str]:
    """The laws that are said to be broken, in all details of a case."""
    return [law for detail in details for law in detail.partition(": ")[0].split(", ")]


@pytest.mark.parametrize(("role", "name", "law"), LAW_BREAKERS)
def test_a_broken_law_is_reported(role: str, name: str, law: str) -> None:
    target = PluginTarget(**{role: f"{DOUBLES}.{name}"})
    case = raw("v2/laws/forests.json", "v2/laws/branches")
    details = judge(parse_case(case), target).details
    assert law in laws_of_details(details), details


# Mergers that spoil a field which the kit itself looks at: the statement that does it to each sample, the law that must
# be named, and what must be said.
MALFORMED = {
    "no metadata": ("s.metadata = {}", "server-keys-kept", "samples[0].metadata has no leaf"),
    "metadata None": ("s.metadata = None", "server-keys-kept", "samples[0].metadata is None"),
    "leaf a text": ("s.metadata['leaf'] = 'x'", "server-keys-kept", "samples[0].metadata.leaf is 'x'"),
    "leaf of another": ("s.metadata['leaf']['node_id'] = [1]", "server-keys-kept", "samples[0].metadata.leaf is {"),
    "no path": ("del s.metadata['leaf']['path_node_ids']", "server-keys-kept", "metadata.leaf.path_node_ids: missing"),
    "no mask": ("s.loss_mask = None", "lengths-agree", "samples[0].loss_mask is None"),
    "mask a number": ("s.loss_mask = 1", "lengths-agree", "samples[0].loss_mask is 1"),
    "no tokens": ("s.tokens = None", "lengths-agree", "samples[0].tokens is None"),
    "tokens of texts": ("s.tokens = ['a']", "lengths-agree", "samples[0].tokens is ['a']"),
    "no response": ("s.response_length = None", "lengths-agree", "samples[0].response_length is None"),
    "response too long": ("s.response_length = 99", "lengths-agree", "a response of 99 in"),
    "log probs a text": ("s.rollout_log_probs = 'abc'", "lengths-agree", "samples[0].rollout_log_probs is 'abc'"),
    "rows a list": ("s.rollout_routed_experts = [1]", "lengths-agree", "samples[0].rollout_routed_experts is [1]"),
    "another token": ("s.tokens[-1] += 1", "exactly-once", "samples[0].tokens["),
    "another prompt": ("s.tokens[0] += 1", "lengths-agree", "samples[0].tokens[0]"),
    "log probs gone": ("s.rollout_log_probs = None", "exactly-once", "samples[0].rollout_log_probs"),
    "log probs made up": ("s.rollout_log_probs[0] -= 1.0", "lengths-agree", "samples[0].rollout_log_probs[0]"),
    "observations trained": (
        "s.loss_mask = [1] * s.response_length",
        "exactly-once",
        "trains a token that no turn generated",
    ),
    "prompt trained": (
        "s.response_length += 1; s.loss_mask.insert(0, 1); s.rollout_log_probs.insert(0, 0.0)",
        "exactly-once",
        "samples[0].response_length",
    ),
    "fresh samples": ("leaf_samples[i] = Sample()", "lengths-agree", "samples[0].loss_mask is None"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_sample_is_a_broken_law_and_no_error_of_the_kit(name: str, tmp_path: Path) -> None:
    statement, law, said = MALFORMED[name]
    file = tmp_path / "mine.py"
    file.write_text(
        "from miles_ref.sample import Sample\n\n\ndef merge(leaf_samples):\n"
        f"    for i, s in enumerate(leaf_samples):\n        {statement}\n    return leaf_samples\n"
    )
    case = raw("v2/laws/forests.json", "v2/laws/branches")
    verdict = judge(parse_case(case), PluginTarget(merger=f"{file}:merge"))
    assert verdict.outcome is Outcome.FAILED
    (detail,) = [detail for detail in verdict.details if law in laws_of_details((detail,))]
    assert f"{file}:merge, hook merge ({file}:4)" in detail
    assert said in detail
    assert "; " in detail.partition(said)[2]  # and how to go on
    # Without lengths-agree and server-keys-kept the case must not hold either.
    case["expect"]["laws"] = ["exactly-once"]
    assert judge(parse_case(case), PluginTarget(merger=f"{file}:merge")).outcome is Outcome.FAILED


def test_a_reward_that_is_no_number_is_as_deterministic_as_any(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def merge(leaf_samples):\n    for s in leaf_samples:\n        s.reward = float('nan')\n"
        "    return leaf_samples\n"
    )
    verdict = judge(parse_case(raw("v2/laws/forests.json", "v2/laws/one-leaf")), PluginTarget(merger=f"{file}:merge"))
    assert laws_of_details(verdict.details) == ["encodable"]


def test_a_value_that_cannot_be_looked_at_is_the_plugins_fault(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "class Odd:\n    def __eq__(self, other):\n        raise ZeroDivisionError('odd')\n\n\n"
        "ODD = Odd()\n\n\ndef merge(leaf_samples):\n    for s in leaf_samples:\n        s.metadata['odd'] = ODD\n"
        "    return leaf_samples\n"
    )
    verdict = judge(parse_case(raw("v2/laws/forests.json", "v2/laws/one-leaf")), PluginTarget(merger=f"{file}:merge"))
    assert verdict.outcome is Outcome.FAILED
    assert any("cannot be looked at: ZeroDivisionError: odd" in detail for detail in verdict.details)


def test_a_plugin_that_raises_is_said_once_a_case() -> None:
    case = parse_case(raw("v2/laws/forests.json", "v2/laws/branches"))
    verdict = judge(case, PluginTarget(picker=f"{DOUBLES}.raising_picker"))
    (detail,) = verdict.details
    assert laws_of_details(verdict.details) == [law for law in case.expect["laws"] if law != "failure-contained"]
    assert "this picker always raises" in detail


SHIPPED = [("picker", "pick"), ("merger", "merge")]


@pytest.mark.parametrize(
    ("role", "name"),
    [(role, one.name) for role, hook in SHIPPED for one in Catalogue([]).plugins() if list(one.hooks) == [hook]],
)
def test_every_shipped_plugin_keeps_the_laws(role: str, name: str) -> None:
    cases = json.loads((ROOT / "v2/laws/forests.json").read_text())
    target = PluginTarget(**{role: name})
    assert {case["id"]: details for case in cases if (details := judge(parse_case(case), target).details)} == {}


def test_a_plugin_is_loaded_once_and_may_go_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\n\nopen('loads', 'a').write('x')\n\n\ndef pick(leaf_samples):\n    os.chdir('/')\n"
        "    return leaf_samples\n"
    )
    monkeypatch.chdir(tmp_path)
    target = PluginTarget(picker="./mine.py:pick")
    case = parse_case(raw("v2/laws/forests.json", "v2/laws/two-roots"))
    assert [judge(case, target).details for _ in range(2)] == [(), ()]
    assert (tmp_path / "loads").read_text() == "x"


def test_a_built_in_set_is_judged_by_its_version() -> None:
    target = PluginTarget(plugin_set="v2")
    assert "other version" in str(
        target.refusal(parse_case(raw("v1/truncate/walk.json", "v1/truncate/the-walk-ends-at-the-first-cut")))
    )


@pytest.mark.parametrize("name", ["longest", "tree-advantage"])
def test_a_single_picker_or_merger_is_no_plugin_set(name: str) -> None:
    with pytest.raises(UsageError, match=rf"give --(picker|merger) {name}"):
        PluginTarget(plugin_set=name)


@pytest.mark.parametrize("token", [-1, -(2**63) - 1, 2**63])
def test_an_accumulated_id_that_no_output_has_is_a_trim_as_the_oracle_says(token: int) -> None:
    oracle = load_oracle()
    linear = raw("v1/compute/trim.json", "v1/compute/trim-on-a-lone-turn")
    linear["input"]["accumulated_token_ids"][-1] = token
    tree = raw("v2/merge/rewards.json", "v2/merge/rewards-by-response-id")
    tree["input"]["nodes"][-1]["token_ids"][-1] = token
    for case in (linear, tree):
        assert oracle(copy.deepcopy(case))["error"] == 422
        observed = run_case(parse_case(case))
        assert observed["error"] == 422
        assert "trim" in observed["message"]
        assert str(token) in observed["message"]


# Capabilities


def test_a_case_is_judged_where_the_target_has_what_it_requires(reference: ReferenceTarget) -> None:
    case = match_case("a")
    requires = Case(id="a", kind="match", input={}, expect={}, raw={"requires": ["metrics", "lists"]})
    for provides, outcome in ((None, "passed"), (frozenset(), "skipped"), (frozenset({"metrics", "lists"}), "passed")):
        target = Scripted()
        target.provides = provides
        assert judge(requires, target).outcome == outcome
        assert judge(case, target).outcome == "passed"
    target.provides = frozenset({"metrics"})
    assert judge(requires, target).details == ("requires lists, which the target does not provide",)
    assert reference.provides is None


def test_a_capability_that_nobody_requires_is_an_error() -> None:
    cases = [Case(id="a", kind="match", input={}, expect={}, raw={"requires": ["metrics"]})]
    check_provides(cases, ["metrics"])
    with pytest.raises(UsageError, match=r"'metrcs': no chosen case requires it; they require metrics"):
        check_provides(cases, ["metrics", "metrcs"])


def test_what_a_started_target_provides_is_said_on_the_command_line() -> None:
    assert choose_target("worker:prog", provides=["metrics"]).provides == {"metrics"}
    assert choose_target("worker:prog").provides == frozenset()
    assert choose_target().provides is None


def test_a_good_plugin_breaks_no_law() -> None:
    target = PluginTarget(picker=f"{DOUBLES}.latest_first", merger=f"{DOUBLES}.tagging_merger")
    case = raw("v2/laws/forests.json", "v2/laws/two-roots")
    assert judge(parse_case(case), target).details == ()


def test_exact_values_say_nothing_about_a_picker() -> None:
    case = parse_case(raw("v1/http/life.json", "v1/http/health"))
    assert judge(case, PluginTarget(picker=f"{DOUBLES}.latest_first")).outcome is Outcome.SKIPPED


# Selection and order


class Scripted:
    """A target that fails the cases it is told to."""

    name = "scripted"
    provides: frozenset[str] | None = None

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.ran: list[str] = []

    def refusal(self, case: Case) -> str | None:
        return None

    def run(self, case: Case) -> list[str]:
        self.ran.append(case.id)
        return ["differs"] if case.id in self.failing else []

    def close(self) -> None:
        pass


def match_case(name: str, *tags: str) -> Case:
    return Case(id=name, kind="match", input={}, expect={}, tags=tags)


def test_smoke_comes_first_and_ends_a_miswired_run() -> None:
    cases = [match_case("a"), match_case("b", "smoke"), match_case("c", "smoke")]
    target = Scripted()
    assert [verdict.case_id for verdict in run_all(cases, target)] == ["b", "c", "a"]
    target = Scripted("b")
    assert [verdict.case_id for verdict in run_all(cases, target)] == ["b"]
    target = Scripted("a")
    assert [verdict.outcome for verdict in run_all(cases, target)][-1] is Outcome.FAILED


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    assert [case.id for case in select([match_case("a/b"), match_case("c/d")], ["a/*"])] == ["a/b"]
    with pytest.raises(CaseError, match="matches no case"):
        select([match_case("a/b")], ["a/*", "x/*"])


def test_a_tag_that_no_case_has_is_an_error() -> None:
    cases = [match_case("a", "trim"), match_case("b", "clock")]
    assert [case.id for case in select(cases, tags=["clock"])] == ["b"]
    for tags in (["nosuch"], ["trim", "nosuch"]):
        with pytest.raises(CaseError, match=r"the tag 'nosuch'; tags are clock, trim"):
            select(cases, tags=tags)


def test_an_implementation_that_crashes_is_a_verdict() -> None:
    class Crashing(Scripted):
        def run(self, case: Case) -> list[str]:
            raise ZeroDivisionError("oh")

    verdict = judge(match_case("a"), Crashing())
    assert (verdict.outcome, verdict.details) == (Outcome.ERROR, ("ZeroDivisionError: oh",))


# Targets


@pytest.mark.parametrize(
    "options",
    [
        {"target": "server:prog"},
        {"target": "server:"},
        {"target": "nothing:prog"},
        {"target": "http://127.0.0.1:1"},
        {"target": "program:x", "picker": "y"},
        {"target": "program:x", "backend_listen": "127.0.0.1:1"},
        {"target": "http://127.0.0.1:1", "backend_listen": "0.0.0.0:80"},
        {"target": "http://127.0.0.1:1", "backend_listen": "127.0.0.1:port"},
        {"target": "http://127.0.0.1:1", "backend_listen": "127.0.0.1:1", "server_config": {"tokeniser": "bytes"}},
        {"target": 'program:"'},
        {"target": 'server:x {port} {backend} "'},
        {"target": "worker: "},
        {"server_version": "v1"},
        {"server_config": {}},
        {"target": "worker:x", "server_config": {}},
        {"picker": "y", "server_version": "v2"},
        {"provides": ["metrics"]},
        {"picker": "y", "provides": ["metrics"]},
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        choose_target(**options)


def test_a_backend_address_that_is_in_use_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError, match=f"--backend-listen {listen}: cannot listen there"):
            choose_target("http://127.0.0.1:1", backend_listen=listen)


@pytest.mark.parametrize("option", ["target", "picker", "merger", "plugin_set", "backend_listen"])
def test_an_empty_name_judges_nobody_else(option: str) -> None:
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} is given with an empty value"):
        choose_target(**{option: ""})


def test_a_config_becomes_flags() -> None:
    config = {"tokenizer": "else", "family": "glm47", "routed_experts": True, "num_layers": 2, "flags": ["--x", "1"]}
    assert server_flags("v2", config) == [
        *("--use-session-server", "v2", "--hf-checkpoint", "else", "--tito-model", "glm47"),
        *("--use-rollout-routing-replay", "--num-layers", "2", "--x", "1"),
    ]


def test_places_of_a_command_are_filled() -> None:
    words = command_line("run -p {port} {flags} --last {backend}/", "v1", {"tokenizer": "t"}, 7, "http://b")
    assert words == ["run", "-p", "7", "--use-session-server", "v1", "--hf-checkpoint", "t", "--last", "http://b/"]
    assert command_line("run {version}", "v2", {}, 7, "b")[:2] == ["run", "v2"]


def test_the_tokenizer_of_a_case_is_said_also_where_it_is_the_formats_default() -> None:
    """A server's own default is another."""
    assert server_flags("v1", {}) == ["--use-session-server", "v1", "--hf-checkpoint", "bytes"]
    assert server_flags("v1", {"tokenizer": "bytes"}) == server_flags("v1", {})


PROGRAM = """
import json, sys
for line in sys.stdin:
    said = json.loads(line)
    if "hello" in said:
        answer = {"hello": 1, "name": "test", "kinds": ["match"]}
    else:
        case = said["case"]
        assert "expect" not in case
        answer = {"id": case["id"], **ANSWERS.get(case["id"], {"observed": {"match": True}})}
    print(json.dumps(answer), flush=True)
"""


def program(tmp_path: Path, answers: dict[str, Any]) -> ProgramTarget:
    script = tmp_path / "program.py"
    script.write_text(f"ANSWERS = {answers!r}\n{PROGRAM}")
    return ProgramTarget(f"{sys.executable} {script}")


def test_a_program_is_judged_by_its_lines(tmp_path: Path) -> None:
    answers = {"wrong": {"observed": {"match": False}}, "left": {"skip": "not yet"}, "odd": {}, "other": {"id": "x"}}
    target = program(tmp_path, answers)
    try:
        outcomes = {
            name: judge(
                Case(id=name, kind="match", input={}, expect={"match": True}, raw={"id": name, "kind": "match"}), target
            )
            for name in ("right", "wrong", "left", "odd", "other")
        }
        assert {name: str(verdict.outcome) for name, verdict in outcomes.items()} == {
            "right": "passed",
            "wrong": "failed",
            "left": "skipped",
            "odd": "error",
            "other": "error",
        }
        encode = Case(id="e", kind="encode", input={}, expect={}, raw={"id": "e", "kind": "encode", "version": "v1"})
        assert judge(encode, target).outcome is Outcome.SKIPPED
    finally:
        target.close()


GREETS = """import sys; sys.stdin.readline(); print('{"hello": 1, "kinds": ["match"]}', flush=True)"""


@pytest.mark.parametrize(
    ("program", "size"),
    [("pass", 0), (GREETS, 0), (GREETS, 10_000_000)],
    ids=["at-once", "after-its-greeting", "while-it-is-written-to"],
)
def test_a_program_that_ends_is_an_error(program: str, size: int) -> None:
    raw = {"id": "a", "kind": "match", "input": "x" * size}
    target = ProgramTarget(shlex.join([sys.executable, "-c", program]))
    with pytest.raises(ProgramError, match="ended, or closed its input"):
        target.refusal(Case(id="a", kind="match", input={}, expect={}, raw=raw))
    target.close()


# The commands


def test_check_writes_every_report(tmp_path: Path) -> None:
    (tmp_path / "pick.py").write_text("def pick(leaf_samples):\n    return leaf_samples\n")
    files = {name: tmp_path / f"out.{name}" for name in ("report", "junit", "html", "badge")}
    arguments = [part for name, file in files.items() for part in (f"--{name}", str(file))]
    picker = [LAWS, "--picker", f"{tmp_path}/pick.py:pick", "-k", "v2/laws/two-roots"]
    done = CliRunner().invoke(check_command, [*picker, *arguments])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == f"picker {tmp_path}/pick.py:pick holds in all 1 judged cases."
    assert all(file.stat().st_size > 200 for file in files.values())
    again = CliRunner().invoke(report_command, [str(files["report"])])
    assert (again.exit_code, again.output) == (0, done.output)
    files["report"].write_text("\n".join(files["report"].read_text().splitlines()[:-1]))
    broken = CliRunner().invoke(report_command, [str(files["report"])])
    assert broken.exit_code == 2
    assert "no footer" in broken.output


def test_check_says_what_fails() -> None:
    done = CliRunner().invoke(
        check_command, [LAWS, "--picker", f"{DOUBLES}.rewriting_picker", "-k", "v2/laws/two-roots"]
    )
    assert done.exit_code == 1
    assert "failed: v2/laws/two-roots" in done.output
    assert "does not hold: 1 of 1 cases" in done.output.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments",
    [
        [LAWS, "-k", "no/such/case"],
        ["/no/such/folder"],
        [LAWS, "--picker", f"{DOUBLES}.no_such_picker"],
        ["--expectations", "/none"],
        [LAWS, "--tag", "no-such-tag"],
        [LAWS, "--picker", ""],
        [LAWS, "--provides", "no-such-capability"],
        [LAWS, "-k", "v2/laws/one-leaf", "--report", "/no/such/folder/r.jsonl"],
        [LAWS, "-k", "v2/laws/one-leaf", "--html", "/"],
    ],
)
def test_check_refuses_what_it_cannot_do(arguments: list[str]) -> None:
    done = CliRunner().invoke(check_command, arguments)
    assert done.exit_code == 2
    assert "Error: " in done.output
    assert "Traceback" not in done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)


@pytest.mark.parametrize(
    "arguments", [["run", LAWS, "--target", ""], ["run", "/no/such/folder"], ["propose", str(ROOT / "schema.json")]]
)
def test_mistakes_have_a_status_of_their_own_in_every_command(arguments: list[str]) -> None:
    done = CliRunner().invoke(case_commands, arguments)
    assert done.exit_code == 2
    assert done.output.startswith("Error: ")


def test_a_report_of_an_earlier_run_is_not_taken_for_one_that_broke_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report.jsonl"
    arguments = [LAWS, "-k", "v2/laws/one-leaf", "--report", str(report)]
    assert CliRunner().invoke(check_command, arguments).exit_code == 0

    def break_off(*anything: object) -> Iterator[object]:
        raise KeyboardInterrupt

    monkeypatch.setattr("miles_ref.testing.check.run_all", break_off)
    assert CliRunner().invoke(check_command, arguments).exit_code != 0
    assert CliRunner().invoke(report_command, [str(report)]).exit_code == 2
