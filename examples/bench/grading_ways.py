"""Three graders for `grading.py`, and the ways of calling them that it compares.

cpu       20 ms of CPU a sample
economy   60 ms of CPU a call and 1 ms a sample: what a model, or anything with a cost per call, gains by batches
waits     0.5 s of waiting a sample: an LLM judge, a remote sandbox
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

PROCESSES = 2
WAIT_S = 0.5


def burn(seconds: float) -> None:
    """Uses so much CPU time, however busy the machine is."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Cpu:
    def __call__(self, *, solution_strs: Sequence[str], **_: Any) -> list[float]:
        burn(0.020 * len(solution_strs))
        return [1.0] * len(solution_strs)


class Economy:
    def __call__(self, *, solution_strs: Sequence[str], **_: Any) -> list[float]:
        burn(0.060 + 0.001 * len(solution_strs))
        return [1.0] * len(solution_strs)


class Waits:
    def __call__(self, *, solution_strs: Sequence[str], **_: Any) -> list[float]:
        time.sleep(WAIT_S * len(solution_strs))
        return [1.0] * len(solution_strs)


class WaitsAsync:
    async def __call__(self, *, solution_strs: Sequence[str], **_: Any) -> list[float]:
        await asyncio.sleep(WAIT_S)
        return [1.0] * len(solution_strs)


class Instant:
    def __call__(self, *, solution_strs: Sequence[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in solution_strs]


class Faulty:
    """5 ms a sample, a hang, a segmentation fault."""

    def __call__(self, *, solution_strs: Sequence[str], **_: Any) -> list[float]:
        for text in solution_strs:
            if text == "hang":
                time.sleep(3600)
            if text == "segfault":
                import ctypes

                ctypes.string_at(0)
            burn(0.005)
        return [1.0] * len(solution_strs)


def call_one(name: str, text: str) -> float:
    return globals()[name]()(solution_strs=[text])[0]


def call_many(name: str, texts: list[str]) -> list[float]:
    return globals()[name]()(solution_strs=texts)


class Way(Protocol):
    """One way of calling a grader."""

    async def start(self) -> None: ...

    async def grade(self, text: str) -> str:
        """The status of a sample: "ok", or what was wrong."""
        ...

    async def close(self) -> None: ...


class Raypipe:
    def __init__(self, grader: str, **options: Any):
        from raypipe.grading.pool import GradingPool

        self.count = 0
        spec = {"path": f"{os.path.abspath(__file__)}:{grader}", **options}
        self.pool = GradingPool([spec], processes=PROCESSES, async_concurrency=256)

    async def start(self) -> None:
        await self.pool.start()
        await asyncio.gather(*(self.grade("warm up") for _ in range(2 * PROCESSES)))

    async def grade(self, text: str) -> str:
        self.count += 1
        row: dict[str, Any] = {
            "sample_id": str(self.count),
            "data_source": "bench",
            "prompt": '""',
            "prompt_text": "",
            "response_ids": [],
            "response_text": text,
        }
        row |= {"response_length": len(text), "ground_truth": "null", "extra_info": "{}"}
        return str((await self.pool.grade(row))["grade_status"])

    async def close(self) -> None:
        await self.pool.close()


class PerSample:
    """Each sample goes to an executor as it arrives."""

    def __init__(self, grader: str, executor: Callable[[], Executor]):
        self.grader, self.make = grader, executor

    async def start(self) -> None:
        self.executor = self.make()
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self.executor, time.sleep, 0.1) for _ in range(PROCESSES)))

    async def grade(self, text: str) -> str:
        try:
            await asyncio.get_running_loop().run_in_executor(self.executor, call_one, self.grader, text)
        except BrokenProcessPool:
            return "BrokenProcessPool"
        return "ok"

    async def close(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)


class Barrier(PerSample):
    """Waits for all samples, then one batch for each process."""

    def __init__(self, grader: str, samples: int):
        super().__init__(grader, processes)
        self.samples = samples
        self.waiting: list[tuple[str, asyncio.Future[str]]] = []

    async def grade(self, text: str) -> str:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        self.waiting.append((text, done))
        if len(self.waiting) == self.samples:
            share = -(-self.samples // PROCESSES)
            parts = [self.waiting[i : i + share] for i in range(0, self.samples, share)]
            await asyncio.gather(*map(self._run, parts))
        return await done

    async def _run(self, part: list[tuple[str, asyncio.Future[str]]]) -> None:
        texts = [text for text, _ in part]
        await asyncio.get_running_loop().run_in_executor(self.executor, call_many, self.grader, texts)
        for _, done in part:
            done.set_result("ok")


class Verl:
    """verl's reward managers, given one sample at a time as its agent loop does."""

    def __init__(self, kind: str, grader: str):
        self.kind, self.grader = kind, grader

    async def start(self) -> None:
        import numpy as np
        import torch
        from omegaconf import OmegaConf
        from verl import DataProto  # type: ignore[import-not-found]
        from verl.experimental.reward_loop.reward_manager import naive, remote  # type: ignore[import-not-found]

        score = verl_score_async if self.grader == "WaitsAsync" else VERL_SCORES[self.grader]
        manager = {"naive": naive.NaiveRewardManager, "remote": remote.RemoteRewardManager}[self.kind]
        config = OmegaConf.create({"reward": {"num_workers": PROCESSES}})
        self.manager = manager(config, self, score)
        ids = torch.zeros(1, 8, dtype=torch.long)
        extra = {"data_source": "bench", "reward_model": {"ground_truth": ""}, "extra_info": {}}
        self.item = DataProto.from_dict(
            {"responses": ids, "attention_mask": torch.ones_like(ids)},
            {key: np.array([value], dtype=object) for key, value in extra.items()},
        )
        await asyncio.gather(*(self.grade("") for _ in range(PROCESSES)))

    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        """Stands for the tokenizer."""
        return ""

    async def grade(self, text: str) -> str:
        await self.manager.run_single(self.item)
        return "ok"

    async def close(self) -> None:
        if self.kind == "remote":
            import ray

            for worker in self.manager.reward_worker:
                ray.kill(worker)


def verl_cpu(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return Cpu()(solution_strs=[solution_str])[0]


def verl_economy(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return Economy()(solution_strs=[solution_str])[0]


async def verl_score_async(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    await asyncio.sleep(WAIT_S)
    return 1.0


VERL_SCORES = {"Cpu": verl_cpu, "Economy": verl_economy}


def processes() -> Executor:
    return ProcessPoolExecutor(PROCESSES)
