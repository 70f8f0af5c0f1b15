"""Graders for tests of the plan."""

import time


class FirstTokenGrader:
    """Scores a response by the parity of its first token."""

    def __call__(self, *, data_sources, solution_strs, ground_truths, extra_infos):
        return [float(int(text.split()[0]) % 2) for text in solution_strs]


class LetterGrader:
    """The fraction of a response that is lower-case letters: what a random model can learn within a few steps.

    Args:
        api_key: as graders that call others may have; of no use here.
    """

    def __init__(self, api_key: str = ""):
        self.api_key = api_key

    def __call__(self, *, data_sources, solution_strs, ground_truths, extra_infos):
        return [sum("a" <= char <= "z" for char in text) / max(1, len(text)) for text in solution_strs]


class SlowGrader:
    """Takes 50 ms a call."""

    def __call__(self, *, data_sources, solution_strs, ground_truths, extra_infos):
        time.sleep(0.05)
        return [1.0] * len(solution_strs)
