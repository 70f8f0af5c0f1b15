"""IFEvalGrader with the real checkers of if-verifiable."""

import json

import pytest

pytest.importorskip("if_verifiable")

from graders.ifeval import IFEvalGrader

GRADER = IFEvalGrader()


def grade(response, instructions, grader=GRADER, extra_info=None, ground_truth=None):
    if extra_info is None:
        extra_info = {"instruction_id_list": [n for n, _ in instructions], "kwargs": [k for _, k in instructions]}
    (result,) = grader(
        data_sources=["ifeval"], solution_strs=[response], ground_truths=[ground_truth], extra_infos=[extra_info]
    )
    return result


# instruction, its arguments, a response that follows it, one that does not
EXAMPLES = [
    ("punctuation:no_comma", {}, "Red and blue.", "Red, blue."),
    ("keywords:existence", {"keywords": ["red", "blue"]}, "Blue and red.", "Blue."),
    ("keywords:forbidden_words", {"forbidden_words": ["red"]}, "Blue.", "A red one."),
    ("keywords:frequency", {"keyword": "red", "frequency": 2, "relation": "at least"}, "red red", "red"),
    ("keywords:letter_frequency", {"letter": "z", "let_frequency": 2, "let_relation": "less than"}, "zero", "zigzag"),
    (
        "language:response_language",
        {"language": "de"},
        "Das ist ein ganz einfacher Satz auf Deutsch.",
        "This is English.",
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one two three", "one two"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one"),
    ("detectable_content:number_placeholders", {"num_placeholders": 1}, "Dear [name]", "Dear you"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP.S. Write.", "Bye."),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n* b", "* a"),
    ("detectable_format:json_format", {}, '{"a": 1}', "a: 1"),
    ("detectable_format:title", {}, "<<Red>>\nbody", "Red\nbody"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Name a colour."}, "Name a colour. Red.", "Red."),
    ("startend:end_checker", {"end_phrase": "Over."}, "Red. Over.", "Over. Red."),
    ("change_case:english_lowercase", {}, "this is all in lower case", "This is not"),
    ("startend:quotation", {}, '"quoted"', "not quoted"),
]


@pytest.mark.parametrize(("name", "kwargs", "good", "bad"), EXAMPLES, ids=[e[0] for e in EXAMPLES])
def test_instruction(name, kwargs, good, bad):
    assert grade(good, [(name, kwargs)])["score"] == 1.0
    assert grade(f"<think>{bad}, red</think>\n{good}", [(name, kwargs)])["score"] == 1.0
    assert grade(bad, [(name, kwargs)])["score"] == 0.0


TWO = [("punctuation:no_comma", {}), ("startend:end_checker", {"end_phrase": "Over."})]


def test_rewards():
    for response, expected in {
        "Red. Over.": (1.0, 1.0, 1.0, 1.0),
        "Red, blue.\nOver.": (0.0, 1.0, 0.5, 1.0),  # loose: the first line may go
        "Red, blue. Over": (0.0, 0.0, 0.0, 0.0),
        "*Red. Over.*": (0.0, 1.0, 0.5, 1.0),
        "": (0.0,) * 4,
        None: (0.0,) * 4,
        "<think>Red. Over.": (0.0,) * 4,
    }.items():
        result = grade(response, TWO)
        names = ("binary_strict", "binary_loose", "partial_strict", "partial_loose")
        assert tuple(result[name] for name in names) == expected, response
        for name in names:
            assert grade(response, TWO, IFEvalGrader(reward=name))["score"] == result[name]


def test_where_the_instructions_are():
    row = {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["red"], "num_words": None}]}
    for ground_truth, extra_info in ((row, {}), (json.dumps(row), {"prompt": "p"}), ("unused", row)):
        assert grade("red", [], extra_info=extra_info, ground_truth=ground_truth)["score"] == 1.0
    assert grade("red", [], extra_info={"instruction_id_list": ["punctuation:no_comma"]})["score"] == 1.0
    assert grade("red", [("punctuation:no_comma", None)])["score"] == 1.0


@pytest.mark.parametrize(
    ("extra_info", "reason"),
    [
        ({}, "the row has no instructions: extra_info or ground_truth needs the lists"),
        ({"instruction_id_list": []}, "the row has no instructions"),
        (
            {"instruction_id_list": ["punctuation:no_coma"]},
            "'punctuation:no_coma' is unknown; near: punctuation:no_comma",
        ),
        (
            {"instruction_id_list": ["punctuation:no_comma"] * 2, "kwargs": [{}]},
            "2 in instruction_id_list but 1 in kwargs",
        ),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{}]}, r"lacks \['keywords'\] in its kwargs"),
        (
            {
                "instruction_id_list": ["keywords:frequency"],
                "kwargs": [{"keyword": "a", "frequency": None, "relation": None}],
            },
            r"lacks \['frequency', 'relation'\] in its kwargs, which have \['keyword'\]",
        ),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"n": 1}]}, "cannot have kwargs {'n': 1}"),
        (
            {
                "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"num_words": "5", "relation": "about"}],
            },
            "cannot have kwargs",
        ),
    ],
)
def test_data_mistakes_are_named(extra_info, reason):
    with pytest.raises(ValueError, match=reason):
        grade("red", [], extra_info=extra_info)


def test_config_mistakes_are_named():
    with pytest.raises(ValueError, match="reward='strict' is unknown: choose one of binary_strict"):
        IFEvalGrader(reward="strict")
    with pytest.raises(ValueError, match="benchmark='other' is unknown"):
        IFEvalGrader(benchmark="other")


def test_scores_repeat():
    # Unseeded, the detector takes this for Spanish or Italian, about equally often.
    scores = [grade("do la le vin", [("language:response_language", {"language": "es"})])["score"] for _ in range(40)]
    assert len(set(scores)) == 1


def test_missing_nltk_data_is_an_error_that_says_how_to_get_it():
    import nltk

    instructions = [("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"})]
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        with pytest.raises(RuntimeError, match="python -m nltk.downloader punkt_tab"):
            grade("One. Two.", instructions)
    else:
        assert grade("One. Two.", instructions)["score"] == 1.0


@pytest.mark.parametrize("name", [e[0] for e in EXAMPLES])
def test_hostile_responses_do_not_raise(name):
    kwargs = next(k for n, k, _, _ in EXAMPLES if n == name)
    for response in (
        "\x00",
        "\ud800",
        "*" * 10_000,
        "[" * 10_000,
        "\n" * 1_000,
        "P.S.",
        "***",
        "<<>>",
        '"',
        "{}",
        "١٢٣",
        "  ",
    ):
        assert grade(response, [(name, kwargs)])["score"] in (0.0, 1.0)
