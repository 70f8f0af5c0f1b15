"""Brackets in an answer: which belong together, and what stands outside all of them.

In: text in the notation of math_text.normalise. Out: positions and parts, in one pass. The one decision: a half-open
interval [2,5) is a pair of brackets like any other, so structure and kind of bracket are judged apart.
"""

import re
from collections.abc import Iterator

CLOSING = {"(": ")]", "[": "])[", "{": "}", "❴": "❵", "⟨": "⟩", "⟬": "⟭", "⌊": "⌋", "⌈": "⌉", "]": "[]", "“": "”"}


def strip_brackets(text: str) -> str | None:
    """Takes off brackets that hold the whole text, however many. None where brackets do not balance."""
    partners = match_brackets(text)
    if partners is None:
        return None
    start, end = 0, len(text) - 1
    while start < end and partners.get(start) == end and text[start] + text[end] in ("()", "{}", "[]"):
        if "," in text[start:end] and text[start] != "{":
            break
        start, end = start + 1, end - 1
        while start < end and text[start] == " ":
            start += 1
        while start < end and text[end] == " ":
            end -= 1
    return text[start : end + 1].strip()


def match_brackets(text: str) -> dict[int, int] | None:
    """Index of each opening bracket to the index of its closing one; [2,5) is a pair. None if unbalanced."""
    stack: list[int] = []
    partners: dict[int, int] = {}
    for index, character in enumerate(text):
        if stack and character in CLOSING[text[stack[-1]]] and not (character == "[" and text[index + 1 :].strip()):
            partners[stack.pop()] = index
        elif character in "([{❴⟨⟬⌊⌈“" or (character == "]" and not stack and not text[:index].strip()):
            stack.append(index)
        elif character in ")]}❵⟩⟭⌋⌉”":
            return None
    return None if stack else partners


def split(text: str, separators: str) -> list[str]:
    """Splits where no bracket or quotation is open. `separators` is a regular expression without groups."""
    pattern = re.compile(separators)
    if not pattern.search(text):
        return [text.strip()]
    partners = match_brackets(text) or {}
    parts, start, index = [], 0, 0
    while index < len(text):
        if found := pattern.match(text, index):
            parts.append(text[start:index].strip())
            start = index = max(found.end(), index + 1)
        else:
            index = partners.get(index, index) + 1
    return [*parts, text[start:].strip()]


def outside_brackets(text: str) -> Iterator[str]:
    partners = match_brackets(text) or {}
    index = 0
    while index < len(text):
        yield text[index]
        index = partners.get(index, index) + 1
