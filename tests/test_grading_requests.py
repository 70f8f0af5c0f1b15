"""Async graders: side by side, within the run's limits, repeated after connection errors only, and killable."""

import asyncio
import json
import socket
import time
from collections import Counter

import pytest
from test_grading_processes import grader, mark, pool_of, values  # noqa: F401

from raypipe.grading import requests


class Server:
    """Answers each request with its number, `wait_s` later; hangs up on the first `failures` requests of each text."""

    def __init__(self, wait_s=0.0, failures=0):
        self.wait_s, self.failures = wait_s, failures
        self.asked = Counter()
        self.starts = []
        self.now = self.most = 0

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.answer, "127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_):
        self.server.close()
        await self.server.wait_closed()

    async def answer(self, reader, writer):
        (text,) = json.loads(await reader.readline())
        self.starts.append(time.monotonic())
        self.asked[text] += 1
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.wait_s)
        self.now -= 1
        if self.asked[text] > self.failures:
            writer.write(text.encode() + b"\n")
        writer.close()


@pytest.fixture
def serve(pool_of, monkeypatch):  # noqa: F811
    """Grades texts against a server, whose counts are returned with the rows and the pool."""
    monkeypatch.setattr(requests, "FIRST_BACKOFF_S", 0.02)

    def run(server, texts, **options):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            server.port = probe.getsockname()[1]
        bench = pool_of(grader("AsyncServer", kwargs={"port": server.port}, timeout_s=20.0), **options)

        async def within_server():
            async with server:
                return await bench.gather(*texts)

        return bench.run(within_server()), bench.pool

    return run


def test_calls_wait_side_by_side_up_to_the_limit(serve):
    server = Server(wait_s=0.2)
    start = time.monotonic()
    rows, _ = serve(server, [str(i) for i in range(40)], async_concurrency=10)
    assert [row["score"] for row in rows] == [float(i) for i in range(40)]
    assert server.most == 10
    assert time.monotonic() - start < 40 * 0.2  # one by one


def test_calls_start_no_faster_than_the_rate(serve):
    server = Server()
    serve(server, [str(i) for i in range(11)], async_rate=20.0)
    assert server.starts[-1] - server.starts[0] >= 10 / 20.0 - 0.02


def test_connection_errors_are_repeated(serve):
    server = Server(failures=2)
    rows, pool = serve(server, ["3", "4"])
    assert [row["score"] for row in rows] == [3.0, 4.0]
    assert server.asked == {"3": 3, "4": 3}
    assert pool.stats()["graders"]["AsyncServer"]["retries"] == 4


def test_repeats_end_and_the_sample_is_marked(serve):
    server = Server(failures=100)
    (row,), _ = serve(server, ["3"], retries=2)
    assert row["grade_status"] == "error"
    assert "ConnectionResetError: the server hung up" in row["grades"]
    assert server.asked == {"3": 3}


def test_repeats_count_as_calls_for_the_rate(serve):
    server = Server(failures=3)
    serve(server, ["1"], async_rate=10.0)
    assert len(server.starts) == 4
    assert server.starts[-1] - server.starts[0] >= 3 / 10.0 - 0.05


def test_other_errors_are_not_repeated(serve):
    server = Server()
    (row,), _ = serve(server, ["seven"])
    assert row["grade_status"] == "error"
    assert "ValueError: could not convert string to float" in row["grades"]
    assert server.asked == {"seven": 1}


def test_a_group_is_one_call(pool_of):  # noqa: F811
    bench = pool_of(grader("AsyncFaulty", scope="group"))
    rows = bench.grade("wait 0", "wait 0", "wait 0", group_id=1, group_size=3)
    assert [row["grade_status"] for row in rows] == ["ok"] * 3
    assert [json.loads(row["grades"])[0]["batch"] for row in rows] == [3] * 3


@pytest.mark.parametrize(
    ("fault", "status", "text", "kills"),
    [
        ("raise", "error", "ValueError: no verdict", False),
        ("hang", "timeout", "took more than 1 s", False),
        ("stubborn", "timeout", "took more than 1 s", True),
        ("segfault", "crash", "killed by SIGSEGV", True),
    ],
)
def test_only_the_guilty_call_is_marked(pool_of, fault, status, text, kills):  # noqa: F811
    bench = pool_of(grader("AsyncFaulty", timeout_s=1.0))
    texts = ["wait 0.1"] * 8
    rows = bench.grade(*texts[:4], fault, *texts[4:])
    assert [row["grade_status"] for row in rows] == ["ok"] * 4 + [status] + ["ok"] * 4, rows
    assert text in json.loads(rows[4]["grades"])[0]["error"]
    assert (bench.pool.stats()["kills"] > 0) == kills
    assert {row["grade_status"] for row in bench.grade(*texts)} == {"ok"}  # and the loop is back


def test_a_call_that_blocks_the_event_loop_is_found_long_before_its_timeout(pool_of):  # noqa: F811
    bench = pool_of(grader("AsyncFaulty", timeout_s=30.0))

    async def all_but_the_guilty():
        guilty = asyncio.create_task(bench.gather("block"))
        others = await asyncio.wait_for(bench.gather(*["wait 0.1"] * 4), 25.0)
        guilty.cancel()
        return others

    assert [row["grade_status"] for row in bench.run(all_but_the_guilty())] == ["ok"] * 4


def test_sync_and_async_graders_of_one_sample_add_up(pool_of):  # noqa: F811
    bench = pool_of(grader("Length"), grader("AsyncFaulty", weight=0.5))
    (row,) = bench.grade("wait 0.01")
    assert row["score"] == len("wait 0.01") + 0.5
    slots = {entry["grader"]: entry["slot"] for entry in json.loads(row["grades"])}
    assert slots["AsyncFaulty"] == "loop"
