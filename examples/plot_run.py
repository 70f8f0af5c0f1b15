"""One picture with the curves of several runs.

    python examples/plot_run.py runs/a runs/b --out curves.png [--metric reward/heldout_mean ...]

In: run folders. Out: a PNG (or what the name of --out ends in: .svg, .pdf), one plot a metric, one line a run. The
decision: it reads metrics.jsonl alone, so it is also the start of a plot of your own.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder, e.g. runs/demo")
    parser.add_argument("--out", default="curves.png", help="file to write (default: curves.png)")
    parser.add_argument("--metric", nargs="+", default=["reward/mean", "reward/heldout_mean"], help="what to plot")
    options = parser.parse_args(arguments)
    try:
        lines = {run: read_metrics(Path(run)) for run in options.runs}
        for metric in options.metric:
            if not any(metric in line for of_run in lines.values() for line in of_run):
                known = sorted({name for of_run in lines.values() for line in of_run for name in line})
                raise ValueError(f"--metric {metric}: no run has it; they have {', '.join(known)}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    figure, axes = plt.subplots(
        1, len(options.metric), figsize=(5.5 * len(options.metric), 3.8), squeeze=False, layout="constrained"
    )
    for axis, metric in zip(axes[0], options.metric, strict=True):
        for run, of_run in lines.items():
            points = [(line["iteration"], line[metric]) for line in of_run if metric in line]
            if points:
                axis.plot(*zip(*points, strict=True), label=label(run), marker="o" if len(points) < 25 else "", ms=3)
        axis.set(title=metric.replace("$", r"\$"), xlabel="iteration")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(frameon=False)
    figure.savefig(options.out, dpi=150)
    print(f"wrote {options.out}")
    return 0


def label(run: str) -> str:
    """The folder's name; matplotlib would leave out one that begins with _, and read $ as the begin of a formula."""
    return " " * Path(run).name.startswith("_") + Path(run).resolve().name.replace("$", r"\$")


def read_metrics(run: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl. A line that a killed run left half written is left out."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{run} is no run folder: it has no metrics.jsonl")
    texts = path.read_text().splitlines()
    return [json.loads(text) for text in texts if text.endswith("}")]


if __name__ == "__main__":
    sys.exit(main())
