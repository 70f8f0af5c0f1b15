"""What staleness costs in reward: the demo at staleness 0, and at staleness 1 with and without the correction.

Needs: `python examples/make_demo.py`. Each run is `configs/demo.yaml` with fewer iterations, by the command that a user
gives, in a process of its own; settings take turns seed by seed. With staleness 1 an iteration is sampled while the
learner trains on the one before, so its tokens are of weights one version older than those that it updates. By default
the learner then recomputes log-probs and weights each token by the truncated ratio to the engine's (`algorithm.tis`);
`tis=none` leaves the weights out, so stale samples are taken for fresh ones. Held-out reward is greedy, on 128 words.

Printed: the held-out reward after the last iteration and its mean over all passes after the first, each as mean over
seeds with the smallest and the largest, and how stale tokens were. The last line is one JSON object.

    python examples/bench/staleness.py [--quick] [--seeds 0 1 2] [--iterations 15]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / ".cache" / "demo"
SETTINGS = {
    "staleness 0": [],
    "staleness 1, corrected": ["pipeline.max_staleness=1"],
    "staleness 1, not corrected": ["pipeline.max_staleness=1", "algorithm.tis=none"],
}
COMMON = ["checkpoint.every=0", "log.quiet=true", "log.timelines=[]", "log.loggers=[]"]


def train(overrides: list[str], seed: int, iterations: int, every: int) -> list[dict[str, Any]]:
    """The metrics of one run, a line an iteration."""
    with tempfile.TemporaryDirectory() as folder:
        own = [f"run.dir={folder}", f"run.seed={seed}", f"run.iterations={iterations}", f"eval.every={every}"]
        config = ROOT / "configs" / "demo.yaml"
        command = [sys.executable, "-m", "raypipe.train", "--config", str(config), *COMMON, *own, *overrides]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}")
        lines = (Path(folder) / "demo" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def outcome(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one run: held-out rewards from the first pass (before training) to the last, and tokens' mean staleness."""
    heldout = [line["reward/heldout_mean"] for line in lines if "reward/heldout_mean" in line]
    stale = [line["staleness/mean"] for line in lines[1:] if "staleness/mean" in line]  # nothing is stale in the first
    return {
        "heldout": heldout,
        "last": heldout[-1],
        "mean": statistics.mean(heldout[1:]),
        "staleness": statistics.mean(stale),
        "iteration_s": statistics.median(line["time/iteration_s"] for line in lines[1:]),
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "min": min(values), "max": max(values)}


def show(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    found = {key: spread([run[key] for run in runs]) for key in ("last", "mean", "staleness", "iteration_s")}
    last, mean = ("{mean:.3f} [{min:.3f} to {max:.3f}]".format(**found[key]) for key in ("last", "mean"))
    print(
        f"{name:28} last {last}, over all passes {mean}, tokens {found['staleness']['mean']:.2f} versions old, "
        f"{found['iteration_s']['mean']:.1f} s an iteration"
    )
    return {**found, "heldout": [run["heldout"] for run in runs]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, four iterations")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--every", type=int, default=3, help="iterations between held-out passes")
    options = parser.parse_args()
    seeds, iterations, every = options.seeds, options.iterations, options.every
    if options.quick:
        seeds, iterations, every = seeds[:1], 4, 2
    if not DATA.is_dir():
        sys.exit(f"{DATA} is missing: run python examples/make_demo.py")
    os.environ.setdefault("RAY_worker_niceness", "0")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in SETTINGS}
    for seed in seeds:
        for name, overrides in SETTINGS.items():
            runs[name].append(outcome(train(overrides, seed, iterations, every)))
            rewards = " ".join(f"{reward:.3f}" for reward in runs[name][-1]["heldout"])
            print(f"seed {seed}, {name}: {rewards}", flush=True)
    print(f"\n{iterations} iterations, seeds {' '.join(map(str, seeds))}: mean [smallest to largest]")
    print(json.dumps({"bench": "staleness", **{name: show(name, own) for name, own in runs.items()}}))


if __name__ == "__main__":
    main()
