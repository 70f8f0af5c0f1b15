"""Groups and mini-batches become complete once all their samples are in, whatever the order."""

import random

import pytest

from raypipe.arrivals import Arrivals
from raypipe.targets import Scored


def sample(group_id: int, member: int, size: int = 2) -> Scored:
    return Scored(f"{group_id}/{member}", group_id, size, True, 1.0, 1.0)


def test_a_group_is_given_out_once_and_whole():
    arrivals = Arrivals(groups=2, mini_batches=1)
    assert arrivals.add([sample(0, 0), sample(1, 1)], ended=False) == []
    assert [s.sample_id for s in arrivals.add([sample(1, 0)], ended=False)] == ["1/1", "1/0"]
    assert not arrivals.is_complete(0)
    assert [s.sample_id for s in arrivals.add([sample(0, 1)], ended=False)] == ["0/0", "0/1"]
    assert arrivals.is_complete(0)


def test_mini_batches_take_prompts_by_number():
    arrivals = Arrivals(groups=4, mini_batches=2)
    arrivals.add([sample(2, 0, 1), sample(3, 0, 1), sample(0, 0, 1)], ended=False)
    assert [arrivals.is_complete(mini) for mini in range(2)] == [False, True]


def test_at_the_end_what_is_there_is_complete():
    arrivals = Arrivals(groups=3, mini_batches=3)
    arrivals.add([sample(0, 0)], ended=False)
    assert [s.sample_id for s in arrivals.add([sample(1, 0)], ended=True)] == ["0/0", "1/0"]
    assert all(arrivals.is_complete(mini) for mini in range(3))


@pytest.mark.parametrize("seed", range(20))
def test_any_order_gives_every_sample_once(seed):
    draw = random.Random(seed)
    rest = [sample(group, member, 3) for group in range(6) for member in range(3)]
    draw.shuffle(rest)
    arrivals, found = Arrivals(6, draw.choice([1, 2, 3])), []
    while rest:
        n = draw.randint(0, 4)
        found += arrivals.add(rest[:n], ended=False)
        rest = rest[n:]
    assert sorted(found) == sorted(sample(group, member, 3) for group in range(6) for member in range(3))
