r"""Reads which of several choices a response names.

In: the choices (label and text) and a response. Out: the index of the one choice that it names, or None.

Reading goes from the most to the least explicit statement, and the first that says anything decides:
    1. the last `<answer>`, and in it or without it the last `\boxed{}`;
    2. the last closing phrase ("the answer is C", "C is correct");
    3. a label or a choice's text that stands alone: as the last line or the first;
    4. the last weak phrase ("I choose C");
    5. the one label mentioned at all.
A statement that names two choices, or a label with another choice's text, names none. Ruled-out choices ("not A",
"B is wrong") do not count, nor do the article A and the pronoun I. After a change of mind ("wait, ...") what follows is
read first.

The design decision: labels and texts of choices are first replaced by single marks, so that the patterns of the
statements are fixed, readable, and linear in the response's length.
"""

import re
import unicodedata
from typing import Any

from graders.exact import after_thinking, last_answer_tag, last_boxed

# Marks are private-use characters: mark i of a range stands for choice i (for a text: for the i-th distinct text).
LABEL0, SMALL0, TEXT0, OTHER = 0xE000, 0xE040, 0xE080, "\ue0ff"
LABEL = "[\ue000-\ue03f]"
CHOICE = "[\ue000-\ue0fe]"  # a label, a small-letter label or a text
THING = "[\ue000-\ue0ff]"  # or OTHER, a capital that labels nothing

# A letter or digit of a script that puts spaces between words (in 答案是C the label follows a letter).
WORD = r"[^\W\u3000-\u9fff\uac00-\ud7a3]"
# "A" and "I" are words rather than labels where another word follows, except one of these.
AFTER_I = "and|are|because|but|by|due|fits|instead|is|isn't|looks|nor|not|or|out|over|rather|remains|seems|since|with"
AFTER_A = AFTER_I + "|cannot|must|so|was|works|would"
STANDALONE = re.compile(
    rf"(?<!{WORD})(?<!{WORD}['.-])"
    rf"(?:[B-HJ-Zb-hj-z\d]|[Aa](?! (?!(?:{AFTER_A})\b){WORD})|[Ii](?! (?!(?:{AFTER_I})\b){WORD}))"
    rf"(?!{WORD}|['+#-]{WORD}|\+\+|#|\.{WORD}\b)"
)

# Repetitions are bounded, so that no pattern takes more than linear time.
PUNCTUATION = r"[ \"'()\[\]{}.:,;–—=→⇒-]{0,8}"
OPEN, CLOSE = r"[\"'(\[{]{0,3}", r"[\"')\]}]{0,3}"
END = re.compile(r"\s*(?:$|[.,;:!?)\]\n]|(?:because|since|as|and|or)\b)", re.IGNORECASE)
JOIN = r"(?:,? ?\b(?:and/or|and|or)\b|[,/&+;]|或者?|和| )"
HEAD = (
    r"(?:\b(?:answers?|ans|solution|respuesta|réponse|antwort|ответ|resposta|risposta)\b|答案|答え|回答|正解|정답|답|"
    r"\bbest(?= is\b)|"
    r"\b(?:correct|right|best|final|chosen|my|only|remaining) (?:option|choice|one|letter|pick|selection)\b)"
)
LINK = r"(?:\b(?:is|was|be|are|remains|seems|es|est|ist|é|è)\b|[是为]|は|는|은)"
FILLER = (
    r"(?:[\s:=>\"'(\[{,–—-]|\b(?:actually|answer|but|certainly|choice|clearly|definitely|hence|indeed|instead|just|"
    r"letter|likely|most|obviously|option|probably|rather|simply|surely|the|then|therefore|thus)\b){0,16}"
)
STRONG = re.compile(rf"{HEAD}(?:[^.!?\n]{{0,80}}?{LINK}|\.?(?=[\s:=>\"'(\[–—-])){FILLER}({THING})", re.IGNORECASE)
VERDICT = re.compile(
    rf"({CHOICE}[ ,]{{0,2}}(?:or|and|,|/|&) ?(?:option |choice )?)?({CHOICE})\)? "
    r"(?:is|are|was|must be|would be|should be|seems) (?:\w+ly )?(?:the )?(?:only )?(?:correct|right|best|answer)\b"
    rf"|({CHOICE})\)? ?[?:=–—-]? ?(?:yes\b|[✓✔✅])",
    re.IGNORECASE,
)
WEAK = re.compile(
    r"(?:\b(?:i(?:'d|'ll| would| will)? (?:answer|choose|go (?:with|for)|guess|meant?|opt for|pick|say|select|think)|"
    r"choose|conclude|gives|going with|hence|it(?:'s| is| must be| has to be| should be)|leaves?(?: us with)?|must be|"
    rf"pick|select|so|that(?:'s| is)|therefore|thus)\b|选择?){FILLER}({THING})",
    re.IGNORECASE,
)
ALONE = re.compile(
    rf"[^\w{THING[1:-1]}]{{0,8}}(?:\b(?:so|thus|therefore|hence|option|choice|letter|answer|it's|it is|i mean|no|then|"
    rf"the)\b[ ,:]{{0,3}}){{0,6}}{OPEN}({THING}){CLOSE}(?P<rest>.*)",
    re.IGNORECASE,
)
NEXT_THING = re.compile(
    rf"{PUNCTUATION}(?:\b(?:which is|that is|i\.e\.|namely|so|thus|the|option|choice|answer)\b{PUNCTUATION}){{0,4}}"
    rf"({CHOICE})",
    re.IGNORECASE,
)
JOINED = re.compile(
    rf"[\"')\]}}.]{{0,3}}(?: ?{JOIN}) ?(?:(?:maybe|possibly|perhaps|also|option|choice|both)\b ?){{0,3}}{OPEN}({THING})"
    rf"(?={END.pattern})",
    re.IGNORECASE,
)

ITEM = rf"(?:(?:not|both|either|options?|choices?|answers?) ){{0,3}}{CHOICE}(?! (?:is|remains|must|works|fits)\b)"
ITEMS = rf"{CHOICE}(?:(?:(?:, ?|/){ITEM}){{0,8}},? ?(?:and|or|nor|/) ?{ITEM})?"
RULED_OUT_BEFORE = (
    r"(?:\b(?:not|never|neither|nor|than|instead of|over|anything (?:but|except))|n't|\bcannot)\b[\s:]{0,3}"
    rf"(?:(?:be|have to be|the|option|choice|either) ){{0,3}}{ITEMS}"
    r"|\b(?:(?:eliminat|exclud|reject|discard)\w*|(?:rul|cross)\w* out)\b[\s:]{0,3}"
    rf"{ITEM}(?:(?:, ?and|,| and| or) ?{ITEM}){{0,8}}"
)
VERB = r"(?:is|are|was|were|can|could|would|do|does|did|has|have|should|will|seems?|looks?)"
BAD = r"(?:wrong|incorrect|false|impossible|invalid|implausible|unlikely|(?:eliminat|exclud|reject)ed|ruled|out|too)"
RULED_OUT_AFTER = (
    rf"(?<!except )(?<!but ){ITEMS}\)?(?:,? ?{VERB}(?: ?n't| not|not)\b(?! (?:wrong|incorrect|false))"
    rf"|,? (?:is|are|was|were|seems?|looks?|can be|must be) (?:\w+ )?{BAD}\b"
    r"| ?[?:)–—=-]? ?(?:(?:no|wrong|incorrect|eliminated|ruled out)\b|[✗❌✘]))"
)
RULED_OUT = re.compile(f"{RULED_OUT_BEFORE}|{RULED_OUT_AFTER}", re.IGNORECASE)
REASON = re.compile(r"\b(?:because|since)\b.*", re.IGNORECASE | re.DOTALL)
SENTENCE_END = re.compile(r"(?<=[.!?\n])")
CHANGE_OF_MIND = re.compile(
    rf"\b(?:no,? )?wait\b|(?<!{CHOICE} )\bno\b[,:.;–—-]? ?(?={OPEN}{CHOICE})|"
    r"\b(?:actually|correction|hold on|oops|sorry|scratch that|on second thoughts?|i changed my mind|i was wrong|"
    r"my mistake|let me (?:correct|rethink|reconsider))\b",
    re.IGNORECASE,
)
ARTICLE = re.compile(r"^(?:the|an?) ")
BOX = r"\\(?:boxed|fbox)\{([^{}]*)\}"
JOINED_BOXES = re.compile(rf"{BOX}[\s$]*(?:or|and|[,/&])[\s$]*{BOX}")


class Reader:
    """Reads which choice a response names, as an index, for one set of choices (label -> text, blank if unknown)."""

    def __init__(self, choices: dict[str, Any]) -> None:
        self.labels = {label.upper(): i for i, label in enumerate(choices)}
        one_character = all(re.fullmatch("[A-Za-z0-9]", label) for label in choices)
        if not choices or len(self.labels) < len(choices) or not one_character:
            raise ValueError(f"choices {list(choices)}: labels must be distinct single letters or digits")
        self.small_letters = any(label.islower() for label in choices)
        self.texts: dict[str, list[int]] = {}
        for i, text in enumerate(choices.values()):
            self.texts.setdefault(_text_key(_clean(str(text))), []).append(i)
        self.texts.pop("", None)
        self.named_by_text = list(self.texts.values())
        # A text that is itself a label is read as the label.
        longest_first = sorted((t for t in self.texts if t.upper() not in self.labels), key=len, reverse=True)
        either = "|".join(re.escape(text).replace(r"\ ", r"\s+") for text in longest_first) or r"(?!)"
        whole = rf"(?<!{WORD})(?<!{WORD}-)(?:(?<![-./])|(?!\d))(?:{either})(?!{WORD}|-{WORD}|[.,/]\d| ?[+*^] ?{WORD})"
        self.text = re.compile(whole, re.IGNORECASE)

    def index_of(self, key: Any) -> int:
        """The index of the right choice; ValueError where the key is none of them."""
        if isinstance(key, int) and not isinstance(key, bool) and 0 <= key < len(self.labels):
            return key
        if isinstance(key, str):
            name = key.strip().strip("().").upper()
            if name in self.labels:
                return self.labels[name]
            if name.isdecimal() and int(name) < len(self.labels):
                return int(name)
            if len(same := self.texts.get(_text_key(_clean(key)), [])) == 1:
                return same[0]
        raise ValueError(f"ground_truth={key!r}: needs one of the labels {list(self.labels)} or an index from 0")

    def read(self, response: str | None) -> int | None:
        """The index of the one choice that the response names, or None."""
        text = after_thinking(response) or ""
        if "<answer>" in text:
            text = last_answer_tag(text) or ""
        if "\\boxed{" in text or "\\fbox{" in text:
            joined = [m.groups() for m in JOINED_BOXES.finditer(text)]
            text = last_boxed(text) or ""
            if joined and joined[-1][1] == text and _clean(joined[-1][0]) != _clean(text):
                return None
        cleaned = _clean(text)
        if (key := _text_key(cleaned)).upper() not in self.labels and (same := self._same_text(key)):
            return self._only(same)
        marked = RULED_OUT.sub(" ", self._mark(cleaned))
        parts = CHANGE_OF_MIND.split(marked)[::-1]
        for statement in (self._stated, self._mentioned):
            for part in parts:
                named = statement(part)
                if named is not None:
                    return self._only(named)
        return None

    def _same_text(self, key: str) -> set[int]:
        """The choices whose text is the whole response, with or without an article."""
        if key in self.texts:
            return set(self.texts[key])
        bare = ARTICLE.sub("", key)
        return {i for text, indices in self.texts.items() if ARTICLE.sub("", text) == bare for i in indices}

    def _mark(self, text: str) -> str:
        def label_mark(match: re.Match[str]) -> str:
            letter = match[0]
            index = self.labels.get(letter.upper())
            if index is None:
                return OTHER if letter.isupper() else letter
            return chr((SMALL0 if letter.islower() and not self.small_letters else LABEL0) + index)

        def text_mark(match: re.Match[str]) -> str:
            key = _text_key(match[0])  # not a text where `re` ignores case and Unicode folding does not, as with İ
            return chr(TEXT0 + list(self.texts).index(key)) if key in self.texts else match[0]

        text = self.text.sub(text_mark, text)
        return STANDALONE.sub(label_mark, text)

    def _named(self, mark: str) -> set[int]:
        if mark == OTHER:
            return {-1}
        code = ord(mark)
        return set(self.named_by_text[code - TEXT0]) if code >= TEXT0 else {(code - LABEL0) % (SMALL0 - LABEL0)}

    def _only(self, named: set[int]) -> int | None:
        return min(named) if len(named) == 1 and named != {-1} else None

    # The readings below give the set of choices that are named (-1: one that does not exist), which is an answer where
    # it holds one choice; an empty set where the statement contradicts itself; None where nothing is stated.

    def _stated(self, part: str) -> set[int] | None:
        strong = [(m.start(1), False) for m in STRONG.finditer(part)]
        verdicts = [(m.start(m.lastindex or 2), m[1] is not None) for m in VERDICT.finditer(part)]
        if strong or verdicts:
            at, names_several = max(strong + verdicts)
            return set() if names_several else self._settle(part, at)
        lines = [line for line in part.splitlines() if line.strip()]
        for ordered in (lines[::-1], lines):
            named = self._alone(ordered)
            if named is not None:
                return named
        weak = [m.start(1) for m in WEAK.finditer(part)]
        return self._settle(part, weak[-1]) if weak else None

    def _alone(self, lines: list[str]) -> set[int] | None:
        """Of the lines that begin a run of answer-like lines, the first, unless it is one entry of a list."""
        run: list[set[int]] = []
        for line in lines:
            match = ALONE.fullmatch(line.strip())
            if not match:
                break
            rest = match["rest"].strip()
            bare = not rest.strip(".:,;!?* ") or NEXT_THING.match(rest) or JOINED.match(" " + rest)
            is_label = ord(match[1]) < TEXT0
            if not bare and not (is_label and re.match(r"[.:,)–—=-]|(?:because|since|as|for)\b", rest)):
                break
            run.append(self._settle(line.strip(), match.start(1)))
        if not run:
            return None
        others = set().union(*run[1:]) - run[0]
        return run[0] if not others or run[0] <= set().union(*run[1:]) else set()

    def _settle(self, text: str, at: int) -> set[int]:
        """What the statement says whose first mark is at `at`: the mark, with what is joined to it."""
        named = self._named(text[at])
        at += 1
        following = NEXT_THING.match(text, at)
        if following:
            also = self._named(following[1])
            if ord(following[1]) < TEXT0:  # a label may also be the text of a choice, as in "C. A"
                also |= set(self.texts.get(list(self.labels)[min(also)].casefold(), ()))
            if named & also:
                named, at = named & also, following.end()
            elif END.match(text, following.end()):
                return set()
        joined = JOINED.match(text, at)
        return named | self._named(joined[1]) if joined else named

    def _mentioned(self, part: str) -> set[int] | None:
        sentences = [REASON.sub("", s) for s in SENTENCE_END.split(part) if not s.endswith("?")]
        marks = re.findall(LABEL, " ".join(sentences))
        return set().union(*map(self._named, marks)) if marks else None


PLAIN = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "。": ". ", "、": ",", "−": "-"})
LATEX_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathsf|mathit|bf|rm)\s*\{([^{}]*)\}")


def _clean(text: str) -> str:
    """The text without what only changes its look: markdown, LaTeX wrappers, full-width forms, invisible characters."""
    text = re.sub(r"[^\x00-\x7f]", lambda m: _plain(m[0]), unicodedata.normalize("NFC", text)).translate(PLAIN)
    text = re.sub(r"~~[^~\n]*~~", " ", text)
    for _ in range(3):
        text = LATEX_WRAPPER.sub(r"\1", text)
    text = re.sub(r"\$|\\[()\[\]]", "", text)
    text = re.sub(r"(?<!\w)[*_`]+|[*_`]+(?!\w)", "", text)
    text = re.sub(r"(?m)^[ \t]*(?:[#>•+-]+[ \t]+)+", "", text)
    return re.sub(r"[^\S\n]+", " ", text)


def _plain(char: str) -> str:
    if unicodedata.category(char) in ("Cf", "Co"):
        return ""
    keep = unicodedata.decomposition(char).startswith(("<super>", "<sub>", "<fraction>"))
    return char if keep else unicodedata.normalize("NFKC", char)


def _text_key(cleaned: str) -> str:
    return " ".join(cleaned.casefold().split()).strip(" .!\"'")
