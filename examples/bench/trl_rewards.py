"""The reward functions of `against_trl.py`, in TRL's form. raypipe calls the very same functions.

Each scores a completion by how many different characters it has, so that advantages differ from 0, after

    instant      nothing
    waits        0.2 s of waiting, all completions at the same time (asyncio)
    waits_pool   0.2 s of waiting, 16 completions at a time (threads)
    sandbox      0.5 to 5 s of waiting, long-tailed: half take under 0.82 s, one in 25 takes 5 s (asyncio)
    cpu          20 ms of CPU, one after the other
    cpu_pool     20 ms of CPU, in as many processes as raypipe's graders have
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import cache
from typing import Any

WAIT_S, SHORTEST_S, LONGEST_S, CPU_S = 0.2, 0.5, 5.0, 0.020
THREADS, PROCESSES = 16, 2
Completions = list[Any]


def score(completion: Any) -> float:
    return len(set(text_of(completion))) / 64


def text_of(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


def sandbox_s(completion: Any) -> float:
    """What this completion would take, a Pareto distribution cut off at LONGEST_S."""
    draw = int.from_bytes(hashlib.sha256(text_of(completion).encode()).digest()[:6], "big") / 2**48
    return min(LONGEST_S, SHORTEST_S * (1 - draw) ** -0.7)


def burn(completion: Any) -> float:
    """Uses so much CPU time, however busy the machine is."""
    end = time.thread_time() + CPU_S
    while time.thread_time() < end:
        pass
    return score(completion)


def wait(completion: Any) -> float:
    time.sleep(WAIT_S)
    return score(completion)


@cache
def threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS)


@cache
def processes() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(PROCESSES)


def instant(prompts: list[Any], completions: Completions, **_: Any) -> list[float]:
    return list(map(score, completions))


async def waits(prompts: list[Any], completions: Completions, **_: Any) -> list[float]:
    await asyncio.sleep(WAIT_S)
    return list(map(score, completions))


def waits_pool(prompts: list[Any], completions: Completions, **_: Any) -> list[float]:
    return list(threads().map(wait, completions))


async def sandbox(prompts: list[Any], completions: Completions, **_: Any) -> list[float]:
    async def one(completion: Any) -> float:
        await asyncio.sleep(sandbox_s(completion))
        return score(completion)

    return list(await asyncio.gather(*map(one, completions)))


def cpu(prompts: list[Any], completions: Completions, **_: Any) -> list[float]:
    return list(map(burn, completions))


def cpu_pool(prompts: list[Any], completions: Completions, **_: Any) -> list[float]:
    return list(processes().map(burn, completions))


# By name: TRL's function, and the one that raypipe is given. Its Grade stage has processes of its own, so the plain
# loop is all that it needs.
REWARDS: dict[str, tuple[Callable[..., Any], str]] = {
    "instant": (instant, "instant"),
    "waits": (waits, "waits"),
    "waits_pool": (waits_pool, "waits_pool"),
    "sandbox": (sandbox, "sandbox"),
    "cpu": (cpu, "cpu"),
    "cpu_pool": (cpu_pool, "cpu"),
}
