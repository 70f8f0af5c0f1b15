"""The watchdog: no state in which a run waits in silence.

In: what has been done so far, as the driver sees it, and what each resident actor says of its work. Out: after
`watchdog.stall_s` without any progress, a text that says who does what, for which samples, since when and where in the
code; after `watchdog.fail_s`, the end of the run. An actor that does not even answer is ended, so that Ray starts it
again and its samples are done anew: what it held was repeatable from the start.
"""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ray

# Seconds that an actor has to say what it does.
ANSWER_S = 10.0
# Frames that are shown of a stack, the innermost.
FRAMES = 12


class Watch:
    """Time since anything moved. Pure but for the clock.

    Args:
        stall_s: seconds without progress after which, and from then on as often, `is_due` says so.
        clock: seconds from any start.
    """

    def __init__(self, stall_s: float, clock: Callable[[], float] = time.monotonic):
        self.stall_s, self.clock = stall_s, clock
        self.marker: Any = None
        self.moved = self.told = clock()

    def still(self, marker: Any) -> float:
        """Seconds since `marker`, whatever shows progress, was last another than before."""
        now = self.clock()
        if marker != self.marker:
            self.marker, self.moved, self.told = marker, now, now
        return now - self.moved

    def is_due(self) -> bool:
        """Whether a stall is to be told of now; once each `stall_s`."""
        due = self.clock() - self.told >= self.stall_s
        if due:
            self.told = self.clock()
        return due


def ask(actors: Mapping[str, Any]) -> tuple[dict[str, list[str]], list[str]]:
    """What actors say that they do, lines by name, and the names of those that do not answer."""
    calls = {name: actor.doing.remote() for name, actor in actors.items()}
    ray.wait(list(calls.values()), num_returns=len(calls), timeout=ANSWER_S)
    said: dict[str, list[str]] = {}
    silent: list[str] = []
    for name, call in calls.items():
        try:
            said[name] = ray.get(call, timeout=0)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError):
            silent.append(name)
        except ray.exceptions.RayActorError as error:
            said[name] = [f"is dead: {error}"]
    return said, silent


def describe(
    said: Mapping[str, Iterable[str]], silent: Iterable[str], pulses: Mapping[int, Mapping[str, Any]]
) -> list[str]:
    """The lines on a stall: residents by name, then learner ranks."""
    lines = [f"{name}: {line}" for name, told in said.items() for line in told]
    lines += [f"{name}: does not answer, and is started again" for name in silent]
    for rank, pulse in sorted(pulses.items()):
        lines.append(
            f"learner-{rank}: {pulse['phase']} since {time.time() - pulse['since']:.0f} s, process {pulse['pid']} on "
            f"{pulse['node']}, heard {time.time() - pulse['at']:.0f} s ago"
        )
        lines += [f"learner-{rank}: {line}" for line in pulse.get("stacks", ())]
    return lines


def oldest(since: Mapping[str, float], count: int = 5) -> list[str]:
    """Lines on the samples that are at work longest; `since`: their start in seconds since the epoch, by id."""
    first = sorted(since.items(), key=lambda item: item[1])[:count]
    return [f"sample {sample} since {time.time() - start:.0f} s" for sample, start in first]


def stacks() -> list[str]:
    """Where each thread and asyncio task of this process is, a line each."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = [
        f"thread {names.get(ident, ident)}: {_line(traceback.extract_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no loop in this thread
        return found
    for task in tasks:
        stack = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in task.get_stack())
        found.append(f"task {task.get_name()}: {_line(stack)}")
    return found


def _line(stack: traceback.StackSummary) -> str:
    return " > ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in stack[-FRAMES:])
