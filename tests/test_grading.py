"""The queue and the columns, with slots that a test holds in its hand; and what a grader may return."""

import asyncio
import json
import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from raypipe.config import GraderConfig
from raypipe.grading import child, scores, wire
from raypipe.grading.deadlines import Pace
from raypipe.grading.queue import GradeQueue, check_data_sources
from raypipe.grading.results import Grade, Reply, combine, valid_entries


def sample(index, response="", group=None, size=1, **columns):
    group = index if group is None else group
    return {
        "sample_id": f"0/{group}/{index}", "plan": "plan-0", "iteration": 0, "group_id": group, "group_size": size,
        "data_source": "test", "prompt": '"?"', "prompt_text": "<?>", "response_text": response,
        "response_ids": [7] * 7, "response_length": 7, "ground_truth": "1", "extra_info": "{}", **columns,
    }  # fmt: skip


class HandSlot:
    """A slot whose calls wait until the test answers them, or that answers by `rule(samples)` at once."""

    def __init__(self, name="slot", rule=None):
        self.name, self.rule = name, rule
        self.calls = []
        self.limits = []
        self.answer = None

    async def call(self, grader, samples, limit_s):
        self.calls.append([row["response_text"] for row in samples])
        self.limits.append(limit_s)
        if self.rule:
            return self.rule([row["response_text"] for row in samples])
        self.answer = asyncio.get_running_loop().create_future()
        return await self.answer

    async def ready(self):
        return

    def release(self, reply=None):
        self.answer.set_result(reply or good(len(self.calls[-1])))


def good(count, score=1.0):
    return Reply("ok", [{"score": score, "values": {}}] * count)


def queue_of(*slots, graders=({"path": "g:G"},), known_s=0.01):
    """A queue of graders of which one call of `known_s` is known; 0: none."""
    specs = [GraderConfig(**grader) for grader in graders]
    queue = GradeQueue(specs, [False] * len(specs), concurrency=64, rate=0.0, retries=4)
    for lane in queue.lanes:
        lane.pace.record("ok", 1, known_s, first=True)
    for slot in slots:
        queue.add_slot(slot)
    return queue


def submit(queue, *rows):
    return [asyncio.create_task(queue.grade(row)) for row in rows]


async def settle():
    """Lets everything run that can run without waiting."""
    for _ in range(20):
        await asyncio.sleep(0)


def run(test):
    asyncio.run(asyncio.wait_for(test(), 20))


def test_a_lone_sample_is_called_at_once():
    async def test():
        slot = HandSlot()
        queue = queue_of(slot)
        (task,) = submit(queue, sample(0, "a"))
        await settle()
        assert slot.calls == [["a"]]
        slot.release()
        assert (await task)["score"] == 1.0

    run(test)


def test_what_came_while_a_slot_was_busy_is_its_next_batch():
    async def test():
        slot = HandSlot()
        queue = queue_of(slot, graders=[{"path": "g:G", "max_batch": 3}])
        tasks = submit(queue, sample(0, "a"))
        await settle()
        for i, text in enumerate("bcde", 1):  # one by one, from different prompts
            tasks += submit(queue, sample(i, text))
            await settle()
        for _ in range(3):
            slot.release()
            await settle()
        assert slot.calls == [["a"], ["b", "c", "d"], ["e"]]
        assert [row["grade_status"] for row in await asyncio.gather(*tasks)] == ["ok"] * 5
        assert queue.stats()["graders"]["G"]["batches"] == {1: 2, 3: 1}

    run(test)


def test_samples_that_come_together_spread_over_all_slots():
    async def test():
        slots = [HandSlot(), HandSlot()]
        submit(queue_of(*slots), *(sample(i, str(i)) for i in range(9)))
        await settle()
        assert [len(slot.calls[0]) for slot in slots] == [5, 2]
        slots[1].release()
        await settle()
        assert [len(call) for call in slots[1].calls] == [2, 1]
        slots[1].release()
        await settle()
        assert [len(call) for call in slots[1].calls] == [2, 1, 1]

    run(test)


def test_the_first_calls_of_all_take_one_sample_each():
    async def test():
        slots = [HandSlot(), HandSlot()]
        submit(queue_of(*slots, known_s=0.0), *(sample(i, str(i)) for i in range(9)))
        await settle()
        assert [slot.calls for slot in slots] == [[["0"]], [["1"]]]
        slots[0].release()
        await settle()
        assert slots[0].calls[1:] == [["2", "3", "4", "5"]]

    run(test)


def test_a_slow_call_holds_up_nothing_but_its_own_batch():
    async def test():
        stuck, free = HandSlot(), HandSlot(rule=lambda texts: good(len(texts)))
        tasks = submit(queue_of(stuck, free), *(sample(i, str(i)) for i in range(8)))
        await settle()
        assert len(stuck.calls[0]) == 4
        assert [task.done() for task in tasks] == [False] * 4 + [True] * 4

    run(test)


def test_batch_false_calls_one_sample_at_a_time():
    async def test():
        slot = HandSlot(rule=lambda texts: good(len(texts)))
        queue = queue_of(slot, graders=[{"path": "g:G", "batch": False, "max_batch": 16}])
        await asyncio.gather(*submit(queue, *(sample(i, str(i)) for i in range(4))))
        assert slot.calls == [["0"], ["1"], ["2"], ["3"]]

    run(test)


def test_the_line_that_waited_longest_is_served_first():
    async def test():
        slot = HandSlot()
        graders = [{"path": f"g:{name}", "data_sources": [name]} for name in ("A", "B")]
        queue = queue_of(slot, graders=graders)
        submit(queue, sample(0, "first", data_source="B"))
        await settle()
        submit(queue, sample(1, "second", data_source="A"))
        await settle()
        submit(queue, *(sample(i, "third", data_source="B") for i in (2, 3, 4)))
        await settle()
        slot.release()
        await settle()
        slot.release()
        await settle()
        assert slot.calls == [["first"], ["second"], ["third"] * 3]

    run(test)


@pytest.mark.parametrize("status", ["error", "timeout", "crash"])
def test_a_failed_call_is_repeated_one_by_one_and_only_the_guilty_is_marked(status):
    async def test():
        def rule(texts):
            failed = Reply(status, error="no", ended=status != "error")
            return failed if "bad" in texts else good(len(texts))

        slot = HandSlot(rule=rule)
        texts = ["a", "b", "bad", "c"]
        graded = await asyncio.gather(*submit(queue_of(slot), *(sample(i, text) for i, text in enumerate(texts))))
        assert [row["grade_status"] for row in graded] == ["ok", "ok", status, "ok"]
        again = [["bad"]] if status == "crash" else []  # the first time may be the doing of "a" and "b"
        assert slot.calls == [texts, ["a"], ["b"], ["bad"], *again, ["c"]]
        assert json.loads(graded[2]["grades"])[0]["error"] == "no"

    run(test)


def test_a_crash_in_a_process_that_others_used_counts_only_in_a_fresh_one():
    async def test():
        replies = iter([good(1), Reply("crash", error="spoilt", ended=True), good(1)])
        slot = HandSlot(rule=lambda texts: next(replies))
        queue = queue_of(slot)
        await queue.grade(sample(0, "a"))
        assert (await queue.grade(sample(1, "b")))["grade_status"] == "ok"
        assert slot.calls == [["a"], ["b"], ["b"]]
        replies = iter([Reply("crash", error="its own", ended=True)] * 2)
        assert (await queue.grade(sample(2, "c")))["grade_status"] == "crash"
        assert slot.calls[3:] == [["c"], ["c"]]  # the first time after "b" in the same process
        replies = iter([Reply("crash", error="its own", ended=True)])
        assert (await queue.grade(sample(3, "d")))["grade_status"] == "crash"
        assert queue.stats()["kills"] == 4

    run(test)


def test_suspects_hold_at_most_half_of_the_slots_while_others_wait():
    async def test():
        slots = [HandSlot(str(i)) for i in range(4)]
        queue = queue_of(*slots)
        submit(queue, *(sample(i, f"hang{i}") for i in range(16)))
        await settle()
        assert [len(slot.calls[0]) for slot in slots] == [4, 3, 3, 2]
        submit(queue, *(sample(i, f"fine{i}") for i in range(20, 60)))
        for slot in slots:
            slot.release(Reply("timeout", ended=True))
            await settle()
        running = [slot.calls[-1] for slot in slots]
        assert sum(len(call) == 1 and call[0].startswith("hang") for call in running) == 2
        assert sum(len(call) > 1 for call in running) == 2

    run(test)


def test_suspects_take_all_slots_when_nothing_else_waits():
    async def test():
        slots = [HandSlot(), HandSlot()]
        submit(queue_of(*slots), *(sample(i, str(i)) for i in range(4)))
        await settle()
        for slot in slots:
            slot.release(Reply("error"))
        await settle()
        assert [len(slot.calls[-1]) for slot in slots] == [1, 1]
        assert all(len(slot.calls) == 2 for slot in slots)

    run(test)


def test_a_lost_call_blames_nobody_until_it_happens_again_and_again():
    async def test():
        replies = iter([Reply("lost", ended=True), Reply("lost", ended=True), good(2)])
        slot = HandSlot(rule=lambda texts: next(replies))
        queue = queue_of(slot)
        graded = await asyncio.gather(*submit(queue, sample(0, "a"), sample(1, "b")))
        assert [row["grade_status"] for row in graded] == ["ok", "ok"]
        assert slot.calls == [["a", "b"]] * 3
        slot.rule = lambda texts: (
            Reply("lost", error="host-0 is gone", ended=True) if "bad" in texts else good(len(texts))
        )
        graded = await asyncio.gather(*submit(queue, sample(2, "a"), sample(3, "bad")))
        assert [row["grade_status"] for row in graded] == ["ok", "crash"]

    run(test)


def test_samples_end_with_a_reason_when_no_slot_comes_back():
    async def test():
        class Dead(HandSlot):
            async def ready(self):
                raise ValueError("no such model")

        slot = Dead(rule=lambda texts: Reply("crash", error="gone", ended=True))
        queue = queue_of(slot)
        rows = [sample(i, str(i)) for i in range(3)]
        graded = await asyncio.gather(*submit(queue, *rows))
        assert [row["grade_status"] for row in graded] == ["crash"] * 3
        assert "can be started any more: no such model" in graded[-1]["grades"]
        assert (await queue.grade(sample(9)))["grade_status"] == "crash"

    run(test)


def test_a_slot_that_raises_is_lost_not_the_sample():
    async def test():
        class Raises(HandSlot):
            async def call(self, grader, samples, limit_s):
                if not self.calls:
                    self.calls.append("raised")
                    raise RuntimeError("no route to host")
                return await super().call(grader, samples, limit_s)

        assert (await queue_of(Raises(rule=lambda texts: good(len(texts)))).grade(sample(0)))["grade_status"] == "ok"

    run(test)


def test_one_who_stops_waiting_does_not_disturb_the_others():
    async def test():
        slot = HandSlot()
        queue = queue_of(slot)
        first, second = submit(queue, sample(0), sample(1))
        await settle()
        first.cancel()
        await settle()
        slot.release()
        assert (await second)["grade_status"] == "ok"
        (third,) = submit(queue, sample(2))
        await settle()
        slot.release()
        assert (await third)["grade_status"] == "ok"

    run(test)


def test_a_sample_alone_gets_its_timeout_and_a_batch_what_calls_take():
    pace = Pace(timeout_s=30.0, max_batch=16)
    assert pace.limit_s(1, first=False) == pace.limit_s(16, first=False) == 30.0  # nothing is known yet
    for _ in range(20):
        pace.record("ok", 16, 0.1, first=False)
    assert pace.limit_s(16, first=False) == pytest.approx(0.5)  # twice what they take, but at least this
    assert pace.limit_s(1, first=False) == 30.0
    pace.record("ok", 1, 4.0, first=True)  # it loaded a model
    assert pace.limit_s(16, first=True) == 8.0
    assert pace.limit_s(16, first=False) == pytest.approx(0.5)
    for _ in range(20):
        pace.record("ok", 16, 3.0, first=False)
    assert pace.limit_s(16, first=False) == 6.0
    for _ in range(50):
        pace.record("ok", 16, 20.0, first=False)
    assert pace.limit_s(16, first=False) == pytest.approx(30.0)  # never more than one sample may take
    small = Pace(timeout_s=30.0, max_batch=16)
    for _ in range(20):
        small.record("ok", 1, 0.1, first=False)
    assert small.limit_s(16, first=False) == pytest.approx(3.2)  # twice what 16 should take


def test_a_stopped_call_makes_the_next_few_wait_longer_and_many_make_all_wait_longer():
    pace = Pace(timeout_s=30.0, max_batch=16)
    for _ in range(50):
        pace.record("ok", 16, 0.8, first=False)
    pace.record("timeout", 16, 1.6, first=False)
    assert pace.limit_s(16, first=False) == pytest.approx(3.2)  # perhaps the machine is busy
    for _ in range(3):
        pace.record("ok", 16, 0.8, first=False)
    assert pace.limit_s(16, first=False) == pytest.approx(1.6)
    pace.record("timeout", 1, 30.0, first=False)
    assert pace.limit_s(16, first=False) == pytest.approx(1.6)  # the guilty one alone says nothing about batches
    for _ in range(6):
        pace.record("timeout", 16, 1.6, first=False)
        pace.record("ok", 16, 0.8, first=False)
        pace.record("ok", 16, 0.8, first=False)
        pace.record("ok", 16, 0.8, first=False)
    assert pace.limit_s(16, first=False) == pytest.approx(3.2)


def test_calls_stay_within_half_of_the_timeout_as_far_as_is_known():
    pace = Pace(timeout_s=30.0, max_batch=16)
    assert pace.share(100, 1) == 1  # the first call of all
    pace.record("ok", 1, 25.0, first=True)  # it loaded a model
    assert pace.share(100, 1) == 16
    pace.record("ok", 1, 5.0, first=False)
    assert pace.share(100, 1) == 3
    for _ in range(20):
        pace.record("ok", 1, 20.0, first=False)
    assert pace.share(100, 1) == 1


def test_the_cost_of_a_call_is_found():
    pace = Pace(timeout_s=30.0, max_batch=64)
    for samples in (3, 8, 1, 12):
        pace.record("ok", samples, 0.06 + 0.001 * samples, first=False)
    assert pace.cost() == pytest.approx((0.06, 0.001))
    same = Pace(timeout_s=30.0, max_batch=64)
    for _ in range(5):
        same.record("ok", 4, 0.4, first=False)
    assert same.cost() == pytest.approx((0.0, 0.1))
    noise = Pace(timeout_s=30.0, max_batch=64)
    for samples, seconds in ((1, 0.5), (2, 0.1), (3, 0.1)):  # falls with n: no work of its own
        noise.record("ok", samples, seconds, first=False)
    assert noise.cost()[1] == 0.0


def test_a_call_is_no_larger_than_makes_what_it_costs_a_small_part():
    pace = Pace(timeout_s=30.0, max_batch=64)  # 1 ms a call and 10 ms a sample
    pace.record("ok", 8, 0.081, first=False)
    assert pace.share(64, 1) == 64  # calls of one size do not tell
    pace.record("ok", 2, 0.021, first=False)
    assert pace.share(64, 1) == 2  # 1 ms of 21
    for _ in range(2000):
        pace.record("ok", 2, 0.021, first=False)
    assert pace.share(64, 1) == 64  # long ago; it may have changed


def test_a_busy_machine_does_not_make_one_slot_take_all():
    steep = Pace(timeout_s=30.0, max_batch=16)  # large calls happened to be slow: no cost of a call itself is seen
    for samples in (1, 2, 8):
        steep.record("ok", samples, 0.010 * samples**1.5, first=False)
    assert steep.share(4, 2) <= 2
    seen = wrong = 0
    for seed in range(50):
        work, chance = Pace(timeout_s=30.0, max_batch=16), random.Random(seed)
        for _ in range(60):
            size = chance.choice((1, 2, 3, 8))
            work.record("ok", size, 0.020 * size * (1 + chance.expovariate(1)), first=False)
            seen += work.cost()[0] > 4 * work.cost()[1]  # a call seems to cost more than four samples
            wrong += work.share(4, 2) > 2
    assert seen > 40 and wrong < 10
    economy = Pace(timeout_s=30.0, max_batch=64)
    for _ in range(60):
        size = chance.choice((1, 8, 30))
        economy.record("ok", size, (0.060 + 0.001 * size) * (1 + chance.expovariate(3)), first=False)
    assert economy.share(30, 2) == 30


def test_the_least_patience_is_what_a_new_process_costs():
    pace = Pace(timeout_s=30.0, max_batch=16)
    for _ in range(20):
        pace.record("ok", 16, 0.1, first=False)
    for seconds, patience_s in ((0.02, 0.5), (0.9, 0.9), (20.0, 1.5)):
        pace.replaced(seconds)
        assert pace.limit_s(16, first=False) == patience_s


def test_what_waits_is_spread_only_if_a_part_has_more_work_than_a_call_costs():
    work = Pace(timeout_s=30.0, max_batch=64)  # 20 ms a sample
    economy = Pace(timeout_s=30.0, max_batch=64)  # 60 ms a call and 1 ms a sample
    mixed = Pace(timeout_s=30.0, max_batch=64)  # 60 ms a call and 10 ms a sample
    for samples in (1, 2, 4, 8):
        work.record("ok", samples, 0.020 * samples, first=False)
        economy.record("ok", samples, 0.060 + 0.001 * samples, first=False)
        mixed.record("ok", samples, 0.060 + 0.010 * samples, first=False)
    assert [pace.share(32, 4) for pace in (economy, mixed)] == [32, 8]
    assert [pace.share(16, 4) for pace in (economy, mixed)] == [16, 8]  # 2 parts of 80 ms, not 4 of 40
    assert [pace.share(6, 4) for pace in (economy, mixed)] == [6, 6]
    assert work.share(32, 4) == 1  # nothing is gained by larger calls
    unknown = Pace(timeout_s=30.0, max_batch=64)
    unknown.record("ok", 1, 0.1, first=True)
    assert unknown.share(10, 4) == 3


def test_a_slow_but_legal_batch_is_never_marked():
    async def test():
        """Each sample takes 0.9 of the timeout, so that a batch of 4 takes longer than its limit."""

        def rule(texts):
            return good(1) if len(texts) == 1 else Reply("timeout", ended=True)

        slot = HandSlot(rule=rule)
        queue = queue_of(slot, graders=[{"path": "g:G", "timeout_s": 10.0}], known_s=9.0)
        graded = await asyncio.gather(*submit(queue, *(sample(i, str(i)) for i in range(4))))
        assert [row["grade_status"] for row in graded] == ["ok"] * 4
        assert slot.limits == [10.0] * 5

    run(test)


def test_a_group_is_called_once_and_whole_when_its_last_member_arrives():
    async def test():
        slot = HandSlot(rule=lambda texts: Reply("ok", [{"score": float(text), "values": {}} for text in texts]))
        queue = queue_of(slot, graders=[{"path": "g:G", "scope": "group", "timeout_s": 2.0}])
        tasks = submit(
            queue, sample(1, "1", group=7, size=3), sample(0, "0", group=7, size=3), sample(5, "5", group=8, size=2)
        )
        await settle()
        assert slot.calls == []
        tasks += submit(queue, sample(2, "2", group=7, size=3))
        await settle()
        assert slot.calls == [["0", "1", "2"]]
        assert slot.limits == [6.0]  # the timeout of one sample for each member
        graded = await asyncio.gather(tasks[0], tasks[1], tasks[3])
        assert [row["score"] for row in graded] == [1.0, 0.0, 2.0]
        assert not tasks[2].done()

    run(test)


def test_a_group_does_not_wait_for_members_whose_generation_failed():
    async def test():
        slot = HandSlot(rule=lambda texts: good(len(texts)))
        queue = queue_of(slot, graders=[{"path": "g:G", "scope": "group"}])
        failed = {"finish_reason": "failed", "generate_error": "engine-0 is gone"}
        tasks = submit(queue, sample(0, "a", group=1, size=3), sample(1, "", group=1, size=3, **failed))
        await settle()
        assert slot.calls == []
        assert (await tasks[1])["grade_status"] == "error"
        assert "engine-0 is gone" in (await tasks[1])["grades"]
        tasks += submit(queue, sample(2, "c", group=1, size=3))
        assert [(await task)["grade_status"] for task in (tasks[0], tasks[2])] == ["ok", "ok"]
        assert slot.calls == [["a", "c"]]
        # When the failed one is the last to arrive, and when there is no other.
        tasks = submit(queue, sample(0, "a", group=2, size=2))
        await settle()
        submit(queue, sample(1, "", group=2, size=2, **failed), sample(0, "", group=3, size=1, **failed))
        assert (await tasks[0])["grade_status"] == "ok"
        assert slot.calls[1:] == [["a"]]

    run(test)


def test_a_failed_group_call_marks_its_members_alone():
    async def test():
        slot = HandSlot(rule=lambda texts: Reply("error", error="no") if "bad" in texts else good(len(texts)))
        queue = queue_of(slot, graders=[{"path": "g:G", "scope": "group"}])
        rows = [sample(i, text, group=i // 2, size=2) for i, text in enumerate(["a", "bad", "c", "d"])]
        graded = await asyncio.gather(*submit(queue, *rows))
        assert [row["grade_status"] for row in graded] == ["error", "error", "ok", "ok"]
        assert slot.calls == [["a", "bad"], ["c", "d"]]

    run(test)


def test_a_member_that_is_generated_anew_has_its_group_called_again():
    async def test():
        slot = HandSlot(rule=lambda texts: Reply("ok", [{"score": float(text), "values": {}} for text in texts]))
        queue = queue_of(slot, graders=[{"path": "g:G", "scope": "group"}])
        # Before the group's call it takes the place of the member it was.
        tasks = submit(queue, sample(0, "1", group=1, size=2))
        await settle()
        tasks += submit(queue, sample(0, "2", group=1, size=2), sample(1, "3", group=1, size=2))
        await asyncio.gather(*tasks)
        assert slot.calls == [["2", "3"]]
        # After it, the others keep the grades that they have.
        (again,) = submit(queue, sample(1, "4", group=1, size=2))
        assert (await again)["score"] == 4.0
        assert slot.calls[1:] == [["2", "4"]]
        queue.forget("plan-0")
        assert not queue.groups

    run(test)


def test_forgetting_a_plan_ends_the_wait_for_members_that_will_not_come():
    async def test():
        queue = queue_of(HandSlot(), graders=[{"path": "g:G", "scope": "group"}])
        tasks = submit(queue, sample(0, group=1, size=2), sample(1, group=1, size=2, plan="plan-1"))
        await settle()
        queue.forget("plan-0")
        await settle()
        assert [task.done() for task in tasks] == [True, False]
        assert "only 1 members of its group arrived" in tasks[0].result()["grades"]

    run(test)


def test_each_sample_goes_to_the_graders_of_its_data_source():
    async def test():
        slot = HandSlot(rule=lambda texts: good(len(texts)))
        graders = [
            {"path": "g:Math", "data_sources": ["gsm8k", "math"], "weight": 2.0},
            {"path": "g:Format", "weight": 0.5},
            {"path": "g:Code", "data_sources": ["apps"]},
        ]
        queue = queue_of(slot, graders=graders)
        row = await queue.grade(sample(0, data_source="gsm8k"))
        assert (row["score"], [entry["grader"] for entry in json.loads(row["grades"])]) == (2.5, ["Math", "Format"])
        row = await queue.grade(sample(1, data_source="poems"))
        assert (row["score"], [entry["grader"] for entry in json.loads(row["grades"])]) == (0.5, ["Format"])

    run(test)


def test_a_data_source_without_a_grader_is_named():
    graders = [GraderConfig(path="g:G", data_sources=["math"])]
    check_data_sources(graders, ["math"])
    with pytest.raises(ValueError, match=r"no grader has the data sources \['gsm8k', 'poems'\]"):
        check_data_sources(graders, ["poems", "math", "gsm8k"])

    async def test():
        row = await queue_of(HandSlot(), graders=[{"path": "g:G", "data_sources": ["math"]}]).grade(sample(0))
        assert row["grade_status"] == "error"
        assert "no grader has the data source 'test'" in row["grades"]

    run(test)


def test_a_sample_that_lacks_a_column_is_refused():
    async def test():
        row = sample(0)
        del row["response_length"]
        with pytest.raises(ValueError, match=r"the sample lacks \['response_length'\]"):
            await queue_of(HandSlot()).grade(row)

    run(test)


def test_two_graders_of_one_name_are_refused():
    async def test():
        with pytest.raises(ValueError, match="two graders are called 'G'"):
            queue_of(HandSlot(), graders=[{"path": "a:G"}, {"path": "b:G"}])

    run(test)


@pytest.mark.parametrize(
    ("grades", "status", "score"),
    [
        ([Grade("ok", 1.0), Grade("ok", -0.5)], "ok", 2.0 * 1.0 + 3.0 * -0.5),
        ([Grade("ok", 1.0), Grade("abstain")], "ok", 2.0),  # who abstains is left out of the sum
        ([Grade("abstain"), Grade("abstain")], "abstain", math.nan),
        ([Grade("ok", 1.0), Grade("error")], "error", math.nan),  # a failure is never a silent zero
        ([Grade("abstain"), Grade("timeout")], "timeout", math.nan),
        ([Grade("error"), Grade("timeout")], "timeout", math.nan),
        ([Grade("crash"), Grade("timeout")], "crash", math.nan),
    ],
)
def test_the_score_is_the_weighted_sum_and_the_status_the_worst(grades, status, score):
    graders = [GraderConfig(path="g:A", weight=2.0), GraderConfig(path="g:B", weight=3.0)]
    row = combine(graders, grades)
    assert row["grade_status"] == status
    assert row["score"] == pytest.approx(score, nan_ok=True)
    assert [entry["score"] for entry in json.loads(row["grades"])] == [grade.score for grade in grades]


@pytest.mark.parametrize(
    ("result", "entry"),
    [
        (1, {"score": 1.0, "values": {}}),
        (True, {"score": 1.0, "values": {}}),
        (np.float32(0.5), {"score": 0.5, "values": {}}),
        (np.array([0.5]), {"score": 0.5, "values": {}}),
        (torch.tensor(0.5, requires_grad=True), {"score": 0.5, "values": {}}),
        (Fraction(1, 4), {"score": 0.25, "values": {}}),
        (None, {"score": None, "values": {}}),
        ({"score": None, "why": "no opinion"}, {"score": None, "values": {"why": "no opinion"}}),
        ({"score": None, "error": "the judge answered nothing"}, {"error": "the judge answered nothing"}),
        (
            {
                "score": 1,
                "acc": np.bool_(True),
                "n": np.int64(3),
                "loss": math.nan,
                "seen": [1, (2, "x")],
                "at": {"a": 1},
            },
            {"score": 1.0, "values": {"acc": True, "n": 3, "loss": None, "seen": [1, [2, "x"]], "at": {"a": 1}}},
        ),
        ({"score": 0.0, "text": "x" * 5000}, {"score": 0.0, "values": {"text": "x" * 2000}}),
        (
            {"score": 0.0, "what": Fraction(1, 3), 7: 10**30},
            {"score": 0.0, "values": {"what": "1/3", "7": str(10**30)}},
        ),
    ],
)
def test_what_a_grader_may_return(result, entry):
    assert scores.entry(result) == entry
    assert valid_entries(wire.decode(wire.encode({"entries": [scores.entry(result)]})[4:])["entries"], 1)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (math.nan, "nan, not a finite number"),
        (-math.inf, "-inf, not a finite number"),
        ({"score": math.inf}, "inf, not a finite number"),
        ("0.5", "'0.5', not a number"),
        ({"reward": 1.0}, "a dict without \"score\": ['reward']"),
        ([1.0], "returned list, not a score"),
        (np.array([1.0, 2.0]), "returned ndarray, not a score"),
        (1j, "returned complex, not a score"),
        (10**400, "returned int, not a score"),
        (object(), "returned object, not a score"),
    ],
)
def test_what_a_grader_may_not_return(result, text):
    entry = scores.entry(result)
    assert text in entry["error"]
    assert valid_entries([entry], 1)


def test_named_values_are_bounded():
    endless = {}
    endless["self"] = endless
    entry = scores.entry({"score": 1.0, "endless": endless, "many": list(range(10**6))})
    assert len(json.dumps(entry)) < 20_000
    entry = scores.entry({"score": 1.0, "large": {str(i): "x" * 2000 for i in range(100)}})
    assert entry == {"score": 1.0, "values": {"left_out": "named values of more than 16384 bytes"}}


@pytest.mark.parametrize(
    "entries",
    [
        None,
        [],
        [1.0],
        [{"score": "1.0", "values": {}}],
        [{"score": math.nan, "values": {}}],
        [{"score": True, "values": {}}],
        [{"score": 1.0}],
        [{"values": {}}],
        [{"error": 3}],
        [{"score": 1.0, "values": {}}] * 2,
    ],
)
def test_entries_that_no_honest_process_sends_are_not_valid(entries):
    assert not valid_entries(entries, 1)


def test_a_grader_gets_lists_with_the_prompt_unless_the_data_has_its_own():
    rows = [
        ["gsm8k", "42", '"42"', '{"index": 3}', '[{"role": "user", "content": "what?"}]', {"response_length": 2}],
        ["gsm8k", "7", "", '{"prompt": "mine"}', '"what?"', {"response_length": 1}],
    ]
    assert child.arguments(rows) == {
        "data_sources": ["gsm8k", "gsm8k"],
        "solution_strs": ["42", "7"],
        "ground_truths": ["42", None],
        "extra_infos": [
            {"prompt": [{"role": "user", "content": "what?"}], "response_length": 2, "index": 3},
            {"prompt": "mine", "response_length": 1},
        ],
    }


def named(name, base=Exception):
    return type(name, (base,), {})


@pytest.mark.parametrize(
    ("error", "retry"),
    [
        (ConnectionResetError("peer"), True),
        (named("ClientConnectorError", named("ClientConnectionError"))(), True),  # aiohttp
        (named("ConnectError", named("NetworkError"))(), True),  # httpx
        (named("APIConnectionError")(), True),  # openai
        (named("APITimeoutError", named("APIConnectionError"))(), False),
        (named("HTTPError", named("URLError", OSError))(), False),  # urllib: the server answered
        (ValueError("no verdict"), False),
        (TimeoutError(), False),
        (FileNotFoundError(), False),
    ],
)
def test_only_connection_errors_ask_for_a_retry(error, retry):
    assert scores.failure(error)["retry"] is retry
    wrapped = RuntimeError("the judge failed")
    wrapped.__cause__ = error
    assert scores.failure(wrapped)["retry"] is retry


def test_an_error_tells_its_message_and_its_line():
    try:
        int("seven")
    except ValueError as error:
        text = scores.describe(error)
    assert text.startswith("ValueError: invalid literal for int() with base 10: 'seven' (")
    assert text.endswith("in test_an_error_tells_its_message_and_its_line)")
