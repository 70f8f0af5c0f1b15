"""Prompts: every case of cases/prompts, both schemas in both kinds of file, the chat template, and the order."""

import datetime
import decimal
import json
import os
import subprocess
import sys
from array import array
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from raypipe.config import DataConfig
from raypipe.prompt_rows import read_examples
from raypipe.prompts import PromptOrder, load_prompts, shuffled

# Other processes of the machine make single examples slow; that is no fault.
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

CASES = Path(__file__).parent / "cases" / "prompts"
DATA_CASES = [case for case in json.loads((CASES / "expect.json").read_text()) if case["what"] == "data"]
CHAT_TEMPLATE = (
    "<s>{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('tools are not supported') }}{% endif %}"
    "<{{ m.role[0] }}>{{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
GSM8K = {
    "data_source": "gsm8k",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 6*7?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"index": 204, "split": "train", "levels": [1, 2]},
}


def byte_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    """One token a byte, and <s> in front of any text whose special tokens are added."""
    vocab = {symbol: i for i, symbol in enumerate(["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    fast.chat_template = chat_template
    return fast


CHAT = byte_tokenizer(CHAT_TEMPLATE)
BASE = byte_tokenizer(None)


def write_jsonl(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path: Path, rows: list[dict] | pa.Table) -> str:
    pq.write_table(rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows), path)
    return str(path)


def load(file: str | list[str], tokenizer=CHAT, base_dir: str | Path = ".", **config):
    files = [file] if isinstance(file, str) else file
    return load_prompts(files, DataConfig(**config), tokenizer, base_dir)


def load_rows(tmp_path: Path, *rows, tokenizer=CHAT, **config):
    return load(write_jsonl(tmp_path / "rows.jsonl", list(rows)), tokenizer, **config).prompts


def refusal(tmp_path: Path, *rows, tokenizer=CHAT, **config) -> str:
    with pytest.raises(ValueError) as caught:
        load_rows(tmp_path, *rows, tokenizer=tokenizer, **config)
    return str(caught.value)


@pytest.mark.parametrize("case", DATA_CASES, ids=[case["kind"] for case in DATA_CASES])
def test_case(case):
    settings = case.get("settings", {})
    if case["accepted"]:
        prompts = load(case["file"], base_dir=CASES, **settings)
        assert len(prompts.prompts) == case["rows"]
        assert prompts.dropped == case.get("dropped", 0)
        return
    with pytest.raises(ValueError) as caught:
        load(case["file"], base_dir=CASES, **settings)
    assert case["file"] in str(caught.value)
    told = str(caught.value).replace(str(CASES / case["file"]), "")  # the words must not come from the file's name
    for any_of in case["must_name"]:
        assert any(word.lower() in told.lower() for word in any_of), f"none of {any_of} in: {told}"


def test_prompt_of_each_schema(tmp_path):
    verl, text, messages = load_rows(
        tmp_path,
        GSM8K,
        {"prompt": "Say 4", "answer": 4},
        {"prompt": [{"role": "user", "content": "Say 4"}], "ground_truth": 4.0, "answer": "worked out"},
    )
    assert verl.prompt_id == "rows.jsonl:1"
    assert verl.data_source == "gsm8k"
    assert verl.text == "<s><s>Be brief.\n<u>What is 6*7?\n<a>"
    assert verl.ground_truth == '"42"'
    assert json.loads(verl.extra_info) == GSM8K["extra_info"] | {"ability": "math"}
    assert (text.prompt_id, text.data_source, text.ground_truth, text.extra_info) == (
        "rows.jsonl:2",
        "default",
        "4",
        "{}",
    )
    assert text.text == messages.text == "<s><u>Say 4\n<a>"
    assert messages.ground_truth == "4.0"
    assert json.loads(messages.extra_info) == {"answer": "worked out"}


def test_special_tokens_are_added_once(tmp_path):
    row = {"prompt": "Say 4", "answer": "4"}
    (templated,) = load_rows(tmp_path, row)
    (raw,) = load_rows(tmp_path, row, tokenizer=BASE)
    assert templated.ids == array("i", CHAT(templated.text, add_special_tokens=False)["input_ids"])
    assert "".join(CHAT.convert_ids_to_tokens(list(templated.ids))) == "<s><u>SayĠ4Ċ<a>"
    assert raw.text == "Say 4"
    assert "".join(BASE.convert_ids_to_tokens(list(raw.ids))) == "<s>SayĠ4"
    assert (templated.ids.count(0), raw.ids.count(0)) == (1, 1)
    assert pa.array([raw.ids], pa.list_(pa.int32())).to_pylist() == [list(raw.ids)]


def test_template_errors_name_the_row(tmp_path):
    ask = {"role": "user", "content": "Say 4"}
    tool = {"prompt": [ask, {"role": "tool", "content": "4"}], "answer": "4"}
    assert "rows.jsonl, line 2: the chat template refuses" in refusal(tmp_path, {"prompt": [ask], "answer": "4"}, tool)
    assert "no chat template" in refusal(tmp_path, {"prompt": [ask], "answer": "4"}, tokenizer=BASE)


def test_prompts_without_tokens_are_refused(tmp_path):
    dropping = byte_tokenizer(None)
    dropping.backend_tokenizer.normalizer = normalizers.Replace("x", "")
    dropping.backend_tokenizer.post_processor = processors.ByteLevel()
    rows = {"prompt": "yx", "answer": "1"}, {"prompt": "xx", "answer": "1"}
    assert "rows.jsonl, line 2: the prompt 'xx' has no tokens" in refusal(tmp_path, *rows, tokenizer=dropping)


def test_overlong(tmp_path):
    rows = [{"prompt": "x" * length, "answer": "1"} for length in (5, 6, 7, 4, 70)]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    kept = load(file, BASE, max_prompt_length=6)  # each has <s> in front
    assert [prompt.text for prompt in kept.prompts] == ["xxxxx", "xxxx"]
    assert kept.dropped == 3
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2: the prompt has 7 tokens, over data.max_prompt_length=6"):
        load(file, BASE, max_prompt_length=6, overlong="error")
    with pytest.raises(ValueError, match=r"rows.jsonl: every prompt .*\(the shortest of 5 has 5 tokens\)"):
        load(file, BASE, max_prompt_length=4)


def test_json_carries_values_exactly(tmp_path):
    extra = {
        "big": 2**70,
        "int": 4,
        "float": 4.0,
        "null": None,
        "nested": [{"a": None}, 1e300],
        "text": "é\u2028\ud800",
    }
    truths = [2**100, 4, 4.0, True, "", [], {"tests": [{"in": "1\n"}]}]
    prompts = load_rows(tmp_path, *[{"prompt": "p", "ground_truth": truth, "extra_info": extra} for truth in truths])
    assert [prompt.ground_truth for prompt in prompts] == [json.dumps(truth) for truth in truths]
    assert prompts[0].extra_info == json.dumps(extra)


def test_extra_info_keeps_its_own_keys(tmp_path):
    prompts = load_rows(
        tmp_path,
        {"prompt": "p", "answer": "1", "index": 3, "hint": None, "extra_info": {"index": None}},
        {"prompt": "p", "answer": "1", "extra_info": '{"index": 18446744073709551616}'},
        {"prompt": "p", "answer": "1", "extra_info": None, "reward_model": {"style": "rule"}, "hint": "carry"},
    )
    assert [json.loads(prompt.extra_info) for prompt in prompts] == [
        {"index": None},
        {"index": 2**64},
        {"hint": "carry"},
    ]
    for bad in ([1], 7, "{", "[1]", ""):
        assert "line 1: " in refusal(tmp_path, {"prompt": "p", "answer": "1", "extra_info": bad})


def test_columns_map(tmp_path):
    row = {
        "q": {"text": "Say 4"},
        "meta.key": "4",
        "task": "sums",
        "info": {"a": {"b": 1}},
        "prompt": "other",
        "answer": 5,
    }
    columns = {"prompt": "q.text", "ground_truth": "meta.key", "data_source": "task", "extra_info": "info.a"}
    (prompt,) = load_rows(tmp_path, row, columns=columns)
    assert (prompt.text, prompt.ground_truth, prompt.data_source) == ("<s><u>Say 4\n<a>", '"4"', "sums")
    others = {"q": row["q"], "info": row["info"], "prompt": "other", "answer": 5}
    assert json.loads(prompt.extra_info) == {"b": 1} | others
    for name in columns:
        message = refusal(tmp_path, row, columns=columns | {name: "q.txet"})
        assert f"line 1: data.columns.{name}=q.txet" in message and "'meta.key'" in message
    assert "data.columns.promt" in refusal(tmp_path, row, columns={"promt": "q"})


def test_ground_truth_may_be_absent_where_no_grader_needs_it(tmp_path):
    rows = {"prompt": "p"}, {"prompt": "p", "ground_truth": None}, {"prompt": "p", "reward_model": {"style": "model"}}
    assert [p.ground_truth for p in load_rows(tmp_path, *rows, require_ground_truth=False)] == ["null"] * 3
    for row in rows:
        assert "line 1: no ground_truth" in refusal(tmp_path, row)


@pytest.mark.parametrize(
    "prompt, named",
    [
        (" \n", "blank"),
        ([], "no messages"),
        ({"role": "user", "content": "x"}, "a list of messages"),
        (["x"], "prompt[0]"),
        ([{"role": ["user"], "content": "x"}], "prompt[0].role is ['user']"),
        ([{"content": "x"}], "prompt[0].role is None"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": "\t"}], "prompt[1].content is blank"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "prompt[0].content is [{"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "prompt[0].content is missing or null"),
        ("half \ud83d of a pair", "surrogate"),
    ],
)
def test_bad_prompts(tmp_path, prompt, named):
    message = refusal(tmp_path, {"prompt": "fine", "answer": "1"}, {"prompt": prompt, "answer": "1"})
    assert "rows.jsonl, line 2: " in message and named in message


def test_messages_may_be_blank_where_that_says_something(tmp_path):
    prompt = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "Add."},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]},
        {"role": "tool", "content": ""},
    ]
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": prompt, "answer": "1"}])
    (example,) = read_examples([file], DataConfig(), tmp_path)
    assert example.prompt == prompt


@pytest.mark.parametrize("source", [3, "", ["a"], "\ud800"])
def test_data_source_is_a_name(tmp_path, source):
    assert "data_source is " in refusal(tmp_path, {"prompt": "p", "answer": "1", "data_source": source})


def test_ids(tmp_path):
    rows = [{"prompt": "p", "answer": "1", "extra_info": {"id": value}} for value in (7, "a", 2**70)]
    prompts = load_rows(tmp_path, *rows, id_key="extra_info.id")
    assert [prompt.prompt_id for prompt in prompts] == ["7", "a", str(2**70)]
    twice = refusal(tmp_path, *rows, rows[1], id_key="extra_info.id")
    assert "rows.jsonl, line 4: duplicate id a " in twice and "rows.jsonl, line 2;" in twice
    for value in (None, True, 1.0, "", [1]):
        assert "line 1: data.id_key=id is " in refusal(tmp_path, {"id": value, "prompt": "p"}, id_key="id")
    assert "line 1: no column 'id'" in refusal(tmp_path, *rows, id_key="id")


def test_ids_are_unique_over_files(tmp_path):
    row = {"id": 1, "prompt": "p", "answer": "1"}
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "train.jsonl", [row])
    write_parquet(tmp_path / "test.parquet", [row])
    files = ["a/train.jsonl", "b/train.jsonl", "test.parquet"]
    prompts = load(files, base_dir=tmp_path).prompts
    labels = [str(tmp_path / "a/train.jsonl:1"), str(tmp_path / "b/train.jsonl:1"), "test.parquet:0"]
    assert [prompt.prompt_id for prompt in prompts] == labels
    with pytest.raises(ValueError, match=r"b/train.jsonl, line 1: duplicate id 1 .*a/train.jsonl, line 1"):
        load(files, base_dir=tmp_path, id_key="id")
    with pytest.raises(ValueError, match="listed twice"):
        load([*files, "a/../a/train.jsonl"], base_dir=tmp_path)


def test_files_that_are_none(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "noextension").touch()
    for files, named in (
        ([], "data.train_files"),
        (["folder.jsonl"], "not a file"),
        (["noextension"], ".jsonl"),
        (["nul\0.jsonl"], "does not exist"),
    ):
        with pytest.raises(ValueError, match=named):
            load(files, base_dir=tmp_path)


@pytest.mark.parametrize(
    "line, named",
    [
        ("[" * 100_000, "not valid JSON"),
        ('{"prompt": "p", "answer": ' + "9" * 5000 + "}", "4300 digits"),
        ('{"prompt": "p", "answer": 1, "answer": 2}', "'answer' occurs twice"),
        ("null", "not an object: None"),
        ('{"prompt": "p", "answer": 1} {}', "not valid JSON"),
    ],
)
def test_bad_lines(tmp_path, line, named):
    (tmp_path / "bad.jsonl").write_text(f'{{"prompt": "p", "answer": "1"}}\n\n{line}\n')
    with pytest.raises(ValueError) as caught:
        load("bad.jsonl", base_dir=tmp_path)
    assert "bad.jsonl, line 3: " in str(caught.value) and named in str(caught.value)
    assert len(str(caught.value)) < 1000


# Parquet


def written_by_pyarrow(path: Path, rows: list[dict]) -> None:
    write_parquet(path, rows)


def written_by_pandas(path: Path, rows: list[dict]) -> None:
    """With messages as a numpy array, and an index that pandas stores as a column of its own."""
    frame = pytest.importorskip("pandas").DataFrame(rows, index=["x", "y"])
    frame["prompt"] = frame["prompt"].map(lambda messages: np.array(messages, dtype=object))
    frame.to_parquet(path)
    assert "__index_level_0__" in pq.read_schema(path).names


def written_by_datasets(path: Path, rows: list[dict]) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).to_parquet(str(path))


@pytest.mark.parametrize("write", [written_by_pyarrow, written_by_pandas, written_by_datasets])
def test_parquet_reads_as_jsonl(tmp_path, write):
    rows = [GSM8K, GSM8K | {"data_source": "gsm8k/test"}]
    write(tmp_path / "rows.parquet", rows)
    from_parquet = load("rows.parquet", base_dir=tmp_path).prompts
    from_jsonl = load_rows(tmp_path, *rows)
    assert [prompt.prompt_id for prompt in from_parquet] == ["rows.parquet:0", "rows.parquet:1"]
    for one, other in zip(from_parquet, from_jsonl, strict=True):
        assert (one.data_source, one.text, one.ids, one.ground_truth) == (
            other.data_source,
            other.text,
            other.ids,
            other.ground_truth,
        )
        assert json.loads(one.extra_info) == json.loads(other.extra_info)


def test_parquet_structs_are_not_filled_in_from_other_rows(tmp_path):
    extras = [{"index": 0, "src": {"page": 3}}, {"level": "easy", "src": {"line": None}}, None]
    rows = [{"prompt": "p", "answer": "1", "extra_info": extra} for extra in extras]
    rows[0]["hint"] = "carry"
    prompts = load(write_parquet(tmp_path / "rows.parquet", rows)).prompts
    assert [json.loads(prompt.extra_info) for prompt in prompts] == [
        {"index": 0, "src": {"page": 3}, "hint": "carry"},
        {"level": "easy", "src": {}},
        {},
    ]
    tools = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "q", "tool_calls": [{"name": "f"}]}]
    file = write_parquet(tmp_path / "rows.parquet", [{"prompt": tools, "answer": "1"}])
    (example,) = read_examples([file], DataConfig(), tmp_path)
    assert example.prompt == tools


def test_parquet_values(tmp_path):
    table = pa.table(
        {
            "prompt": pa.array(["p"], pa.large_string()),
            "data_source": pa.array(["a"]).dictionary_encode(),
            "ground_truth": pa.array(['{"n": 18446744073709551616, "none": null}'], pa.json_()),
            "extra_info": pa.array(
                [[("k", {"a": 1}), ("none", None)]], pa.map_(pa.string(), pa.struct([("a", pa.int64())]))
            ),
            "when": pa.array([datetime.datetime(2024, 5, 17, 12)], pa.timestamp("us")),
            "price": pa.array([decimal.Decimal("1.10")]),
            "scores": pa.array([[1.0, None, float("nan")]]),
        }
    )
    (prompt,) = load(write_parquet(tmp_path / "rows.parquet", table)).prompts
    assert (prompt.data_source, prompt.ground_truth) == ("a", '{"n": 18446744073709551616, "none": null}')
    extra = json.loads(prompt.extra_info)
    assert np.isnan(extra["scores"].pop())
    assert extra == {
        "k": {"a": 1},
        "none": None,
        "when": "2024-05-17T12:00:00",
        "price": "1.10",
        "scores": [1.0, None],
    }


def test_bad_parquet_rows(tmp_path):
    latin = pa.array([b"fine", b"caf\xe9"], pa.binary()).view(pa.string())
    answers = pa.array(["1", "1"])
    write_parquet(tmp_path / "latin.parquet", pa.table({"prompt": latin, "answer": answers}))
    image = pa.array([None, [{"bytes": b"\x89PNG"}]])
    write_parquet(tmp_path / "image.parquet", pa.table({"prompt": ["p", "p"], "answer": answers, "images": image}))
    write_parquet(tmp_path / "twice.parquet", pa.Table.from_arrays([answers] * 3, names=["prompt", "answer", "answer"]))
    for file, named in (
        ("latin.parquet", "row 1: 'utf-8' codec can't decode byte 0xe9"),
        ("image.parquet", "row 1: images cannot be carried as JSON: it holds b'\\x89PNG' (bytes)"),
        ("twice.parquet", "the columns ['answer'] occur twice"),
    ):
        with pytest.raises(ValueError) as caught:
            load(file, base_dir=tmp_path)
        assert file in str(caught.value) and named in str(caught.value)


def test_rows_are_numbered_through_batches_and_row_groups(tmp_path):
    count = 2500
    table = pa.table({"prompt": [f"p{i}" for i in range(count)], "answer": ["1"] * count})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=700)
    prompts = load("rows.parquet", BASE, tmp_path).prompts
    assert [(p.prompt_id, p.text) for p in prompts] == [(f"rows.parquet:{i}", f"p{i}") for i in range(count)]


# Whatever is in a file: rows, or a ValueError with its name.

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
messages = [{"role": "user", "content": "x"}]
rows_of_any_kind = st.fixed_dictionaries(
    {"prompt": st.just("p") | st.just(messages) | json_values},
    optional={
        "reward_model": st.just({"ground_truth": 4}) | json_values,
        "answer": json_values,
        "data_source": st.text(max_size=3) | json_values,
        "extra_info": st.dictionaries(st.text(max_size=8), json_values, max_size=3) | json_values,
        "id": st.integers(0, 3) | json_values,
        "other": json_values,
    },
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


def rows_or_refusal(path: Path, **config) -> list:
    try:
        return list(read_examples([path.name], DataConfig(**config), path.parent))
    except ValueError as error:
        assert path.name in str(error)
        return []


@untimed
@given(st.lists(rows_of_any_kind, min_size=1, max_size=3), st.booleans())
def test_any_objects(folder, rows, with_ids):
    file = folder / "objects.jsonl"
    write_jsonl(file, rows)
    examples = rows_or_refusal(file, id_key="id" if with_ids else "", require_ground_truth=False)
    for example, row in zip(examples, rows, strict=False):
        extra = row.get("extra_info")
        if isinstance(extra, dict):
            read = json.loads(example.extra_info)
            assert {key: json.dumps(read[key]) for key in extra} == {key: json.dumps(extra[key]) for key in extra}


@untimed
@given(
    json_values.filter(lambda value: value is not None), st.dictionaries(st.text(max_size=8), json_values, max_size=4)
)
def test_any_values_arrive_as_they_were(folder, truth, extra):
    file = folder / "values.jsonl"
    write_jsonl(file, [{"prompt": "p", "ground_truth": truth, "extra_info": extra}])
    (example,) = read_examples([file.name], DataConfig(), folder)
    assert (example.ground_truth, example.extra_info) == (json.dumps(truth), json.dumps(extra))


@untimed
@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,\\u0d\n\r promtnswe1', max_size=60).map(str.encode))
def test_any_bytes_as_jsonl(folder, content):
    file = folder / "bytes.jsonl"
    file.write_bytes(content)
    rows_or_refusal(file)


@untimed
@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=4), st.booleans())
def test_any_bytes_as_parquet(folder, position, patch, cut):
    content = (CASES / "d02_good_parquet.parquet").read_bytes()
    position %= len(content)
    file = folder / "bytes.parquet"
    file.write_bytes(content[:position] + patch + (b"" if cut else content[position + len(patch) :]))
    rows_or_refusal(file)


# Order

orders = st.builds(
    PromptOrder, n=st.integers(1, 40), batch=st.integers(1, 100), seed=st.integers(0, 2**40), shuffle=st.booleans()
)


@untimed
@given(orders)
def test_each_epoch_is_a_permutation(order):
    cursor, taken = 0, []
    while len(taken) < 3 * order.n:
        indices, cursor = order.batch_at(cursor)
        assert len(indices) == order.batch
        taken += indices.tolist()
        assert cursor == len(taken)
    for epoch in range(3):
        part = taken[epoch * order.n : (epoch + 1) * order.n]
        assert sorted(part) == list(range(order.n))
        assert order.shuffle or part == list(range(order.n))


@untimed
@given(orders, st.integers(1, 100), st.integers(0, 6))
def test_resuming_anywhere_equals_going_on(order, other_batch, batches):
    cursor = 0
    for _ in range(batches):
        _, cursor = order.batch_at(cursor)
    going_on = order.batch_at(cursor)[0]
    resumed = PromptOrder(order.n, order.batch, order.seed, order.shuffle).batch_at(cursor)[0]
    assert resumed.tolist() == going_on.tolist()
    # The sequence does not depend on the size of the batches.
    fine = PromptOrder(order.n, 1, order.seed, order.shuffle)
    assert [int(fine.batch_at(cursor + i)[0][0]) for i in range(order.batch)] == going_on.tolist()


def test_order_is_fixed_by_seed_and_epoch():
    assert shuffled(8, 0, 0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    different = {tuple(shuffled(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(different) == 9


def test_order_is_uniform():
    """Every one of 4 prompts is first in a quarter of 4,000 epochs: 1,000 give or take 5 standard deviations of 27."""
    first = np.bincount([PromptOrder(4, 1, 1, True).batch_at(4 * epoch)[0][0] for epoch in range(4000)], minlength=4)
    assert (abs(first - 1000) < 137).all()


@pytest.mark.parametrize("bad", [{"n": 0}, {"batch": 0}, {"seed": -1}])
def test_order_refuses(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        PromptOrder(**{"n": 3, "batch": 2, "seed": 0, "shuffle": True} | bad)
    with pytest.raises(ValueError, match="cursor=-1"):
        PromptOrder(3, 2, 0, True).batch_at(-1)


def test_imports_nothing_heavy():
    check = (
        "import sys, raypipe.prompts; print([m for m in ('torch', 'ray', 'vllm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.strip() == "[]"
