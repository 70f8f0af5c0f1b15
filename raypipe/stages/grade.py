"""Grade: hands each sample of a block to the run's grade dispatcher and waits for its score.

In: PROMPT_COLUMNS and GENERATE_COLUMNS. Out: GRADE_COLUMNS. The stage is thin: the child processes that run graders,
and the one queue that forms their batches across blocks, outlive the plan. Its actors are what Ray Data scales when
`grade.workers` is a range: each one that attaches adds a grader host to the run.
"""

import pyarrow as pa
import pyarrow.compute as pc
import ray

from raypipe.rows import GENERATE_COLUMNS, GRADE_COLUMNS, PROMPT_COLUMNS, add_columns, check_columns

# What a grader may see; log-probs and the prompt's tokens stay out of the way.
READS = (
    "sample_id", "iteration", "group_id", "group_size", "member", "purpose", "data_source", "prompt",
    "prompt_text", "ground_truth", "extra_info", "response_text", "response_ids", "finish_reason", "generate_error",
)  # fmt: skip


class Grade:
    """Args:
    dispatcher: name of the grade dispatcher actor.
    plan: key of the plan; a run has as many grader hosts as its widest plan has Grade actors.
    """

    def __init__(self, dispatcher: str, plan: str):
        self.dispatcher = ray.get_actor(dispatcher)
        ray.get(self.dispatcher.attach.remote(plan, ray.get_runtime_context().get_actor_id()))

    async def __call__(self, table: pa.Table) -> pa.Table:
        check_columns(table, {**PROMPT_COLUMNS, **GENERATE_COLUMNS}, "Grade")
        lengths = pc.list_value_length(table["response_ids"])
        seen = table.select(list(READS)).append_column("response_length", lengths)
        graded = await self.dispatcher.grade.remote(seen.to_pylist())
        return add_columns(table, graded, GRADE_COLUMNS)
