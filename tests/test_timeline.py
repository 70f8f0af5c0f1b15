"""Timeline: intervals, spans, summary, advice, Chrome trace and picture, on hand-made and simulated iterations."""

import heapq
import itertools
import json
import math
import random

import matplotlib.colors
import matplotlib.image
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe import timeline, timeline_plot
from raypipe.intervals import in_work, intersect, pack, subtract, union
from raypipe.spans import collect
from raypipe.timeline_trace import chrome_trace, lanes

T = 1_700_000_000.0


def simulate(
    iteration: int = 3,
    samples: int = 64,
    engines: int = 1,
    graders: int = 2,
    slots: int = 64,
    grade_s: float = 0.05,
    start: float = T,
    train_s: float = 3.0,
    fail: float = 0.03,
    seed: int = 0,
) -> tuple[list[dict], list[dict]]:
    """Rows and spans of one iteration: `slots` requests at a time an engine, one sample at a time a grader."""
    draw = random.Random(seed)
    free_slots = [(start, engine) for engine in range(engines) for _ in range(slots)]
    free_graders = [(start, grader) for grader in range(graders)]
    heapq.heapify(free_slots)
    rows = []
    for i in range(samples):
        at, engine = heapq.heappop(free_slots)
        tokens = min(400, int(20 + draw.lognormvariate(4.4, 0.6)))
        end = at + 0.3 + tokens * 0.02
        heapq.heappush(free_slots, (end + 0.002, engine))
        rows.append(row(f"{iteration}/{i // 8}/{i % 8}", iteration, f"engine-{engine}", at, end, tokens))
    for r in sorted(rows, key=lambda r: r["generate_end"]):
        at, grader = heapq.heappop(free_graders)
        r["grade_start"] = max(at, r["generate_end"] + 0.01)
        r["grade_status"] = draw.choice(["timeout", "error"]) if draw.random() < fail else "ok"
        slow = 12 if r["grade_status"] == "timeout" else 1
        r["grade_end"] = r["grade_start"] + slow * grade_s * draw.uniform(0.5, 2)
        r["grader"] = f"grader-{grader}"
        heapq.heappush(free_graders, (r["grade_end"], grader))
    graded = max(r["grade_end"] for r in rows)
    spans = [
        {"lane": "learner", "name": "wait for rows", "start": start, "end": graded},
        {"lane": "learner", "name": "train", "start": graded + 0.02, "end": graded + train_s},
        {"lane": "learner", "name": "update weights", "start": graded + train_s, "end": graded + train_s + 0.4},
        {"lane": "driver", "name": "open plan", "start": graded + 0.02, "end": graded + 1.6},
    ]
    return rows, spans


def row(sample_id: str, iteration: int, engine: str, start: float, end: float, tokens: int = 5) -> dict:
    return {
        "sample_id": sample_id,
        "iteration": iteration,
        "response_ids": [7] * tokens,
        "finish_reason": "length" if tokens >= 400 else "stop",
        "engine": engine,
        "generate_start": start,
        "generate_end": end,
        "grade_status": "ok",
        "grader": "grader-0",
        "grade_start": math.nan,
        "grade_end": math.nan,
    }


def summary_of(rows, spans=(), window=None):
    return timeline.summarize(rows, spans, window)


def test_union_merges_overlapping_and_touching_intervals():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert union([]) == []


def test_intersect_and_subtract_of_unions():
    a, b = [(0, 4), (5, 9)], [(1, 2), (3, 6), (8, 10)]
    assert intersect(a, b) == [(1, 2), (3, 4), (5, 6), (8, 9)]
    assert subtract(a, b) == [(0, 1), (2, 3), (6, 8)]
    assert subtract(a, []) == a


times = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda t: (t[0], t[0] + t[1])), max_size=30)


@given(times, times)
def test_interval_sets_agree_with_sets_of_unit_cells(a, b):
    def cells(intervals):
        return {cell for start, end in intervals for cell in range(start, end)}

    assert cells(union(a)) == cells(a)
    assert cells(intersect(union(a), union(b))) == cells(a) & cells(b)
    assert cells(subtract(union(a), union(b))) == cells(a) - cells(b)
    for time, count in in_work(a):
        assert count == sum(start <= time < end for start, end in a)


@given(times)
def test_packed_rows_hold_no_overlap_and_are_as_few_as_the_peak(intervals):
    rows = pack(intervals)
    for row in set(rows):
        inside = sorted(interval for interval, r in zip(intervals, rows, strict=True) if r == row)
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(inside))
    lasting = [interval for interval in intervals if interval[0] < interval[1]]
    if lasting == intervals and intervals:
        assert max(rows) + 1 == max(count for _, count in in_work(intervals))


def worked_example():
    """Two engines and one grader over [0, 10] (plus T): engine-0 busy 0-4 and 3-5, engine-1 0-2, grader 2-3 and 5-6,
    learner 6-9 and new weights 9-10."""
    a = row("3/0/0", 3, "engine-0", T, T + 4)
    b = row("3/0/1", 3, "engine-0", T + 3, T + 5) | {"grade_start": T + 5, "grade_end": T + 6}
    c = row("3/1/0", 3, "engine-1", T, T + 2) | {"grade_start": T + 2, "grade_end": T + 3}
    spans = [
        {"lane": "learner", "name": "wait for rows", "start": T, "end": T + 6},
        {"lane": "learner", "name": "train", "start": T + 6, "end": T + 9},
        {"lane": "learner", "name": "update weights", "start": T + 9, "end": T + 10},
        {"lane": "driver", "name": "open plan", "start": T + 6, "end": T + 10},
    ]
    return [a, b, c], spans


def test_busy_and_idle_fractions_and_efficiency():
    summary = summary_of(*worked_example())
    assert summary.window == (T, T + 10)
    assert summary.busy == {
        "Generate": {"engine-0": pytest.approx(0.5), "engine-1": pytest.approx(0.2)},
        "Grade": {"grader-0": pytest.approx(0.2)},
        "Learner": {"learner": pytest.approx(0.4)},
    }
    assert summary.idle == {"Generate": pytest.approx(0.65), "Grade": pytest.approx(0.8), "Learner": pytest.approx(0.6)}
    assert summary.efficiency == pytest.approx(0.5)
    assert summary.phases == pytest.approx(
        {"generate": 5, "grade": 2, "wait for rows": 6, "train": 3, "update weights": 1, "open plan": 4}
    )


def test_a_window_cuts_what_lies_outside_it():
    summary = summary_of(*worked_example(), window=(T + 4, T + 14))
    assert summary.busy["Generate"] == {"engine-0": pytest.approx(0.1), "engine-1": 0}
    assert summary.wall_s == 10 and summary.phases["train"] == pytest.approx(3)


def test_two_ranks_that_train_side_by_side_count_once_in_the_phase_and_each_in_the_idle_fraction():
    spans = [{"lane": f"learner-{rank}", "name": "train", "start": T, "end": T + 2 + 2 * rank} for rank in range(2)]
    summary = summary_of([], spans)
    assert summary.phases == pytest.approx({"train": 4})
    assert summary.idle == {"Learner": pytest.approx(0.25)}


def test_overlap_evidence():
    rows, spans = worked_example()
    summary = summary_of(rows, spans)
    assert summary.first_grade_start_before_last_generate_end is True
    assert summary.overlap == pytest.approx(0.5)  # graded 2-3 under generation, 5-6 after it
    barrier = [r | {"grade_start": T + 5, "grade_end": T + 6} for r in rows]
    assert summary_of(barrier).first_grade_start_before_last_generate_end is False
    assert summary_of(barrier).overlap == 0
    ungraded = [r | {"grade_start": math.nan, "grade_end": None} for r in rows]
    assert summary_of(ungraded).first_grade_start_before_last_generate_end is None
    assert summary_of(ungraded).overlap is None


def test_one_iteration_without_overlap_among_several_is_seen():
    rows, spans = worked_example()
    later = [row("4/0/0", 4, "engine-0", T + 10, T + 12) | {"grade_start": T + 12, "grade_end": T + 13}]
    assert summary_of(rows + later, spans).first_grade_start_before_last_generate_end is False


def test_a_row_whose_stage_never_ran_or_whose_clock_stepped_back_gives_no_negative_time():
    never = row("3/0/0", 3, "engine-0", T, T + 1) | {"grade_start": 0.0, "grade_end": 0.0}
    back = row("3/0/1", 3, "engine-0", T + 2, T + 1)
    spans = collect([never, back])
    assert [(span.stage, span.start, span.end) for span in spans] == [
        ("Generate", T, T + 1),
        ("Generate", T + 2, T + 2),
    ]


def test_each_grader_of_a_sample_has_a_span_of_its_own_where_the_grades_tell_it():
    grades = [
        {"grader": "math", "status": "ok", "score": 1.0, "seconds": 0.5, "slot": "grader-0/1", "start": T + 2},
        {"grader": "code", "status": "timeout", "score": None, "seconds": 5.0, "slot": "grader-1/0", "start": T + 2.5},
        {"grader": "judge", "status": "error", "score": None, "seconds": 0.0, "slot": "", "start": 0.0},
    ]
    graded = {"grader": "grader-0/1,grader-1/0", "grade_start": T + 2, "grade_end": T + 7.5}
    graded["grades"] = json.dumps(grades)
    spans = collect([row("3/0/0", 3, "engine-0", T, T + 1) | graded])
    assert [(span.lane, span.start, span.end, span.failed) for span in spans[1:]] == [
        ("grader-0/1", T + 2, T + 2.5, False),
        ("grader-1/0", T + 2.5, T + 7.5, True),
    ]
    assert spans[2].args["grader"] == "code"


def test_nothing_to_summarize_is_an_error():
    with pytest.raises(ValueError, match="0 spans"):
        summary_of([])


def test_generation_bounds_and_a_long_tail_is_named():
    rows = [row(f"3/0/{i}", 3, "engine-0", T, T + 5 + i % 2) for i in range(16)]
    assert summary_of(rows).advice == (
        "generation bounds (100% busy): add engines (engine.count) or raise engine.max_num_seqs"
    )
    rows.append(row("3/1/0", 3, "engine-0", T, T + 20))
    assert "14.0 s of it for the last few of 17 requests: lower rollout.max_response_length" in summary_of(rows).advice


def test_a_light_load_of_grading_does_not_bound_however_long_graders_have_an_item():
    """Two graders take turns, 1.99 s a sample, one a second: both are nearly always at work, but nothing ever waits."""
    rows = [
        row(f"3/0/{i}", 3, "engine-0", T + 0.1 + i, T + 1 + i)
        | {"grade_start": T + 1 + i, "grade_end": T + 2.99 + i, "grader": f"grader-{i % 2}"}
        for i in range(30)
    ]
    summary = summary_of(rows)
    assert summary.phases["grade"] > summary.phases["generate"]
    assert summary.bounding == "Generate"


def test_graders_that_pause_between_calls_bound_all_the_same():
    """Eight graders, each 1.8 s at work and 0.2 s between calls, all samples there after 1 s but for one that is
    generated for 20 s: the graders have 8 calls in work for a fifth of the time, 7 for the rest, and work for 24 s."""
    rows = [row("3/9/0", 3, "engine-0", T, T + 20)]
    for i in range(96):
        at = T + 1 + 0.25 * (i % 8) + 2.0 * (i // 8)
        graded = {"grade_start": at, "grade_end": at + 1.8, "grader": f"grader-{i % 8}"}
        rows.append(row(f"3/{i // 8}/{i % 8}", 3, "engine-0", T, T + 0.5) | graded)
    summary = summary_of(rows)
    assert summary.bounding == "Grade"
    assert summary.advice.endswith("raise grade.workers from 8 to about 9")


def test_grading_bounds_and_the_advice_names_how_many_workers_hide_it_under_generation():
    """16 samples finish within 4 s; two graders at 2 s each need 16 s. Hidden in 4 s of generation: 32 s / 4 s = 8."""
    rows = []
    for i in range(16):
        at = T + 0.25 + 2 * (i // 2)
        done = T + 0.25 * (1 + i)
        rows.append(row(f"3/0/{i}", 3, "engine-0", T, done))
        rows[-1] |= {"grade_start": max(at, done), "grade_end": max(at, done) + 2, "grader": f"grader-{i % 2}"}
    summary = summary_of(rows)
    assert summary.bounding == "Grade"
    assert summary.advice.endswith("raise grade.workers from 2 to about 8")
    assert "grading bounds (98% busy)" in summary.advice


def test_samples_of_one_batch_are_one_call():
    """The same, with each call grading 4 samples: 4 calls of 2 s by one grader are 8 s of work, so 2 workers do."""
    rows = []
    for i in range(16):
        rows.append(row(f"3/0/{i}", 3, "engine-0", T, T + 4))
        rows[-1] |= {"grade_start": T + 4 + 2 * (i // 4), "grade_end": T + 6 + 2 * (i // 4)}
    assert summary_of(rows).advice.endswith("from 1 to about 2")


def test_the_advice_counts_processes_by_host():
    """The same work as 2 graders cannot do, done by 2 processes of one host, and of an async grader's calls."""
    rows, _ = simulate(samples=64, graders=2, grade_s=1.0, fail=0)
    for r in rows:
        r["grader"] = r["grader"].replace("grader-", "host-0/")
    advice = summary_of(rows).advice
    needed = int(advice.split(" to about ")[1].split(" ")[0])
    assert "raise grade.workers from 1 to about" in advice and advice.endswith("(2 grade.processes each)")
    for r in rows:
        r["grader"] = "host-0/loop"
    advice = summary_of(rows).advice
    assert "raise grade.async_concurrency (and grade.async_rate, if it is set) from 2 to about" in advice
    calls = int(advice.split(" to about ")[1].split(" ")[0])
    assert needed == math.ceil(calls / 2), "each worker has two processes"


def test_one_slow_sample_is_named_rather_than_more_workers():
    rows = [row(f"3/0/{i}", 3, "engine-0", T, T + 1 + i) for i in range(8)]
    for r in rows:
        r |= {"grade_start": r["generate_end"], "grade_end": r["generate_end"] + 0.1}
    rows[3] |= {"grade_end": T + 34, "grade_status": "timeout"}
    advice = summary_of(rows).advice
    assert "grading bounds" in advice
    assert "by one sample: 3/0/3 took 30.0 s (timeout)" in advice and "raise" not in advice


def test_samples_that_wait_for_their_group_do_not_make_grading_bound():
    """A group-scoped grader sees 8 samples at once, in no time: the samples wait, the graders do not work."""
    rows = [
        row(f"3/{g}/{i}", 3, "engine-0", T, T + 1 + g + i) | {"grade_start": T + 9 + g, "grade_end": T + 9.01 + g}
        for g in range(8)
        for i in range(8)
    ]
    assert summary_of(rows).bounding == "Generate"


def test_the_learner_bounds():
    rows, spans = simulate(train_s=30.0)
    assert "the learner bounds" in summary_of(rows, spans).advice
    assert "train.ranks" in summary_of(rows, spans).advice


def test_time_in_which_nothing_works_bounds():
    rows, spans = worked_example()
    assert summary_of(rows, spans, window=(T - 40, T + 10)).advice == (
        "nothing bounds: no resource was busy for 40.0 of 50.0 s (start-up, switching, waiting)"
    )


def test_a_scorer_is_a_stage_of_its_own():
    call = {"scorer": "scorer-0", "start": T + 2, "end": T + 9}
    scored = {"grade_start": T + 1, "grade_end": T + 2, "scoring": json.dumps([call])}
    summary = summary_of([row("3/0/0", 3, "engine-0", T, T + 1) | scored])
    assert summary.busy["Score"] == {"scorer-0": pytest.approx(7 / 9)}
    assert summary.bounding == "Score" and summary.advice.startswith("scoring bounds (78% busy)")


def test_chrome_trace_has_named_lanes_whose_slices_never_overlap():
    rows, spans = simulate(engines=2, slots=16)
    trace = chrome_trace(collect(rows, spans))
    events = json.loads(json.dumps(trace, allow_nan=False))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == [
        "in work", "Generate engine-0", "Generate engine-1", "Grade grader-0", "Grade grader-1", "Learner learner",
        "Driver driver",
    ]  # fmt: skip
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == 64 * 2 + len(spans)
    threads: dict = {}
    for e in slices:
        threads.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(threads) <= named
    for times_of_thread in threads.values():
        ordered = sorted(times_of_thread)
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(ordered))


def test_chrome_trace_tells_sample_tokens_status_and_leads_from_generation_to_grade():
    rows, spans = worked_example()
    rows[1]["grade_status"] = "timeout"
    events = chrome_trace(collect(rows, spans))["traceEvents"]
    grade = next(e for e in events if e["ph"] == "X" and e["name"] == "3/0/1 (timeout)")
    assert grade["cat"] == "Grade,failed" and grade["dur"] == 1_000_000
    assert grade["args"] == {"sample_id": "3/0/1", "iteration": 3, "tokens": 5, "status": "timeout"}
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert set(starts) == set(ends) and len(starts) == 2
    assert ends["3/0/1>Grade,failed"]["ts"] == grade["ts"]
    count = [(e["ts"], e["args"]["n"]) for e in events if e["ph"] == "C" and e["name"] == "Generate in work"]
    assert count == [(0, 2), (2_000_000, 1), (3_000_000, 2), (4_000_000, 1), (5_000_000, 0)]


def test_lanes_are_in_the_plans_order_and_counted_as_numbers():
    rows = [row(f"3/0/{i}", 3, f"engine-{i}", T, T + 1) for i in (10, 2)]
    assert list(lanes(collect(rows))) == [("Generate", "engine-2"), ("Generate", "engine-10")]


def draw_to(path, rows, spans):
    found = collect(rows, spans)
    timeline_plot.draw(path, found, summary_of(rows, spans), "run $x_1$ <b>")
    image = matplotlib.image.imread(path)[:, :, :3]
    return image, lambda color: int((abs(image - matplotlib.colors.to_rgb(color)).max(axis=2) < 0.01).sum())


@pytest.mark.parametrize("samples, engines, graders", [(1, 1, 1), (64, 1, 2), (512, 2, 4), (600, 14, 40)])
def test_the_picture_shows_every_stage_and_failures_at_any_size(tmp_path, samples, engines, graders):
    rows, spans = simulate(samples=samples, engines=engines, graders=graders, fail=0.2 if samples > 1 else 0)
    image, pixels = draw_to(tmp_path / "timeline.png", rows, spans)
    assert image.shape[1] == 1950 and 600 < image.shape[0] < 2000
    for stage in ("Generate", "Grade", "Learner", "Driver"):
        assert pixels(timeline_plot.COLORS[stage]) > 500, stage
    assert (pixels(timeline_plot.RED) > 100) == (samples > 1)


def test_the_picture_brackets_the_overlap_of_each_iteration_that_has_one(tmp_path):
    rows, spans = simulate(3)
    more_rows, more_spans = simulate(4, start=T + 30)
    image, _ = draw_to(tmp_path / "two.png", rows + more_rows, spans + more_spans)
    assert brackets(image) == 2
    barrier = [r | {"grade_start": T + 10, "grade_end": T + 11} for r in rows]
    image, _ = draw_to(tmp_path / "barrier.png", barrier + more_rows, spans + more_spans)
    assert brackets(image) == 1


def brackets(image) -> int:
    """How many unbroken horizontal lines of ink, longer than any letter's, the image's busiest row of ink has."""
    ink = abs(image - matplotlib.colors.to_rgb(timeline_plot.INK)).max(axis=2) < 0.01
    runs = [[len(list(group)) for dark, group in itertools.groupby(line) if dark] for line in ink]
    return max(sum(run > 60 for run in line) for line in runs)
