"""The row contract: one row is one sample, flat Arrow columns, and each stage only adds columns.

In: prompts become rows in `pipeline.py`. Out: the learner reads rows that every stage has passed over. A stage names
the columns it reads and adds here, and `check_columns` fails at its door with the name of what is missing, so no stage
needs to know another. JSON is used where the value's type differs from row to row (`prompt`, `ground_truth`,
`extra_info`, `grades`): an Arrow struct would force one schema on all rows.

An example row after Grade (Generate added `response_*`, Grade added `score` and below):

    sample_id        "3/17/2"                   iteration 3, 17th prompt of it, member 2 of its group
    iteration        3
    group_id         17
    member           2
    group_size       8
    purpose          "train"                    train | heldout (graded and reported, never trained on)
    reserve          -1                         number in the iteration's reserve (see reserve.py), else -1
    prompt_id        "gsm8k-train-204"
    min_version      3                          the gate holds the request until the engine has these weights
    data_source      "gsm8k"
    prompt           "\"What is 6*7?\""           JSON: the prompt as the data has it, text or messages
    prompt_text      "<|user|>What is 6*7?<|assistant|>"   after the chat template
    prompt_ids       [1, 529, ...]
    ground_truth     "\"42\""                   JSON
    extra_info       "{\"index\": 204}"         JSON
    seed             7301
    response_text    "6*7 = 42 #### 42"
    response_ids     [22, 30, ...]              T tokens
    engine_logprobs  [-0.11, -0.02, ...]        T sampling log-probs of the engine, temperature applied
    weight_versions  [3, 3, ...]                T versions of the weights that made each token
    finish_reason    "stop"                     stop | length (cut at rollout.max_response_length) | failed | unused
                                                | surplus (see FINISH_REASONS)
    generate_error   ""
    engine           "engine-0"
    generate_start   1716822000.12              seconds since the epoch; the engine took the request past the gate
    generate_end     1716822003.40
    score            1.0                        weighted sum over graders; NaN unless grade_status is "ok"
    grade_status     "ok"                       ok | abstain | error | timeout | crash
    grades           "[{\"grader\": \"math\", \"status\": \"ok\", \"score\": 1.0, ...}]"   JSON, one entry a grader
    grader           "grader-0"
    grade_start      1716822003.41
    grade_end        1716822003.43

With a Score stage (algorithms with a critic, a KL, or recomputed log-probs) also, each list T long or empty:

    ref_logprobs     [-0.13, -0.02, ...]        log-probs of the reference model
    old_logprobs     [-0.11, -0.02, ...]        log-probs of the policy, recomputed
    values           [0.4, 0.7, ...]            of the states that the tokens were chosen in
    score_error      ""                         why no scorer could score it; then it is not trained on
    scoring          "[{\"scorer\": \"scorer-values-0\", \"start\": ..., \"end\": ...}]"   JSON, one entry a scorer
"""

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

PROMPT_COLUMNS = {
    "sample_id": pa.string(),
    "iteration": pa.int64(),
    "group_id": pa.int64(),
    "member": pa.int64(),
    "group_size": pa.int64(),
    "purpose": pa.string(),
    "reserve": pa.int64(),
    "prompt_id": pa.string(),
    "min_version": pa.int64(),
    "data_source": pa.string(),
    "prompt": pa.string(),
    "prompt_text": pa.string(),
    "prompt_ids": pa.list_(pa.int32()),
    "ground_truth": pa.string(),
    "extra_info": pa.string(),
    "seed": pa.int64(),
}
GENERATE_COLUMNS = {
    "response_text": pa.string(),
    "response_ids": pa.list_(pa.int32()),
    "engine_logprobs": pa.list_(pa.float32()),
    "weight_versions": pa.list_(pa.int32()),
    "finish_reason": pa.string(),
    "generate_error": pa.string(),
    "engine": pa.string(),
    "generate_start": pa.float64(),
    "generate_end": pa.float64(),
}
# Beside PROMPT_COLUMNS, for Generate alone: the place of a block's requests in the order in which engines start them
# (lengths.py). Blocks reach the stage, and requests the engines, in about this order only.
PLACE = "place"
# Of training prompts that bring their responses (data.rollouts) beside PROMPT_COLUMNS: what Generate passes on.
SAVED = (
    "saved",
    pa.struct(
        [
            (name, GENERATE_COLUMNS[name])
            for name in ("response_text", "response_ids", "engine_logprobs", "weight_versions", "finish_reason")
        ]
    ),
)
GRADE_COLUMNS = {
    "score": pa.float64(),
    "grade_status": pa.string(),
    "grades": pa.string(),
    "grader": pa.string(),
    "grade_start": pa.float64(),
    "grade_end": pa.float64(),
}
SCORE_COLUMNS = {
    "ref_logprobs": pa.list_(pa.float32()),
    "old_logprobs": pa.list_(pa.float32()),
    "values": pa.list_(pa.float32()),
    "score_error": pa.string(),
    "scoring": pa.string(),
}

# What grading reads of a row, besides the length of its response: neither log-probs nor the tokens of the prompt.
GRADE_READS = (
    "sample_id", "iteration", "group_id", "group_size", "member", "purpose", "data_source", "prompt",
    "prompt_text", "ground_truth", "extra_info", "response_text", "response_ids", "finish_reason", "generate_error",
)  # fmt: skip

GRADE_STATUSES = ("ok", "abstain", "error", "timeout", "crash")
# unused: of a prompt in reserve that was not needed; such rows end with the plan. surplus: of a group that was not yet
# complete when enough others were (rollout.overprovision); such rows are counted, and are of no other use.
FINISH_REASONS = ("stop", "length", "failed", "unused", "surplus")
# How the error begins of a sample that was over watchdog.sample_s in an engine or scorer.
TOO_LONG = "took too long"


def check_columns(table: pa.Table, required: Iterable[str], stage: str) -> None:
    """Raises ValueError that names the columns which `stage` reads and `table` lacks."""
    missing = [name for name in required if name not in table.column_names]
    if missing:
        raise ValueError(f"{stage} reads the columns {missing}, which its input lacks; it got {table.column_names}")


def to_grade(row: Mapping[str, Any], plan: str) -> dict[str, Any]:
    """What grading reads of a generated row of `plan`."""
    return {name: row[name] for name in GRADE_READS} | {"response_length": len(row["response_ids"]), "plan": plan}


def add_columns(table: pa.Table, values: list[dict], columns: dict[str, pa.DataType]) -> pa.Table:
    """Appends `columns` to `table`, taking row i's values from `values[i]` (B dicts for B rows)."""
    for name, dtype in columns.items():
        table = table.append_column(pa.field(name, dtype), pa.array([row[name] for row in values], dtype))
    return table
