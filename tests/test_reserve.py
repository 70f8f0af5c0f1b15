"""Which prompts in reserve an iteration needs: one for each group without signal, and no more than there are; and which
groups are surplus when more are made than it needs."""

import asyncio

import pytest

from raypipe.reserve import Graded, Reserve, Supply


def group(group_id: int, *scores: float | None) -> list[Graded]:
    return [Graded(f"{group_id}/{i}", group_id, len(scores), score) for i, score in enumerate(scores)]


def test_a_group_of_one_score_releases_a_prompt_and_the_next_of_the_same_another():
    supply = Supply(wanted=2, reserve=3)
    supply.add(group(0, 1.0, 1.0))
    assert (supply.released, supply.is_settled) == (1, False)
    supply.add(group(1, 0.0, 1.0))
    assert (supply.released, supply.is_settled) == (1, False)
    supply.add(group(2, 0.0, 0.0))
    assert (supply.released, supply.is_settled) == (2, False)
    supply.add(group(3, 0.5, 1.0))
    assert (supply.released, supply.is_settled) == (2, True)


def test_the_reserve_is_bounded():
    supply = Supply(wanted=2, reserve=1)
    for group_id in range(3):
        assert not supply.is_settled
        supply.add(group(group_id, 1.0, 1.0))
    assert (supply.released, supply.is_settled) == (1, True)


@pytest.mark.parametrize("scores", [(None, None), (None, 1.0), (1.0, 1.0)])
def test_failed_samples_give_no_signal(scores):
    supply = Supply(wanted=1, reserve=1)
    supply.add(group(0, *scores))
    assert supply.released == 1


def test_what_is_told_twice_counts_once():
    supply = Supply(wanted=2, reserve=3)
    samples = group(0, 1.0, 1.0)
    supply.add(samples[:1] * 3)
    assert supply.released == 0
    supply.add(samples[1:])
    supply.add(samples)
    assert (supply.released, supply.lost) == (1, 1)


def test_of_more_groups_than_wanted_the_first_count_and_the_others_are_surplus():
    supply = Supply(wanted=2, reserve=1, extra=1, needs_signal=False)
    assert (supply.released, supply.is_settled, supply.is_enough) == (1, False, False)
    supply.add(group(2, 1.0, 1.0))
    supply.add(group(0, None, None))  # failed, but the learner waits for no other in its place
    assert supply.is_enough and supply.is_settled
    supply.add(group(1, 0.0, 1.0))
    supply.add(group(2, 1.0, 1.0))
    assert supply.surplus == {2: False, 0: False, 1: True}


def test_extra_prompts_run_beside_a_reserve_for_dynamic_sampling():
    supply = Supply(wanted=2, reserve=3, extra=1, needs_signal=True)
    supply.add(group(0, 1.0, 1.0))
    assert supply.released == 2  # one started with the others, one takes the place of group 0
    supply.add(group(1, 0.0, 1.0) + group(3, 0.0, 1.0) + group(2, 0.0, 0.5))
    assert (supply.useful, supply.surplus) == (3, {0: False, 1: False, 3: False, 2: True})


def test_a_group_is_told_the_same_however_often_it_asks():
    async def scenario() -> None:
        reserve = Reserve(wanted=1, reserve=1, extra=1, needs_signal=False)
        await reserve.open("plan")
        await reserve.open("another")
        waiting = asyncio.create_task(reserve.enough("plan"))
        assert await reserve.needed("plan", 0) is True
        assert await reserve.is_surplus("plan", 0) is False
        assert await reserve.graded("plan", group(0, 1.0, 1.0)) is False
        await waiting
        assert await reserve.is_surplus("plan", 1) is True
        assert await reserve.graded("plan", group(1, 1.0, 1.0)) is True
        assert (
            await reserve.graded("plan", group(0, 1.0, 1.0)) is False and await reserve.is_surplus("plan", 0) is False
        )
        left = asyncio.create_task(reserve.enough("another"))
        await reserve.forget("another")
        await left

    asyncio.run(scenario())


def test_what_was_known_of_a_plan_dies_with_the_actor_and_ends_the_plan():
    reserve = Reserve(wanted=1, reserve=1)  # as it comes back
    with pytest.raises(RuntimeError, match="has lost count of plan run.000003"):
        asyncio.run(reserve.needed("run.000003", 0))


def test_requests_wait_until_it_is_known_whether_they_are_needed():
    async def scenario() -> None:
        reserve = Reserve(wanted=1, reserve=2)
        await reserve.open("plan")
        await reserve.open("another")
        first, second = (asyncio.create_task(reserve.needed("plan", number)) for number in (0, 1))
        other = asyncio.create_task(reserve.needed("another", 0))
        await asyncio.sleep(0.05)
        assert not (first.done() or second.done())
        await reserve.graded("plan", group(0, 1.0, 1.0))
        assert await first is True and not second.done()
        await reserve.graded("plan", group(1, 0.0, 1.0))
        assert await second is False
        assert not other.done()
        await reserve.forget("another")
        assert await other is False
        assert await reserve.needed("another", 0) is False
        await reserve.graded("another", group(0, 1.0, 1.0))
        assert "another" not in reserve.supplies

    asyncio.run(scenario())
