"""Writes the README's tables of config keys and of metrics from the code, between their markers.

python examples/readme_tables.py [--check]
"""

import argparse
import dataclasses
import re
import sys
from pathlib import Path

from raypipe.config import Config
from raypipe.config_file import LISTS, default_of
from raypipe.live import LIVE
from raypipe.metrics import METRICS

README = Path(__file__).parents[1] / "README.md"


def config_table() -> str:
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for part in dataclasses.fields(Config):
        lines += _rows(part.type, f"{part.name}.")
    for name, cls in LISTS.items():
        lines += _rows(cls, f"{name}[].")
    return "\n".join(lines)


def _rows(cls: type, prefix: str) -> list[str]:
    return [
        f"| `{prefix}{field.name}` | `{default_of(field)}` | {field.metadata['doc'].replace('|', 'or')} |"
        for field in dataclasses.fields(cls)
    ]


def metrics_table() -> str:
    rows = [f"| `{name}` | {unit} | {meaning} |" for name, (unit, meaning) in METRICS.items()]
    return "\n".join(["| name | unit | meaning |", "|---|---|---|", *rows])


def live_table() -> str:
    rows = [f"| `{name}` | {kind} | {unit} | {meaning} |" for name, (kind, unit, meaning) in LIVE.items()]
    return "\n".join(["| name | kind | unit | meaning |", "|---|---|---|---|", *rows])


def with_tables(text: str) -> str:
    """The README with its tables as the code has them."""
    tables = {
        "config-reference": config_table(),
        "metrics-reference": metrics_table(),
        "live-reference": live_table(),
    }
    for marker, table in tables.items():
        pattern = re.compile(f"(<!-- {marker} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        text, count = pattern.subn(lambda found, table=table: found[1] + table + found[2], text)
        assert count == 1, f"the README has no place for {marker}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the README is out of date")
    check = parser.parse_args().check
    text = README.read_text()
    if check:
        return int(with_tables(text) != text)
    README.write_text(with_tables(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
