"""Answers that are words: what they are compared by, and which of them stand for mathematics.

In: text in the notation of math_text.normalise. Out: plain words without case and articles. The one decision: words
are compared whole. A sentence around the right word counts only if it ends by naming it and denies nothing.
"""

import re

_NONE = "(?:there (?:is|are) )?no(?: real| integer)? solutions?(?: exists?)?|(?:the )?empty set|none"
_MISSING = "DNE|(?:(?:it|the limit) )?does not exist"
_ALL = "(?:the )?(?:set of )?all (?:reals|real numbers)"
DENIAL = re.compile(
    r"\b(?:not|no|none|never|neither|nor|cannot|isn't|wrong|false|ignore|any|anything|whatever|accept\w*|too|than|grad(?:er|ing)|key|"
    r"credit)\b",
    re.IGNORECASE,
)
_MEANINGS = {
    "∅": re.compile(rf"∅|❴\s*❵|“(?:{_NONE})”", re.IGNORECASE),
    "dne": re.compile(f"“(?:{_MISSING})”", re.IGNORECASE),
    "ℝ": re.compile(f"ℝ|“(?:{_ALL})”", re.IGNORECASE),
}


def meaning_of(text: str) -> str:
    """∅, ℝ or dne where the words stand for one of them, else an empty text."""
    return next((meaning for meaning, pattern in _MEANINGS.items() if pattern.fullmatch(text)), "")


def says(sentence: str, word: str) -> bool:
    """Whether a sentence, as words_of gives it, ends by naming the word: "the triangle is isosceles"."""
    return sentence.endswith(f" is {word}") and not DENIAL.search(sentence) and " or " not in sentence


def words_of(text: str) -> str:
    """The text as words to be compared: no case, no punctuation round words, no lead-in such as "the answer is"."""
    plain = re.sub(r"[“”\s]+", " ", text).strip(" .,;:!?'\"")
    if re.fullmatch(r"(?:[Aa] )?[^\W\d_]{2,}(?:[ .,'\-()]+\w+)*", plain.strip("()")):
        plain = re.sub(r"[.,'()]|(?<=\s)\s", "", plain.casefold().replace("-", " "))
        plain = re.sub(r"^(?:so )?(?:the |my )?(?:final |correct )?(?:answer|option|choice)(?: is| :)? ", "", plain)
        return re.sub(r"^(?:the|an?|it is|its) (?=\w)", "", plain)
    plain = plain.strip("() ") if re.fullmatch(r"\W*\w\W*", plain) else plain
    return plain.casefold() if len(plain) == 1 else plain.replace(" ", "")
