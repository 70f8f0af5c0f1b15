"""Reads an answer's structure: a number with a unit, a set, an interval, an equation, a word, ...

In: text in the notation of math_text.normalise. Out: the readings that a person would consider, the likeliest first
(12,345 is a number, else a list; 7:30 a time, else a ratio). The one decision: reading never fails; what is not
mathematics is Words.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from graders import math_expression, math_units
from graders.math_brackets import match_brackets, outside_brackets, split, strip_brackets
from graders.math_expression import Expression, Unreadable
from graders.math_words import DENIAL, meaning_of, words_of

MAX_DEPTH = 12
RELATIONS = "=<>≤≥≠≈∈"
_UNIT_WORD = "“(?!(?:or|and|to)”)[^”]*”"


@dataclass(frozen=True)
class Scalar:
    expression: Expression
    unit: str = ""
    percent: bool = False
    glued: bool = False  # 5m: perhaps five metres, perhaps 5 times m
    digits: str = ""  # as written, where it is plain digits: leading zeros and base are judged on these


@dataclass(frozen=True)
class Listing:
    """Values without order: a set, or roots in a row. `joined` by "and", "or" or a comma."""

    items: tuple["Readings", ...]
    joined: str = ","
    braces: bool = False


@dataclass(frozen=True)
class Bracket:
    """Values in order between two brackets: a point, a vector, an interval."""

    opener: str
    items: tuple["Readings", ...]
    closer: str


@dataclass(frozen=True)
class Matrix:
    rows: tuple[tuple["Readings", ...], ...]


@dataclass(frozen=True)
class Relation:
    """a = b, or a chain a < b <= c: one more side than operators."""

    sides: tuple[str, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True)
class SetOperation:
    operator: str  # one of ∪ ∩ ∖
    parts: tuple["Readings", ...]


@dataclass(frozen=True)
class Clock:
    seconds: int
    half: str = ""  # am, pm or not said


@dataclass(frozen=True)
class Ratio:
    parts: tuple[Expression, ...]


@dataclass(frozen=True)
class Based:
    digits: str
    base: int


@dataclass(frozen=True)
class Choice:
    letter: str
    rest: "Readings" = ()


@dataclass(frozen=True)
class Words:
    text: str


Answer = Scalar | Listing | Bracket | Matrix | Relation | SetOperation | Clock | Ratio | Based | Choice | Words
Readings = tuple[Answer, ...]


def read(text: str, depth: int = 0) -> Readings:
    """All readings of the text; only Words for what is nested too deep or has unbalanced brackets."""
    words = (Words(words_of(text)),)
    if depth > MAX_DEPTH:
        return words
    text = split(re.sub(r"^“?([A-J])[.:]?”?\)", r"(\1)", text), "→")[-1].lstrip("=≈ ")
    stripped = strip_brackets(text)
    return (tuple(_readings(stripped, depth + 1)) if stripped else ()) or words


def read_sentence(text: str) -> Readings:
    """Mathematics with words before or after it, such as "There are 460 ways". Nothing if the words deny it, or if the
    text is mathematics as it stands."""
    if not isinstance(read(text)[0], Words) or "”(" in text or DENIAL.search(text):
        return ()
    body = re.sub(r"^(?:“[^”]*”[\s:,.]*)+", "", text)
    note = re.sub(r"\s*\((?:“[^”]*”[\s,.\-]*)+\)$", "", body)  # 5 (five)
    for rest in (body, note, re.sub(r"(?:[\s,.]*“[^”]*”)+[.!]?$", "", body)):
        readings = read(rest) if rest and rest != text else ()
        if readings and not isinstance(readings[0], Words | Choice):
            return readings
    return ()


def _readings(text: str, depth: int) -> Iterator[Answer]:
    yield from _choice(text, depth)
    yield from _based(text)
    if number := _scalar(text):
        yield number
    if glued := re.fullmatch(r"(-?\d+(?:\.\d+)?)([A-Za-z](?:\^\{?[23]\}?)?)", text):
        if glued[2][0] in math_units.LETTER_UNITS:
            yield Scalar(math_expression.parse(glued[1]), math_units.canonical(glued[2]), glued=True)
    if number and (text.isdigit() or "," not in text):
        return
    sets_and_relations = (_relation, _set_operation) if "=" in text else (_set_operation, _relation)
    for splitter in (_joined, _comma_list, *sets_and_relations, _bracketed, _plus_minus, _colon):
        found = tuple(splitter(text, depth))
        yield from found
        if found:
            return
    if meaning := meaning_of(text):
        yield Words(meaning)


def _choice(text: str, depth: int) -> Iterator[Answer]:
    r"""(C), \textbf{(C)} 14, C) 14, C. 14, option C."""
    text = re.sub(r"(?i)^“(?:the )?(?:answer|option|choice)(?: is)?”\s*:?\s*|^“(?:option|choice) (?=[A-J]”)", "", text)
    text = text if text.count("“") == text.count("”") else "“" + text
    text = re.sub(r"^“([A-J])[.:] ", r"(\1) “", text)
    match = re.match(
        r"(?:\(\s*“?([A-Ja-j])[”.:]*\s*\)|“([A-J])[.:]?”|([A-J])(?=\s*[).:]|\s+[\d“\\]|$)[).:]?)[\s:.)]*", text
    )
    if match:
        letter, rest = (match[1] or match[2] or match[3]).upper(), text[match.end() :].strip()
        if not rest or (rest[0] not in "+-*/^=<>≤≥_!'(|∈," and not re.match("“(?:or|and|to)”", rest)):
            yield Choice(letter, read(rest, depth) if rest else ())


def _scalar(text: str) -> Scalar | None:
    core, unit = _split_unit(_join_thousands(text))
    percent = False
    if re.fullmatch("%|percent|per cent|pct|percentage points?", unit.strip()):
        percent, unit = True, ""
    if DENIAL.search(unit):
        return None
    words = unit.strip("“”").split(" ")
    scale = math_units.SCALES.get(words[0].lower())
    if scale:
        core, unit = f"({core})*{scale}", " ".join(words[1:])
    try:
        expression = math_expression.parse(core)
    except Unreadable:
        if re.fullmatch(r"[+-]?\s*∞", core):
            return Scalar(Expression(core.replace("+", "").replace(" ", ""), ()))
        return None
    return Scalar(expression, math_units.canonical(unit), percent, digits=core if core.isalnum() else "")


def _join_thousands(text: str) -> str:
    return re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", lambda match: match.group().replace(",", ""), text)


def _split_unit(text: str) -> tuple[str, str]:
    """12 “cm”^2 to ("12", "“cm”^2"), $5 to ("5", "$")."""
    if match := re.match(r"(-?)\s*([$€£¥₹])\s*(?=[\d.])", text):
        core, unit = _split_unit(text[: match.start(2)] + text[match.end() :])
        return core, f"{unit} {match[2]}"
    if (match := re.search(r"(?<=[\d}])\s*°\s*(“?[CFK]”?)?$", text)) and not re.search(r"\\[a-z]*(sin|cos|tan)", text):
        return text[: match.start()], "°" + (match[1] or "").strip("“”")
    if match := re.search(rf"\s*(?:%|{_UNIT_WORD}|[$€£¥₹])(?:{_UNIT_WORD}|[\s/*.\-]|\^\s*\{{?-?\d\}}?)*$", text):
        if match.start() and (unit := match.group().strip()):
            return text[: match.start()], unit.replace("“", "").replace("”", "") if "%" not in unit else "%"
    if match := re.fullmatch(r"(-?[\d.,/]+)\s+([A-Za-z])((?:\^\{?[23]\}?)?)", text):
        if match[2] in math_units.LETTER_UNITS:
            return match[1], match[2] + match[3]
    return text, ""


def _joined(text: str, depth: int) -> Iterator[Answer]:
    parts = split(text, r",?\s*“(?:or|and)”")
    if len(parts) > 1 and all(parts):
        items = tuple(read(piece, depth) for part in parts for piece in _commas(part))
        yield Listing(items, "and" if "“and”" in text and "“or”" not in text else "or")


def _comma_list(text: str, depth: int) -> Iterator[Answer]:
    for separators in ";,":
        parts = [part for part in split(text, separators) if part]
        if len(parts) > 1:
            yield Listing(tuple(read(part, depth) for part in parts))
            return


def _commas(text: str) -> list[str]:
    whole = re.fullmatch(r"[^,]*(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])[^,]*", text)
    return [text] if whole else [part for part in split(text, "[,;]") if part]


def _relation(text: str, depth: int) -> Iterator[Answer]:
    sides = split(text, f"[{RELATIONS}]")
    if len(sides) < 2 or not all(sides):
        return
    operators = tuple(character for character in outside_brackets(text) if character in RELATIONS)
    if operators == ("∈",):
        yield from read(sides[1], depth)
    elif "∈" not in operators:
        yield Relation(tuple(sides), operators)


def _set_operation(text: str, depth: int) -> Iterator[Answer]:
    for operator in "∖∪∩":
        parts = split(text, rf"{operator}|(?<=[)\]❵])\s*U\s*(?=[(\[❴])" if operator == "∪" else operator)
        if len(parts) > 1 and all(parts):
            yield SetOperation(operator, tuple(read(part, depth) for part in parts))
            return


def _bracketed(text: str, depth: int) -> Iterator[Answer]:
    text = re.sub(r"^[A-Z]\s*(?=\([^()]*,)", "", text)  # the point A(3, -2)
    if (match_brackets(text) or {}).get(0) != len(text) - 1:
        return
    opener, inside, closer = text[0], text[1:-1].strip(), text[-1]
    if opener == "⟬":
        rows = [split(row, "&") for row in split(inside, "⏎") if row]
        yield Matrix(tuple(tuple(read(cell, depth) for cell in row) for row in rows))
    elif opener == "❴":
        builder = split(inside, r"[|:]")
        if len(builder) == 2 and any(relation in builder[1] for relation in RELATIONS):
            yield from read(builder[1], depth)
        elif inside:
            yield Listing(tuple(read(part, depth) for part in split(inside, "[,;]") if part), braces=True)
    elif opener in "([]⟨":
        parts = split(inside, "[,;]")
        if len(parts) > 1 and all(parts):
            opener, closer = {"⟨": "(", "]": "("}.get(opener, opener), {"⟩": ")", "[": ")"}.get(closer, closer)
            yield Bracket(opener, tuple(read(part, depth) for part in parts), closer)
        elif opener in "([" and inside[:1] == "⟬":
            yield from read(inside, depth)


def _plus_minus(text: str, depth: int) -> Iterator[Answer]:
    text = text if "±" in text else text.replace("∓", "±")  # one sign alone names both values
    if text.count("±") == 1 and "∓" not in text:
        yield Listing((read(text.replace("±", "+").lstrip("+ "), depth), read(text.replace("±", "-"), depth)))


def _colon(text: str, depth: int) -> Iterator[Answer]:
    clock = re.fullmatch(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?\s*(?:“([AaPp])\.?\s?[Mm]\.?”)?", text)
    if clock and int(clock[1]) < 25:
        half = f"{clock[4].lower()}m" if clock[4] else ""
        yield Clock(int(clock[1]) * 3600 + int(clock[2]) * 60 + int(clock[3] or 0), half)
        return
    parts = split(text, ":|“to”")
    if len(parts) > 1:
        scalars = [_scalar(part) for part in parts]
        if all(scalar and not scalar.unit for scalar in scalars):
            yield Ratio(tuple(scalar.expression for scalar in scalars if scalar))


_BASES = dict(two=2, three=3, four=4, five=5, six=6, seven=7, eight=8, nine=9, ten=10, twelve=12, sixteen=16)


def _based(text: str) -> Iterator[Answer]:
    match = re.fullmatch(r"\(?([0-9A-Fa-f]+)\)?_\{?\(?(?:base )?(\d\d?|[a-z]+)\)?\}?", re.sub("[“”]", "", text).strip())
    base = int(match[2]) if match and match[2].isdigit() else _BASES.get(match[2], 0) if match else 0
    if match and 2 <= base <= 36 and all(int(digit, 36) < base for digit in match[1]):
        yield Based(match[1].lstrip("0").upper() or "0", base)
