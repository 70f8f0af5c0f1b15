"""Finds the program in a response: `extract_code(response) -> str | None`, in time linear in its length."""

import re
from dataclasses import dataclass

PYTHON_TAGS = {"python", "py", "python3"}
CODE_BEGINS = (" ", "\t", "def ", "async def ", "class ", "from ", "import ", "@")


def extract_code(response: str, completes: bool = False) -> str | None:
    """The last closed Python block after any thinking, else the last closed block without a tag, else None.

    Tags are python, py and python3 in any case; fences are three or more backticks or tildes. Thinking that does not
    end leaves no answer, and a blank block is none. `completes`: where the task is to complete a given text, a response
    without any fence is taken whole if it looks like code (it is indented, or defines something).
    """
    text = response.rpartition("</think>")[2]
    if "<think>" in text:
        return None
    tagged: str | None = None
    untagged: str | None = None
    opened: _Fence | None = None
    fences = 0
    lines: list[str] = []
    for line in text.split("\n"):
        fence = _read_fence(line)
        if fence and opened and fence.closes(opened):
            block = "\n".join(lines)
            if opened.tag in PYTHON_TAGS:
                tagged = block
            elif not opened.tag:
                untagged = block
            opened = None
        elif fence and (opened is None or (fence.tag in PYTHON_TAGS and fence.marks == opened.marks)):
            opened, lines = fence, []  # a second opening: the block before it was never closed
            fences += 1
        elif opened:
            indent = len(line) - len(line.lstrip(" \t"))
            lines.append(line[min(indent, opened.indent) :])
    code = untagged if tagged is None else tagged
    if completes and not fences and text.lstrip("\n").startswith(CODE_BEGINS):
        code = text
    code = (code or "").removeprefix("\ufeff")
    return code if code.strip() else None


@dataclass(frozen=True)
class _Fence:
    indent: int
    marks: str
    info: str

    @property
    def tag(self) -> str:
        match = re.match(r"[\w+#-]+", self.info.lower().lstrip("{."))
        return match[0] if match else self.info

    def closes(self, opened: "_Fence") -> bool:
        return not self.info and self.marks.startswith(opened.marks) and self.indent <= opened.indent + 3


def _read_fence(line: str) -> _Fence | None:
    """Reads a fence as CommonMark does, at any indentation."""
    body = line.strip()
    marks = body[: len(body) - len(body.lstrip(body[:1]))]
    info = body[len(marks) :].strip()
    if len(marks) < 3 or marks[0] not in "`~" or (marks[0] == "`" and "`" in info):
        return None
    return _Fence(len(line) - len(line.lstrip(" \t")), marks, info)
