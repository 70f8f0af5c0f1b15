"""Grade: hands each sample of a block to the run's grade dispatcher and waits for its score.

In: PROMPT_COLUMNS and GENERATE_COLUMNS. Out: GRADE_COLUMNS. The stage is thin: the child processes that run graders,
and the one queue that forms their batches across blocks, outlive the plan. A sample that the dispatcher has heard of
before its block came here is graded, or about to be, and this stage collects its score; any other is graded now. The
stage's actors are what Ray Data scales when `grade.workers` is a range: each one that attaches adds a grader host.
"""

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

UNUSED = {
    "score": math.nan, "grade_status": "abstain", "grades": "[]", "grader": "", "grade_start": math.nan,
    "grade_end": math.nan,
}  # fmt: skip


class Grade:
    """Args:
    dispatcher: name of the grade dispatcher actor.
    plan: key of the plan; a run has as many grader hosts as its widest plan has Grade actors.
    reserve: name of the actor that is told of scores, since it knows which prompts in reserve they call for; may be "".
    """

    def __init__(self, dispatcher: str, plan: str, reserve: str = ""):
        self.reserve = ray.get_actor(reserve) if reserve else None
        self.dispatcher, self.plan = ray.get_actor(dispatcher), plan
        ray.get(self.dispatcher.attach.remote(plan, ray.get_runtime_context().get_actor_id()))

    async def __call__(self, table: pa.Table) -> pa.Table:
        check_columns(table, {**PROMPT_COLUMNS, **GENERATE_COLUMNS}, "Grade")
        rows = table.select(list(GRADE_READS)).to_pylist()
        if rows[0]["finish_reason"] == "unused":  # then the whole block is: its samples are of one prompt
            return add_columns(table, [UNUSED] * len(rows), GRADE_COLUMNS)
        graded = await self.dispatcher.grade.remote([to_grade(row, self.plan) for row in rows])
        if self.reserve:
            await self.reserve.graded.remote(self.plan, told(rows, graded))
        return add_columns(table, graded, GRADE_COLUMNS)


def told(rows: list[dict[str, Any]], graded: list[dict[str, Any]]) -> list[Graded]:
    """What the reserve hears of training samples."""
    return [
        Graded(
            row["sample_id"],
            row["group_id"],
            row["group_size"],
            grade["score"] if grade["grade_status"] == "ok" else None,
        )
        for row, grade in zip(rows, graded, strict=True)
        if row["purpose"] == "train"
    ]
