"""The plan on real Ray Data: streaming, nothing lost, early start behind the gate, engines that outlive plans."""

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray.data._internal.execution import streaming_executor_state
from ray.data._internal.execution.interfaces.op_runtime_metrics import OpRuntimeMetrics

from raypipe import pipeline
from raypipe.carry import CarryOver, planned
from raypipe.config import (
    Config,
    DataConfig,
    EvalConfig,
    GradeConfig,
    GraderConfig,
    ModelConfig,
    PipelineConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from raypipe.engines.scripted import LongTail
from raypipe.plans import iteration_blocks, iteration_size, reserve_order, sample_seed
from raypipe.prompts import Prompt, PromptOrder
from raypipe.rows import GENERATE_COLUMNS, GRADE_COLUMNS, PROMPT_COLUMNS, check_columns
from raypipe.scripted import scripted_run

PROMPTS = [Prompt(f"p{i}", "toy", f'"q{i}"', f"q{i}", [1, 2], '"1"', "{}") for i in range(10)]


# For what goes on while a plan is read.
READER = ThreadPoolExecutor(1)


def config_for(name: str, prompts: int = 4, n: int = 4, ranks: int = 1, iterations: int = 3, grain: int = 1) -> Config:
    return Config(
        run=RunConfig(name=name, iterations=iterations),
        model=ModelConfig(path="scripted"),
        data=DataConfig(train_files=["toy.jsonl"], train_batch_size=prompts),
        rollout=RolloutConfig(n=n, max_response_length=16, samples_per_block=grain),
        grade=GradeConfig(graders=[GraderConfig(path="toy_graders:FirstTokenGrader")], processes=1),
        train=TrainConfig(ranks=ranks),
    )


# -- pure --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["raypipe.engines.vllm", "raypipe.scorer", "raypipe.grading.dispatcher"])
def test_looking_an_actor_up_by_its_name_does_not_import_torch(module):
    # Ray imports the actor's class for it, in every process of every plan.
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_the_executor_still_has_the_wait_that_is_shortened():
    # In a process of its own: a plan that ran in this one may have left another wait.
    module = "ray.data._internal.execution.streaming_executor_state"
    code = f"import {module} as m; print(m.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert float(found) == pipeline.RAY_WAIT_S


def test_the_executor_waits_less_while_blocks_move(monkeypatch):
    """An operator's counts are set by hand, one turn of the executor after the other, and what the turn took."""
    assert {"num_tasks_submitted", "num_task_outputs_generated"} <= set(OpRuntimeMetrics.__dataclass_fields__)

    def wait_after(seconds: float, submitted: int, generated: int, spent: float = 0.0) -> float:
        clock[0] += seconds
        cpu[0] += spent
        metrics = SimpleNamespace(num_tasks_submitted=submitted, num_task_outputs_generated=generated)
        callback.on_execution_step(SimpleNamespace(_topology=[SimpleNamespace(metrics=metrics)]))
        return streaming_executor_state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S

    clock, cpu, callback = [100.0], [0.0], pipeline.ShortWait()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "thread_time", lambda: cpu[0])
    monkeypatch.setattr(streaming_executor_state, "WAIT_FOR_TASK_COMPLETION_TIMEOUT_S", pipeline.RAY_WAIT_S)
    turns = [(0, 0, 0), (0, 3, 0), (0.9, 3, 0), (0.2, 3, 0), (9.0, 3, 1), (1.1, 3, 1)]
    waits = [wait_after(seconds * pipeline.STILL_S, *counts) for seconds, *counts in turns]
    long, short = pipeline.RAY_WAIT_S, pipeline.SHORT_WAIT_S
    assert waits == [long, short, short, long, short, long]
    # With many blocks in flight a turn takes long, and the executor rests longer, but never longer than Ray's own.
    assert wait_after(0.01, 4, 1, spent=0.006) == pytest.approx(pipeline.REST * 0.006)
    assert wait_after(0.01, 5, 1, spent=0.5) == long
    assert wait_after(0.01, 6, 1, spent=0.0001) == short


def test_scripted_lengths_have_a_long_tail():
    tail, draw = LongTail(median=100, sigma=0.8, most=1000), random.Random(0)
    drawn = sorted(tail(draw) for _ in range(20_000))
    assert drawn[10_000] == pytest.approx(100, rel=0.03) and drawn[-1] == 1000
    assert sum(value > 300 for value in drawn) / 20_000 == pytest.approx(0.085, abs=0.01)  # ln 3 / 0.8 = 1.37 sigma
    assert sum(drawn) / 20_000 == pytest.approx(tail.mean, rel=0.03)


def blocks_of(config: Config, iteration: int, heldout: list[Prompt] = []):  # noqa: B006
    order = PromptOrder(len(PROMPTS), config.data.train_batch_size, config.run.seed, shuffle=True)
    reserve = reserve_order(config, len(PROMPTS))
    return iteration_blocks(config, iteration, planned(config, iteration), order, reserve, PROMPTS, heldout)


def test_an_iteration_is_blocks_of_one_prompt():
    blocks = blocks_of(config_for("x", prompts=3, n=6, grain=2), 1)
    assert [len(block) for block in blocks] == [2] * 9
    rows = [row for block in blocks for row in block.to_pylist()]
    assert [row["sample_id"] for row in rows] == [f"1/{group}/{member}" for group in range(3) for member in range(6)]
    assert all(len(set(block["prompt_id"].to_pylist())) == 1 for block in blocks)
    assert len({row["seed"] for row in rows}) == 18
    assert {row["min_version"] for row in rows} == {1} and {row["group_size"] for row in rows} == {6}
    check_columns(blocks[0], PROMPT_COLUMNS, "test")
    # By default of all its samples.
    assert [len(block) for block in blocks_of(config_for("x", prompts=3, n=6, grain=0), 1)] == [6] * 3


def test_an_iteration_is_the_same_whenever_it_is_made_again():
    config = config_for("x")
    assert blocks_of(config, 2) == blocks_of(config, 2) != blocks_of(config, 1)


def test_seeds_depend_on_the_run_and_the_sample():
    assert sample_seed(0, "1/2/3") == sample_seed(0, "1/2/3")
    assert len({sample_seed(seed, sample) for seed in (0, 1) for sample in ("1/2/3", "1/2/4")}) == 4


def test_held_out_prompts_come_first_last_and_every_n_iterations():
    config = config_for("x", iterations=5)
    config = Config(**{**vars(config), "eval": EvalConfig(every=2)})
    counts = [
        Counter(row["purpose"] for block in blocks_of(config, i, PROMPTS[:2]) for row in block.to_pylist())
        for i in range(6)
    ]
    assert [count["heldout"] for count in counts] == [2, 0, 2, 0, 2, 2]
    assert [count["train"] for count in counts] == [16] * 5 + [0]


def test_the_reserve_has_an_order_of_its_own():
    plain = config_for("x", prompts=3, n=2)
    config = dataclasses.replace(plain, rollout=dataclasses.replace(plain.rollout, reserve_prompts=2))
    rows = [row for block in blocks_of(config, 0, PROMPTS[:1]) for row in block.to_pylist()]
    assert [row["reserve"] for row in rows] == [-1] * 6 + [0, 0, 1, 1] + [-1]
    assert [row["group_id"] for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    ordinary = [row for block in blocks_of(plain, 0) for row in block.to_pylist()]
    assert [row["prompt_id"] for row in rows[:6]] == [row["prompt_id"] for row in ordinary]


def test_each_held_out_prompt_is_sampled_eval_n_times():
    config = config_for("x")
    config = Config(**{**vars(config), "eval": EvalConfig(n=3, temperature=1.0)})
    rows = [row for block in blocks_of(config, 0, PROMPTS[:2]) for row in block.to_pylist()]
    held = [row for row in rows if row["purpose"] == "heldout"]
    assert [row["member"] for row in held] == [0, 1, 2] * 2 and {row["group_size"] for row in held} == {3}
    assert len({row["seed"] for row in held}) == 6 and len({row["group_id"] for row in rows}) == 4 + 2
    assert iteration_size(config, 0, 2) == len(rows)


def test_a_stage_names_the_column_that_is_missing():
    block = blocks_of(config_for("x"), 0)[0].drop_columns(["seed"])
    with pytest.raises(ValueError, match=r"Generate reads the columns \['seed'\]"):
        check_columns(block, PROMPT_COLUMNS, "Generate")


# -- on Ray ------------------------------------------------------------------------------------------------------------


def test_prompts_without_signal_are_replaced_from_the_reserve(ray_session):
    plain = config_for("reserve", prompts=6, n=2, iterations=1)
    config = dataclasses.replace(plain, rollout=dataclasses.replace(plain.rollout, reserve_prompts=5))
    with scripted_run(config, seconds=(0.0, 0.2)) as run:
        [rows] = run.rows([run.feed()], 0)
        groups: dict[int, set[float]] = {}
        for row in rows:
            groups.setdefault(row["group_id"], set()).add(row["score"])
        useful = sum(len(scores) > 1 for scores in groups.values())
        reserve = {row["reserve"] for row in rows} - {-1}
        assert len(rows) == 2 * len(groups) and {row["finish_reason"] for row in rows} <= {"stop", "length"}
        assert reserve == set(range(len(reserve)))  # used in order
        assert len(groups) == 6 + len(reserve)
        # Each prompt without signal brought in another, as long as there were some.
        assert len(reserve) == min(5, len(groups) - useful) and useful <= 6
        assert useful == 6 or len(reserve) == 5
        assert len(reserve) > 0  # or the seed shows nothing


def test_the_slowest_groups_are_cut_off_once_there_are_enough(ray_session):
    plain = config_for("enough", prompts=6, n=2, iterations=2, grain=0)
    config = dataclasses.replace(plain, rollout=dataclasses.replace(plain.rollout, overprovision=0.4))
    with scripted_run(config, heldout=3, seconds=(0.3, 5.0)) as run:
        feed = run.feed()
        for iteration in range(2):
            [rows] = run.rows([feed], iteration)
            train = [row for row in rows if row["purpose"] == "train"]
            assert Counter(row["purpose"] for row in rows) == Counter(train=9 * 2, heldout=0 if iteration else 3)
            surplus = {row["group_id"] for row in train if row["finish_reason"] == "surplus"}
            kept = [row for row in train if row["group_id"] not in surplus]
            # Exactly as many as are trained on, each whole; of the others not one sample counts.
            assert len(surplus) == 3 and Counter(row["group_id"] for row in kept).total() == 12
            assert {row["finish_reason"] for row in kept} <= {"stop", "length"}
            assert {row["grade_status"] for row in kept} == {"ok"}
            assert {row["grade_status"] for row in train if row["group_id"] in surplus} == {"abstain"}
            # The engine ended what ran of them; but held-out samples are waited for.
            ended = [row for row in train if row["generate_error"] == "aborted"]
            assert ended and {row["group_id"] for row in ended} <= surplus
            assert all(row["response_ids"] for row in rows if row["group_id"] not in surplus)
            run.open_gates(iteration + 1)


def test_what_is_under_way_at_the_end_of_an_iteration_is_trained_on_in_the_next(ray_session):
    plain = config_for("carry", prompts=6, n=2, iterations=3, grain=0)
    config = dataclasses.replace(
        plain,
        rollout=dataclasses.replace(plain.rollout, carry_over=0.4),
        pipeline=dataclasses.replace(plain.pipeline, max_staleness=1, inflight_update=True),
    )
    with scripted_run(config, prompts=64, seconds=(0.2, 3.0)) as run:
        feed, carry = run.feed(), CarryOver(config, lambda value: [value])
        trained: list[list[dict]] = []
        for iteration in range(3):
            take, rows, ended = carry.taker(iteration, feed.taker(iteration), evaluates=False), [], False
            while not ended:
                news, ended = take(60.0)
                rows += news
            carry.settle()
            assert Counter(row["group_id"] for row in rows) == dict.fromkeys(range(6), 2)
            assert {row["grade_status"] for row in rows} == {"ok"}
            carried = [row for row in rows if row["iteration"] < iteration]
            assert len(carried) == (6 if iteration else 0) and len(carry.positions) == (3 if iteration < 2 else 0)
            assert all(min(row["weight_versions"]) >= iteration - 1 for row in rows)
            if carried:  # they were the last of their plan, and nobody waited for them
                in_time = [row for row in trained[-1] if row["iteration"] == iteration - 1]
                assert max(row["generate_end"] for row in carried) > max(row["generate_end"] for row in in_time)
            trained.append(rows)
            run.open_gates(iteration + 1)
            ray.get(run.server.report.remote(0, iteration, 0, {"rows": rows, "metrics": {}}))
        prompts = Counter(row["prompt_id"] for rows in trained for row in rows)
        assert len(prompts) == 18 and set(prompts.values()) == {2}
        # A learner that goes on from two iterations has what was under way then started anew, and goes on behind it.
        attempt = ray.get(run.server.begin.remote())
        ray.get(run.server.starts_at.remote(attempt, 2, [11, 3]))
        rows = [row for block in run.feed(attempt=attempt).rows(2) for row in block]
        order = PromptOrder(64, 6, config.run.seed, shuffle=True)
        wanted = {f"p{order.at(position)}" for position in (11, 3, 14, 15, 16, 17)}
        assert len(rows) == 12 and {row["prompt_id"] for row in rows} == wanted


def test_groups_that_wait_for_a_slow_grader_are_cut_off_too(ray_session):
    plain = config_for("graded", prompts=4, n=2, iterations=1, grain=0)
    graders = [GraderConfig(path="toy_graders:SlowGrader", max_batch=1)]
    config = dataclasses.replace(
        plain,
        rollout=dataclasses.replace(plain.rollout, overprovision=20.0),
        grade=GradeConfig(graders=graders, processes=1),
    )
    with scripted_run(config) as run:
        [rows] = run.rows([run.feed()], 0)
        graded = ray.get(run.dispatcher.stats.remote())["graded"]
        kept = [row for row in rows if row["finish_reason"] != "surplus"]
        assert len(rows) == 84 * 2 and len(kept) == 8 and {row["grade_status"] for row in kept} == {"ok"}
        assert graded < len(rows)


def test_samples_stream_one_by_one_and_none_is_lost(ray_session):
    config = config_for("stream", prompts=6, n=4, iterations=2)
    with scripted_run(config, engines=2, seconds=(0.2, 4.0)) as run:
        feed = run.feed()
        processes = {stat["pid"] for stat in ray.get([engine.stats.remote() for engine in run.engines])}
        for iteration in range(2):
            [rows] = run.rows([feed], iteration)
            assert sorted(row["sample_id"] for row in rows) == sorted(
                f"{iteration}/{group}/{member}" for group in range(6) for member in range(4)
            )
            assert set(rows[0]) >= {*PROMPT_COLUMNS, *GENERATE_COLUMNS, *GRADE_COLUMNS}
            assert {row["grade_status"] for row in rows} == {"ok"}
            assert all(row["score"] == row["response_ids"][0] % 2 for row in rows)
            assert all(set(row["weight_versions"]) == {iteration} for row in rows)
            # Grading starts, and the learner has its first sample, before the last one is generated.
            last = max(row["generate_end"] for row in rows)
            assert min(row["grade_start"] for row in rows) < last
            if iteration:  # the first plan's Grade stage may still be starting
                assert min(row["received"] for row in rows) < last
            assert {row["engine"] for row in rows} == {"engine-0", "engine-1"}
            by_group = {row["group_id"]: set() for row in rows}
            for row in rows:
                by_group[row["group_id"]].add(row["engine"])
            assert all(len(engines) == 1 for engines in by_group.values()), "a prompt's samples share an engine"
            run.open_gates(iteration + 1)
        # Engines start once in a run: the same processes have served all plans.
        stats = ray.get([engine.stats.remote() for engine in run.engines])
        assert sum(stat["served"] for stat in stats) == 48
        assert {stat["pid"] for stat in stats} == processes and len(processes) == 2


def test_a_sample_is_graded_at_once_though_its_block_is_a_group(ray_session):
    config = config_for("grain", prompts=3, n=4, iterations=1, grain=4)
    with scripted_run(config, seconds=(0.1, 2.5)) as run:
        [rows] = run.rows([run.feed()], 0)
        last = {group: max(row["generate_end"] for row in rows if row["group_id"] == group) for group in range(3)}
        early = [row for row in rows if last[row["group_id"]] - row["generate_end"] > 0.5]
        assert early and all(row["grade_end"] < last[row["group_id"]] for row in early)
        assert len({row["sample_id"] for row in rows}) == 12 and {row["grade_status"] for row in rows} == {"ok"}
        # By hint and by block, each was graded once.
        assert ray.get(run.dispatcher.stats.remote())["graded"] == 12


def test_lost_hints_cost_nothing_but_time(ray_session):
    config = config_for("lost", prompts=3, n=4, iterations=1, grain=4)
    with scripted_run(config, seconds=(0.5, 2.0)) as run:
        reading = READER.submit(run.rows, [run.feed()], 0)
        until(lambda: ray.get(run.dispatcher.stats.remote())["kept"] >= 3)
        os.kill(ray.get(run.dispatcher.stats.remote())["pid"], signal.SIGKILL)  # and what hints had told it
        [rows] = reading.result()
        assert len({row["sample_id"] for row in rows}) == 12
        assert {row["grade_status"] for row in rows} == {"ok"}
        assert all(row["score"] == row["response_ids"][0] % 2 for row in rows)


def test_a_stage_that_dies_has_no_sample_graded_twice(ray_session):
    config = config_for("rerun", prompts=3, n=4, iterations=1, grain=4)
    with scripted_run(config, seconds=(0.5, 3.0)) as run:
        reading = READER.submit(run.rows, [run.feed()], 0)
        until(lambda: ray.get(run.dispatcher.stats.remote())["kept"] >= 3)
        [stage] = [
            process
            for process in psutil.Process().children(recursive=True)
            if "MapBatches(Generate)" in " ".join(process.cmdline())
        ]
        stage.kill()
        [rows] = reading.result()
        assert sorted(row["sample_id"] for row in rows) == sorted(f"0/{g}/{m}" for g in range(3) for m in range(4))
        assert {row["grade_status"] for row in rows} == {"ok"}
        stats = ray.get(run.dispatcher.stats.remote())
        assert (stats["graded"], stats["kept"]) == (12, 12)


def test_many_hosts_of_a_fixed_number_cost_a_plan_one_grade_actor(ray_session):
    config = config_for("fixed", prompts=3, n=4, iterations=1, grain=4)
    config = dataclasses.replace(config, grade=dataclasses.replace(config.grade, workers="3"))
    with scripted_run(config, seconds=(0.5, 2.0)) as run:
        reading = READER.submit(run.rows, [run.feed()], 0)
        until(lambda: ray.get(run.dispatcher.stats.remote())["kept"] >= 3)
        titles = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
        assert sum("MapBatches(Grade)" in title for title in titles) == 1
        [rows] = reading.result()
        assert {row["grade_status"] for row in rows} == {"ok"} and len(rows) == 12
        assert {row["grader"].partition("/")[0] for row in rows} <= {"host-0", "host-1", "host-2"}
        assert ray.get(run.dispatcher.stats.remote())["hosts"] == 3


def test_a_plan_that_is_over_or_abandoned_is_forgotten(ray_session):
    config = config_for("forget", prompts=2, n=2, iterations=2)
    with scripted_run(config, seconds=(0.0, 0.1)) as run:
        kept = lambda: ray.get(run.dispatcher.stats.remote())["kept"]  # noqa: E731
        run.rows([run.feed()], 0)
        assert kept() == 4
        attempt = ray.get(run.server.begin.remote())  # the learner group has started again
        until(lambda: kept() == 0)
        run.rows([run.feed(attempt=attempt)], 0)
        until(lambda: kept() == 4)
        ray.get(run.server.report.remote(attempt, 0, 0, {"rows": []}))
        until(lambda: kept() == 0)


def until(condition, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def dead_sockets() -> int:
    """Sockets of this process that the kernel knows no connection of any more."""
    alive = {
        word
        for table in ("tcp", "tcp6", "udp", "udp6", "unix", "netlink")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()
        for word in line.split()
    }
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum(link.startswith("socket:[") and link[8:-1] not in alive for link in found)


def stage_classes() -> int:
    """Classes of stage actors that Ray's GCS keeps."""
    gcs = ray._private.worker.global_worker.gcs_client
    return sum(b"MapWorker(" in gcs.internal_kv_get(key, b"fun") for key in gcs.internal_kv_keys(b"ActorClass", b"fun"))


def test_plans_that_are_over_leave_no_thread_connection_or_class_behind(ray_session):
    with scripted_run(config_for("threads", prompts=2, n=2, iterations=4)) as run:
        feed, threads, sockets = run.feed(), set(threading.enumerate()), dead_sockets()
        classes = stage_classes()
        run.open_gates(4)
        for iteration in range(4):
            (rows,) = run.rows([feed], iteration)
            assert len(rows) == 4
            ray.get(run.server.report.remote(0, iteration, 0, {"rows": rows}))
        until(lambda: set(threading.enumerate()) <= threads)
        # Of the first three: the last one's blocks are still held.
        until(lambda: dead_sockets() <= sockets + 1)
        assert stage_classes() <= classes


def test_the_next_plan_waits_at_the_gate(ray_session):
    config = config_for("gate", prompts=4, n=4, iterations=2)
    with scripted_run(config, seconds=(0.05, 0.3)) as run:
        feed = run.feed()
        run.rows([feed], 0)
        until(lambda: ray.get(run.engines[0].stats.remote())["waiting"] == 16)
        opened = time.time()
        run.open_gates(1)
        [rows] = run.rows([feed], 1)
        first = min(row["generate_start"] for row in rows) - opened
        assert 0 <= first < 0.3, f"{first} s from open gate to the first running request"


def test_with_staleness_requests_pass_the_gate_earlier(ray_session):
    config = config_for("stale", iterations=2)
    config = Config(**{**vars(config), "pipeline": PipelineConfig(max_staleness=1)})
    with scripted_run(config) as run:
        feed = run.feed()
        run.rows([feed], 0)
        [rows] = run.rows([feed], 1)  # no gate was opened
        assert {version for row in rows for version in row["weight_versions"]} == {0}


@pytest.mark.parametrize(("prompts", "n", "grain", "iterations"), [(13, 1, 1, 1), (1, 3, 1, 1), (5, 4, 2, 2)])
def test_two_ranks_get_every_sample_once(ray_session, prompts, n, grain, iterations):
    config = config_for(f"ranks-{prompts}-{n}", prompts=prompts, n=n, ranks=2, iterations=iterations, grain=grain)
    with scripted_run(config, seconds=(0.0, 0.2)) as run:
        feeds = [run.feed(0), run.feed(1)]
        for iteration in range(iterations):
            parts = run.rows(feeds, iteration)
            ids = [row["sample_id"] for part in parts for row in part]
            assert sorted(ids) == sorted(f"{iteration}/{g}/{m}" for g in range(prompts) for m in range(n))
            run.open_gates(iteration + 1)


def test_held_out_samples_travel_in_the_same_plan(ray_session):
    config = config_for("heldout", prompts=2, n=2, iterations=1)
    with scripted_run(config, heldout=3) as run:
        feed = run.feed()
        [rows] = run.rows([feed], 0)
        assert Counter(row["purpose"] for row in rows) == {"train": 4, "heldout": 3}
        run.open_gates(1)
        [rows] = run.rows([feed], 1)
        assert Counter(row["purpose"] for row in rows) == {"heldout": 3}
        assert {version for row in rows for version in row["weight_versions"]} == {1}


def test_a_restarted_group_gets_a_plan_of_its_own_and_the_old_one_is_aborted(ray_session):
    config = config_for("again", prompts=2, n=2, iterations=1)
    with scripted_run(config, seconds=(0.0, 0.1)) as run:
        run.rows([run.feed()], 0)
        # The plan of iteration 1 (there is only iteration 0 to train) never opens its gate; a new attempt starts over.
        assert ray.get(run.server.begin.remote()) == 1
        [rows] = run.rows([run.feed(attempt=1)], 0)
        assert sorted(row["sample_id"] for row in rows) == ["0/0/0", "0/0/1", "0/1/0", "0/1/1"]


def test_an_engine_that_dies_is_left_for_another(ray_session):
    config = config_for("death", prompts=4, n=4, iterations=0)
    config = Config(**{**vars(config), "run": RunConfig(name="death", iterations=1)})
    with scripted_run(config, engines=2, seconds=(1.0, 3.0)) as run:
        feed = run.feed()
        blocks = feed.rows(0)
        rows = next(blocks)
        ray.kill(run.engines[0])
        for block in blocks:
            rows += block
        assert len({row["sample_id"] for row in rows}) == 16
        assert {row["finish_reason"] for row in rows} <= {"stop", "length"}


def test_ray_data_scales_the_grader_hosts_under_load(ray_session):
    config = config_for("scale", prompts=32, n=8, iterations=1)
    graders = [GraderConfig(path="toy_graders:SlowGrader", max_batch=1)]
    config = Config(**{**vars(config), "grade": GradeConfig(graders=graders, processes=1, workers="1..3")})
    with scripted_run(config) as run:
        [rows] = run.rows([run.feed()], 0)
        assert len(rows) == 256 and {row["grade_status"] for row in rows} == {"ok"}
        until(lambda: ray.get(run.dispatcher.stats.remote())["hosts"] >= 2)  # one may still be starting
        assert ray.get(run.dispatcher.stats.remote())["hosts"] <= 3
