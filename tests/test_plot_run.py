"""The plot of several runs: what is drawn, and what is said where there is nothing to draw."""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from simulated_runs import simulated_run

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import plot_run  # noqa: E402


@pytest.fixture
def folder(tmp_path) -> Path:
    simulated_run(tmp_path / "a", 8)
    simulated_run(tmp_path / "_b$x", 5)
    return tmp_path


def test_a_line_a_run_and_a_plot_a_metric(folder):
    runs = [str(folder / "a"), str(folder / "_b$x")]
    with (folder / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 8, "rewa')
    plt.close("all")
    assert plot_run.main([*runs, "--out", str(folder / "c.png"), "--metric", "reward/mean", "lr"]) == 0
    assert (folder / "c.png").read_bytes().startswith(b"\x89PNG")
    reward, rate = plt.gcf().axes
    assert [list(line.get_xdata()) for line in reward.lines] == [list(range(8)), list(range(5))]
    assert list(rate.lines[0].get_ydata()) == [1e-5] * 8
    assert [text.get_text().strip() for text in reward.get_legend().get_texts()] == ["a", r"_b\$x"]


def test_an_unknown_metric_and_a_folder_without_a_run_are_named(folder, capsys):
    assert plot_run.main([str(folder / "a"), "--metric", "reward/men"]) == 1
    assert "reward/men: no run has it; they have" in capsys.readouterr().err
    assert plot_run.main([str(folder)]) == 1
    assert "is no run folder" in capsys.readouterr().err
