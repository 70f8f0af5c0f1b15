"""Carrying over: each iteration has its number of whole groups, and every prompt is trained on once."""

import random
import threading
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raypipe.carry import CarryOver, planned, started
from raypipe.config import Config, DataConfig, GradeConfig, GraderConfig, ModelConfig, PipelineConfig, RolloutConfig
from raypipe.config import RunConfig as Run
from raypipe.config_checks import check_across


def config_of(batch: int, carry_over: float, iterations: int, n: int = 2) -> Config:
    return Config(
        run=Run(name="carry", iterations=iterations),
        model=ModelConfig(path="model"),
        data=DataConfig(train_files=["a.jsonl"], train_batch_size=batch),
        rollout=RolloutConfig(n=n, carry_over=carry_over),
        grade=GradeConfig(graders=[GraderConfig(path="a:b")]),
        pipeline=PipelineConfig(max_staleness=1, inflight_update=True),
    )


class Ranks:
    """Threads that meet in `gather`, as the ranks of a learner do."""

    def __init__(self, count: int):
        self.count, self.values = count, [None] * count
        self.barrier = threading.Barrier(count, timeout=20)

    def gather_of(self, rank: int):
        def gather(value):
            self.values[rank] = value
            self.barrier.wait()
            found = list(self.values)
            self.barrier.wait()
            return found

        return gather

    def run(self, work) -> list:
        """What work(rank, gather) returned on each."""
        found, errors = [None] * self.count, []

        def one(rank: int) -> None:
            try:
                found[rank] = work(rank, self.gather_of(rank))
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        if errors:
            raise errors[0]
        return found


class Plans:
    """Plans whose rows reach ranks in a given order, a few at each call; positions by (iteration, group_id)."""

    def __init__(self, config: Config, ranks: int, seed: int, heldout: int = 0, lost: float = 0.0):
        self.config, self.ranks, self.heldout, self.lost = config, ranks, heldout, lost
        self.random = random.Random(seed)
        self.parts: dict[int, list[list[dict]]] = {}
        self.lock = threading.Lock()

    def _make(self, iteration: int, first: int, again: list[int]) -> list[list[dict]]:
        positions = planned(self.config, iteration, first, again)
        rows = [
            {"sample_id": f"{iteration}/{g}/{m}", "iteration": iteration, "group_id": g, "position": position,
             "group_size": self.config.rollout.n, "purpose": "train"}
            for g, position in enumerate(positions) for m in range(self.config.rollout.n)
            if self.random.random() >= self.lost
        ]  # fmt: skip
        rows += [{"sample_id": f"{iteration}/h{i}", "purpose": "heldout", "group_id": 0} for i in range(self.heldout)]
        self.random.shuffle(rows)
        parts: list[list[dict]] = [[] for _ in range(self.ranks)]
        for row in rows:
            self.random.choice(parts).append(row)
        return parts

    def take(self, iteration: int, rank: int, first: int, again: list[int]):
        with self.lock:
            if iteration not in self.parts:
                self.parts[iteration] = self._make(iteration, first, again)
        rows = self.parts[iteration][rank]
        own = random.Random(f"{iteration} {rank}")

        def take(seconds: float):
            count = own.choice((0, 0, 1, 1, 2, 5))
            found = [rows.pop() for _ in range(min(count, len(rows)))]
            return found, not rows and own.random() < 0.5

        return take


def train(config: Config, ranks: int, plans: Plans, first: int = 0, again: tuple[int, ...] = (), last: int = 0):
    """By iteration the rows of all ranks, and the positions under way behind each."""

    def work(rank, gather):
        carry, found = CarryOver(config, gather, again), []
        for iteration in range(first, last or config.run.iterations):
            take = carry.taker(iteration, plans.take(iteration, rank, first, list(again)), plans.heldout > 0)
            rows, ended = [], False
            while not ended:
                news, ended = take(0.0)
                rows += news
            carry.settle()
            found.append((rows, list(carry.positions)))
        return found

    by_rank = Ranks(ranks).run(work)
    by_iteration = list(zip(*by_rank, strict=True))
    for each in by_iteration:
        assert len({tuple(positions) for _, positions in each}) == 1, "ranks differ in what is under way"
    return [([row for rows, _ in each for row in rows], each[0][1]) for each in by_iteration]


def trained_positions(rows: list[dict], config: Config) -> list[int]:
    """Of an iteration; its groups are whole, each under one number."""
    rows = [row for row in rows if row["purpose"] == "train"]
    groups: dict[int, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["group_id"], []).append(row)
    assert sorted(groups) == list(range(config.data.train_batch_size))
    assert all(len(group) == config.rollout.n for group in groups.values())
    assert all(len({row["position"] for row in group}) == 1 for group in groups.values())
    return [group[0]["position"] for group in groups.values()]


def test_the_worked_example():
    config = config_of(batch=4, carry_over=0.25, iterations=3)
    plans = [planned(config, iteration) for iteration in range(3)]
    assert plans == [[0, 1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]]


def test_without_it_an_iteration_starts_its_batch():
    config = config_of(batch=4, carry_over=0.0, iterations=3)
    assert [started(config, iteration, 0) for iteration in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_learner_that_goes_on_starts_again_what_was_under_way():
    config = config_of(batch=4, carry_over=0.25, iterations=5)
    assert started(config, 2, 0, again=[6]) == [6, 9, 10, 11, 12]
    assert planned(config, 3, first=2, again=[6]) == [13, 14, 15, 16]
    # After a run's last iteration nothing is, and one that is made longer begins as at first.
    assert started(config, 3, 0, again=[]) == [12, 13, 14, 15, 16]


@given(
    batch=st.integers(1, 6), carry_over=st.floats(0.01, 1.0), iterations=st.integers(1, 5), ranks=st.integers(1, 3),
    heldout=st.sampled_from((0, 0, 3)), seed=st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_prompt_is_trained_on_once(batch, carry_over, iterations, ranks, heldout, seed):
    config = config_of(batch, carry_over, iterations)
    found = train(config, ranks, Plans(config, ranks, seed, heldout))
    everything: Counter[int] = Counter()
    for iteration, (rows, under_way) in enumerate(found):
        positions = trained_positions(rows, config)
        everything.update(positions)
        assert sum(row["purpose"] == "heldout" for row in rows) == heldout
        age = [iteration - int(row["sample_id"].split("/")[0]) for row in rows if row["purpose"] == "train"]
        assert max(age) <= 1, "carried over twice"
        assert not set(under_way) & set(everything)
    assert everything == Counter(range(batch * iterations)) and not found[-1][1]


@given(batch=st.integers(1, 5), carry_over=st.floats(0.01, 1.0), stop=st.integers(1, 3), seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_learner_that_is_lost_trains_on_every_prompt_once(batch, carry_over, stop, seed):
    config = config_of(batch, carry_over, iterations=5)
    before = train(config, 2, Plans(config, 2, seed), last=stop)
    under_way = before[-1][1]
    after = train(config, 2, Plans(config, 2, seed + 1), first=stop, again=tuple(under_way))
    everything = Counter(position for rows, _ in before + after for position in trained_positions(rows, config))
    assert everything == Counter(range(batch * 5))


def test_groups_that_lack_samples_are_whole_when_no_more_will_come():
    config = config_of(batch=4, carry_over=0.5, iterations=4, n=3)
    found = train(config, 2, Plans(config, 2, seed=3, lost=0.4))
    positions = [row["position"] for rows, _ in found for row in rows]
    assert len(found) == 4 and not found[-1][1]
    assert max(Counter(positions).values()) <= 3 and set(positions) <= set(range(16))


def test_the_slowest_are_those_that_are_carried_over():
    config = config_of(batch=2, carry_over=0.5, iterations=2, n=1)
    order = {0: [1, 2, 0], 1: [0]}  # group ids of each plan as they come; 0 of plan 0 is the slowest

    def take_of(iteration):
        rows = [
            {"sample_id": f"{iteration}/{g}/0", "group_id": g, "group_size": 1, "purpose": "train"}
            for g in order[iteration]
        ]
        return lambda seconds: ([rows.pop(0)], not rows)

    carry, trained = CarryOver(config, lambda value: [value]), []
    for iteration in range(2):
        take, ended = carry.taker(iteration, take_of(iteration), evaluates=False), False
        while not ended:
            rows, ended = take(0.0)
            trained += [(iteration, row["sample_id"], row["group_id"]) for row in rows]
        carry.settle()
    assert trained == [(0, "0/1/0", 0), (0, "0/2/0", 1), (1, "0/0/0", 0), (1, "1/0/0", 1)]


@pytest.mark.parametrize(
    ("rollout", "pipeline", "says"),
    [
        ({}, {}, "set pipeline.max_staleness to at least 1 and pipeline.inflight_update=true"),
        ({}, {"max_staleness": 1}, "pipeline.inflight_update=false"),
        ({}, {"inflight_update": True}, "pipeline.max_staleness=0"),
        ({"overprovision": 0.5}, {"max_staleness": 1, "inflight_update": True}, "rollout.overprovision=0.5"),
        ({"reserve_prompts": 2}, {"max_staleness": 1, "inflight_update": True}, "rollout.reserve_prompts=2"),
    ],
)
def test_what_does_not_go_with_it_is_said(rollout, pipeline, says):
    config = Config(
        model=ModelConfig(path="model"),
        data=DataConfig(train_files=["a.jsonl"]),
        rollout=RolloutConfig(carry_over=0.125, **rollout),
        grade=GradeConfig(graders=[GraderConfig(path="a:b")]),
        pipeline=PipelineConfig(**pipeline),
    )
    with pytest.raises(ValueError, match=r"rollout\.carry_over=0\.125") as refused:
        check_across(config)
    assert says in str(refused.value)
