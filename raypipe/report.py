"""The command `python -m raypipe.report RUN [RUN ...] --out report.html`: run folders as one page.

In: run folders. Out: one HTML file that works offline and on its own: curves of all runs in the same charts, what each
stage did, timelines, graders' statuses, and a browser of samples. Decision: what a model wrote is data. It stands in
the page as JSON in which no tag can begin, the page's script writes it as text alone, and a Content-Security-Policy
allows that one script and style, by hash, and nothing else: no request, no handler, no markup from a string.
"""

import argparse
import base64
import datetime
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raypipe.report_data import read_run
from raypipe.samples import to_json

PAGE = Path(__file__).parent / "report_page"
SCRIPTS = ("dom.js", "charts.js", "timeline.js", "samples.js", "panels.js", "page.js")
MAX_SAMPLES = 2000


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m raypipe.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder, e.g. runs/demo")
    parser.add_argument("--out", default="report.html", help="file to write (default: report.html)")
    parser.add_argument(
        "--max-samples", type=int, default=MAX_SAMPLES, help=f"most samples of a run (default: {MAX_SAMPLES})"
    )
    options = parser.parse_args(arguments)
    try:
        runs = [read_run(Path(run), options.max_samples) for run in options.runs]
        out = Path(options.out)
        try:
            out.write_text(page(runs, datetime.datetime.now()), encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--out {out}: cannot be written ({error.strerror}); name another file") from None
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB): open it in a browser")
    return 0


def page(runs: Sequence[dict[str, Any]], made: datetime.datetime) -> str:
    """The HTML of `runs` (see `read_run`)."""
    style = (PAGE / "style.css").read_text(encoding="utf-8")
    script = '"use strict";\n' + "\n".join((PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    policy = (
        f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    parts = {
        "policy": policy,
        "style": style,
        "data": _embedded({"made": f"{made:%Y-%m-%d %H:%M}", "runs": distinct(runs)}),
        "script": script,
    }
    template = (PAGE / "page.html").read_text(encoding="utf-8")
    pieces = template.split("%%")  # text, name, text, name, ..., text: what is filled in is not looked at again
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def distinct(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs of one name in different folders are told apart by as much of their paths as it takes."""
    names = [run["name"] for run in runs]
    return [run if names.count(run["name"]) == 1 else run | {"name": _longer(run["path"])} for run in runs]


def _longer(path: str) -> str:
    return "/".join(Path(path).parts[-3:])


def _embedded(data: Any) -> str:
    """JSON that may stand in a script element: without <, > and &, no tag, comment or entity begins in it."""
    text = to_json(data)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _source(text: str) -> str:
    """The CSP source of an inline element with exactly this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


if __name__ == "__main__":
    sys.exit(main())
