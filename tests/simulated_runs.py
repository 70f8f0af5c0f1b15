"""Run folders of made-up runs, written by the same code as real ones: what the report and the plots are tested on."""

import json
import math
import random
from pathlib import Path
from typing import Any

from raypipe.metrics import iteration_metrics
from raypipe.run_folder import RunFolder
from raypipe.samples import write_samples
from raypipe.spans import collect
from raypipe.timeline import summarize
from raypipe.timeline_trace import write_trace

T = 1_700_000_000.0
# What a model might write to harm who reads it.
HOSTILE = {
    "ends the script": "</script><script>window.pwned = 'script'; document.title = 'pwned'</script>",
    "comment": "<!--<script>window.pwned = 'comment'</script>",
    "handler": "<img src=x onerror=\"window.pwned = 'handler'\"><svg onload=\"window.pwned = 'svg'\">",
    "frame": '<iframe src="javascript:parent.pwned = 1"></iframe><a href="javascript:alert(1)">click</a>',
    "remote": '<link rel=stylesheet href="http://127.0.0.1:9/x.css"><img src="http://127.0.0.1:9/x.png">',
    "policy": '<meta http-equiv="refresh" content="0; url=http://127.0.0.1:9/"><base href="http://127.0.0.1:9/">',
    "template": "%%script%% ${alert(1)} {{constructor}} &lt;b&gt; \\u003cscript\\u003e",
    "terminal": "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x00null\x9b31m",
    "bidi": "safe\u202etxt.exe\u2066\u2069 zero\u200bwidth \ufeff line\u2028end",
    "surrogate": "half \ud800 of a pair \udfff",
    "combining": "Z" + "\u0351\u034f" * 3000,
    "words": "a" * 300_000,
    "lines": "line\n" * 30_000,
    "nulls": "\x00" * 5_000,
    "emoji": "👩‍👩‍👧 family, 数学, עברית, ok",
    "prototype": "__proto__ constructor toString",
}


def simulated_run(
    folder: Path, iterations: int = 12, seed: int = 0, graders: tuple[str, ...] = ("math", "format"),
    timelines: tuple[int, ...] = (1,), hostile: bool = False, gain: float = 0.8,
) -> RunFolder:  # fmt: skip
    """A run of `iterations` iterations of 8 prompts x 4 samples whose reward rises by `gain`, in `folder`."""
    run = RunFolder(folder, resumed=False)
    for name in ("samples", "timelines", "checkpoints"):
        (folder / name).mkdir(parents=True)
    (folder / "config.yaml").write_text(f"run:\n  name: {folder.name}\n  iterations: {iterations}\n")
    draw = random.Random(seed)
    begin = T
    for iteration in range(iterations):
        rows = simulated_rows(draw, iteration, begin, graders, 0.1 + gain * iteration / iterations, hostile)
        graded = max(row["grade_end"] for row in rows)
        spans = [
            {"lane": "learner-0", "name": "wait for rows", "start": begin, "end": graded},
            {"lane": "learner-0", "name": "train", "start": graded, "end": graded + 2.5},
            {"lane": "learner-0", "name": "update weights", "start": graded + 2.5, "end": graded + 2.8},
        ]
        found = collect(rows, spans)
        end = max(span.end for span in found)
        summary = summarize(rows, spans, (begin, end))
        learner = {
            "policy/kl": 0.002 * draw.random(),
            "policy/entropy": 2.0 * math.exp(-iteration / iterations),
            "policy/clip_frac": 0.1 * draw.random(),
            "grad_norm": draw.uniform(0.3, 1.0),
            "lr": 1e-5,
            "mismatch/kl": 1e-6 * draw.random(),
            "mismatch/max": 1e-4 * draw.random(),
        }
        run.append_metrics(iteration_metrics(iteration, rows, learner, iteration, summary))
        run.append_stages(iteration, summary)
        write_samples(run.samples(iteration), rows, 4)
        if iteration in timelines:
            write_trace(run.timeline(iteration, ".json"), found)
        begin = end
    return run


def simulated_rows(
    draw: random.Random, iteration: int, begin: float, graders: tuple[str, ...], skill: float, hostile: bool
) -> list[dict[str, Any]]:
    rows = []
    purposes = ["train"] * 32 + ["heldout"] * (8 if iteration % 4 == 0 else 0)
    texts = list(HOSTILE.values())
    for i, purpose in enumerate(purposes):
        tokens = int(20 + draw.lognormvariate(4, 0.7))
        end = begin + 0.3 + 0.03 * tokens
        right = draw.random() < skill
        status = draw.choice(["timeout", "error", "crash"]) if draw.random() < 0.08 else "ok"
        start = end + draw.uniform(0.005, 0.05)
        took = 1.5 if status == "timeout" else draw.uniform(0.05, 0.6)
        text = f"{i} + {iteration} = {i + iteration}\nSo the answer is {i + iteration if right else i}."
        if hostile and purpose == "train":
            text = texts[(i + 32 * iteration) % len(texts)]
        entries = [
            {
                "grader": name, "status": status if j == 0 else "ok",
                "score": (float(right) if j == 0 else 1.0) if j or status == "ok" else None, "weight": 1.0,
                "values": {"answer": text[:40]} if j == 0 else {},
                "error": "" if status == "ok" or j else f"{status}: {text[:50]}",
                "slot": f"host-{i % 2}/{j}", "start": start, "seconds": took / (j + 1), "batch": 1,
            }
            for j, name in enumerate(graders)
        ]  # fmt: skip
        rows.append(
            {
                "sample_id": f"{iteration}/{i // 4}/{i % 4}", "iteration": iteration, "group_id": i // 4,
                "member": i % 4, "group_size": 4, "purpose": purpose, "prompt_id": f"train.jsonl:{i // 4}",
                "data_source": "sums",
                "prompt_text": f"<|user|>What is {i} + {iteration}?<|assistant|>", "prompt_ids": [1] * 12,
                "ground_truth": json.dumps(str(i + iteration)), "extra_info": "{}", "seed": i,
                "response_text": text, "response_ids": [7] * tokens, "engine_logprobs": [-1.0] * tokens,
                "weight_versions": [iteration] * tokens, "finish_reason": "length" if tokens > 200 else "stop",
                "generate_error": "", "engine": f"engine-{i % 2}", "generate_start": begin + 0.01 * i,
                "generate_end": end,
                "score": sum(entry["score"] or 0.0 for entry in entries) if status == "ok" else math.nan,
                "grade_status": status, "grades": json.dumps(entries), "grader": "host-0/0", "grade_start": start,
                "grade_end": start + took, "advantage": draw.gauss(0, 1),
            }
        )  # fmt: skip
    return rows
