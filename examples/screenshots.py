"""Pictures of a run's report for the README: its overview with curves, its timelines, and its samples.

    python examples/screenshots.py runs/demo [RUN ...] --out docs

In: run folders. Out: report_overview.png, report_timeline.png and report_samples.png in `--out`. Needs chromium.
"""

import argparse
import tempfile
from pathlib import Path

from browser import PROGRAM, Browser

from raypipe.report import main as write_report

PARTS = {"overview": "overview", "timeline": "timelines", "samples": "samples"}
SIZE = (1400, 900)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder")
    parser.add_argument("--out", default="docs", help="folder for the pictures")
    options = parser.parse_args()
    if PROGRAM is None:
        parser.error("there is no chromium here (Debian: apt-get install chromium)")
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work, Browser(Path(work) / "profile", *SIZE) as page:
        report = Path(work) / "report.html"
        if write_report([*options.runs, "--out", str(report)]):
            return 1
        page.open(report)
        for name, part in PARTS.items():
            page.value(
                f"document.getElementById('{part}').scrollIntoView({{behavior: 'instant'}}),"
                "new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))"
            )
            page.picture(out / f"report_{name}.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
