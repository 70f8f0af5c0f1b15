"""Writes an answer, in LaTeX, plain text or Unicode, in one plain notation that the readers share.

In: "\\dfrac{1}{2}\\,\\text{ cm}^2", "½ cm²". Out: "\\frac{1}{2} “cm”^{2}". The one decision: everything that has a
character of its own is written as that character (≤ ∪ ∞ π √ °, ❴❵ for set braces, ⟬⟭ for a matrix), every word stands
in quotes “”, and the only commands left are \\frac, \\binom, functions, accents and Greek letters. So splitting an
answer into its parts is looking at single characters.
"""

import re
import unicodedata

from graders.math_units import UNITS

FUNCTION_NAMES = (
    "arcsinh arccosh arctanh arcsin arccos arctan sinh cosh tanh sin cos tan cot sec csc log ln exp lg".split()
)
_GREEK_NAMES = "alpha beta gamma delta theta lambda mu sigma omega phi".split()

_SYMBOLS = {
    **dict.fromkeys("−–—‐‑‒―﹣", "-"), **dict.fromkeys("×∗⋅·∙•✕", "*"), "÷": "/", "∕": "/", "⁄": "/",
    "、": ",", "。": ".", "′": "'", "’": "'", "‘": "'", "“": '"', "”": '"', "º": "°", "˚": "°", "∶": ":",
    **{character: character for character in "ℝℤℚℕℂ…"}, "⩽": "≤", "≦": "≤", "⩾": "≥", "≧": "≥", "≅": "≈", "∣": "|",
    "∛": "√[3]", "∜": "√[4]", "或": " or ", "和": " and ", "与": " and ", "及": " and ", "〈": "⟨", "〉": "⟩", "⋃": "∪",
    "∘": "°", "ø": "∅", "Ø": "∅", "⌀": "∅", "Ω": "\\Omega ", "µ": "\\mu ",
}  # fmt: skip

_COMMANDS = {
    **dict.fromkeys(", ; : > space quad qquad enspace thinspace nobreakspace".split(" "), " "), " ": " ", "~": " ",
    **dict.fromkeys("! left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr displaystyle textstyle "
                    "limits nolimits therefore bf rm it sf tt boxed fbox underline Large large".split(), ""),
    **dict.fromkeys("le leq leqslant leqq".split(), "≤"), **dict.fromkeys("ge geq geqslant geqq".split(), "≥"),
    **dict.fromkeys("ne neq".split(), "≠"), **dict.fromkeys("approx simeq cong".split(), "≈"), "lt": "<", "gt": ">",
    **dict.fromkeys("cdot times ast".split(), "*"), "div": "/", "pm": "±", "mp": "∓", "in": "∈", "cup": "∪", "cap": "∩",
    "setminus": "∖", "backslash": "∖", "infty": "∞", "emptyset": "∅", "varnothing": "∅", "pi": "π", "sqrt": "√",
    "circ": "°", "degree": "°", "prime": "'", "colon": ":", "mid": "|", "vert": "|", "lvert": "|", "rvert": "|",
    "{": "❴", "}": "❵", "lbrace": "❴", "rbrace": "❵", "lbrack": "[", "rbrack": "]", "langle": "⟨", "rangle": "⟩",
    "lfloor": "⌊", "rfloor": "⌋", "lceil": "⌈", "rceil": "⌉", **{character: character for character in "|%$_&#"},
    **dict.fromkeys("dfrac tfrac cfrac nicefrac sfrac".split(), "\\frac"), "dbinom": "\\binom", "tbinom": "\\binom",
    **dict.fromkeys("ldots dots cdots dotsc".split(), "…"), "lg": "\\log", "euro": "€",
    **dict.fromkeys("land wedge And".split(), "“and”"), **dict.fromkeys("lor vee".split(), "“or”"),
    **dict.fromkeys("implies Rightarrow rightarrow to".split(), "→"), "pounds": "£", "textdegree": "°",
    "textdollar": "$", "imath": "i",
    **dict.fromkeys("mathrm mathbf text textbf textit mbox mathit bm boldsymbol operatorname mathbb".split(), ""),
}  # fmt: skip

_FONTS = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|math(?:rm|bf|it|sf|tt|cal|normal)|mbox|hbox|bm|boldsymbol|emph"
    r"|operatorname\*?)\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_MATRIX = re.compile(r"\\(begin|end)\s*\{[pbB]?(?:small)?(?:matrix|array)\}(?:\s*\{[lcr| ]*\})?")
_REMOVED = re.compile(
    r"\\(?:begin|end)\s*\{(?:aligned|align\*?|equation\*?|gathered|gather\*?)\}|\\(?:left|right)\s*\."
    r"|\\(?:h?phantom|vphantom|hspace|tag|label|color)\s*\{[^{}]*\}|\\textcolor\s*\{[^{}]*\}|&(?=\s*=)"
)
_INFIX = re.compile(r"\{((?:[^{}]|\{[^{}]*\})*)\\(over|choose)(?![a-zA-Z])((?:[^{}]|\{[^{}]*\})*)\}")
_INFIX_NAMES = {"over": "frac", "choose": "binom"}
_SETS = re.compile(r"\\mathbb\s*(?:\{\s*([RZQNC])\s*\}|([RZQNC])(?![A-Za-z]))")
_THIN = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\!,|\\!\s*,\\!|\\[,;: ]|~|\\!)(?=\d{3}(?!\d))")
_SPEED = re.compile(r"(?<=[\d} ])(km|cm|mm|m|mi|ft|kg|g|mg|L|J) ?/ ?(h|hr|s|sec|min|day|m|L|mL|kg|g)(?![A-Za-z])")
_ANY_COMMAND = re.compile(r"\\(?:([A-Za-z]+)\*?|(.))", re.DOTALL)
_WORD = re.compile(r"“[^”]*”|\\[A-Za-z]+|(?<![A-Za-z])[ap]\.\s?m\b\.?|[A-Za-z]{2,}(?:'[a-z]+)?")
_QUOTED_PART = re.compile(r"[^\W\d_]+(?:['.\-][^\W\d_]+)*\.?|.", re.DOTALL)

# The last touches, in this order.
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"[~`]", " "),
        (r"\*\*", "^"),
        (r"<=|=<", "≤"),
        (r">=", "≥"),
        (r"!=", "≠"),
        (r"==", "="),
        (r"\.\.\.", "…"),
        (r"\^\s*\{?\s*°\s*\}?", "°"),  # ^{\circ}
        (r"\^\s*\{?\s*('+)\s*\}?", r"\1"),  # ^{\prime}
        (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", "*"),  # 3.2 x 10^5
        (r"(?<![\w\\“}.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])", r"\1*10^{\2}"),  # 3.2e5
        (r"\\(frac|binom)\s*(\d)\s*(\d)", r"\\\1{\2}{\3}"),  # \frac12
        (r"\\(overline|bar|dot)\s*(\d)", r"\\\1{\2}"),  # 0.\overline3
        (r"(\\frac|\\frac\s*\{[^{}]*\})\s*(\d)(?=\d)", r"\1{\2}"),  # \frac{1}23 is half of three
        (r"\\frac\s*\{\s*(“[^”]*”)\s*\}\s*\{\s*(“[^”]*”)\s*\}", r"\1/\2"),  # \frac{m}{s}
        (r"(?<![\d.,])(\d{1,3}) (\d{3}(?: \d{3})*)(?![\d,])", lambda m: m[1] + m[2].replace(" ", "")),  # 12 345
        (r"\s+", " "),
        (r"” “(?!(?:or|and)”)", " "),
        (r"“(or|and) ", r"“\1” “"),
    )
]


def normalise(text: str) -> str:
    """The answer in plain notation; empty if nothing is there. Takes time linear in the length."""
    text = _plain_characters(text).strip().strip("*")
    text = re.sub(r"\{\s*\\(?:rm|bf|it|sf|tt)\b([^{}]*)\}", r"\\text{\1}", text)
    for _ in range(4):  # {{1\over 2}\over 3}
        text, changes = _INFIX.subn(lambda m: f"\\{_INFIX_NAMES[m[2]]}{{{m[1]}}}{{{m[3]}}}", text)
        if not changes:
            break
    text = re.sub(r"\\not\s*=", r"\\neq ", text)
    text = _delimiters(text)
    text = _MATRIX.sub(lambda match: "⟬" if match[1] == "begin" else "⟭", text)
    text = _SETS.sub(lambda match: {"R": "ℝ", "Z": "ℤ", "Q": "ℚ", "N": "ℕ", "C": "ℂ"}[match[1] or match[2]], text)
    text = _REMOVED.sub(" ", _THIN.sub("", text))
    for _ in range(4):  # wrappers inside wrappers
        text, changes = _FONTS.subn(_unwrap, text)
        if not changes:
            break
    text = _ANY_COMMAND.sub(_command, text.replace("{,}", ",").replace("{:}", ":"))
    text = _SPEED.sub(r"“\1”/“\2”", text)
    text = _WORD.sub(_bare_word, text)
    return _tidy(text)


def _plain_characters(text: str) -> str:
    """Full-width and other look-alike characters become plain ones; control characters and surrogates go."""
    text = re.sub(r"\x1b\[[0-9;]*m|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "", text)
    if text.isascii():
        return text
    text = re.sub(r"(?:\d\u0305)+", lambda m: "\\overline{" + m.group().replace("\u0305", "") + "}", text)
    text = "".join(character if character.isascii() else _plain(character) for character in text)
    return re.sub(r"\}[\^_]\{", "", text)  # x¹⁰ came out as x^{1}^{0}


def _plain(character: str) -> str:
    if character in _SYMBOLS:
        return _SYMBOLS[character]
    kind, category = unicodedata.decomposition(character).split(" ")[0], unicodedata.category(character)
    if category == "Nd":
        return str(unicodedata.decimal(character))
    if category in ("Cc", "Cf", "Cs", "Co", "Cn"):
        return ""
    if category[0] == "Z":
        return " "
    if "GREEK" in (name := unicodedata.name(character, "")) and "LETTER" in name and character not in "πΠ":
        letter = name.split()[-1].lower()
        return "\\" + (letter if "SMALL" in name else letter.capitalize()) + " "
    plain = unicodedata.normalize("NFKC", character)
    if kind == "<fraction>":
        top, _, bottom = plain.partition("⁄")
        return f"\\frac{{{top}}}{{{bottom}}}"
    if kind in ("<super>", "<sub>"):
        return ("^{" if kind == "<super>" else "_{") + plain.replace("−", "-") + "}"
    return plain


def _delimiters(text: str) -> str:
    """Drops $...$, \\(...\\), \\[...\\]; a dollar sign that is money stays as $."""
    text = re.sub(r"\\[()\[\]]", " ", text)
    escaped = text.replace("\\$", "\ue000")
    if escaped.count("$") % 2 == 0 or not re.match(r"\s*-?\s*\$\s*[\d.]", escaped):
        escaped = escaped.replace("$", " ")
    return escaped.replace("\ue000", "\\$")


def _unwrap(match: re.Match[str]) -> str:
    letter = match[1].strip()
    return letter if letter in ("e", "i", "d") and match.group().startswith("\\math") else _quote(letter)


def _quote(text: str) -> str:
    """The words of a \\text{...} in quotes, numbers and signs outside them: "12 cm" is 12 “cm”."""
    text = _ANY_COMMAND.sub(_command, text)
    parts = re.findall(r"“[^”]*”|[^“]+", text)
    return "".join(part if part[0] == "“" else _QUOTED_PART.sub(_quoted_part, part) for part in parts)


def _quoted_part(match: re.Match[str]) -> str:
    part = match.group()
    return f"“{part}”" if part[0].isalpha() and part[0] not in "πℝℤℚℕℂ" else part


def _command(match: re.Match[str]) -> str:
    if match[2] == "\\":
        return "⏎"
    name = match[1] or match[2]
    return _COMMANDS[name] if name in _COMMANDS else match.group().rstrip("*")


def _bare_word(match: re.Match[str]) -> str:
    """Decides whether letters outside \\text are a word, a function or a product of symbols."""
    text = match.group()
    if text[0] in "“\\":
        return text
    low = text.lower()
    if low in FUNCTION_NAMES:
        return "\\" + low.replace("lg", "log")
    if low in ("pi", "sqrt", "infinity", "inf", "oo"):
        return {"pi": "π", "sqrt": "√"}.get(low, "∞")
    if low in _GREEK_NAMES:
        return f"\\{low} "
    before = match.string[max(0, match.start() - 4) : match.start()]
    after_number = re.search(r"[\d)}]\s*$", before)
    glued = bool(after_number) and before[-1] != " "
    after = match.string[match.end() : match.end() + 9]
    in_sentence = re.search(r"[A-Za-z]{2}[ ,]+$", before) or re.match(r"[ ,]+[A-Za-z]{2}", after)
    if low in ("or", "and", "no", "to") or in_sentence or re.fullmatch(r"[ap]\.?\s?m\.?", low):
        return f"“{text}”"
    if after_number and low in UNITS:
        return f"“{text}”"
    is_word = len(text) >= 3 and bool(re.search("[aeiouAEIOU]", text)) and not (glued and len(text) < 5)
    return f"“{text}”" if is_word else text


def _tidy(text: str) -> str:
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.rstrip(' .,;:⏎"').lstrip(' ,;:"')
    return text[1:-1] if text[:1] == text[-1:] == "'" else text
