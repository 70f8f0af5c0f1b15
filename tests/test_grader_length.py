"""LengthPenaltyGrader against equation 13 of DAPO, worked by hand."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from graders.length import LengthPenaltyGrader


def scores(grader, lengths=None, texts=None):
    count = len(lengths or texts)
    infos = [{"response_length": n} for n in lengths] if lengths else [{}] * count
    results = grader(
        data_sources=["t"] * count,
        solution_strs=texts or ["ignored"] * count,
        ground_truths=[None] * count,
        extra_infos=infos,
    )
    return [result["score"] for result in results]


def test_equation_13():
    # L_max = 100, L_cache = 20: 0 up to 80, (80 - length) / 20 up to 100, then -1.
    grader = LengthPenaltyGrader(max_length=100, buffer=20)
    assert scores(grader, [0, 79, 80, 81, 85, 90, 99, 100, 101, 10_000]) == pytest.approx(
        [0, 0, 0, -0.05, -0.25, -0.5, -0.95, -1, -1, -1]
    )


def test_penalty_scales_and_buffer_0_is_a_step():
    assert scores(LengthPenaltyGrader(max_length=100, buffer=20, penalty=0.5), [90, 200]) == [-0.25, -0.5]
    assert scores(LengthPenaltyGrader(max_length=100, buffer=0), [100, 101]) == [0.0, -1.0]
    assert scores(LengthPenaltyGrader(max_length=100, buffer=100), [0, 50]) == [0.0, -0.5]
    assert scores(LengthPenaltyGrader(max_length=100, buffer=20, penalty=0), [90]) == [0.0]


def test_length_is_logged():
    grader = LengthPenaltyGrader(max_length=10, buffer=5)
    result = grader(data_sources=["t"], solution_strs=[""], ground_truths=[None], extra_infos=[{"response_length": 7}])
    assert result == [{"score": pytest.approx(-0.4), "length": 7.0}]


@pytest.fixture
def model_folder(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_truncation(3)  # as some tokenizer.json files have it
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


def test_tokens_are_counted(model_folder):
    grader = LengthPenaltyGrader(max_length=6, buffer=4, tokenizer=model_folder)
    assert scores(grader, texts=["", None, "a b", "a b c", "a b c d", "a b c d e f g h"]) == [
        0,
        0,
        0,
        -0.25,
        -0.5,
        -1.0,
    ]


def test_mistakes_are_named(tmp_path):
    for kwargs, reason in (
        ({"max_length": 0, "buffer": 0}, "max_length=0"),
        ({"max_length": 10, "buffer": 11}, "buffer=11: needs 0 to max_length=10"),
        ({"max_length": 10, "buffer": -1}, "buffer=-1"),
        ({"max_length": 10, "buffer": 1, "penalty": -1.0}, "penalty=-1.0"),
        ({"max_length": 10, "buffer": 1, "tokenizer": str(tmp_path)}, "has no tokenizer.json"),
    ):
        with pytest.raises(ValueError, match=reason):
            LengthPenaltyGrader(**kwargs)
    with pytest.raises(ValueError, match=r'no extra_info\["response_length"\]: give the grader kwargs.tokenizer'):
        scores(LengthPenaltyGrader(max_length=10, buffer=1), texts=["a"])
