"""Longest expected first: only the order moves, and it is the order that ends soonest."""

import heapq
import itertools
import random
import subprocess
import sys

import pyarrow as pa
import pytest
import ray
from test_pipeline import PROMPTS, blocks_of, config_for

from raypipe.config import Config, EvalConfig, TrainConfig
from raypipe.lengths import ResponseLengths, longest_first
from raypipe.scripted import scripted_run


def finished(prompt_id: str, *lengths: int, purpose: str = "train", finish_reason: str = "stop") -> list[dict]:
    return [
        {"prompt_id": prompt_id, "purpose": purpose, "finish_reason": finish_reason, "response_ids": [1] * length}
        for length in lengths
    ]


def prompts_of(blocks: list[pa.Table]) -> list[str]:
    return [block["prompt_id"][0].as_py() for block in blocks]


def test_a_prompt_is_expected_to_take_what_it_took_last_and_an_unknown_one_the_mean():
    lengths = ResponseLengths()
    assert lengths.expected("train", "a") == 0
    lengths.add(finished("a", 10, 20) + finished("b", 100, finish_reason="length"))
    assert (lengths.expected("train", "a"), lengths.expected("train", "b")) == (15, 100)
    assert lengths.expected("train", "c") == lengths.expected("heldout", "a") == 57.5
    lengths.add(finished("a", 40))
    assert (lengths.expected("train", "a"), lengths.expected("train", "c")) == (40, 70)
    lengths.add(finished("a", 0, finish_reason="failed"))
    assert lengths.expected("train", "a") == 40


@pytest.mark.parametrize("grain", [0, 1])
def test_the_order_alone_moves(grain):
    config = config_for("x", prompts=4, n=2, grain=grain)
    blocks = blocks_of(config, 0)
    assert longest_first(blocks, ResponseLengths(), config) == blocks  # without a history
    a, b, c, d = dict.fromkeys(prompts_of(blocks))
    lengths = ResponseLengths()
    lengths.add(finished(a, 5) + finished(c, 50) + finished(d, 20))  # 25 in the mean
    moved = longest_first(blocks, lengths, config)
    assert list(dict.fromkeys(prompts_of(moved))) == [c, b, d, a]
    by_id = {block["sample_id"][0].as_py(): block for block in blocks}
    assert len(moved) == len(blocks) and all(block == by_id[block["sample_id"][0].as_py()] for block in moved)


def test_mini_batches_the_reserve_and_held_out_prompts_keep_their_places():
    config = config_for("x", prompts=4, n=2, grain=0)
    parts = {"train": TrainConfig(mini_batches=2), "eval": EvalConfig(n=1)}
    config = Config(**{**vars(config), **parts})
    object.__setattr__(config.rollout, "reserve_prompts", 2)
    heldout = PROMPTS[8:]
    blocks = blocks_of(config, 0, heldout)
    lengths = ResponseLengths()
    for position, block in enumerate(blocks):  # the later, the longer
        lengths.add(finished(block["prompt_id"][0].as_py(), 1 + position, purpose=block["purpose"][0].as_py()))
    moved = [block["group_id"][0].as_py() for block in longest_first(blocks, lengths, config)]
    assert moved == [1, 0, 3, 2, 4, 5, 7, 6]


def makespan(seconds: list[float], slots: int) -> float:
    """When the last of these, started in this order as slots become free, ends."""
    ends = [0.0] * slots
    for took in seconds:
        heapq.heappush(ends, heapq.heappop(ends) + took)
    return max(ends)


def test_a_long_tailed_iteration_ends_sooner():
    """256 prompts, 8 samples each, lengths log-normal over prompts and, less, within one; 128 run at a time."""
    draw, gains = random.Random(0), []
    for _ in range(20):
        scale = [draw.lognormvariate(0, 0.8) for _ in range(256)]
        last, now = ([[s * draw.lognormvariate(0, 0.3) for _ in range(8)] for s in scale] for _ in range(2))
        lengths = ResponseLengths()
        for i, group in enumerate(last):
            lengths.add(finished(f"p{i}", *(int(1000 * length) for length in group)))
        order = sorted(range(256), key=lambda i: -lengths.expected("train", f"p{i}"))
        plain = makespan([length for group in now for length in group], 128)
        sooner = makespan([length for i in order for length in now[i]], 128)
        assert sooner < 1.05 * max(sum(map(sum, now)) / 128, max(map(max, now)))  # the best that any order could do
        gains.append(plain / sooner)
    assert 1.25 < sum(gains) / len(gains) < 1.35


def test_the_plan_server_learns_and_the_engine_starts_the_longest_first(ray_session):
    config = config_for("longest", prompts=10, n=2, iterations=3, grain=0)
    with scripted_run(config, prompts=10, concurrency=1, tokens=(1, 15)) as run:
        feed = run.feed()
        [first] = run.rows([feed], 0)
        ray.get(run.server.report.remote(0, 0, 0, {"rows": first}))
        took: dict[str, float] = {}
        for row in first:
            took[row["prompt_id"]] = took.get(row["prompt_id"], 0) + len(row["response_ids"]) / 2
        run.open_gates(1)
        run.rows([feed], 1)  # its plan was open before the report of iteration 0
        run.open_gates(2)
        [rows] = run.rows([feed], 2)
        started = [took[row["prompt_id"]] for row in sorted(rows, key=lambda row: row["generate_start"])]
        pairs = [(a, b) for a, b in itertools.combinations(started, 2) if a != b]
        # Neighbours may pass each other on their way to the engine.
        assert len(pairs) > 100 and sum(a < b for a, b in pairs) < len(pairs) / 5, started
        assert sorted(row["sample_id"] for row in rows) == [f"2/{i // 2}/{i % 2}" for i in range(20)]


def test_the_plan_server_needs_no_torch():
    code = "import sys, raypipe.plans; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
