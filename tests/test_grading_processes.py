"""Grader processes: start, replacement, isolation, and what is left when they or their parent are gone."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest
from test_grading_faults import FAULTY, Bench, mark, marked, sample, until  # noqa: F401

from raypipe.grading import keeper, watch
from raypipe.grading.namespaces import permitted_namespaces
from raypipe.grading.pool import GradingPool
from raypipe.grading.process import GraderStartError


@pytest.fixture
def pool_of(mark):  # noqa: F811
    """Builds pools that end with the test, with every process of theirs."""
    made = []

    def build(*graders, **options):
        made.append(Bench(mark, *graders, **options))
        return made[-1]

    yield build
    for bench in made:
        bench.close()
    assert not marked(mark)


def grader(class_name, **options):
    return {"path": f"{FAULTY}:{class_name}", **options}


def values(row):
    (entry,) = json.loads(row["grades"])
    return entry["values"]


def test_tokens_that_nobody_has_counted_are_left_out(pool_of):
    bench = pool_of(grader("Seen"))
    for response, known in (("text", False), ("", True)):
        seen = values(*bench.grade(response, response_ids=[], response_length=0))
        assert set(seen["extra_info"]) == {"prompt", "prompt_text"} | (
            {"response_ids", "response_length"} if known else set()
        )


def test_a_grader_is_called_with_the_contract_in_a_process_with_one_thread_a_library(pool_of):
    bench = pool_of(grader("Seen", kwargs={"unit": "marks"}))
    seen = values(*bench.grade("6*7 = 42", data_source="gsm8k", ground_truth='"42"', extra_info='{"index": 3}'))
    assert seen["pid"] != os.getpid()
    del seen["pid"]
    assert seen == {
        "data_source": "gsm8k", "solution_str": "6*7 = 42", "ground_truth": "42", "unit": "marks", "batch": 1,
        "extra_info": {
            "prompt": "?", "prompt_text": "<?>", "response_ids": [7] * 7, "response_length": 7, "index": 3,
        },
    }  # fmt: skip


def test_text_of_any_kind_arrives_unchanged(pool_of):
    text = "\ud800 half a pair, \0, \u2028, 𝒳, " + "long " * 100_000
    assert pool_of(grader("Length")).grade(text)[0]["score"] == len(text)


def test_bad_json_marks_its_sample_only(pool_of):
    bench = pool_of(grader("Length"))
    rows = [sample("abc", i, ground_truth="{" if i == 1 else "1") for i in range(3)]
    graded = bench.run(asyncio.wait_for(_all(bench, rows), 20))
    assert [row["grade_status"] for row in graded] == ["ok", "error", "ok"]


async def _all(bench, rows):
    return await asyncio.gather(*map(bench.pool.grade, rows))


def test_one_hang_and_one_segfault_among_many_cost_two_samples_and_no_more_time_than_the_hang(pool_of):
    timeout_s = 3.0
    bench = pool_of(grader("Faulty", timeout_s=timeout_s))
    bench.grade(*["fine"] * 32)  # what calls take is known
    texts = ["hang" if i == 100 else "segfault" if i == 50 else "fine" for i in range(256)]
    start = time.monotonic()
    graded = bench.grade(*texts)
    seconds = time.monotonic() - start
    assert [i for i, row in enumerate(graded) if (row["grade_status"], row["score"]) != ("ok", 1.0)] == [50, 100]
    assert [graded[i]["grade_status"] for i in (50, 100)] == ["crash", "timeout"]
    # A batch of 16 that is waited for like 16 samples would take 48 s; halving with full waits 15 s.
    assert timeout_s < seconds < timeout_s + 2.0


def test_a_first_call_that_loads_a_model_is_not_stopped(pool_of):
    bench = pool_of(grader("SlowStart", timeout_s=10.0))
    for _ in range(3):
        assert {row["grade_status"] for row in bench.grade(*["a"] * 16)} == {"ok"}
    assert bench.pool.stats()["kills"] == 0


def test_a_process_that_others_have_spoilt_costs_no_sample(pool_of):
    bench = pool_of(grader("Leaky", max_batch=1))
    assert {row["grade_status"] for row in bench.grade(*["a"] * 20)} == {"ok"}
    assert bench.pool.stats()["kills"] >= 6


@pytest.mark.parametrize("namespaces", [True, False])
def test_what_calls_leave_behind_ends_with_the_pool(pool_of, namespaces):
    bench = pool_of(grader("Faulty"), namespaces=namespaces)
    bench.grade("fine", "fine")
    before, ports = len(marked(bench.mark)), set(listening(bench.mark))
    assert {row["grade_status"] for row in bench.grade(*["leave_daemon", "leave_port"] * 3)} == {"ok"}
    until(lambda: len(marked(bench.mark)) >= before + 6 and len(set(listening(bench.mark)) - ports) == 3)
    # The fixture sees that the processes are gone once the pool is closed.


def listening(mark):  # noqa: F811
    pids = marked(mark)
    return [c.laddr.port for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid in pids]


def test_a_grader_that_kills_everything_it_can_kills_itself_only(pool_of):
    if not permitted_namespaces():
        pytest.skip("this kernel permits no PID namespace")
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        bench = pool_of(grader("Faulty"))
        graded = bench.grade("fine", "fine", "kill_everything", "fine")
        assert [row["grade_status"] for row in graded] == ["ok", "ok", "crash", "ok"]
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_grader_with_a_thread_is_started_anew_instead_of_copied(pool_of):
    bench = pool_of(grader("Thread"))
    assert bench.pool.processes.not_forkable == "2 threads"
    graded = bench.grade("fine", "fine", "crash", "fine")
    assert [row["grade_status"] for row in graded] == ["ok", "ok", "crash", "ok"]


def test_a_template_that_is_gone_is_built_again_and_nobody_is_blamed(pool_of, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a keeper that is killed leaves its folder
    bench = pool_of(grader("Sleep"))
    template = bench.pool.processes.template.result()

    async def kill_amid():
        task = asyncio.create_task(bench.gather(*["0.3"] * 8))
        await asyncio.sleep(0.5)
        os.kill(template.keeper.pid, signal.SIGKILL)  # with a PID namespace, all copies of it end with it
        return await task

    assert {row["grade_status"] for row in bench.run(kill_amid())} == {"ok"}
    assert bench.pool.processes.template.result() is not template or not permitted_namespaces()
    assert {row["grade_status"] for row in bench.grade(*["0"] * 8)} == {"ok"}


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "LookupError: no such model: small-judge"),
        ("exit", "exited with code 3; last output: could not read the licence"),
        ("segfault", "killed by SIGSEGV"),
        ("SystemExit", "SystemExit: wrong licence"),
        ("hang", "took more than 3 s to build"),
    ],
)
def test_a_constructor_that_fails_stops_the_start_with_its_name_and_traceback(mark, how, text):  # noqa: F811
    graders = [grader("Length"), grader("Broken", name="judge", kwargs={"how": how})]
    pool = GradingPool(graders, start_limit_s=3.0 if how == "hang" else 60.0)
    with pytest.raises(GraderStartError) as caught:
        asyncio.run(pool.start())
    assert isinstance(caught.value, ValueError)
    assert "the grader 'judge'" in str(caught.value)
    assert text in str(caught.value)
    if how == "raise":
        assert 'raise LookupError("no such model: small-judge")' in str(caught.value)
    until(lambda: not marked(mark))


def test_closing_ends_calls_in_progress(pool_of):
    bench = pool_of(grader("Faulty", timeout_s=600.0))

    async def close_amid():
        tasks = [asyncio.create_task(bench.pool.grade(sample("hang", i))) for i in range(6)]
        await asyncio.sleep(0.2)
        start = time.monotonic()
        await bench.pool.close()
        rows = await asyncio.gather(*tasks)
        return rows, time.monotonic() - start

    rows, seconds = bench.run(close_amid())
    assert {row["grade_status"] for row in rows} == {"crash"}
    assert seconds < 5.0
    until(lambda: not marked(bench.mark))


PARENT = """
import asyncio, sys
from raypipe.grading.namespaces import permitted_namespaces
from raypipe.grading.pool import GradingPool
from raypipe.grading.queue import SEEN

async def main():
    pool = GradingPool([{"path": sys.argv[1]}], namespaces=sys.argv[2] == "True")
    await pool.start()
    row = dict.fromkeys(SEEN, "") | {"prompt": "null"}
    row["response_text"] = "hang_with_daemons"
    task = asyncio.create_task(pool.grade(row))
    await asyncio.sleep(0.5)
    print("hangs", flush=True)
    await task

asyncio.run(main())
"""


@pytest.mark.parametrize("namespaces", [True, False])
def test_nothing_outlives_a_parent_that_is_killed(mark, tmp_path, namespaces):  # noqa: F811
    command = [sys.executable, "-c", PARENT, f"{FAULTY}:Faulty", str(namespaces)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"TMPDIR": str(tmp_path)})
    assert parent.stdout.readline() == b"hangs\n"
    until(lambda: len(marked(mark)) > 8)  # keepers, the template, graders and three daemons
    parent.kill()
    parent.wait()
    until(lambda: not marked(mark))
    until(lambda: not list(tmp_path.iterdir()))


def test_until_the_work_has_its_own_proc_the_machines_processes_do_not_count():
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert child.pid in keeper.processes_of_work(namespace=True)
        assert os.getppid() not in keeper.processes_of_work(namespace=True)
    finally:
        child.kill()
        child.wait()


def test_folders_of_keepers_that_were_killed_are_removed_at_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    old, new, locked = (tmp_path / f"raypipe-grader-{name}" for name in ("old", "new", "locked"))
    for folder in (old, new, locked):
        (folder / "raypipe-grader-inner").mkdir(parents=True)
    for folder in (old, locked):
        os.utime(folder, (0, 0))
    lock = keeper.lock_folder(locked)
    keeper.remove_stale_folders()
    assert sorted(tmp_path.iterdir()) == [locked, new]
    os.close(lock)
    keeper.remove_stale_folders()
    assert sorted(tmp_path.iterdir()) == [new]


def test_crash_after_crash_costs_no_memory_and_no_open_file(pool_of, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    bench = pool_of(grader("Faulty"))
    faults = ["segfault", "exit_3", "raise_value_error", "leave_file", "fine"] * 8

    def held():
        me, template = psutil.Process(), bench.pool.processes.template.result()
        rss = me.memory_info().rss
        return len(os.listdir("/proc/self/fd")), rss, len(bench.pool.processes.living), template.ended.is_set()

    bench.grade(*faults)
    files, rss, living, _ = held()
    for _ in range(4):
        bench.grade(*faults)
    assert bench.pool.stats()["kills"] > 100
    later_files, later_rss, later_living, ended = held()
    assert (later_files, later_living, ended) == (files, living, False)
    assert later_rss - rss < 2 << 20
    assert len(list(tmp_path.rglob("*"))) < 10  # a folder a process; of 40 files left behind, none of the ended ones


def test_descendants_are_found_with_and_without_the_kernels_list_of_children():
    chain = "import os, time; os.fork(); os.fork(); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", chain])
    try:
        until(lambda: len(watch.descendants(child.pid)) == 3)
        assert set(watch._descendants_by_parents(child.pid)) == set(watch.descendants(child.pid))
    finally:
        for pid in [*watch.descendants(child.pid), child.pid]:
            os.kill(pid, signal.SIGKILL)
        child.wait()
