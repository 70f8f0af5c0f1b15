"""Own: runs a stage of the user's, a class or a function of Arrow tables, as a part of the plan.

In: a block with all columns so far. Out: the block with what the stage added or changed. Decision: a stage may add
columns and change values, a score say, but not drop, add or reorder rows: the learner waits for every member of a
group, and a sample that is not there would be waited for for ever.
"""

import inspect
from typing import Any

import pyarrow as pa

from raypipe.adapters import find_grader


class Own:
    """Args:
    path: package.module:Name or path/to/file.py:name of a class, or of a function of a table.
    kwargs: arguments of the class's constructor; a function has none.
    """

    def __init__(self, path: str, kwargs: dict[str, Any]):
        found: Any = find_grader(path)  # a class or a function
        self.path = path
        self.stage: Any = found(**kwargs) if inspect.isclass(found) else found

    async def __call__(self, table: pa.Table) -> pa.Table:
        """Raises ValueError where the stage returns another kind of thing, other rows, or fewer columns."""
        result = self.stage(table)
        if inspect.isawaitable(result):
            result = await result
        if not isinstance(result, pa.Table):
            raise ValueError(f"pipeline.stages: {self.path} returned a {type(result).__name__}, not a pyarrow.Table")
        if missing := [name for name in table.column_names if name not in result.column_names]:
            raise ValueError(f"pipeline.stages: {self.path} dropped the columns {missing}; return them as they are")
        if not result["sample_id"].equals(table["sample_id"]):
            raise ValueError(
                f"pipeline.stages: {self.path} got {len(table)} rows and returned {len(result)}, or others in another "
                "order; a stage may add columns and change values, but rows stay as they are"
            )
        return result


def labelled(name: str) -> type[Own]:
    """Own under another class name, which is what Ray's dashboard shows."""
    return type(name, (Own,), {"__doc__": Own.__doc__})
