"""Stages of the user's: the page's example in a real plan, and what a stage must not do."""

import asyncio
import dataclasses
import re
from pathlib import Path

import pyarrow as pa
import pytest
from test_pipeline import config_for

from raypipe.config import PipelineConfig, StageConfig
from raypipe.config_file import load_config
from raypipe.preflight import check_parts
from raypipe.scripted import scripted_run
from raypipe.stages.own import Own, labelled

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "own_stage.md").read_text()
(EXAMPLE,) = re.findall(r'```python title="my_stages.py"\n(.*?)```', PAGE, re.DOTALL)
BAD = """
import pyarrow as pa

class First:
    def __call__(self, table): return table.slice(0, 1)
class Turned:
    def __call__(self, table): return table.take(list(range(len(table)))[::-1])
class Fewer:
    def __call__(self, table): return table.select(["sample_id"])
class Listed:
    def __call__(self, table): return table.to_pylist()
async def double(table):
    return table.append_column("twice", pa.array([2 * x for x in table["score"].to_pylist()]))
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "my_stages.py").write_text(EXAMPLE)
    (tmp_path / "other_stages.py").write_text(BAD)
    return tmp_path


def table() -> pa.Table:
    return pa.table({"sample_id": ["0/0/0", "0/0/1"], "response_ids": [[1, 2, 3], [4]], "score": [1.0, 0.0]})


def call(path: str, **kwargs) -> pa.Table:
    return asyncio.run(Own(path, kwargs)(table()))


def test_the_pages_example_is_short_and_does_what_it_says(folder):
    assert len(EXAMPLE.splitlines()) < 20
    found = call(f"{folder}/my_stages.py:Brevity", cost=0.1).to_pydict()
    assert found["score"] == pytest.approx([0.7, -0.1]) and found["tokens"] == [3, 1]


def test_functions_and_coroutines_are_stages(folder):
    assert call(f"{folder}/other_stages.py:double")["twice"].to_pylist() == [2.0, 0.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("First", "got 2 rows and returned 1"),
        ("Turned", "in another order"),
        ("Fewer", r"dropped the columns \['response_ids', 'score'\]"),
        ("Listed", "returned a list, not a pyarrow.Table"),
    ],
)
def test_a_stage_that_breaks_the_rows_is_named(folder, name, message):
    with pytest.raises(ValueError, match=f"pipeline.stages: .*other_stages.py:{name} .*{message}"):
        call(f"{folder}/other_stages.py:{name}")


def test_the_dashboard_shows_its_name():
    assert labelled("Brevity").__name__ == "Brevity" and issubclass(labelled("Brevity"), Own)


def test_a_config_finds_stages_beside_it_and_names_mistakes(folder):
    good = "model: {path: m}\ndata: {train_files: [t.jsonl]}\ngrade: {graders: [{path: graders.math:MathGrader}]}\n"
    (folder / "config.yaml").write_text(good)

    def load(stages: str):
        return load_config(folder / "config.yaml", [f"pipeline.stages={stages}"])

    (stage,) = load("[{path: 'my_stages.py:Brevity', kwargs: {cost: 0.5}}]").pipeline.stages
    assert stage == StageConfig(path=f"{folder}/my_stages.py:Brevity", kwargs={"cost": 0.5})
    with pytest.raises(ValueError, match=r"pipeline.stages.0.afterwards is not a key; did you mean .*after\?"):
        load("[{path: 'a:B', afterwards: grade}]")
    with pytest.raises(ValueError, match="pipeline.stages.0.after='graded'.*did you mean 'grade'"):
        load("[{path: 'a:B', after: graded}]")
    with pytest.raises(ValueError, match="pipeline.stages.0 must be a mapping such as"):
        load("['a:B']")
    with pytest.raises(ValueError, match="pipeline.stages.0.path=.*my_stages.py:Brevet.*it has Brevity"):
        check_parts(load("[{path: 'my_stages.py:Brevet'}]"), [])


def test_a_stage_is_part_of_the_plan(folder, ray_session):
    stages = [
        StageConfig(path=f"{folder}/my_stages.py:Brevity", kwargs={"cost": 0.1}),
        StageConfig(path=f"{folder}/other_stages.py:double", after="score", actors=2),
    ]
    config = dataclasses.replace(config_for("own", iterations=1), pipeline=PipelineConfig(stages=stages))
    with scripted_run(config) as run:
        (rows,) = run.rows([run.feed()], 0)
    assert len(rows) == 16
    for row in rows:
        raw = float(int(row["response_text"].split()[0]) % 2)
        assert row["tokens"] == len(row["response_ids"])
        assert row["score"] == pytest.approx(raw - 0.1 * row["tokens"])
        assert row["twice"] == pytest.approx(2 * row["score"])
