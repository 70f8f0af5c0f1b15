"""The stages, the reserve and scripted engines in one event loop, without Ray between them: what is cut off, when."""

import asyncio
import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import ray
from test_pipeline import PROMPTS, blocks_of, config_for

from raypipe.config import Config, extra_prompts, reserve_size
from raypipe.engines.scripted import ScriptedEngine
from raypipe.reserve import Reserve
from raypipe.stages.generate import Generate
from raypipe.stages.grade import Grade


class Here:
    """An object of this process behind the interface of a Ray actor's handle."""

    def __init__(self, actor: Any):
        self.actor = actor

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            return await getattr(self.actor, name)(*args)

        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(call(*args)))


class SlowDispatcher:
    """Grades one sample after another, in order of arrival; the score is the parity of the first token."""

    def __init__(self, seconds: float):
        self.seconds, self.graded, self.lock = seconds, 0, asyncio.Lock()

    async def attach(self, *_: str) -> None:
        pass

    async def hint(self, row: dict[str, Any]) -> None:
        pass

    async def grade(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        async with self.lock:
            await asyncio.sleep(self.seconds * len(rows))
            self.graded += len(rows)
        score = {"grade_status": "ok", "grades": "[]", "grader": "host-0/0", "grade_start": 1.0, "grade_end": 2.0}
        return [score | {"score": float(row["response_ids"][0] % 2)} for row in rows]


def run_plan(config: Config, monkeypatch, grading: float = 0.0, heldout: int = 0, **engine: Any):
    """An iteration's rows, and its actors by name."""

    async def scenario() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        wanted, signal = config.data.train_batch_size, config.rollout.reserve_prompts > 0
        actors: dict[str, Any] = {
            "engine-0": ScriptedEngine("engine-0", **engine),
            "engine-1": ScriptedEngine("engine-1", **engine),
            "dispatcher": SlowDispatcher(grading),
            "reserve": Reserve(wanted, reserve_size(config), extra_prompts(config), signal),
        }
        monkeypatch.setattr(ray, "get_actor", lambda name: Here(actors[name]))
        monkeypatch.setattr(ray, "get", lambda _: None)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_actor_id=lambda: "grade-0"))
        await actors["reserve"].open("plan")
        sampling: dict[str, Any] = {purpose: {"max_tokens": 16} for purpose in ("train", "heldout")}
        generate = Generate(["engine-0", "engine-1"], "plan", sampling, "dispatcher", "reserve")
        grade = Grade("dispatcher", "plan", "reserve")

        async def through(block: pa.Table) -> pa.Table:
            return await grade(await generate(block))

        blocks = await asyncio.gather(*map(through, blocks_of(config, 0, PROMPTS[:heldout])))
        return [row for block in blocks for row in block.to_pylist()], actors

    return asyncio.run(scenario())


def with_rollout(config: Config, **rollout: Any) -> Config:
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, **rollout))


def groups_of(rows: list[dict[str, Any]], *finish_reasons: str) -> set[int]:
    return {row["group_id"] for row in rows if row["purpose"] == "train" and row["finish_reason"] in finish_reasons}


def seconds_of(row: dict[str, Any], longest: float) -> float:
    """What the scripted engine takes for a sample, from its seed."""
    draw = random.Random(row["seed"])
    tokens = draw.randint(1, 8)
    for _ in range(tokens):
        draw.randrange(1, 64)
    return draw.uniform(0, longest)


def test_the_first_groups_count_and_what_runs_of_the_others_is_aborted(monkeypatch):
    config = with_rollout(config_for("x", prompts=4, n=3, grain=0), overprovision=0.5)
    rows, actors = run_plan(config, monkeypatch, seconds=(0, 2), heldout=2)
    surplus = groups_of(rows, "surplus")
    took: dict[int, float] = {}
    for row in rows:
        if row["purpose"] == "train":
            took[row["group_id"]] = max(took.get(row["group_id"], 0), seconds_of(row, 2))
    # Four of six, the quickest; the fifth takes 0.4 s longer.
    assert sorted(took.values())[:4] == sorted(took[group] for group in set(took) - surplus)
    assert len(rows) == 6 * 3 + 2 and groups_of(rows, "stop", "length") == set(took) - surplus
    for row in rows:
        if row["group_id"] in surplus:
            assert row["grade_status"] == "abstain" and row["generate_error"] in ("", "aborted")
        else:
            assert row["grade_status"] == "ok" and row["response_ids"]
    assert any(row["generate_error"] == "aborted" for row in rows)
    assert not any(running for name in ("engine-0", "engine-1") for running in actors[name].running.values())


def test_held_out_samples_are_waited_for(monkeypatch):
    config = with_rollout(config_for("x", prompts=2, n=2, grain=0), overprovision=1.0)
    rows, _ = run_plan(config, monkeypatch, seconds=(0, 1), heldout=6)
    heldout = [row for row in rows if row["purpose"] == "heldout"]
    assert len(heldout) == 6 and {row["grade_status"] for row in heldout} == {"ok"}
    assert len(groups_of(rows, "surplus")) == 2


def test_groups_that_wait_for_a_grader_are_surplus_too(monkeypatch):
    config = with_rollout(config_for("x", prompts=3, n=2, grain=0), overprovision=3.0)
    rows, actors = run_plan(config, monkeypatch, grading=0.02)
    assert len(groups_of(rows, "surplus")) == 9 and len(groups_of(rows, "stop", "length")) == 3
    assert actors["dispatcher"].graded == 6  # the plan ended without the other 18


@pytest.mark.parametrize("reserve", [0, 4])
def test_with_dynamic_sampling_it_is_groups_with_signal_that_are_enough(monkeypatch, reserve):
    config = with_rollout(config_for("x", prompts=4, n=2, grain=0), overprovision=0.5, reserve_prompts=reserve)
    rows, _ = run_plan(config, monkeypatch, seconds=(0, 1))
    kept: dict[int, set[float]] = {}
    for row in rows:
        if row["finish_reason"] in ("stop", "length"):
            kept.setdefault(row["group_id"], set()).add(row["score"])
    if not reserve:
        assert len(kept) == 4 and groups_of(rows, "unused") == set()
        return
    useful = sum(len(scores) > 1 for scores in kept.values())
    assert useful == 4 or not groups_of(rows, "unused", "surplus")
    assert useful <= 4 and len(rows) == 2 * (4 + 2 + reserve)


def test_dynamic_sampling_alone_cuts_nothing_off(monkeypatch):
    config = with_rollout(config_for("x", prompts=4, n=2, grain=1), reserve_prompts=3)
    rows, _ = run_plan(config, monkeypatch, seconds=(0, 0.5))
    assert groups_of(rows, "surplus") == set() and set(range(4)) <= groups_of(rows, "stop", "length")
