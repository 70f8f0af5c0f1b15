"""The demo: makes a tiny model and its data, trains it by RL through the whole pipeline, and says what came of it.

    make demo          or          python examples/demo.py [key=value ...]

In: configs/demo.yaml, and settings that replace its own. Out: a run folder with a name not yet in use, and a summary of
it. The decision: the summary is read from the run folder alone, as anyone could. Exit code 1 unless the held-out reward
rose from below 0.4 to above 0.8.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
from make_demo import make_demo
from rich.console import Console
from rich.table import Table

from raypipe.checkpoint_files import find_start
from raypipe.config_file import load_config
from raypipe.run_folder import RunFolder
from raypipe.train import main as train

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "demo.yaml"
START_BELOW, END_ABOVE = 0.4, 0.8


def main(overrides: list[str]) -> int:
    begin = time.monotonic()
    console = Console(highlight=False)
    try:
        wanted = load_config(CONFIG, overrides).run
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    torch.set_num_threads(1)  # faster than two for so small a model
    console.print("model and data: making them (about half a minute)")
    console.print("model and data: made" if make_demo() else "model and data: there already")
    run = free_folder(Path(wanted.dir) / wanted.name)
    if code := train(["--config", str(CONFIG), *overrides, f"run.name={run.name}"]):
        return code
    return 0 if report(console, RunFolder(run, resumed=True), time.monotonic() - begin) else 1


def free_folder(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that is not there."""
    names = [path.name, *(f"{path.name}-{i}" for i in range(2, 100_000))]
    return next(path.with_name(name) for name in names if not path.with_name(name).exists())


def report(console: Console, run: RunFolder, seconds: float) -> bool:
    """Prints what the metrics of `run` say and where everything is; whether the reward rose as it should."""
    lines = run.read_metrics()
    heldout = [line for line in lines if "reward/heldout_mean" in line]
    trained = [line for line in lines if "reward/mean" in line]
    table = Table(title=f"{run.path.name}: {len(trained)} iterations, {seconds:.0f} s in all", title_justify="left")
    table.add_column("metric")
    table.add_column("value", justify="right")
    table.add_row("reward/heldout_mean, first -> last", first_and_last(heldout, "reward/heldout_mean"))
    table.add_row("reward/mean, first -> last", first_and_last(trained, "reward/mean"))
    steady = trained[1:] or trained  # the first iteration also warms everything up
    names = ["time/iteration_s", "lag/graded_p95_s", "efficiency", "overlap/grading_hidden_frac"]
    names += sorted({name for line in steady for name in line if name.startswith("idle/")})
    for name in names:
        values = [line[name] for line in steady if name in line]
        if values:
            table.add_row(f"{name}, median", f"{statistics.median(values):.3f}")
    disagreement = max((line["mismatch/max"] for line in trained if "mismatch/max" in line), default=None)
    if disagreement is not None:
        table.add_row("mismatch/max, largest", f"{disagreement:.1e}")
    console.print(table)
    newest = find_start(run.checkpoints).path
    for what, where in [
        ("reward and all metrics", run.metrics),
        ("samples", run.path / "samples"),
        ("timelines", run.path / "timelines"),
        ("trained model", newest / "hf" if newest else "none was saved"),
    ]:
        console.print(f"{what}: {where}", soft_wrap=True)
    rewards = [line["reward/heldout_mean"] for line in heldout] or [float("nan")]
    rose = rewards[0] < START_BELOW and rewards[-1] > END_ABOVE
    wanted = f"from below {START_BELOW} to above {END_ABOVE}"
    if rose:
        console.print(f"The held-out reward rose {wanted}: {rewards[0]:.3f} -> {rewards[-1]:.3f}.", style="bold green")
    else:
        console.print(f"The held-out reward did NOT rise {wanted}.", style="bold red")
    return rose


def first_and_last(lines: list[dict[str, float]], name: str) -> str:
    return f"{lines[0][name]:.3f} -> {lines[-1][name]:.3f}" if lines else "none"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
