"""The learner group's lives: who is heard, what the driver is told, and how vain attempts are counted."""

import threading
import time

from raypipe.attempts import Attempts


def begun(attempts: Attempts, first: int) -> int:
    number = attempts.begin()
    attempts.starts_at(number, first)
    return number


def test_records_are_given_once_all_ranks_have_reported_in_rank_order():
    attempts = Attempts(ranks=2)
    number = begun(attempts, 0)
    assert not attempts.report(number, 0, 1, "b")
    assert attempts.told(0, number, 0.0).records is None
    assert attempts.report(number, 0, 0, "a")
    assert attempts.told(0, number, 0.0).records == ["a", "b"]
    assert attempts.told(0, number, 0.0).records is None, "they were taken"


def test_a_rank_that_reports_twice_counts_once():
    attempts = Attempts(ranks=2)
    number = begun(attempts, 0)
    assert not attempts.report(number, 0, 0, "a")
    assert not attempts.report(number, 0, 0, "a again")
    assert attempts.told(0, number, 0.0).records is None


def test_a_restart_tells_where_it_goes_on_and_why_and_forgets_what_is_done_again():
    attempts = Attempts(ranks=2)
    first = begun(attempts, 0)
    for iteration in (0, 1, 2):
        attempts.report(first, iteration, 0, f"{iteration}.0")
    for iteration in (0, 1):
        attempts.report(first, iteration, 1, f"{iteration}.1")
    attempts.failed(first, 1, "RuntimeError: out of memory")
    attempts.failed(first, 0, "RuntimeError: connection closed by peer")
    second = attempts.begin()
    assert second == first + 1
    assert attempts.told(2, first, 0.0).first is None, "it still loads"
    attempts.starts_at(second, 1)
    told = attempts.told(2, first, 0.0)
    assert (told.attempt, told.first, told.records) == (second, 1, None)
    assert told.trouble == "rank 1: RuntimeError: out of memory", "the first to speak is believed"
    assert attempts.told(0, second, 0.0).records == ["0.0", "0.1"], "iteration 0 stays done"
    assert attempts.told(1, second, 0.0).records is None, "iteration 1 is done again"


def test_what_an_earlier_attempt_says_is_not_heard():
    attempts = Attempts(ranks=1)
    first = begun(attempts, 0)
    second = begun(attempts, 0)
    assert not attempts.report(first, 0, 0, "late")
    attempts.starts_at(first, 7)
    attempts.failed(first, 0, "late")
    attempts.pulse(first, 0, {"phase": "late"}, "other", 0.0)
    told = attempts.told(0, second, 0.0)
    assert (told.first, told.records, told.trouble, told.pulses) == (0, None, "", {})


def test_attempts_in_vain_are_counted_until_one_finishes_an_iteration():
    attempts = Attempts(ranks=1)
    counts = []
    for finishes in (False, False, True, False):
        number = begun(attempts, 3)
        counts.append(attempts.told(3, number, 0.0).fruitless)
        if finishes:
            attempts.report(number, 3, 0, "record")
    begun(attempts, 3)
    assert [*counts, attempts.told(3, 9, 0.0).fruitless] == [0, 1, 2, 0, 1]


def test_an_attempt_that_dies_before_it_has_loaded_is_in_vain_too():
    attempts = Attempts(ranks=1)
    attempts.begin()
    attempts.begin()
    assert attempts.told(0, -1, 0.0).fruitless == 1


def test_orders_reach_a_waiting_rank_at_once_and_a_later_one_too():
    attempts = Attempts(ranks=1)
    number = begun(attempts, 0)
    heard: list[str] = []
    waiting = threading.Thread(target=lambda: heard.append(attempts.pulse(number, 0, {"phase": "train"}, "", 30.0)))
    waiting.start()
    deadline = time.monotonic() + 10
    while not attempts.pulses:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert attempts.told(0, number, 0.0).pulses[0]["phase"] == "train"
    attempts.give("stop")
    waiting.join(10)
    assert heard == ["stop"]
    assert attempts.pulse(attempts.begin(), 0, {}, "", 30.0) == "stop"
