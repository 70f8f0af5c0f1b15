"""Score: has resident models look at each graded sample, and adds what they say of its tokens.

In: PROMPT_COLUMNS, GENERATE_COLUMNS and GRADE_COLUMNS. Out: SCORE_COLUMNS. The stage is thin: the scorers and their
weights outlive the plan. A sample that is not trained on (held out, failed) is passed on without being scored. One that
a scorer fails at is tried once more, by another if there is one, and then marked: its group goes on without it.
"""

import asyncio
import json
from collections import Counter
from typing import Any

import pyarrow as pa
import ray

from raypipe.rows import GENERATE_COLUMNS, GRADE_COLUMNS, PROMPT_COLUMNS, SCORE_COLUMNS, add_columns, check_columns

ATTEMPTS = 2
READS = ("sample_id", "purpose", "min_version", "grade_status", "prompt_ids", "response_ids")


class Score:
    """Args:
    scorers: names of the scorer actors of each role, e.g. {"ref_logprobs": [...], "values": [...]}; the roles are
        columns of SCORE_COLUMNS.
    """

    def __init__(self, scorers: dict[str, list[str]]):
        self.scorers = {role: {name: ray.get_actor(name) for name in names} for role, names in scorers.items()}
        self.in_flight: Counter[str] = Counter()

    async def __call__(self, table: pa.Table) -> pa.Table:
        check_columns(table, {**PROMPT_COLUMNS, **GENERATE_COLUMNS, **GRADE_COLUMNS}, "Score")
        rows = table.select(list(READS)).to_pylist()
        return add_columns(table, await asyncio.gather(*map(self._score, rows)), SCORE_COLUMNS)

    async def _score(self, row: dict[str, Any]) -> dict[str, Any]:
        nothing: dict[str, Any] = {"ref_logprobs": [], "old_logprobs": [], "values": [], "score_error": ""}
        if row["purpose"] != "train" or row["grade_status"] != "ok" or not row["response_ids"]:
            return nothing | {"scoring": "[]"}
        sample = {name: row[name] for name in ("prompt_ids", "response_ids", "min_version")}
        try:
            found = await asyncio.gather(*(self._call(role, sample) for role in self.scorers))
        except ray.exceptions.RayError as error:
            return nothing | {"scoring": "[]", "score_error": str(error)[:2000]}
        calls = [{name: result[name] for name in ("scorer", "start", "end")} for result in found]
        return {
            **nothing,
            **{role: result["values"] for role, result in zip(self.scorers, found, strict=True)},
            "scoring": json.dumps(calls),
        }

    async def _call(self, role: str, sample: dict[str, Any]) -> dict[str, Any]:
        """Asks the role's scorer with the fewest samples. Ray repeats the call when a scorer dies and comes back.

        Raises RayError when a second one failed at the sample too.
        """
        tried: list[str] = []
        while True:
            name = min(self.scorers[role], key=lambda name: (name in tried, self.in_flight[name]))
            self.in_flight[name] += 1
            try:
                return await self.scorers[role][name].score.remote(sample)
            except ray.exceptions.RayError:
                tried.append(name)
                if len(tried) == ATTEMPTS:
                    raise
            finally:
                self.in_flight[name] -= 1
