"""The worker's book-keeping: every deadline by a clock that the test moves, no process and no server."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from miles_ref.agents.core import Act, ActKind, Answer, CoreSettings, ReportLog, Submission, WorkerCore
from miles_ref.agents.machine import State


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Worker:
    """A core, its clock, and short ways to drive it."""

    def __init__(self, **settings: Any) -> None:
        self.clock = Clock()
        self.core = WorkerCore(self.clock, CoreSettings(**settings), boot_id="boot-1", version="1")

    def submit(self, call_id: str = "a", content: bytes = b"content", boot_id: str | None = None) -> Answer:
        return self.core.submit(Submission(call_id, "module:function", "10.0.0.1:30000", content, boot_id))

    def acts(self) -> list[Act]:
        acts = [act for act in self.core.outbox if act.kind is not ActKind.WAKE]
        self.core.outbox.clear()
        return acts

    def running(self, call_id: str = "a") -> None:
        self.submit(call_id)
        self.core.spawned(call_id, 4711)
        self.core.started(call_id)
        self.acts()

    def finished(self, call_id: str = "a", *, fetched: bool = False) -> None:
        self.running(call_id)
        self.core.outcome_read(call_id, b'{"kind":"ok","value":1}')
        self.core.gone(call_id, 0)
        if fetched:
            self.core.fetched(call_id)
        self.acts()

    def outcome(self, call_id: str = "a") -> Any:
        after = self.count(call_id)
        reply = self.core.poll(call_id, after)
        return None if reply is None or reply.outcome is None else json.loads(reply.outcome)

    def count(self, call_id: str) -> int:
        return next(int(row["reports"]) for row in self.core.listing() if row["call_id"] == call_id)

    def state(self, call_id: str = "a") -> str | None:
        refusal = self.core.check_poll(call_id, 0, cancel=False)
        if refusal is not None:
            return str(refusal.body["code"])
        return next(str(row["state"]) for row in self.core.listing() if row["call_id"] == call_id)

    def later(self, seconds: float) -> None:
        self.clock.now += seconds
        self.core.tick()


def code(answer: Answer | None) -> tuple[int, str]:
    assert answer is not None
    return answer.status, answer.body["code"]


# --- submit: what goes before what ------------------------------------------------------------------------------------


def test_a_submit_is_admitted_and_spawns_its_child() -> None:
    worker = Worker()
    assert worker.submit() == Answer(200, {"state": "importing"})
    assert worker.acts() == [Act(ActKind.SPAWN, "a")]


def test_the_same_submit_again_is_the_same_call() -> None:
    worker = Worker()
    worker.running()
    assert worker.submit() == Answer(200, {"state": "running"})
    assert worker.acts() == []


def test_another_boot_goes_before_the_known_id() -> None:
    worker = Worker()
    worker.running()
    assert code(worker.submit(boot_id="boot-0")) == (412, "boot")
    assert worker.submit(boot_id="boot-1").status == 200


def test_a_known_id_goes_before_drain_and_capacity() -> None:
    worker = Worker(max_calls=1)
    worker.running()
    assert worker.submit().status == 200
    assert code(worker.submit(content=b"other")) == (409, "conflict")
    worker.core.delete("gone")
    assert code(worker.submit("gone")) == (410, "tombstone")
    worker.core.drain()
    assert code(worker.submit()) == (410, "cancelled")
    assert code(worker.submit("gone")) == (410, "tombstone")


def test_a_cancelled_call_goes_before_the_conflict() -> None:
    worker = Worker()
    worker.running()
    worker.core.delete("a")
    assert code(worker.submit(content=b"other")) == (410, "cancelled")
    worker.core.gone("a", -15)
    assert code(worker.submit()) == (410, "cancelled")


def test_an_outcome_that_came_before_the_cancel_makes_no_cancelled_call() -> None:
    worker = Worker()
    worker.running()
    worker.core.outcome_read("a", b'{"kind":"ok","value":1}')
    assert worker.core.delete("a") == Answer(202, {"state": "ending"})
    worker.core.gone("a", 0)
    assert worker.submit().status == 200
    assert worker.outcome() == {"kind": "ok", "value": 1}


def test_an_expired_call_is_refused_as_expired_and_not_as_conflict() -> None:
    worker = Worker(outcome_ttl=600)
    worker.finished(fetched=True)
    worker.later(600)
    assert code(worker.submit(content=b"other")) == (410, "expired")


def test_drain_goes_before_capacity() -> None:
    worker = Worker(max_calls=1)
    worker.running()
    worker.core.drain()
    assert code(worker.submit("b")) == (503, "draining")


def test_a_full_worker_says_when_to_come_again() -> None:
    worker = Worker(max_calls=1)
    worker.running()
    answer = worker.submit("b")
    assert code(answer) == (429, "full")
    assert answer.retry_after is not None
    worker.core.gone("a", 0)
    assert worker.submit("b").status == 200


def test_a_call_counts_until_its_child_is_gone() -> None:
    worker = Worker(max_calls=1)
    worker.running()
    worker.core.outcome_read("a", b"{}")
    assert code(worker.submit("b")) == (429, "full")
    worker.core.delete("a")
    assert worker.core.health()["running"] == 1


# --- delete and tombstones --------------------------------------------------------------------------------------------


def test_delete_answers_at_once_and_is_idempotent() -> None:
    worker = Worker(cancel_grace=10)
    worker.running()
    assert worker.core.delete("a") == Answer(202, {"state": "cancelling"})
    assert worker.acts() == [Act(ActKind.TERMINATE, "a")]
    assert worker.core.delete("a") == Answer(202, {"state": "cancelling"})
    assert worker.acts() == []
    worker.core.gone("a", -15)
    assert worker.core.delete("a") == Answer(200, {"state": "finished"})
    assert worker.outcome() == {"kind": "cancelled", "by": "caller", "exit_status": -15}


def test_the_grace_ends_by_sigkill() -> None:
    worker = Worker(cancel_grace=10)
    worker.running()
    worker.core.delete("a")
    worker.acts()
    worker.later(9.9)
    worker.core.delete("a")
    assert worker.acts() == []
    worker.later(0.1)
    assert worker.acts() == [Act(ActKind.KILL, "a")]
    assert worker.state() == "cancelling"


def test_a_state_has_one_name_in_every_answer() -> None:
    worker = Worker(cancel_grace=10)
    worker.running()
    worker.core.reported("a", b"1")

    def names() -> set[str]:
        polled = worker.core.poll("a", 0)
        assert polled is not None
        names = {worker.state() or "", polled.state, worker.core.empty_poll("a", 0).state}
        return names | {worker.core.delete("a").body["state"]}

    worker.core.delete("a")
    assert names() == {"cancelling"}
    worker.later(10)
    assert names() == {"cancelling"}
    worker.core.gone("a", -9)
    assert names() == {"finished"}
    worker.core.fetched("a")
    assert names() == {"finished"}


def test_delete_of_an_unknown_call_leaves_a_tombstone_for_its_time() -> None:
    worker = Worker(tombstone_ttl=50)
    assert worker.core.delete("a") == Answer(202, {"state": "tombstone"})
    assert worker.core.delete("a") == Answer(202, {"state": "tombstone"})
    assert code(worker.submit()) == (410, "tombstone")
    assert worker.state() == "tombstone"
    worker.later(49.9)
    assert worker.state() == "tombstone"
    worker.later(0.1)
    assert worker.state() == "unknown"
    assert worker.submit().status == 200


def test_a_malformed_id_leaves_no_tombstone() -> None:
    worker = Worker()
    assert worker.core.delete("no spaces").status == 400
    assert worker.core.delete("x" * 129).status == 400


# --- the orphan timer -------------------------------------------------------------------------------------------------


def test_the_orphan_timer_starts_at_admission() -> None:
    worker = Worker(orphan_timeout=120)
    worker.submit()
    worker.acts()
    worker.later(119.9)
    assert worker.acts() == []
    worker.later(0.1)
    assert worker.acts() == [Act(ActKind.TERMINATE, "a")]
    worker.core.gone("a", -15)
    assert worker.outcome() == {"kind": "cancelled", "by": "orphan", "exit_status": -15}


def test_a_held_poll_counts_as_polling_and_the_timer_starts_at_the_end_of_the_last() -> None:
    worker = Worker(orphan_timeout=120)
    worker.running()
    worker.later(100)
    worker.core.begin_poll("a")
    worker.core.begin_poll("a")
    worker.later(500)
    worker.core.end_poll("a")
    worker.later(500)
    assert worker.acts() == []
    worker.core.end_poll("a")
    worker.later(119.9)
    assert worker.acts() == []
    worker.later(0.1)
    assert worker.acts() == [Act(ActKind.TERMINATE, "a")]


def test_a_client_that_still_takes_its_reply_starts_the_timer_again_unless_a_poll_is_held() -> None:
    worker = Worker(orphan_timeout=120)
    worker.running()
    worker.later(100)
    worker.core.polled("a")
    worker.later(119.9)
    assert worker.acts() == []
    worker.core.begin_poll("a")
    worker.core.polled("a")
    worker.later(500)
    assert worker.acts() == []
    worker.core.end_poll("a")
    worker.later(119.9)
    assert worker.acts() == []
    worker.later(0.1)
    assert worker.acts() == [Act(ActKind.TERMINATE, "a")]
    worker.core.polled("a")
    worker.core.polled("forgotten meanwhile")
    worker.later(0)
    assert worker.acts() == []


def test_a_finished_or_cancelled_call_is_no_orphan() -> None:
    worker = Worker(orphan_timeout=20, cancel_grace=1000)
    worker.finished("done")
    worker.running("cancelled")
    worker.core.delete("cancelled")
    worker.acts()
    worker.later(500)
    assert worker.acts() == []


def test_the_next_deadline_is_the_earliest_of_those_that_still_hold() -> None:
    worker = Worker(orphan_timeout=120, cancel_grace=10)
    assert worker.core.next_deadline() is None
    worker.running("a")
    worker.later(5)
    worker.running("b")
    assert worker.core.next_deadline() == 1120.0
    worker.core.begin_poll("a")
    assert worker.core.next_deadline() == 1125.0
    worker.core.delete("b")
    assert worker.core.next_deadline() == 1015.0


# --- polls ------------------------------------------------------------------------------------------------------------


def test_polling_consumes_nothing() -> None:
    worker = Worker()
    worker.running()
    for item in (b"0", b"1", b"2"):
        worker.core.reported("a", item)
    for _ in range(2):
        reply = worker.core.poll("a", 1)
        assert reply is not None
        assert (reply.reports, reply.next, reply.outcome) == ([b"1", b"2"], 3, None)
    assert worker.core.poll("a", 3) is None
    first = worker.core.poll("a", 0)
    assert first is not None
    assert first.reports == [b"0", b"1", b"2"]


def test_reports_and_outcome_share_a_reply() -> None:
    worker = Worker()
    worker.running()
    worker.core.reported("a", b"0")
    worker.core.outcome_read("a", b'{"kind":"ok","value":null}')
    before = worker.core.poll("a", 0)
    assert before is not None
    assert before.outcome is None, "the outcome is shown once the child is gone"
    worker.core.gone("a", 0)
    reply = worker.core.poll("a", 0)
    assert reply is not None
    assert (reply.reports, reply.next, reply.outcome) == ([b"0"], 1, b'{"kind":"ok","value":null}')


def test_a_reply_carries_8_mib_of_reports_or_one_item_and_the_outcome_waits_for_the_last() -> None:
    worker = Worker()
    worker.running()
    small, large = b"s" * (3 << 20), b"l" * (9 << 20)
    for item in (small, small, small, large, small):
        worker.core.reported("a", item)
    worker.core.outcome_read("a", b"{}")
    worker.core.gone("a", 0)
    pages = []
    after = 0
    while True:
        reply = worker.core.poll("a", after)
        assert reply is not None
        pages.append((len(reply.reports), reply.outcome is not None))
        after = reply.next
        if reply.outcome is not None:
            break
    assert pages == [(2, False), (1, False), (1, False), (1, True)]


def test_after_over_the_count_is_refused_and_has_no_effect() -> None:
    worker = Worker()
    worker.running()
    worker.core.reported("a", b"0")
    assert worker.core.check_poll("a", 1, cancel=False) is None
    assert code(worker.core.check_poll("a", 2, cancel=True)) == (400, "form")
    assert worker.state() == "running"


def test_a_poll_of_what_is_not_there() -> None:
    worker = Worker()
    assert code(worker.core.check_poll("a", 0, cancel=False)) == (404, "unknown")
    worker.core.delete("a")
    assert code(worker.core.check_poll("a", 0, cancel=False)) == (410, "tombstone")


def test_a_poll_with_cancel_is_a_delete() -> None:
    worker = Worker()
    worker.running()
    assert worker.core.check_poll("a", 0, cancel=True) is None
    assert worker.acts() == [Act(ActKind.TERMINATE, "a")]
    assert code(worker.core.check_poll("unseen", 0, cancel=True)) == (410, "tombstone")
    assert code(worker.submit("unseen")) == (410, "tombstone")


def test_a_poll_gets_what_its_check_saw_even_if_that_expires_in_between() -> None:
    worker = Worker(outcome_ttl=600)
    worker.finished(fetched=True)
    worker.clock.now += 599.9
    assert worker.core.check_poll("a", 0, cancel=False) is None
    worker.clock.now += 0.2
    reply = worker.core.poll("a", 0)
    assert reply is not None
    assert reply.outcome == b'{"kind":"ok","value":1}'
    assert code(worker.core.check_poll("a", 0, cancel=False)) == (410, "expired")


def test_a_report_wakes_those_who_wait() -> None:
    worker = Worker()
    worker.running()
    worker.core.outbox.clear()
    worker.core.reported("a", b"0")
    assert list(worker.core.outbox) == [Act(ActKind.WAKE, "a")]


# --- the report budget ------------------------------------------------------------------------------------------------


def test_at_the_budget_the_child_waits_until_the_caller_has_read_on() -> None:
    worker = Worker(report_budget_bytes=10)
    worker.running()
    worker.core.reported("a", b"12345")
    assert worker.acts() == []
    worker.core.reported("a", b"67890")
    assert worker.acts() == [Act(ActKind.PAUSE, "a")]
    assert worker.core.poll("a", 0) is not None
    assert worker.acts() == [], "a poll that was answered is not yet one that was received"
    worker.core.poll("a", 1)
    assert worker.acts() == [Act(ActKind.RESUME, "a")]


def test_unread_reports_are_never_dropped_and_read_ones_only_for_room() -> None:
    log = ReportLog(10)
    for item in (b"1111", b"2222", b"3333"):
        log.append(item)
    assert log.full
    assert log.page(0) == [b"1111", b"2222", b"3333"]
    log.read_on(2)
    assert not log.full
    assert (log.first, log.page(1)) == (1, [b"2222", b"3333"])
    log.append(b"4444")
    assert (log.first, log.page(2), log.count) == (2, [b"3333", b"4444"], 4)


def test_a_poll_for_dropped_reports_is_told_so() -> None:
    worker = Worker(report_budget_bytes=4)
    worker.running()
    worker.core.reported("a", b"1111")
    worker.core.poll("a", 1)
    worker.core.reported("a", b"2222")
    assert code(worker.core.check_poll("a", 0, cancel=False)) == (410, "expired")
    assert worker.core.check_poll("a", 1, cancel=False) is None


def test_an_item_larger_than_the_budget_passes() -> None:
    log = ReportLog(3)
    log.append(b"123456")
    assert log.full
    assert log.page(0) == [b"123456"]
    log.read_on(1)
    assert not log.full


def test_a_log_gives_and_drops_what_a_plain_list_would() -> None:
    random = Random(1)
    log, reported, read_on, first = ReportLog(60), list[bytes](), 0, 0
    for _ in range(5000):
        if random.random() < 0.6:
            reported.append(b"x" * random.randint(1, 20))
            log.append(reported[-1])
        else:
            after = random.randint(first, len(reported))
            read_on = max(read_on, after)
            log.read_on(after)
        while sum(map(len, reported[first:])) > 60 and first < read_on:
            first += 1
        assert (log.first, log.count) == (first, len(reported))
        assert log.kept_bytes == sum(map(len, reported[first:]))
        assert log.full == (sum(map(len, reported[read_on:])) >= 60)
        after = random.randint(first, len(reported))
        assert log.page(after) == reported[after:]


def test_many_small_reports_cost_linear_time() -> None:
    """Takes longer than a test may, if each report is sought from an end of the log, or each drop moves the rest."""
    count = 2_000_000
    log = ReportLog(count)
    for _ in range(count):
        log.append(b"1")
    for after in range(count // 4, 3 * count // 4, count // 16):
        assert len(log.page(after)) == count - after
        log.read_on(after)
    log.read_on(count)
    for _ in range(count):
        log.append(b"1")
    assert (log.first, log.count, log.kept_bytes) == (count, 2 * count, count)


# --- what is kept, and for how long -----------------------------------------------------------------------------------


def test_an_unfetched_outcome_is_kept_for_an_hour() -> None:
    worker = Worker(outcome_ttl=600)
    worker.finished()
    worker.later(3599.9)
    assert worker.outcome() == {"kind": "ok", "value": 1}
    worker.later(0.1)
    assert worker.state() == "expired"


def test_a_fetched_outcome_is_kept_for_the_ttl_and_its_id_for_an_hour_more() -> None:
    worker = Worker(outcome_ttl=600)
    worker.finished(fetched=True)
    worker.later(599.9)
    assert worker.outcome() == {"kind": "ok", "value": 1}
    worker.later(0.1)
    assert worker.state() == "expired"
    assert worker.core.listing() == []
    assert worker.core.delete("a") == Answer(200, {"state": "expired"})
    worker.later(3599.9)
    assert worker.state() == "expired"
    worker.later(0.1)
    assert worker.state() == "unknown"


def test_a_full_table_evicts_the_oldest_that_ended_and_nothing_younger_than_120_s() -> None:
    worker = Worker(max_known=3)
    worker.finished("fetched", fetched=True)
    worker.later(1)
    worker.core.delete("tombstone")
    worker.running("lives")
    worker.later(118.9)
    answer = worker.submit("new")
    assert code(answer) == (429, "full")
    assert answer.retry_after is not None
    assert code(worker.core.delete("new")) == (503, "tombstones_full")
    worker.later(0.1)
    assert worker.submit("new").status == 200
    assert worker.state("fetched") == "unknown"
    assert worker.state("tombstone") == "tombstone"


def test_outcomes_that_nobody_has_are_evicted_last() -> None:
    worker = Worker(max_known=2)
    worker.finished("unfetched")
    worker.later(10)
    worker.finished("fetched", fetched=True)
    worker.later(200)
    worker.submit("new")
    assert worker.state("unfetched") == "finished"
    assert worker.state("fetched") == "unknown"


def test_kept_bytes_are_bounded_too() -> None:
    worker = Worker(max_kept_bytes=100)
    worker.running("large")
    worker.core.outcome_read("large", b"x" * 101)
    worker.core.gone("large", 0)
    assert code(worker.submit("new")) == (429, "full")
    worker.later(120)
    assert worker.submit("new").status == 200
    assert worker.state("large") == "unknown"


# --- drain ------------------------------------------------------------------------------------------------------------


def test_drain_cancels_what_runs_with_its_grace() -> None:
    worker = Worker(cancel_grace=10)
    worker.running()
    worker.core.drain()
    assert worker.acts() == [Act(ActKind.TERMINATE, "a")]
    assert worker.core.health()["draining"] is True
    worker.later(10)
    assert worker.acts() == [Act(ActKind.KILL, "a")]
    worker.core.gone("a", -9)
    assert worker.outcome() == {"kind": "cancelled", "by": "drain", "exit_status": -9}


def test_a_second_drain_kills_at_once() -> None:
    worker = Worker(cancel_grace=10)
    worker.running()
    worker.core.drain()
    worker.acts()
    worker.core.drain()
    assert worker.acts() == [Act(ActKind.KILL, "a")]


def test_a_drained_worker_may_exit_when_all_outcomes_are_fetched() -> None:
    worker = Worker()
    worker.running()
    assert not worker.core.drained()
    worker.core.drain()
    assert not worker.core.drained()
    worker.core.gone("a", -15)
    assert not worker.core.drained()
    worker.core.fetched("a")
    assert worker.core.drained()


def test_a_drained_worker_waits_5_s_after_the_last_child_for_outcomes_nobody_fetches() -> None:
    worker = Worker()
    worker.running()
    worker.core.drain()
    worker.later(3)
    worker.core.gone("a", -15)
    worker.later(4.9)
    assert not worker.core.drained()
    worker.later(0.1)
    assert worker.core.drained()


def test_an_idle_worker_drains_at_once_and_old_outcomes_get_their_5_s() -> None:
    idle = Worker()
    idle.core.drain()
    assert idle.core.drained()
    waited = Worker()
    waited.finished()
    waited.later(100)
    waited.core.drain()
    assert not waited.core.drained()
    waited.later(5)
    assert waited.core.drained()


# --- listings hold no values ------------------------------------------------------------------------------------------


def test_the_listing_says_what_runs() -> None:
    worker = Worker()
    worker.running()
    worker.core.reported("a", b'"secret"')
    worker.later(2.5)
    assert worker.core.listing() == [
        {
            "call_id": "a",
            "state": "running",
            "scope": "10.0.0.1:30000",
            "age": 2.5,
            "pid": 4711,
            "fn": "module:function",
            "reports": 1,
        }
    ]
    worker.core.gone("a", 0)
    assert worker.core.listing()[0]["pid"] is None


@pytest.mark.parametrize("state", list(State))
def test_every_state_has_a_time_or_lasts_on_purpose(state: State) -> None:
    timed = set(CoreSettings().times())
    assert (state in timed) == (state not in (State.UNKNOWN, State.KILLED))
