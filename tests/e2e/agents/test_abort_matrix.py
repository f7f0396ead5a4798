"""The abort matrix of agents.md, one test a cell; a cell that cannot occur is checked to say why."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.agents.matrix import AbortScope, Caller, CallScope, Cell, Delete, Moment, cells, expected
from tests.e2e.agents.matrix_run import Workers, complaints, run_cell, workers

POSSIBLE = [cell for cell in cells() if cell.impossible() is None]
IMPOSSIBLE = [cell for cell in cells() if cell.impossible() is not None]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Workers]:
    async with workers() as both:
        yield both


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("cell", POSSIBLE, ids=lambda cell: cell.id)
async def test_cell(cell: Cell, shared: Workers) -> None:
    result = await run_cell(cell, shared)
    assert complaints(cell, expected(cell), result) == []


def test_every_cell_is_run_or_says_why_it_cannot_occur() -> None:
    ids = [cell.id for cell in cells()]
    assert len(ids) == len(set(ids)) == len(AbortScope) * len(CallScope) * len(Moment) * len(Delete) * len(Caller)
    assert {cell.id for cell in POSSIBLE} | {cell.id for cell in IMPOSSIBLE} == set(ids)
    for cell in IMPOSSIBLE:
        assert len((cell.impossible() or "").split()) > 5


@pytest.mark.parametrize("moment", Moment)
def test_every_moment_is_aborted_by_own_and_every_scope(moment: Moment) -> None:
    taken = {cell.abort for cell in POSSIBLE if cell.moment is moment and cell.aborted and cell.caller is Caller.ALIVE}
    assert taken == {AbortScope.OWN, AbortScope.EVERY}


def test_the_tables_expect_what_the_contract_says() -> None:
    def outcome(moment: Moment, delete: Delete, abort: AbortScope = AbortScope.OWN) -> str:
        return expected(Cell(abort, CallScope.SET, moment, delete, Caller.ALIVE)).outcome

    assert outcome(Moment.RUNNING, Delete.ARRIVES) == "WorkerCancelled"
    assert outcome(Moment.RUNNING, Delete.ARRIVES, AbortScope.ANOTHER) == "ok"
    assert outcome(Moment.RUNNING, Delete.LOST) == "WorkerCancelled"
    assert outcome(Moment.HELD, Delete.OVERTAKES) == "WorkerCancelled"
    assert outcome(Moment.UNFETCHED, Delete.ARRIVES) == "ok"
    assert outcome(Moment.CLEANUP, Delete.ARRIVES, AbortScope.NULL) == "WorkerCancelled"
    assert outcome(Moment.LOST, Delete.ARRIVES, AbortScope.ANOTHER) == "WorkerUnreachable"
    cancelled = Cell(AbortScope.NULL, CallScope.NONE, Moment.RUNNING, Delete.LOST, Caller.CANCELLED)
    assert expected(cancelled).outcome == "CancelledError"
