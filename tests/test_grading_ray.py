"""The dispatcher and its hosts on a real Ray: one queue, each row once, nothing lost when an actor dies."""

import asyncio
import itertools
import json
import os
import signal
import time
import uuid
from pathlib import Path

import pyarrow as pa
import pytest
import ray
from test_grading_faults import FAULTY, sample, until

from raypipe.config import GradeConfig, GraderConfig
from raypipe.grading.dispatcher import start_dispatcher
from raypipe.rows import GRADE_COLUMNS

LIMIT_S = 90.0
# Tells the grader processes of one test from all others'.
MEMORY_MB = itertools.count(4000 + os.getpid() % 1000 * 100)


@pytest.fixture
def dispatch(ray_session):
    """Starts dispatchers that end with the test and leave no process behind."""
    yield from dispatchers()


@pytest.fixture(scope="module")
def shared(ray_session):
    """A dispatcher for several tests, with one grader for each data source of the same name."""
    starts = dispatchers()
    names = {
        "Length": {},
        "Sleep": {"kwargs": {"fixed": 0.2}},
        "Seen": {},
        "Spread": {"scope": "group"},
        "Faulty": {"timeout_s": 2.0},
    }
    options = {"timeout_s": 20.0}
    yield next(starts)(*({"path": name, "data_sources": [name], **options, **more} for name, more in names.items()))
    next(starts, None)


def dispatchers():
    made = []
    memory_mb = next(MEMORY_MB)

    def start(*graders, hosts=(1, 1), cpus=1, **options):
        specs = [GraderConfig(**{**spec, "path": f"{FAULTY}:{spec['path']}"}) for spec in graders]
        config = GradeConfig(graders=specs, processes=2, memory_mb=memory_mb, **options)
        made.append(start_dispatcher(config, hosts, run_name=uuid.uuid4().hex, cpus_per_host=cpus))
        get(made[-1].start.remote())
        assert grader_processes(memory_mb)
        return made[-1]

    start.memory_mb = memory_mb
    yield start
    for dispatcher in made:
        get(dispatcher.close.remote())
        ray.kill(dispatcher)
    until(lambda: not grader_processes(memory_mb))


def grader_processes(memory_mb):
    """Ids of keepers, templates and graders: all bear the command line of the first, in which their limit stands."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if b"raypipe.grading.child" in command and f'"memory_mb": {memory_mb},'.encode() in command:
            found.add(int(path.parent.name))
    return found


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def get(refs):
    return ray.get(refs, timeout=LIMIT_S)


def rows_of(*responses, **columns):
    return [sample(text, index, **columns) for index, text in enumerate(responses)]


def statuses(graded):
    return [row["grade_status"] for row in graded]


def test_rows_get_the_columns_of_grade_in_their_order(shared):
    graded = get(shared.grade.remote(rows_of("a", "bcd", "", data_source="Length", iteration=1)))
    assert [row["score"] for row in graded] == [1.0, 3.0, 0.0]
    table = pa.Table.from_pylist(graded, pa.schema(GRADE_COLUMNS))
    assert set(graded[0]) == set(table.column_names)
    assert all(row["grade_start"] <= row["grade_end"] <= time.time() for row in graded)
    assert graded[0]["grader"].startswith("host-0/")


def test_blocks_of_many_callers_form_common_batches(shared):
    refs = [shared.grade.remote([sample("0", i, data_source="Sleep", iteration=2)]) for i in range(64)]
    assert {status for graded in get(refs) for status in statuses(graded)} == {"ok"}
    batches = get(shared.stats.remote())["graders"]["Sleep"]["batches"]
    assert sum(batches.values()) < 20
    assert max(batches) > 4


def test_a_row_that_is_asked_for_again_is_graded_once_until_it_is_forgotten(shared):
    (row,) = rows_of("once", data_source="Seen", plan="plan-7")
    first, second = get([shared.grade.remote([row]), shared.grade.remote([row])])
    third = get(shared.grade.remote([row, row]))
    assert first == second == third[:1] == third[1:]
    get(shared.forget.remote("plan-6"))  # another plan
    assert get(shared.grade.remote([row])) == first
    assert seen(shared) == 1
    (again,) = rows_of("generated anew", data_source="Seen", plan="plan-7")
    assert get(shared.grade.remote([again])) != first
    assert seen(shared) == 2


def seen(dispatcher):
    """Samples that the grader Seen has graded."""
    return get(dispatcher.stats.remote())["graders"]["Seen"]["statuses"].get("ok", 0)


def test_a_hint_has_a_row_graded_before_its_plan_asks(shared):
    before = seen(shared)
    rows = rows_of(*"abc", data_source="Seen", plan="plan-8")
    get(shared.hint.remote(rows[:2]))
    until(lambda: seen(shared) == before + 2, LIMIT_S)
    begin = time.time()
    graded = get(shared.grade.remote(rows))  # of the third no hint came
    assert statuses(graded) == ["ok"] * 3
    assert [row["grade_end"] < begin for row in graded] == [True, True, False]
    # A hint that comes late, or while the row is graded, changes nothing.
    (last,) = rows_of("d", data_source="Seen", plan="plan-8", group_id=9)
    *_, (alone,) = get([shared.hint.remote([rows[2]]), shared.hint.remote([last]), shared.grade.remote([last])])
    assert get(shared.grade.remote(rows)) == graded and alone["grade_status"] == "ok"
    assert seen(shared) == before + 4


def test_nothing_is_kept_of_a_plan_that_is_forgotten(shared):
    before, kept = seen(shared), get(shared.stats.remote())["kept"]
    (row,) = rows_of("x", data_source="Seen", plan="plan-9")
    (half,) = rows_of("y", data_source="Spread", plan="plan-9", group_size=2)
    get([shared.hint.remote([half]), shared.grade.remote([row])])
    assert get(shared.stats.remote())["kept"] == kept + 2
    get(shared.forget.remote("plan-9"))
    # Stragglers: nobody waits for what they would bring.
    get([shared.hint.remote([row]), shared.hint.remote([half])])
    assert statuses(get(shared.grade.remote([row, half]))) == ["error"] * 2
    assert get(shared.stats.remote())["kept"] == kept
    assert seen(shared) == before + 1


def test_members_of_a_group_may_come_from_different_blocks(shared):
    refs = [
        shared.grade.remote([sample(text, i, group_id=5, group_size=3, data_source="Spread", iteration=3)])
        for i, text in enumerate("cab")
    ]
    assert [graded[0]["score"] for graded in get(refs)] == [2.0, 0.0, 1.0]


def test_a_group_whose_members_hints_told_of_is_graded_before_its_plan_asks(shared):
    rows = [
        sample(text, i, group_id=6, group_size=3, data_source="Spread", plan="plan-10") for i, text in enumerate("cab")
    ]
    before = get(shared.stats.remote())["graded"]
    get(shared.hint.remote(rows))
    until(lambda: get(shared.stats.remote())["graded"] == before + 3, LIMIT_S)
    assert [row["score"] for row in get(shared.grade.remote(rows))] == [2.0, 0.0, 1.0]
    assert get(shared.stats.remote())["graded"] == before + 3


def test_faults_mark_the_guilty_only(shared):
    texts = ["fine"] * 12 + ["segfault", "hang", "raise_value_error"] + ["fine"] * 12
    graded = get(shared.grade.remote(rows_of(*texts, data_source="Faulty", iteration=4)))
    assert statuses(graded) == ["ok"] * 12 + ["crash", "timeout", "error"] + ["ok"] * 12


def test_as_many_hosts_as_the_widest_plan_has_actors(dispatch):
    dispatcher = dispatch({"path": "Length"}, hosts=(1, 3))

    def slots():
        return get(dispatcher.stats.remote())["slots"]

    get(dispatcher.attach.remote("plan-0", "a"))
    get(dispatcher.attach.remote("plan-0", "a"))  # came back
    get(dispatcher.attach.remote("plan-1", "b"))  # the next plan, opened early
    assert (slots(), get(dispatcher.stats.remote())["hosts"]) == (2, 1)
    for worker in "bcde":
        get(dispatcher.attach.remote("plan-0", worker))
    until(lambda: slots() == 3 * 2, LIMIT_S)
    graded = get(dispatcher.grade.remote(rows_of(*["abc"] * 60)))
    assert {row["score"] for row in graded} == {3.0}
    assert {row["grader"].split("/")[0] for row in graded} == {"host-0", "host-1", "host-2"}


def test_a_host_for_which_there_is_no_cpu_holds_up_nothing(dispatch):
    dispatcher = dispatch({"path": "Length"}, hosts=(1, 2), cpus=5)
    get([dispatcher.attach.remote("plan-0", "a"), dispatcher.attach.remote("plan-0", "b")])
    assert statuses(get(dispatcher.grade.remote(rows_of(*["abc"] * 8)))) == ["ok"] * 8
    assert get(dispatcher.stats.remote())["hosts"] == 1


def test_a_host_that_dies_loses_no_sample_and_comes_back(dispatch):
    dispatcher = dispatch({"path": "Sleep"}, hosts=(2, 2))
    grading = grader_processes(dispatch.memory_mb)
    host = next(parent for parent in map(parent_of, grading) if parent not in grading)
    ref = dispatcher.grade.remote(rows_of(*["0.1"] * 60))
    until(lambda: get(dispatcher.stats.remote())["running"] > 0, LIMIT_S)
    os.kill(host, signal.SIGKILL)
    assert statuses(get(ref)) == ["ok"] * 60
    iteration = itertools.count(1)

    def hosts():
        rows = rows_of(*["0"] * 20, iteration=next(iteration))
        return {row["grader"].split("/")[0] for row in get(dispatcher.grade.remote(rows))}

    until(lambda: hosts() == {"host-0", "host-1"}, LIMIT_S)


def test_callers_do_not_notice_that_the_dispatcher_died(dispatch):
    dispatcher = dispatch({"path": "Sleep"})
    ref = dispatcher.grade.remote(rows_of(*["0.05"] * 40))
    until(lambda: get(dispatcher.stats.remote())["running"] > 0, LIMIT_S)
    os.kill(get(dispatcher.stats.remote())["pid"], signal.SIGKILL)
    assert statuses(get(ref)) == ["ok"] * 40


def test_a_grader_that_cannot_be_built_stops_the_start(ray_session):
    grader = GraderConfig(path=f"{FAULTY}:Broken", name="judge", kwargs={"how": "raise"})
    dispatcher = start_dispatcher(GradeConfig(graders=[grader]), (1, 1), uuid.uuid4().hex, cpus_per_host=0)
    with pytest.raises(ValueError, match="the grader 'judge' could not be built: LookupError: no such model"):
        get(dispatcher.start.remote())
    get(dispatcher.close.remote())
    ray.kill(dispatcher)


def test_the_rate_of_an_async_grader_holds_over_all_hosts(dispatch):
    starts = []

    async def serve():
        async def answer(reader, writer):
            await reader.readline()
            starts.append(time.monotonic())
            await asyncio.sleep(0.3)
            writer.write(b"1\n")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        spec = {"path": "AsyncServer", "kwargs": {"port": port}}
        dispatcher = await asyncio.to_thread(lambda: dispatch(spec, hosts=(2, 2), async_rate=20.0))
        graded = await dispatcher.grade.remote(rows_of(*"123456789"))
        server.close()
        return graded

    graded = asyncio.run(serve())
    assert {row["score"] for row in graded} == {1.0}
    assert {json.loads(row["grades"])[0]["slot"] for row in graded} == {"host-0/loop", "host-1/loop"}
    assert max(starts) - min(starts) >= 8 / 20.0 - 0.05
