"""What a grader is: a callable class that scores a batch of responses.

In: four lists of one length n. Out: a list of n scores, in the same order. That is the whole contract; a grader needs
no import from raypipe and no Ray, and `MyGrader()(...)` in a notebook is the same call that the Grade stage makes.

    class LengthGrader:
        def __call__(self, *, data_sources, solution_strs, ground_truths, extra_infos):
            return [1.0 if len(text) < 200 else 0.0 for text in solution_strs]

Whatever goes wrong inside (an exception, a wrong number of scores, NaN, a hang, a crash) marks the sample it concerns
with a status; it is never turned into a score of 0 and never stops the run.
"""

from collections.abc import Sequence
from typing import Any, Protocol

# float: the score. dict: {"score": float, **named values to log}. None: abstain, the grader has no opinion; with
# {"score": None, "error": text} the sample could not be graded (status error).
Score = float | dict[str, Any] | None


class Grader(Protocol):
    """A batch grader. Its `__init__` takes the `kwargs` of the config entry that names it."""

    def __call__(
        self,
        *,
        data_sources: Sequence[str],
        solution_strs: Sequence[str],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[dict[str, Any]],
    ) -> Sequence[Score]:
        """Scores n responses.

        Args:
            data_sources: n names of the data set that each prompt came from.
            solution_strs: n responses, decoded, without the prompt.
            ground_truths: n keys to grade against (any JSON value, None where the data has none).
            extra_infos: n dicts of whatever else the data row carried; in a run also `prompt` (as the data has it: text
                or messages), `prompt_text` (after the chat template), `response_ids` (tokens) and `response_length`
                (their number), unless the row has its own.

        Returns:
            n scores in the same order.
        """
        ...
