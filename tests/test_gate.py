"""The gate alone: who passes, when, in which order, and what a cancelled or closed-out waiter leaves behind."""

import asyncio

from raypipe.engines.gate import Gate


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 10))


async def settle() -> None:
    """Lets every coroutine that can run do so; the gate itself never sleeps."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_passes_at_once_when_new_enough():
    async def scenario():
        gate = Gate(3)
        return await gate.wait(3), await gate.wait(0), gate.waiting

    assert run(scenario()) == (3, 3, 0)


def test_holds_until_the_version_is_there():
    async def scenario():
        gate, passed = Gate(0), []

        async def request(name, min_version):
            passed.append((name, await gate.wait(min_version)))

        tasks = [asyncio.create_task(request(n, v)) for n, v in [("a", 1), ("b", 2), ("c", 1)]]
        await settle()
        held = (list(passed), gate.waiting)
        gate.open(1)
        await settle()
        after_1 = (list(passed), gate.waiting)
        gate.open(2)
        await asyncio.gather(*tasks)
        return held, after_1, passed, gate.waiting

    held, after_1, passed, waiting = run(scenario())
    assert held == ([], 3)
    assert after_1 == ([("a", 1), ("c", 1)], 1)
    assert passed[2] == ("b", 2) and waiting == 0


def test_first_come_first_served():
    async def scenario():
        gate, order = Gate(None), []

        async def request(i):
            await gate.wait(i % 3)
            order.append(i)

        tasks = [asyncio.create_task(request(i)) for i in range(100)]
        await settle()
        gate.open(2)
        await asyncio.gather(*tasks)
        return order

    assert run(scenario()) == list(range(100))


def test_a_cancelled_waiter_leaves_nothing_and_frees_no_other():
    async def scenario():
        gate = Gate(0)
        first, second = asyncio.create_task(gate.wait(1)), asyncio.create_task(gate.wait(1))
        await settle()
        first.cancel()
        await settle()
        waiting = gate.waiting
        gate.open(1)
        return first.cancelled(), waiting, await second, gate.waiting

    assert run(scenario()) == (True, 1, 1, 0)


def test_closed_holds_everyone_and_the_version_is_the_one_at_the_time_of_passing():
    async def scenario():
        gate = Gate(5)
        gate.close()
        old = asyncio.create_task(gate.wait(0))
        await settle()
        held = not old.done()
        gate.open(6)
        return held, await old

    assert run(scenario()) == (True, 6)


def test_closing_right_after_opening_catches_those_who_have_not_run_yet():
    async def scenario():
        gate = Gate(None)
        request = asyncio.create_task(gate.wait(1))
        await settle()
        gate.open(1)
        gate.close()
        await settle()
        held = not request.done()
        gate.open(2)
        return held, await request

    assert run(scenario()) == (True, 2)


def test_a_lower_version_after_a_resume_holds_newer_requests_again():
    async def scenario():
        gate = Gate(7)
        gate.open(4)
        request = asyncio.create_task(gate.wait(5))
        await settle()
        held = not request.done()
        gate.open(5)
        return held, await request

    assert run(scenario()) == (True, 5)


def test_those_that_wait_pass_by_their_place_and_then_as_they_came():
    async def scenario() -> list[str]:
        gate, passed = Gate(), []

        async def request(name: str, place: int) -> None:
            await gate.wait(1, place)
            passed.append(name)

        tasks = [asyncio.create_task(request(name, place)) for name, place in (("c", 2), ("a", 0), ("d", 2), ("b", 1))]
        await asyncio.sleep(0)
        gate.open(1)
        await asyncio.gather(*tasks)
        return passed

    assert asyncio.run(scenario()) == ["a", "b", "c", "d"]
