"""Graders for tests of the plan."""


class FirstTokenGrader:
    """Scores a response by the parity of its first token."""

    def __call__(self, *, data_sources, solution_strs, ground_truths, extra_infos):
        return [float(int(text.split()[0]) % 2) for text in solution_strs]
