"""How fast finished samples are graded: raypipe's grading pool beside the ways it is usually done.

    python examples/bench/grading.py [--quick] [--samples 256] [--arrival 2.0]

256 samples arrive over about 2 s, as from an engine. For three graders and each way of calling them: seconds still
needed after the last arrival, 95th percentile of the lag from finished to graded, and CPU seconds of all processes.

    cpu       20 ms of CPU a sample
    economy   60 ms of CPU a call and 1 ms a sample: what a model, or anything with a cost per call, gains by batches
    waits     0.5 s of waiting a sample: an LLM judge, a remote sandbox

Then a hang and a segmentation fault among the 256, and how many samples a second an instant grader gets: from the
queue's front to its processes and back, and through a whole Ray Data plan. verl's own reward managers run too where
verl is installed. All ways have two processes. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import logging
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grading_ways
from grading_ways import PROCESSES, Barrier, PerSample, Raypipe, Verl, Way, processes

ROUNDS = 3  # where the ways are near to each other


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
    seeded = random.Random(0)
    arrivals = sorted(seeded.uniform(0, arrival_s) for _ in texts)
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


async def _measure_all(ways: dict[str, Way], samples: int, arrival_s: float) -> dict[str, dict[str, Any]]:
    return {name: await measure(way, ["fine"] * samples, arrival_s) for name, way in ways.items()}


def measure_rounds(rounds: int, ways: Callable[[], dict[str, Way]], samples: int, arrival_s: float) -> dict[str, Any]:
    """Each way once a round, so that whatever else the machine does meets all alike: the round with the median time."""
    results = [asyncio.run(_measure_all(ways(), samples, arrival_s)) for _ in range(rounds)]
    return {
        name: sorted((result[name] for result in results), key=lambda row: row["after_last_s"])[rounds // 2]
        for name in results[0]
    }


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


def through_plan(samples: int, per_block: int) -> dict[str, float]:
    """The same through a Ray Data plan, from the first call to the last; blocks of so many samples."""
    from raypipe.config import Config, GradeConfig, GraderConfig, RunConfig
    from raypipe.grade import grade_rows

    graders = [GraderConfig(path=f"{grading_ways.__file__}:Instant")]
    config = Config(run=RunConfig(name="bench"), grade=GradeConfig(graders=graders, processes=PROCESSES))
    sample = {"data_source": "bench", "prompt_text": "", "response_text": "x" * 4096, "ground_truth": "null"}
    sample["extra_info"] = "{}"
    graded = grade_rows(config, [sample | {"sample_id": str(i), "group_id": i} for i in range(samples)], per_block)
    seconds = max(row["grade_end"] for row in graded) - min(row["grade_start"] for row in graded)
    return {"samples_per_s": round(samples / seconds), "samples_per_block": per_block}


def has_verl() -> bool:
    try:
        import ray
        from verl.experimental.reward_loop.reward_manager import naive, remote  # noqa: F401
    except ImportError as error:
        print(f"verl's reward managers are left out: {error}")
        return False
    ray.init(
        address="local", num_cpus=PROCESSES, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
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

    results: dict[str, Any] = {}
    results["instant"] = asyncio.run(instant(2000 if args.quick else 10_000))
    results["plan"] = [through_plan(blocks * size, size) for blocks, size in ((500, 1), (250, 8))]
    verl = has_verl()
    for grader in ("cpu", "economy", "waits"):
        rounds = ROUNDS if grader == "cpu" else 1
        makers = partial(ways, grader, args.samples, args.quick, verl)
        results[grader] = measure_rounds(rounds, makers, args.samples, args.arrival)
        show(f"{grader}: {args.samples} samples over {args.arrival:g} s, median of {rounds}", results[grader])
    results["faults"] = asyncio.run(faults(args.samples, args.arrival, args.timeout))
    show(f"one hang and one crash, timeout_s {args.timeout:g}", results["faults"])
    print(f"\ninstant grader: {results['instant']['samples_per_s']} samples/s")
    for row in results["plan"]:
        print(f"through a plan, blocks of {row['samples_per_block']}: {row['samples_per_s']} samples/s")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
