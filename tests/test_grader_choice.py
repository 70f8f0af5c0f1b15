"""ChoiceGrader against its cases and further wordings of each kind."""

import json
import time
from pathlib import Path

import pytest

from graders.choice import ChoiceGrader
from graders.choice_reader import Reader

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases" / "choice.jsonl").read_text().splitlines()]
METALS = {"A": "tin", "B": "gold", "C": "iron", "D": "lead"}


def score(response, key, choices, **kwargs):
    grader = ChoiceGrader(**kwargs)
    extra_info = {} if choices is None else {"choices": choices}
    (result,) = grader(data_sources=["t"], solution_strs=[response], ground_truths=[key], extra_infos=[extra_info])
    return result


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case):
    assert score(case["response"], case["ground_truth"], case["choices"]) == case["score"], case["why"]


# What a careful person takes each response to name among METALS; None: no single choice.
READINGS = {
    "C": [
        "C", "(C)", "[C]", "C)", "C:", '"C"', "'C'", "c)", "(c)", "c.", "option C", "Option C.", "Choice (C)",
        "C. Iron.", "C) iron", "C: iron", "C - iron", "C – iron", "(C) iron", "C iron", "c. iron", "[C] iron",
        "C.iron", "The correct answer is (C) iron.", "So the answer must be C", "Therefore, option C is correct.",
        "C is the answer.", "C is the right answer because gold is soft.", "The correct choice would be C.",
        "My answer: C", "Final Answer: C", "**Answer:** C", "**Answer: C**", "The answer is: **C**", "Answer - C",
        "Answer = C", "Answer C", "Ans: C", "Ans. C", "It's C", "I choose C.", "I'd go with C", "I would pick (C)",
        "I think C", "I think it's C.", "答案是C", "正确答案是 C", "答案：（Ｃ）", "选C", "答案为Ｃ",
        "Ａｎｓｗｅｒ：Ｃ", "（Ｃ）", "Ｃ", "Ｃ．", "Ⓒ",
        "𝐂", r"\boxed{C}", r"\boxed{\text{C}}", r"\boxed{\textbf{(C)}}", r"$\boxed{C}$", r"\fbox{C}",
        r"The answer is \boxed{C. iron}.", r"\boxed{iron}", r"\boxed{B} no wait \boxed{C}", "<answer>C</answer>",
        "<answer>\nC. iron\n</answer>", "<answer>(C)</answer> done", "<answer>The answer is C</answer>",
        "<answer>iron</answer>", "<answer>B</answer><answer>C</answer>", r"<answer>\boxed{C}</answer>",
        "A careful look shows that the correct option is C.", "A bit of thought gives C",
        "A is a common letter but the answer is C", "iron", "Iron.", "IRON", "The answer is iron.",
        "The answer is iron", "It's iron.", "Iron is the answer.", '"iron"', "**iron**", "The answer is iron (C).",
        "iron (C)", "The answer is C. Gold is too soft.", "The answer is C (iron), not B (gold).",
        "Answer: B. No wait. Answer: C", "Answer: B. No wait, it's C.", "Answer: B. Wait, no: C.",
        "Answer: B\n\nActually, the answer is C.", "The answer is B. Hmm, let me reconsider. The answer is C.",
        "I first thought B, but the answer is C.", "B. Wait, no, C.", "The answer is A. Sorry, I meant C.",
        "The answer is actually C.", "The answer is B. The answer is C.",
        "First I said the answer is B. On second thought, the answer is C.", "Not A, not B, not D. The answer is C.",
        "Not A, not B, not D. C.", "Not A or B, and D is out, so C.", "A is wrong. B is wrong. D is wrong. C.",
        "A is wrong, B is wrong, D is wrong, so C", "Eliminate A, B, and D. So C.",
        "Rule out A and D; B is too soft. So C", "It can't be A or B, and D is impossible, so it must be C.",
        "It cannot be B. The answer is C.", "The answer is not B but C.", "The answer is not B. The answer is C.",
        "The answer is C, not B.", "The answer is C rather than B.", "C, not B", "C and not B", "C instead of B",
        "Neither A nor B works, D is too soft. C.", "We can eliminate A, B and D, leaving C.",
        "After eliminating A, B, and D, C remains.", "~~B~~ C", "A. tin\nB. gold\nC. iron\nD. lead\n\nC",
        "A. tin\nB. gold\nC. iron\nD. lead\nAnswer: C",
        "A. tin - soft\nB. gold - soft\nC. iron - hard\nD. lead - soft\nThe answer is C.", "*C*", "`C`", "__C__",
        "## C", "> C", "- C", "**C. iron**", "### Answer\nC", "**Final answer**\n\n**C**", "Answer:\n\n(C) iron",
        "<think>B looks nice</think>\nC", "<think>The answer is B</think>The answer is C",
        "<think>a</think><think>b</think>C", "Let me think about the answer. Iron rusts. The answer is C",
        "The answer is clear. C", "The correct answer among A, B, C and D is C", "C, because B is too soft",
        "C because gold does not rust", "C since A, B and D are soft.", "C. It has the strongest bonds.",
        "C\n\nIron is the strongest of them all.", "C is correct", "A is soft; B is a metal; C is correct.",
        "Is it B? No. The answer is C.", "La respuesta es C", "Die Antwort ist C.", "Respuesta: C",
        "La réponse est C", "The answer is c", "answer: c", "the answer is c, iron",
        "The answer is a hard one to find, but it is C", "I think A is tempting, but the answer is C.",
        "The answer is (C), since (A) and (B) are too soft.",
        "Looking at option A, it is wrong. Option B is not right. Option D is incorrect. Therefore option C.",
        "Answer: C. Wait, let me double check B: it's wrong.",
        "The answer is C. Let me double check: B is gold, which is soft. So yes.", "Answer is C", "ANSWER: C",
        "Correct answer: C", "Correct option: C) iron", "The best answer is C) iron", "Solution: C",
        r"The final answer is $\boxed{C}$. I hope it is correct.", "The final answer is $C$.",
        r"Hence, the correct option is $\mathrm{(C)}$.", "Question: which metal rusts?\nAnswer: C",
        "The answer is option C", "The answer is letter C.", "The answer would be choice C: iron",
        "I'm going with C!", "C!", "C?", "{C}", "The answer is B, no, C", "B... no, C", "A: no, B: no, C: yes",
        "A ✗ B ✗ C ✓ D ✗", "A: wrong\nB: wrong\nC: ✅\nD: wrong", "Options A, B and D are incorrect, so C.",
        "Options A/B/D are wrong. C.", "I pick B. Actually C.", "Everything except C is wrong",
        "It's neither A nor B, and D is wrong, leaving C.", "Answer: B\nAnswer: C", "C → iron", "Ｃ．ｉｒｏｎ", 
        "答案是Ｃ。",
        "选Ｃ", "***C***", "**C.** iron", "**(C)** iron", "> **C**", "1. C", "C.  iron.", "C.) iron", "C: Iron!",
        "I am confident that the right answer is C", "C it is.", "It should be C.", "The right one is C",
        "Let's go with C.", "My final choice is C.", "C is my answer", "Answering this is easy: C",
        "An answer that fits is C", "Answer: A. Hmm, on reflection, answer: C.", "The answer is C: iron.",
        "Among A, B, C and D, the best is C", "The answer is:\n\n**C. iron**",
        "So the answer is C) iron, because it rusts.",
        "Iron rusts, so the answer is C.", "The correct answer is option C, iron.",
        "After checking each option, C fits best.",
        "B is incorrect because gold does not rust. C is correct because iron rusts.",
        "(A) is soft, (B) is soft, (D) is soft. Only (C) is hard. The answer is (C).", 'The answer is "C".',
        "The answer is 'C'", 'Answer: "C. iron"', "Answer: [C]", "Answer: <C>", "answer is: C.", "ANSWER IS C",
        "Your answer: C", "The answer's C", "Choose C", "Select option C.", "C, final answer.", "C - final answer",
        "Final: C", '{"answer": "C"}', "The answer is B... wait, it is C.",
        "The answer cannot be A, B or D; it is C.", "Since it is not A, not B and not D, it has to be C.",
        "A? No. B? No. D? No. C? Yes.", "A no, B no, D no, C yes", "The answer is C because A and B are soft metals.",
        "The answer is C, since neither A nor B rusts.", "We have A = tin and B = gold. The answer is C.",
    ],
    "A": [
        "The answer is A", "The answer is A because tin is light.", "A", "a", "(A) tin", "The answer is A.",
        "Answer: A", "A is correct",
    ],
    "B": [
        "The answer is C? No wait, the answer is B", "I am fairly sure the answer is (B).", "I, for one, choose B",
    ],
    "D": [
        "I believe the answer is D", "I am sure: D", "I'd say D.", "A quick check shows D.", "not C but D",
    ],
    None: [
        r"\boxed{B} or \boxed{C}", r"\boxed{}", r"\boxed{C", "<answer>C", "<answer></answer>",
        "C <answer>B or C</answer>", "gold (C)", "C. gold", "C) gold", "(C) gold", "C: gold", "Answer: C - gold",
        "The answer is C. gold", "The answer is C (gold).", "The answer is gold (C).",
        "The answer is C, which is gold.", "B. iron", r"\boxed{C. gold}", "<answer>C. gold</answer>", "B or C",
        "B and C", "B/C", "B, C", "B & C", "Either B or C", "The answer is B or C", "The answer is B and C.",
        "Answer: B, C", "Answer: B/C", r"\boxed{B, C}", r"\boxed{B or C}", "(B) or (C)", "Both B and C",
        "both B and C are correct", "B or C is correct", "I choose B or C.", "iron or gold",
        "The answer is iron or gold", "C or maybe B", "It could be B or C.", "C. iron or B. gold",
        "The answer is not C.", "Not C", "E", "(E)", "The answer is E", "Answer: F", "E. iron", "Z", "A B C D",
        "A, B, C, D", "ABCD", "A/B/C/D", "(A) (B) (C) (D)", "A\nB\nC\nD", "A. tin\nB. gold\nC. iron\nD. lead",
        "All of A, B, C and D", "A and B and C and D", "The answer is A, B, C, D", "A or B or C or D", "", "   \n",
        "Definitely iron-rich things exist", "Definitely", "Don't know", "Because I said so", "Cats are nice",
        "Doubtful", "Don't ask me, ask Bob.", "Absolutely anything could be right", "By all means, Do it", "C-shaped",
        "D'accord", "I don't know", "<think>The answer is C", "<think>C</think>", "The answer is a metal.", "a metal",
        "The answer is a matter of taste", "B, or maybe C", "B C", "B, possibly C", "Could be B. Could be C.",
        "The answer is (C) gold", "C (gold)", "<answer>C: lead</answer>", "C = gold", "C, gold", "C gold", "C → gold",
        "5", "Call me maybe", "Dunno", "A metal that rusts", "abcd", "a b c d", "(a) (b) (c) (d)", "A-D", "A–D",
        "A, B, C and D", "The correct answer is option C, gold.", "It is not C", "The answer isn't C.", "C is wrong",
        "Anything but C",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("label", "response"), [(label, text) for label, texts in READINGS.items() for text in texts])
def test_reading(label, response):
    index = Reader(METALS).read(response)
    assert (None if index is None else "ABCD"[index]) == label


def test_every_reading_pays_its_own_key_only():
    for label, responses in READINGS.items():
        for key in "ABCD":
            assert {score(text, key, METALS) for text in responses} == {1.0 if key == label else 0.0}


TEXTS_LIKE_LABELS = {"A": "12", "B": "21", "C": "A", "D": "None of these"}
LABELS_SWAPPED = {"A": "B", "B": "A", "C": "D", "D": "C"}
COLOURS = dict(zip("ABCDEFGHIJ", "red green blue pink cyan teal navy gray gold lime".split(), strict=True))
NUMBERS = {"A": "-5", "B": "5", "C": "1/2", "D": "x+1"}
PREFIXES = {"A": "iron", "B": "iron ore", "C": "ore", "D": "pig iron"}
ABOUT_LABELS = {"A": "Both B and C", "B": "tin", "C": "iron", "D": "None of the above"}
LATEX = {"A": r"$\frac{1}{2}$", "B": r"$\frac{1}{3}$", "C": "$x^2$", "D": "$2x$"}
YES_NO = {"A": "Yes", "B": "No"}
TRUE_FALSE = {"A": "True", "B": "False"}
CLAUSES = {"A": "in the same way as gold", "B": "No, because it rusts", "C": "Yes, because it is a metal"}


@pytest.mark.parametrize(
    ("choices", "label", "responses"),
    [
        (
            TEXTS_LIKE_LABELS,
            "C",
            ["The answer is C", "C", "C. A", "C) A", "(C) A", "The answer is C (A)", "Answer: C. A"],
        ),
        (TEXTS_LIKE_LABELS, "A", ["The answer is A", "A", "A. 12", "12", "The answer is 12.", "A: 12"]),
        (TEXTS_LIKE_LABELS, "D", ["None of these", "D. None of these", "The answer is none of these.", "D"]),
        (TEXTS_LIKE_LABELS, "B", ["B. 21", "21", "The answer is 21 because 12 is smaller"]),
        (TEXTS_LIKE_LABELS, None, ["B. A", "B. 12", "123", "2.1", "-12", "The answer is 12.5", "The answer is -12"]),
        (LABELS_SWAPPED, "A", ["A", "The answer is A", "A. B", "(A) B", "The answer is A: B"]),
        (LABELS_SWAPPED, None, ["A. C", "B. D", "A or B"]),
        (COLOURS, "D", ["I think the answer is: D", "I believe it's D", "I would say D", "I pick pink."]),
        (COLOURS, "I", ["The answer is I", "I", "(I)", "I. gold", "Answer: I", "I is correct"]),
        (COLOURS, None, ["I think so", "K", "A or I"]),
        (NUMBERS, "A", ["-5", "A. -5", "The answer is -5."]),
        (NUMBERS, "B", ["5", "B. 5", "The answer is 5.", "5."]),
        (NUMBERS, "C", ["1/2", "The answer is $1/2$."]),
        (NUMBERS, "D", ["x+1", "D. x+1", "The answer is x+1"]),
        (NUMBERS, None, ["A. 5", "B. -5", "The answer is 5.5", "The answer is 15", "C. 5"]),
        (PREFIXES, "A", ["iron", "A. iron", "The answer is iron."]),
        (PREFIXES, "B", ["iron ore", "B. iron ore", "The answer is iron ore."]),
        (PREFIXES, None, ["A. iron ore", "B. iron", "A. pig iron", "D. iron"]),
        (ABOUT_LABELS, "A", ["A. Both B and C", "Both B and C", "The answer is both B and C.", "A"]),
        (ABOUT_LABELS, "D", ["D. None of the above", "None of the above", "The answer is D: none of the above."]),
        (LATEX, "A", [r"A. $\frac{1}{2}$", r"\boxed{A}", r"The answer is $\frac{1}{2}$.", r"\boxed{\frac{1}{2}}"]),
        (LATEX, "C", ["C", "The answer is C. $x^2$", "$x^2$"]),
        (LATEX, None, [r"A. $\frac{1}{3}$", r"\boxed{A. \frac{1}{3}}", r"\boxed{2}"]),
        (YES_NO, "B", ["No", "B", "B. No", "The answer is no.", "B) No.", "**No**"]),
        (YES_NO, None, ["A. No", "Yes and no", "B. Yes"]),
        (TRUE_FALSE, "B", ["False", "B. False", "The statement is wrong. The answer is False.", "B: False"]),
        (CLAUSES, "B", ["No, because it rusts", "B. No, because it rusts", "The answer is No, because it rusts."]),
        ({"A": "Straße", "B": "café"}, "A", ["strasse", "STRASSE", "A. straße"]),
        ({"A": "Straße", "B": "café"}, "B", ["cafe\u0301", "B. CAFÉ", "The answer is café"]),
        ({"A": "tin", "B": "tin"}, "A", ["A", "A. tin"]),
        ({"A": "tin", "B": "tin"}, None, ["tin", "t\u0130n"]),
        ({"a": "tin", "b": "gold", "c": "iron"}, "c", ["c", "C", "(c)", "I think c", "c. iron", "so c"]),
        ({"1": "tin", "2": "gold", "3": "iron"}, "3", ["3", "iron", "(3)", "3) iron", "Answer: 3"]),
        ({"1": "tin", "2": "gold", "3": "iron"}, None, ["5", "3. gold", "2 or 3"]),
    ],
)
def test_reading_of_awkward_choices(choices, label, responses):
    for response in responses:
        index = Reader(choices).read(response)
        assert (None if index is None else list(choices)[index]) == label, response


def test_forms_of_choices_and_key():
    texts = ["tin", "gold", "iron"]
    for choices in (texts, {"label": ["A", "B", "C"], "text": texts}, {**METALS, "E": None}):
        for key in ("C", "c", "(C)", 2, "2", "iron"):
            assert score("The answer is C.", key, choices) == 1.0
            assert score("The answer is B.", key, choices) == 0.0
    assert score("A", 0, texts) == 1.0
    assert score("E", "E", None, labels="ABCDE") == 1.0
    assert [score("C", key, METALS) for key in (None, "", " ")] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("key", ["E", 4, -1, True, 1.5, ["C"], "chromium"])
def test_key_that_is_no_choice_is_an_error_that_names_it(key):
    with pytest.raises(ValueError, match="ground_truth=.*needs one of the labels"):
        score("C", key, METALS)


@pytest.mark.parametrize("labels", ["", "AA", "Aa", "A!", "A B"])
def test_bad_labels_are_an_error(labels):
    with pytest.raises(ValueError, match="label"):
        ChoiceGrader(labels=labels)


def test_bad_choices_are_an_error():
    for choices in ("ABCD", 4, {}, {"AB": "tin"}, {"A": "tin", "a": "gold"}):
        with pytest.raises(ValueError, match="choices"):
            score("A", "A", choices)


@pytest.mark.parametrize(
    "unit",
    ["A B C D ", "answer ", "answer is ", "the answer is not ", "C, ", "(", "not ", "not A or B, ", "because ", "**",
     "\\boxed{", "<answer>", "\\text{", "A\n", "wait ", "C is ", "?", "~~", "\u24b8", " ", "\n", "'", "=> ", "iron "],
)  # fmt: skip
def test_long_responses_take_linear_time(unit):
    reader = Reader(METALS)

    def seconds(length):
        text = (unit * length)[:length] + "x"
        started = time.thread_time()
        reader.read(text)
        return time.thread_time() - started

    # Quadratic work would take 64 times as long, however often; 24 and two more tries leave room for another's load.
    assert any(seconds(160_000) < 24 * max(seconds(20_000), 0.005) for _ in range(3))


def test_an_article_before_a_text_says_nothing():
    organs = {"A": "The mitochondria", "B": "The nucleus", "C": "A ribosome", "D": "Both A and B"}
    assert [score(text, "B", organs) for text in ("nucleus", "The nucleus", "a nucleus", "nuclei")] == [1, 1, 1, 0]
    twice = {"A": "a mole", "B": "the mole", "C": "an owl"}
    assert [score(text, "A", twice) for text in ("a mole", "mole", "the mole")] == [1, 0, 0]
