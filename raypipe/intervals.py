"""Sets of times. In and out: (start, end) pairs of seconds. A *union* is a sorted list of disjoint pairs.

Pure Python over sorted lists: an iteration has some thousands of intervals, which is milliseconds of work.
"""

import heapq
import math
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The times that at least one interval covers. Touching intervals become one."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersect(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The times that both unions cover."""
    common, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The times that union `a` covers and union `b` does not."""
    edges = [-math.inf, *(edge for interval in b for edge in interval), math.inf]
    return intersect(a, list(zip(edges[::2], edges[1::2], strict=True)))


def seconds(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def in_work(intervals: Iterable[Interval]) -> list[tuple[float, int]]:
    """Steps (time, how many intervals cover the times from there on), by time, one a distinct time."""
    change: dict[float, int] = {}
    for start, end in intervals:
        change[start] = change.get(start, 0) + 1
        change[end] = change.get(end, 0) - 1
    steps, count = [], 0
    for time in sorted(change):
        count += change[time]
        steps.append((time, count))
    return steps


def pack(intervals: Sequence[Interval]) -> list[int]:
    """A row (0, 1, ...) for each interval, in the order given, so that none overlap in a row; as few rows as can be."""
    rows = [0] * len(intervals)
    free: list[int] = []
    running: list[tuple[float, int]] = []
    for index in sorted(range(len(intervals)), key=lambda i: intervals[i]):
        start, end = intervals[index]
        while running and running[0][0] <= start:
            heapq.heappush(free, heapq.heappop(running)[1])
        rows[index] = heapq.heappop(free) if free else len(running)
        heapq.heappush(running, (end, rows[index]))
    return rows
