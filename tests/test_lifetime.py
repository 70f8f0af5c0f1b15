"""Processes of an engine end with the engine's actor, whatever killed it; real processes, no vLLM."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from raypipe.engines.lifetime import ENGINE_PID

WORKER = """
import time
from raypipe.engines.lifetime import die_with_engine
die_with_engine()
print("up", flush=True)
time.sleep(600)
"""
# An EngineCore that runs its worker in a process of its own, as with tensor parallelism.
CORE = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {WORKER!r}])
time.sleep(600)
"""
ENGINE = f"""
import os, subprocess, sys
os.environ["{ENGINE_PID}"] = str(os.getpid())
subprocess.Popen([sys.executable, "-c", sys.argv[1]]).wait()
"""


def wait_until(condition, what: str):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("child, processes", [(WORKER, 1), (CORE, 2)], ids=["worker in the core", "worker below it"])
def test_all_processes_end_when_the_engine_is_killed(child, processes):
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, child], stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None and engine.stdout.readline() == "up\n"
    children = psutil.Process(engine.pid).children(recursive=True)
    assert len(children) == processes
    engine.kill()
    engine.wait()
    try:
        wait_until(lambda: all(map(ended, children)), "children of the killed engine still run")
    finally:
        for process in children:
            if not ended(process):
                process.kill()


def test_a_process_that_starts_after_its_engine_died_ends_at_once():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    late = subprocess.run(
        [sys.executable, "-c", WORKER], env=os.environ | {ENGINE_PID: str(gone.pid)}, capture_output=True, timeout=60
    )
    assert late.returncode == -9 and late.stdout == b""
