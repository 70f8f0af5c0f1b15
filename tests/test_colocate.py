"""Engines and learner by turns: who gets which GPU, and the order of every call. What sleep does to a GPU is vLLM's."""

import ast
import dataclasses
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import ray
import torch
from tiny_models import tiny_model

from raypipe import colocate
from raypipe.colocate import Turns, check_places
from raypipe.config import Config, EngineConfig, PipelineConfig, TrainConfig
from raypipe.engines.vllm import MAX_CONCURRENCY, VLLMEngine
from raypipe.engines.vllm_config import weight_transfer
from raypipe.engines.weight_store import start_store
from raypipe.learner import Learner
from raypipe.placement import Node
from raypipe.resources import Machine, demands, missing
from raypipe.streaming import Spans
from raypipe.targets import why_not_streaming
from raypipe.weights import WeightPublisher

COLOCATED = Config(
    engine=EngineConfig(count=2, tensor_parallel_size=2),
    train=TrainConfig(ranks=4),
    pipeline=PipelineConfig(colocate=True),
)


# -- who gets what -----------------------------------------------------------------------------------------------------


def machine(gpus: int) -> Machine:
    return Machine((Node(64, gpus),), local=True)


def test_engines_and_ranks_ask_for_the_same_gpus():
    asked = {demand.actor: demand for demand in demands(COLOCATED, machine(4))}
    assert (asked["engine"].gpus, asked["learner rank"].gpus) == (1.5, 0.25)
    assert missing(list(asked.values()), machine(4)) == []
    assert missing(list(asked.values()), machine(3)) != []
    without = {demand.actor: demand.gpus for demand in demands(COLOCATED, machine(0))}
    assert without["engine"] == without["learner rank"] == 0


def test_a_scorer_keeps_a_gpu_of_its_own():
    config = dataclasses.replace(COLOCATED, algorithm=dataclasses.replace(COLOCATED.algorithm, kl_coef=0.1))
    asked = {demand.actor: demand.gpus for demand in demands(config, machine(5))}
    assert asked["scorer"] == 1


def test_weights_do_not_go_by_nccl_and_the_learner_waits_for_the_last_row():
    assert weight_transfer(COLOCATED, gpus=True) == "object_store"
    assert "take turns" in why_not_streaming(COLOCATED)


def test_ranks_must_sit_on_the_engines_gpus_one_to_one():
    engines = [{"node": "a", "gpus": ["0", "1"]}, {"node": "b", "gpus": ["3"]}]
    check_places([("b", "3"), ("a", "1"), ("a", "0")], engines)
    check_places([], [{"node": "a", "gpus": []}])  # a machine without GPUs
    for ranks in ([("a", "0"), ("a", "1"), ("b", "2")], [("a", "0"), ("a", "0"), ("b", "3")], [("a", "0"), ("a", "1")]):
        with pytest.raises(RuntimeError, match="pipeline.colocate: learner ranks are on the GPUs"):
            check_places(ranks, engines)


PLACEMENT = """
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from raypipe.colocate import assigned_gpus, place_engine
from raypipe.config import Config, EngineConfig
from raypipe.resources import RANK_SHARE
ray.init(address="local", num_cpus=32, num_gpus=6, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
config = Config(engine=EngineConfig(count=3, tensor_parallel_size=2))
engines = [place_engine(config)[1] for _ in range(3)]
# As Ray Train places ranks, after the engines.
ranks = placement_group([{"GPU": RANK_SHARE, "CPU": 1}] * 6, strategy="PACK")
assert ranks.wait(60)
place = lambda i: PlacementGroupSchedulingStrategy(ranks, i)
found = [assigned_gpus.options(num_gpus=RANK_SHARE, scheduling_strategy=place(i)).remote() for i in range(6)]
print([engines, ray.get(found)])
"""


def test_ray_pairs_each_engine_gpu_with_one_rank():
    """On six GPUs that are only counted."""
    done = subprocess.run([sys.executable, "-c", PLACEMENT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    engines, ranks = ast.literal_eval(done.stdout.splitlines()[-1])
    gpus = {str(i) for i in range(6)}
    assert [len(engine) for engine in engines] == [2, 2, 2] and {gpu for engine in engines for gpu in engine} == gpus
    assert [len(rank) for rank in ranks] == [1] * 6 and {gpu for rank in ranks for gpu in rank} == gpus


# -- the order of calls ------------------------------------------------------------------------------------------------


class RecordedLLM:
    """Stands where vLLM stands, and writes down what it is asked; `generate` fails, once it is reached."""

    errored = False
    model_config = SimpleNamespace(dtype=torch.float32)
    vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type="recorded"))

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def update_weight_version(self, version: str) -> None:
        self.calls.append(f"version {version}")

    async def sleep(self, level: int, mode: str) -> None:
        self.calls.append(f"sleep {level} {mode}")

    async def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {' '.join(tags)}")

    async def start_weight_update(self) -> None:
        self.calls.append("start update")

    async def update_weights(self, request: object) -> None:
        if self.calls[-1] != "weights":
            self.calls.append("weights")

    async def finish_weight_update(self, version: str = "") -> None:
        self.calls.append(f"finish update {version}")

    async def reset_prefix_cache(self) -> bool:
        self.calls.append("reset prefix cache")
        return True

    async def generate(self, *_: object):
        self.calls.append("generate")
        raise RuntimeError("recorded")
        yield


@ray.remote
class RecordedEngine(VLLMEngine):
    """A real engine actor over a recorded vLLM."""

    def __init__(self, config: Config, store: str):
        from vllm.v1.engine.async_llm import AsyncLLM

        AsyncLLM.from_engine_args = classmethod(lambda cls, args: RecordedLLM())  # type: ignore[method-assign]
        super().__init__("engine-0", config, store)

    async def calls(self) -> list[str]:
        return self.llm.calls


def until(condition, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def engine(ray_session, tmp_path_factory):
    from tiny_models import save_model

    folder = save_model(tiny_model(), tmp_path_factory.mktemp("model"))
    config = dataclasses.replace(COLOCATED, model=dataclasses.replace(COLOCATED.model, path=str(folder)))
    start_store("colocate/weights")
    actor = RecordedEngine.options(num_cpus=0, max_concurrency=MAX_CONCURRENCY).remote(config, "colocate/weights")
    ray.get(actor.ready.remote(), timeout=300)
    yield actor
    ray.kill(actor)


def request(sample_id: str, min_version: int) -> dict:
    return {"sample_id": sample_id, "plan": "plan", "prompt_ids": [1], "min_version": min_version, "seed": 0}


def test_a_turn_is_rows_sleep_training_room_for_weights_weights_room_for_the_cache_and_the_gate(engine):
    calls = lambda: ray.get(engine.calls.remote())  # noqa: E731
    turns = Turns([engine], 0, lambda value: [value])
    before = calls()
    turns.sleep_engines()
    assert calls()[len(before) :] == ["sleep 2 wait"]
    # While the learner trains: neither a request for the next weights nor one for those of before gets to vLLM.
    held = [engine.generate.remote(request(f"{version}", version)) for version in (0, 1)]
    until(lambda: ray.get(engine.stats.remote())["waiting"] == 2)
    turns.make_room()
    WeightPublisher(bucket_bytes=10_000).publish(tiny_model(), 1, [engine])
    answers = ray.get(held, timeout=60)
    assert all("recorded" in answer["generate_error"] for answer in answers)  # vLLM has seen them
    assert calls()[len(before) + 1 :] == [
        "wake weights", "start update", "weights", "finish update 1", "wake kv_cache", "generate", "generate",
    ]  # fmt: skip


def test_a_learner_that_comes_back_wakes_the_engine_that_the_last_one_left_half_awake(engine):
    version = ray.get(engine.ready.remote())["version"]
    ray.get(engine.sleep.remote())
    ray.get(engine.sleep.remote())  # once is enough
    ray.get(engine.start_update.remote())
    before = ray.get(engine.calls.remote())
    WeightPublisher().publish(tiny_model(), version + 1, [engine])
    after = ray.get(engine.calls.remote())[len(before) :]
    # vLLM takes no notice of a second wake-up.
    assert after[:3] == ["wake weights", "finish update ", "start update"]
    assert after[-2:] == [f"finish update {version + 1}", "wake kv_cache"]
    assert before.count("sleep 2 wait") == 2  # one here and one in the test before
    assert ray.get(engine.ready.remote())["version"] == version + 1
    # Awake, an update is as without colocation.
    WeightPublisher().publish(tiny_model(), version + 2, [engine])
    last = ray.get(engine.calls.remote())[-4:]
    assert last == ["start update", "weights", f"finish update {version + 2}", "reset prefix cache"]


class RowsAreIn(Exception):
    """Ends a rank where it would begin to train."""


def test_engines_sleep_once_and_only_when_every_rank_has_its_last_row(ray_session, monkeypatch):
    slept: list[str] = []
    monkeypatch.setattr(colocate, "Engines", lambda handles: SimpleNamespace(call=slept.append))
    barrier, values, last_row = threading.Barrier(2), [None, None], threading.Event()
    waited: list[int] = []

    def gather_as(rank: int):
        def gather(value):
            values[rank] = value
            barrier.wait(30)
            found = list(values)
            barrier.wait(30)
            return found

        return gather

    def take_as(rank: int):
        def take(seconds: float):
            if rank == 1 and not last_row.wait(0.05):
                waited.append(rank)
                return [], False
            return [{"rank": rank}], True

        return take

    def run(rank: int) -> None:
        learner = object.__new__(Learner)
        learner.gather, learner.stopping = gather_as(rank), lambda: False
        turns = Turns([], rank, learner.gather)

        def sleep_and_end() -> None:
            turns.sleep_engines()
            raise RowsAreIn

        learner.rows_are_in = sleep_and_end
        with pytest.raises(RowsAreIn):
            learner.wait_and_train(take_as(rank), Spans())

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in ranks:
        thread.start()
    until(lambda: len(waited) > 3)
    assert slept == []  # rank 0 has its last row, rank 1 not
    last_row.set()
    for thread in ranks:
        thread.join(30)
    assert slept == ["sleep"] and not any(thread.is_alive() for thread in ranks)
