"""Units of measure: which letters after a number are a unit, and when two of them are the same one.

In: the words after a number. Out: one canonical spelling. Units are compared, never converted: a key in kilometres is
not met by metres.
"""

import re

_SPELLINGS = """
mm millimeter millimetre | cm centimeter centimetre | dm decimeter decimetre | m meter metre | km kilometer kilometre
in inch inches | ft foot feet | yd yard | mi mile | mg milligram | g gram gm | kg kilogram kilo | t ton tonne
lb pound lbs | oz ounce | ml mL milliliter millilitre | cl cL | dl dL | l L liter litre | gal gallon | ms millisecond
s sec second
min minute | h hr hour | d day | wk week | mo month | yr year | kmh kph kmph | mph | rpm | hz Hz hertz | khz kHz
N newton | J joule | kj kJ | W watt | kw kW | V volt | A amp ampere | Pa pascal | K kelvin | mol mole | rad radian
° degree deg degs | $ dollar usd USD buck | ¢ cent | € euro eur EUR | £ gbp GBP quid | ¥ yen yuan rmb RMB
₹ rupee rs Rs INR | ha hectare | acre | sr
"""
_CANONICAL = {
    word: spellings.split()[0]
    for line in _SPELLINGS.strip().splitlines()
    for spellings in line.split("|")
    for word in spellings.split()
}
_PLURALS = {"feet": "foot", "inches": "inch", "people": "person", "children": "child", "men": "man", "women": "woman"}
SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
# What counts as a unit after a number when no \text says so; single letters are variables first.
UNITS = {word.lower() for word in _CANONICAL if len(word) > 1} | {word + "s" for word in _CANONICAL if len(word) > 2}
UNITS |= set(SCALES) | {"unit", "units", "sq", "square", "cubic", "percent", "per"}
LETTER_UNITS = {word for word in _CANONICAL if len(word) == 1 and word.isalpha()} - {"t", "d"}


def canonical(text: str) -> str:
    """The unit m^2 for square metres, m^{2} or sq m; an empty text for words that say nothing, such as units."""
    text = re.sub(r"\bper\b", "/", re.sub(r"[“”{}.*()]", " ", text))
    parts, power = [], ""
    for word in re.findall(r"\^\s*-?\d+|[^\s/^]+|/", text):
        low = word.lower()
        if word[0] == "^":
            parts.append(word.replace(" ", ""))
        elif low in ("square", "sq", "squared", "cubic", "cubed"):
            power = "^2" if low[0] == "s" else "^3"
            if low in ("squared", "cubed"):
                parts.append(power)
                power = ""
        elif low not in ("unit", "units", "of", "the", "a", "an", "is", "are"):
            parts.append(_one(word) + power)
            power = ""
    text = "".join(part if part[0] in "^/" or i == 0 else " " + part for i, part in enumerate(parts)).replace("/ ", "/")
    return re.sub(r" ([^ ^/]+)\^-(\d)", lambda m: f"/{m[1]}" + f"^{m[2]}" * (m[2] != "1"), text)  # m s^-2


def conflict(key: str, answer: str) -> bool:
    """Whether two canonical units contradict each other. One that is missing does not; nor does a longer name of a
    thing that is counted (red apple, apple)."""
    if not key or not answer or key == answer:
        return False
    words, other = set(key.split()), set(answer.split())
    counted = not (words | other) & set(_CANONICAL.values()) and not re.search(r"[\^/]", key + answer)
    return not (counted and (words <= other or other <= words))


def _one(word: str) -> str:
    low = word.lower()
    singular = _PLURALS.get(low) or re.sub(r"(?<=.{2})s$", "", low)
    for form in (word, low, singular, re.sub("es$", "", low)):
        if form in _CANONICAL:
            return _CANONICAL[form]
    return singular
