"""A hook of mkdocs: pages take their text from where it is kept, the README and examples/, instead of a copy.

In a page `{{ readme: Write a grader }}` stands for that section of the README without its heading, and `{{ file:
examples/from_verl.md }}` for a file. Links of the README to files of the repository become links to the pages that hold
the same, or plain code.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = re.compile(r"^\{\{ (readme|file): (.+?) \}\}$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    return PLACE.sub(
        lambda found: readme(found[2]) if found[1] == "readme" else (ROOT / found[2]).read_text(), markdown
    )


def readme(title: str) -> str:
    """The text of the README's section `title`, its headings one level up; "(start)" is what comes before them."""
    text = (ROOT / "README.md").read_text()
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    sections = {"(start)": parts[0].partition("\n")[2], **dict(zip(parts[1::2], parts[2::2], strict=True))}
    if title not in sections:
        raise ValueError(f"the README has no section {title!r}; it has {', '.join(sections)}")
    section = re.sub(r"<!-- .*? -->\n", "", sections[title]).strip()
    section = re.sub(r"^###", "##", section, flags=re.MULTILINE)
    return section.replace("](docs/", "](")
