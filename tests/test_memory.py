"""What processes hold, by kind."""

import multiprocessing
import os
import sys
import time

import numpy as np
import psutil
import pytest
import ray

from raypipe.memory import GIB, MemoryWatch, kind_of, object_store_bytes, own_bytes, tree_bytes

MIB = 2**20


@pytest.mark.parametrize(
    "title, kind",
    [
        ("ray::run/engine-0:VLLMEngine.__init__", "engine"),
        ("ray::VLLMEngine", "engine"),
        ("ray::RayTrainWorker.execute", "learner"),
        ("ray::MapWorker(MapBatches(Grade)).submit", "stages"),
        ("ray::SplitCoordinator.get", "stages"),
        ("ray::run/plans:PlanServer.__init__", "plans"),
        ("ray::GraderHost", "grader_host"),
        ("ray::IDLE", "idle"),
        ("ray::DashboardAgent", "ray"),
        ("ray::SomeoneElse(Scorer)", "ray"),
    ],
)
def test_kinds_follow_from_titles(title, kind):
    assert kind_of([title])[0] == kind


def test_other_processes_are_of_the_kind_above_them():
    assert kind_of(["VLLM::EngineCore"]) is None and kind_of([]) is None and kind_of(["/bin/python", "x.py"]) is None


def hold(bytes_, ready):
    held = np.ones(bytes_, np.uint8)
    ready.set()
    time.sleep(600)
    del held


def hold_in_a_child(bytes_, ready):
    child = multiprocessing.get_context("spawn").Process(target=hold, args=(bytes_, ready), daemon=True)
    child.start()
    child.join()


def test_a_tree_counts_each_process_and_what_it_holds_alone():
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    root = context.Process(target=hold_in_a_child, args=(200 * MIB, ready))
    root.start()
    processes = [psutil.Process(root.pid)]
    try:
        assert ready.wait(60)
        processes += processes[0].children(recursive=True)
        (held,), alone = map(sum, tree_bytes(processes[0]).values()), own_bytes(processes[0])
    finally:
        for process in reversed(processes):
            process.kill()
        root.join()
    assert 200 * MIB <= held - alone < 500 * MIB
    with pytest.raises(psutil.Error):
        own_bytes(psutil.Process(root.pid))


class Scorer:
    """By its name a scorer; holds memory of its own, in a child too, and in the object store."""

    def hold(self, bytes_: int) -> int:
        self.held = np.ones(bytes_, np.uint8)
        return os.getpid()

    def put(self, bytes_: int) -> None:
        self.ref = ray.put(np.ones(bytes_, np.uint8))

    def start_child(self, bytes_: int) -> None:
        import subprocess

        code = f"held = bytearray(b'1') * {bytes_}; print(flush=True); import time; time.sleep(600)"
        self.child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        self.child.stdout.readline()


def test_the_metrics_of_a_session_show_who_holds_what(ray_session):
    watch = MemoryWatch()
    scorer = ray.remote(Scorer).options(num_cpus=0).remote()
    ray.get(scorer.hold.remote(1))
    before = watch.read()
    assert before.keys() >= {"memory/driver_gib", "memory/ray_gib", "memory/scorer_gib", "memory/object_store_gib"}
    ray.get([scorer.hold.remote(300 * MIB), scorer.start_child.remote(100 * MIB), scorer.put.remote(64 * MIB)])
    begin = time.perf_counter()
    after = watch.read()
    assert time.perf_counter() - begin < 5
    grown = {name: (after[name] - before.get(name, 0.0)) * GIB / MIB for name in after}
    assert 400 <= grown["memory/scorer_gib"] < 500
    assert 64 <= grown["memory/object_store_gib"] < 80
    assert abs(grown["memory/driver_gib"]) < 50
    processes = [metrics["memory/scorer_processes"] for metrics in (before, after)]
    assert processes == [1, 2] and after["memory/driver_processes"] == 1
    ray.kill(scorer)
    deadline = time.monotonic() + 60
    while object_store_bytes() > 60 * MIB or watch.read().get("memory/scorer_processes"):
        assert time.monotonic() < deadline, "what a dead actor held is still counted"
        time.sleep(0.1)
    for probe in watch.probes.values():
        ray.kill(probe)
