"""The README says what the code does: its tables are the code's, its commands and files exist."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import readme_tables  # noqa: E402

README = readme_tables.README.read_text()


def test_tables_are_up_to_date():
    assert readme_tables.with_tables(README) == README, "run: python examples/readme_tables.py"


def test_both_commands_are_named():
    assert "make demo" in README and "make test" in README


def test_every_config_that_is_named_exists():
    named = set(re.findall(r"configs/\w+\.yaml", README))
    assert named and all((ROOT / name).is_file() for name in named)


def test_every_shipped_grader_that_is_named_exists():
    for module, name in re.findall(r"`graders\.(\w+):(\w+)`", README):
        paths = [ROOT / "graders" / f"{module}.py", ROOT / "graders" / module / "__init__.py"]
        assert any(path.is_file() and name in path.read_text() for path in paths), f"graders.{module}:{name}"


def test_every_picture_that_is_shown_exists():
    shown = re.findall(r"!\[[^]]*\]\(([^)]+)\)", README)
    assert shown and all((ROOT / name).read_bytes().startswith(b"\x89PNG") for name in shown)
