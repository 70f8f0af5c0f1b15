"""The demo: makes a tiny model and its data, trains it by RL through the whole pipeline, and says what came of it.

    make demo          or          python examples/demo.py [key=value ...]

Exits 1 unless the held-out reward rose from below 0.4 to above 0.8.
"""

import json
import sys
import time
from pathlib import Path

from make_demo import make_demo
from rich.console import Console
from rich.table import Table

from raypipe.train import main as train

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs"
START_BELOW, END_ABOVE = 0.4, 0.8


def main(overrides: list[str]) -> int:
    begin = time.time()
    console = Console()
    console.print("The demo's model: made" if make_demo() else "The demo's model: there already")
    name = free_name("demo")
    code = train(["--config", str(ROOT / "configs" / "demo.yaml"), f"run.name={name}", f"run.dir={RUNS}", *overrides])
    return code or report(console, RUNS / name, time.time() - begin)


def free_name(wanted: str) -> str:
    """`wanted`, or `wanted-2`, `wanted-3`, ... if runs of these names are there."""
    names = [wanted, *(f"{wanted}-{i}" for i in range(2, 10_000))]
    return next(name for name in names if not (RUNS / name).exists())


def report(console: Console, run: Path, seconds: float) -> int:
    """Prints what the run's metrics say; 1 if the reward did not rise as it should."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    heldout = [line["reward/heldout_mean"] for line in lines if "reward/heldout_mean" in line]
    trained = [line for line in lines if "reward/mean" in line]
    rose = heldout[0] < START_BELOW and heldout[-1] > END_ABOVE

    def median(key: str) -> float:
        values = sorted(line[key] for line in trained[1:])
        return values[len(values) // 2]

    table = Table(
        "what", "value", title=f"{run.name}: {len(trained)} iterations in {seconds:.0f} s", title_justify="left"
    )
    table.add_row("held-out reward, first to last", f"{heldout[0]:.3f} to {heldout[-1]:.3f}")
    table.add_row(
        "training reward, first to last", f"{trained[0]['reward/mean']:.3f} to {trained[-1]['reward/mean']:.3f}"
    )
    table.add_row("seconds an iteration, median", f"{median('time/iteration_s'):.1f}")
    table.add_row("finished to graded, p95, median", f"{median('lag/graded_p95_s') * 1000:.0f} ms")
    for stage in ("generate", "grade", "learner"):
        table.add_row(f"idle {stage}, median", f"{median(f'idle/{stage}'):.0%}")
    table.add_row("learner against engine, largest", f"{max(line['mismatch/max'] for line in trained):.1e} nats")
    console.print(table)
    for what, where in (
        ("metrics", "metrics.jsonl"), ("samples", "samples/"), ("timelines", "timelines/"), ("model", "checkpoints/"),
    ):  # fmt: skip
        console.print(f"{what:<10} {run / where}", highlight=False)
    if not rose:
        console.print(
            f"The held-out reward did not rise from below {START_BELOW} to above {END_ABOVE}.", style="bold red"
        )
    return 0 if rose else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
