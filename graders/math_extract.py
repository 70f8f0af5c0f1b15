"""Finds the answer that a response gives.

In: a response as decoded. Out: the text of its answer, or None if it gives none. The one decision: what a response ends
with counts, so each marker is looked for from the end, and a marker that was begun and not finished is no answer rather
than a reason to look further up.
"""

import re

_BOX = re.compile(
    r"\\{1,4}(?P<box>boxed|fbox)\b\s*(?:(?P<brace>\{)|(?P<digits>-?\d[\d.,/]*)|(?P<end>$))|\\.|(?P<bracket>[{}])",
    re.DOTALL,
)
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n]*)")
_HEADING = re.compile(
    r"\W*(?:step|part|solution|conclusion|explanation|case|section|method|verification|check|final|answer)\b", re.I
)
_PHRASE = re.compile(
    r"\banswers?\b[^.\n=:：]{0,60}?(?:\b(?:is|are|was|be)\b|[:：=])"
    r"|^[^\w\n]{0,20}(?:final\s+)?answer[^\w\n]{0,20}$|答案?(?:[是为為]|\W{0,4}[:：])|</?answer>",
    re.I | re.M,
)
_JOIN = re.compile(
    r"\b(?:and|or)\b|[或和与及]|\b(?:maybe|perhaps|possibly|alternatively|could)\b|^[\s$,;/|(\[\\)]*$", re.I
)
_NOT_JOINED = re.compile(
    r"[.!?。！？]\s|\n|\b(?:rather|wait|no|not|actually|sorry|correct\w*|should|must|instead|so|hence|thus|therefore|then|but|"
    r"equivalently|mistake|wrong|oops|hmm)\b",
    re.I,
)
_SPANS = re.compile(
    r"\$\$([^$]{1,2000})\$\$|\$([^$\n]{1,2000})\$|\\\(((?:[^\\]|\\(?!\))){1,2000})\\\)|\\\[((?:[^\\]|\\(?!\])){1,2000})\\\]"
)
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])[-+−])?\$?(?:\d*\s?\\[dt]?frac\s?\{[^{}]{1,60}\}\s?\{[^{}]{1,60}\}"
    r"|(?:\d+\s+(?=\d+/\d))?\d+(?:,\d{3})*(?:\.\d+)?(?:\s?[/:]\s?\d+)*|\.\d+)(?:\s?(?:\\pi|π))?(?:\s?\\?%)?"
)
_WORDS = re.compile(r"(?<!\\)\b(?!(?:sin|cos|tan|log|ln|sqrt|pi|and|or|cm|km|mm|kg|mg|ml|ft|in)\b)[^\W\d_]{2,}", re.I)
_CLAUSE_END = re.compile(
    r"(?<!\.[A-Za-z])[.!?](?=\s|$)|[。！？]|\n|,?\s+\b(?:because|since|which|where|as|so)\b|\s\((?=[a-z]{3})"
    r"|,?\s+and\s+(?=(?:we|that|this|it|i|so|the)\b)|,?\s+(?:and\s+|but\s+)?not\s",
    re.I,
)


def extract(response: str) -> str | None:
    """The answer by the last box, else the last #### line, else a closing phrase, else the last number."""
    text = after_thinking(response)
    if text is None or not text.strip():
        return None
    boxes = find_boxes(text)
    if boxes:
        return _joined_boxes(text, boxes)
    if (answer := _after_hashes(text)) is not None:
        return answer or None
    if (answer := after_phrase(text)) is not None:
        return answer or None
    return _last_number(text)


def after_thinking(text: str) -> str | None:
    """The part after the last </think>; None if thinking was begun and not finished."""
    text = text[text.rfind("</think>") + len("</think>") :] if "</think>" in text else text
    return None if "<think>" in text else text


def find_boxes(text: str) -> list[tuple[int, int, str | None]]:
    r"""Start, end and content of each outermost \boxed{} or \fbox{}; content None if it is not closed. One pass."""
    found: list[tuple[int, int, str | None]] = []
    open_braces: list[tuple[int, int] | None] = []  # (start, content start) of a box, None for any other brace
    for match in _BOX.finditer(text):
        if match["box"] and match["brace"]:
            open_braces.append((match.start(), match.end()))
        elif match["box"]:
            found.append((match.start(), match.end(), match["digits"]))
        elif match["bracket"] == "{":
            open_braces.append(None)
        elif match["bracket"] == "}" and open_braces and (box := open_braces.pop()):
            while found and found[-1][0] > box[0]:  # boxes inside this one
                found.pop()
            found.append((box[0], match.end(), text[box[1] : match.start()]))
    unclosed = [box for box in open_braces if box]
    if unclosed and (not found or unclosed[-1][0] > found[-1][0]):
        found.append((unclosed[-1][0], len(text), None))
    return found


def _joined_boxes(text: str, boxes: list[tuple[int, int, str | None]]) -> str | None:
    """The last box with those before it that one sentence joins to it by "and", "or" or nothing but punctuation."""
    start, _, content = boxes[-1]
    if content is None or not content.strip():
        return None
    answer, parts = content, [content]
    for before in reversed(boxes[:-1]):
        between = text[before[1] : start]
        if before[2] is None or len(between) > 120 or not _JOIN.search(between) or _NOT_JOINED.search(between):
            break
        if before[2].strip() and before[2] not in parts:
            word = "and" if re.search(r"\band\b", between) else "or"
            answer = f"{before[2]} \\text{{ {word} }} {answer}"
            parts.append(before[2])
        start = before[0]
    return answer


def _after_hashes(text: str) -> str | None:
    """What follows the last #### that is not a heading; empty if nothing does, None if there is no such line."""
    for match in reversed(list(_HASHES.finditer(text))):
        line = _strip_marks(match[1])
        if not _HEADING.match(line):
            return line
        if (phrase := after_phrase(text[match.start() :])) is not None:
            return phrase
    return None


def after_phrase(text: str) -> str | None:
    """The clause after the last closing phrase; empty if the text ends there, None if there is no phrase."""
    matches = list(_PHRASE.finditer(text))
    if not matches:
        return None
    match = matches[-1]
    if match.group().lower() == "</answer>" and len(matches) > 1:
        return text[matches[-2].end() : match.start()].strip()
    rest = _strip_marks(text[match.end() :].lstrip(" \t\r\n*:：_"))[:4000]
    span = _SPANS.match(rest)
    if span and not re.match(r"\s*(?!(?:,\s*)?(?:and\s+|but\s+)?not\b)(?:,|\\?%|and\b|or\b|[/:])", rest[span.end() :]):
        return next(group for group in span.groups() if group)
    end = _CLAUSE_END.search(rest)
    clause = (rest[: end.start()] if end else rest).strip(" *")
    # "Answer: First we have to see what is asked" begins a solution and does not close one.
    return None if len(clause.split()) > 6 and not re.search(r"[\d\\$]", clause) else clause


def _last_number(text: str) -> str | None:
    """The last number, with the formula or line that it is part of; text without numbers is taken whole if short."""
    last = max((match.start() for match in re.finditer(r"\d", text)), default=None)
    if last is None:
        short = text.strip().strip("*").strip()
        return short if len(short) <= 60 and short.lower() not in ("none", "null", "nan", "n/a") else None
    start = max(text.rfind("\n", 0, last) + 1, last - 2_000)
    paragraph_start = max(text.rfind("\n\n", 0, last), last - 2_000, 0)
    for span in _SPANS.finditer(text, paragraph_start, min(len(text), last + 2_000)):
        if span.start() <= last < span.end():
            percent = re.match(r"\s*\\?%", text[span.end() :])
            return next(group for group in span.groups() if group) + ("\\%" if percent else "")
    end = text.find("\n", last)
    line = _strip_marks(text[start : end if end >= 0 else len(text)]).lstrip("# ")
    if len(line) <= 300 and not _WORDS.search(line):
        return line
    numbers = _NUMBER.findall(text[start : last + 100])
    return numbers[-1] if numbers else None


def _strip_marks(text: str) -> str:
    """Without Markdown's bold and code marks."""
    return re.sub(r"(?<!\w)\*\*|\*\*(?!\w)|`", "", text).strip()
