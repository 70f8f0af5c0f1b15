"""Grade: hands each sample of a block to the run's grade dispatcher and waits for its score.

In: PROMPT_COLUMNS and GENERATE_COLUMNS. Out: GRADE_COLUMNS. The stage is thin: the child processes that run graders,
and the one queue that forms their batches across blocks, outlive the plan. A sample that the dispatcher has heard of
before its block came here is graded, or about to be, and this stage collects its score; any other is graded now.

Where the plan has a reserve (`reserve.py`), the actor that holds it hears of a group's scores and says whether the
group is surplus; one that is, or is not graded when there are enough without it, leaves as such, without a grade.

The stage's actors are what Ray Data scales when `grade.workers` is a range: each one that attaches adds a grader host.
"""

import asyncio
import math
from typing import Any

import pyarrow as pa
import ray

from raypipe.reserve import Graded
from raypipe.rows import (
    GENERATE_COLUMNS,
    GRADE_COLUMNS,
    GRADE_READS,
    PROMPT_COLUMNS,
    add_columns,
    check_columns,
    to_grade,
)

NOTHING = {
    "score": math.nan, "grade_status": "abstain", "grades": "[]", "grader": "", "grade_start": math.nan,
    "grade_end": math.nan,
}  # fmt: skip


class Grade:
    """Args:
    dispatcher: name of the grade dispatcher actor.
    plan: key of the plan; a run has as many grader hosts as its widest plan has Grade actors.
    reserve: name of the actor that is told of scores, since it knows which prompts they call for; may be "".
    """

    def __init__(self, dispatcher: str, plan: str, reserve: str = ""):
        self.reserve: Any = ray.get_actor(reserve) if reserve else None
        self.dispatcher, self.plan = ray.get_actor(dispatcher), plan
        self.enough: asyncio.Future[None] | None = None
        ray.get(self.dispatcher.attach.remote(plan, ray.get_runtime_context().get_actor_id()))

    async def __call__(self, table: pa.Table) -> pa.Table:
        check_columns(table, {**PROMPT_COLUMNS, **GENERATE_COLUMNS}, "Grade")
        rows = table.select(list(GRADE_READS)).to_pylist()
        if rows[0]["finish_reason"] == "unused":  # then the whole block is: its samples are of one prompt
            return add_columns(table, [NOTHING] * len(rows), GRADE_COLUMNS)
        if any(row["finish_reason"] == "surplus" for row in rows):
            return surplus(table)
        asked: Any = self.dispatcher.grade.remote([to_grade(row, self.plan) for row in rows])
        grading: asyncio.Future[list[dict[str, Any]]] = asyncio.ensure_future(asked)
        if self.reserve and rows[0]["purpose"] == "train" and await self._is_surplus(rows, grading):
            return surplus(table)
        return add_columns(table, await grading, GRADE_COLUMNS)

    async def _is_surplus(self, rows: list[dict[str, Any]], grading: asyncio.Future[list[dict[str, Any]]]) -> bool:
        """Whether there are enough groups without that of these rows; waits until it is graded, or there are."""
        if self.enough is None:
            self.enough = asyncio.ensure_future(self.reserve.enough.remote(self.plan))
        await asyncio.wait([grading, self.enough], return_when=asyncio.FIRST_COMPLETED)
        if not grading.done() and await self.reserve.is_surplus.remote(self.plan, rows[0]["group_id"]):
            return True
        return await self.reserve.graded.remote(self.plan, told(rows, await grading))


def told(rows: list[dict[str, Any]], graded: list[dict[str, Any]]) -> list[Graded]:
    """What the reserve hears of the training samples of one group."""
    return [
        Graded(
            row["sample_id"],
            row["group_id"],
            row["group_size"],
            grade["score"] if grade["grade_status"] == "ok" else None,
        )
        for row, grade in zip(rows, graded, strict=True)
    ]


def surplus(table: pa.Table) -> pa.Table:
    """The block as one that nobody needs."""
    at = table.column_names.index("finish_reason")
    table = table.set_column(at, table.field(at), pa.array(["surplus"] * len(table), pa.string()))
    return add_columns(table, [NOTHING] * len(table), GRADE_COLUMNS)
