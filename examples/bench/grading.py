"""How fast finished samples are graded: raypipe's grading pool beside the ways it is usually done.

    python examples/bench/grading.py [--quick] [--samples 256] [--arrival 2.0]

256 samples arrive over about 2 s, as from an engine. For three graders and each way of calling them: seconds still
needed after the last arrival, 95th percentile of the lag from finished to graded, and CPU seconds of all processes.

    cpu       20 ms of CPU a sample
    economy   60 ms of CPU a call and 1 ms a sample: what a model, or anything with a cost per call, gains by batches
    waits     0.5 s of waiting a sample: an LLM judge, a remote sandbox

Then a hang and a segmentation fault among the 256, and how many samples a second an instant grader gets. verl's own
reward managers run too where verl is installed. All ways have two processes. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import logging
import os
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
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
            "prompt_text": "",
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


def cpu_seconds() -> float:
    """CPU time of this process and all below it, Ray's included."""
    import psutil

    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


async def measure(way: Way, texts: Sequence[str], arrival_s: float) -> dict[str, Any]:
    """Lets the samples arrive at random over `arrival_s` and tells when they were graded."""
    arrivals = sorted(random.Random(0).uniform(0, arrival_s) for _ in texts)
    await way.start()
    cpu, start = cpu_seconds(), time.perf_counter()

    async def one(text: str, arrival: float) -> tuple[str, float, float]:
        await asyncio.sleep(start + arrival - time.perf_counter())
        finished = time.perf_counter()
        return await way.grade(text), finished, time.perf_counter()

    graded = await asyncio.gather(*map(one, texts, arrivals))
    lags = [end - finished for _, finished, end in graded]
    result = {
        "after_last_s": max(end for *_, end in graded) - max(finished for _, finished, _ in graded),
        "p95_lag_s": statistics.quantiles(lags, n=20)[-1],
        "cpu_s": cpu_seconds() - cpu,
        "statuses": {status: sum(s == status for s, *_ in graded) for status in {s for s, *_ in graded}},
    }
    await way.close()
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in result.items()}


def ways(grader: str, samples: int, quick: bool, verl: bool) -> dict[str, Way]:
    if grader == "waits":
        threads: dict[str, Way] = {"64 threads": PerSample("Waits", lambda: ThreadPoolExecutor(64))}
        slow: dict[str, Way] = {
            "raypipe, sync in 2 processes": Raypipe("Waits"),
            "pool per sample": PerSample("Waits", processes),
        }
        peers: dict[str, Way] = {"verl naive, async": Verl("naive", "WaitsAsync")} if verl else {}
        return {"raypipe": Raypipe("WaitsAsync"), **threads, **peers, **({} if quick else slow)}
    name = grader.capitalize()
    peers = {f"verl {kind}": Verl(kind, name) for kind in ("naive", "remote")} if verl else {}
    return {
        "raypipe": Raypipe(name, max_batch=64 if grader == "economy" else 16),
        "pool per sample": PerSample(name, processes),
        "barrier": Barrier(name, samples),
        **peers,
    }


async def faults(samples: int, arrival_s: float, timeout_s: float) -> dict[str, Any]:
    """A hang and a crash among the samples, and for comparison the crash alone in a process pool."""
    texts = ["fine"] * samples
    texts[samples // 3], texts[samples // 2] = "segfault", "hang"
    result = await measure(Raypipe("Faulty", timeout_s=timeout_s), texts, arrival_s)
    texts[samples // 2] = "fine"
    pool = await measure(PerSample("Faulty", processes), texts, arrival_s)
    return {"raypipe": {"timeout_s": timeout_s, **result}, "pool per sample, the crash alone": pool}


async def instant(samples: int, in_flight: int = 256) -> dict[str, float]:
    """Samples a second of a grader that costs nothing, with responses of 4 KB."""
    way, permits = Raypipe("Instant"), asyncio.Semaphore(in_flight)
    await way.start()

    async def one() -> None:
        async with permits:
            await way.grade("x" * 4096)

    start = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(samples)))
    seconds = time.perf_counter() - start
    await way.close()
    return {"samples_per_s": round(samples / seconds)}


def has_verl() -> bool:
    try:
        import ray
        from verl.experimental.reward_loop.reward_manager import naive, remote  # noqa: F401
    except ImportError as error:
        print(f"verl's reward managers are left out: {error}")
        return False
    ray.init(num_cpus=PROCESSES, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    return True


def show(title: str, rows: dict[str, dict[str, Any]]) -> None:
    print(f"\n{title}\n{'':34}{'after last, s':>14}{'p95 lag, s':>12}{'CPU, s':>9}  statuses")
    for name, row in rows.items():
        numbers = f"{row['after_last_s']:14.2f}{row['p95_lag_s']:12.2f}{row['cpu_s']:9.1f}"
        print(f"{name:34}{numbers}  {row['statuses']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="leave out what takes a minute by design")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--arrival", type=float, default=2.0, help="seconds over which the samples arrive")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds a sample may take, for the hang")
    args = parser.parse_args()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(work)

    verl = has_verl()
    results: dict[str, Any] = {}
    for grader in ("cpu", "economy", "waits"):
        results[grader] = {
            name: run(measure(way, ["fine"] * args.samples, args.arrival))
            for name, way in ways(grader, args.samples, args.quick, verl).items()
        }
        show(f"{grader}: {args.samples} samples over {args.arrival:g} s", results[grader])
    results["faults"] = run(faults(args.samples, args.arrival, args.timeout))
    show(f"one hang and one crash, timeout_s {args.timeout:g}", results["faults"])
    results["instant"] = run(instant(2000 if args.quick else 10_000))
    print(f"\ninstant grader: {results['instant']['samples_per_s']} samples/s\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
