"""avg@k, pass@k and maj@k of sampled prompts, with confidence intervals.

In: `PromptSamples`, one a prompt. Out: an `Estimate` a measure. Decision: the unit is the prompt. Each prompt gives one
unbiased value, the estimate is their mean, and the interval says how it would vary over other prompts of the same kind;
samples of one prompt are not independent and are never counted as such.

A sample that could not be graded is no wrong answer: it is left out, and a prompt with fewer than k graded samples
gives no value at k. `Estimate.prompts` says how many gave one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z = 1.959964  # of a 95% interval
RESAMPLES = 2000
SUBSETS = 200  # drawn a prompt for maj@k with k below the number of samples


@dataclass(frozen=True)
class PromptSamples:
    """The graded samples of one prompt: `scores`, whether each `passes`, and the `answers` that vote; None: no vote."""

    scores: Sequence[float]
    passes: Sequence[bool]
    answers: Sequence[str | None]


@dataclass(frozen=True)
class Estimate:
    """A mean over `prompts` prompts and its 95% interval."""

    value: float
    low: float
    high: float
    prompts: int


def measures(prompts: Sequence[PromptSamples], n: int, seed: int = 0) -> dict[str, Estimate]:
    """avg@n (mean score), pass@k for k = 1, 2, 4, ... and n, and maj@k for those of 3 or more."""
    found: dict[str, Sequence[float]] = {f"avg@{n}": [float(np.mean(p.scores)) for p in prompts if len(p.scores)]}
    rng = np.random.default_rng(seed)
    enough = {k: [prompt for prompt in prompts if len(prompt.scores) >= k] for k in ks(n)}
    found |= {f"pass@{k}": [pass_at_k(len(p.passes), sum(p.passes), k) for p in enough[k]] for k in enough}
    found |= {f"maj@{k}": [maj_at_k(p.answers, p.passes, k, rng) for p in enough[k]] for k in enough if k >= 3}
    return {name: estimate(values, seed) for name, values in found.items() if len(values)}


def ks(n: int) -> list[int]:
    """1, 2, 4, ... below n, and n."""
    return [*(2**i for i in range(n.bit_length()) if 2**i < n), n]


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of k samples passes, unbiased, from n samples of which c pass.

    1 - C(n-c, k) / C(n, k): Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    """
    assert 0 <= c <= n and 1 <= k <= n
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def maj_at_k(answers: Sequence[str | None], passes: Sequence[bool], k: int, rng: np.random.Generator) -> float:
    """The chance that the commonest answer of k samples passes; among equally common ones each is as likely.

    Exact where k is the number of samples; else the mean over `SUBSETS` random subsets.
    """
    if k == len(answers):
        return _majority(answers, passes, range(k))
    subsets = (rng.choice(len(answers), size=k, replace=False) for _ in range(SUBSETS))
    return float(np.mean([_majority(answers, passes, subset) for subset in subsets]))


def _majority(
    answers: Sequence[str | None], passes: Sequence[bool], subset: Sequence[int] | np.ndarray | range
) -> float:
    votes: dict[str, list[bool]] = {}
    for i in subset:
        answer = answers[i]
        if answer is not None:
            votes.setdefault(answer, []).append(passes[i])
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    return float(np.mean([np.mean(found) for found in votes.values() if len(found) == most]))


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """The mean of one value a prompt. The interval is Wilson's where each is 0 or 1, else a percentile bootstrap."""
    array = np.asarray(values, dtype=float)
    mean = float(array.mean())
    low, high = wilson(mean, len(array)) if np.isin(array, (0.0, 1.0)).all() else bootstrap(array, seed)
    return Estimate(mean, low, high, len(array))


def wilson(fraction: float, n: int) -> tuple[float, float]:
    """Wilson's 95% score interval of a fraction of n (Wilson 1927); unlike the normal one, not empty at 0 and 1."""
    center = fraction + Z**2 / (2 * n)
    spread = Z * math.sqrt(fraction * (1 - fraction) / n + Z**2 / (4 * n**2))
    scale = 1 + Z**2 / n
    return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)


def bootstrap(values: np.ndarray, seed: int) -> tuple[float, float]:
    """The 95% percentile interval of the mean over resampled values."""
    rng = np.random.default_rng(seed)
    at_once = max(1, 1_000_000 // len(values))  # bounds the memory that the drawn numbers take
    parts = [min(at_once, RESAMPLES - done) for done in range(0, RESAMPLES, at_once)]
    means = [values[rng.integers(len(values), size=(part, len(values)))].mean(axis=1) for part in parts]
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(low), float(high)
