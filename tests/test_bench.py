"""What the benchmarks compute of what they measure."""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "examples" / "bench"))

import against_trl  # noqa: E402
import memory  # noqa: E402
import overlap  # noqa: E402
import staleness  # noqa: E402
import trl_rewards  # noqa: E402


def write(folder: Path, **files: dict) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_copy_of_a_model_ends_only_at_another_token(tmp_path):
    tokens = [{"id": 7, "content": "<|eos|>"}, {"id": 9, "content": "<|never|>"}]
    model = write(
        tmp_path / "model", tokenizer={"added_tokens": tokens}, config={"eos_token_id": 7, "vocab_size": 10},
        generation_config={"eos_token_id": 7}, tokenizer_config={"eos_token": "<|eos|>"},
    )  # fmt: skip
    copy = against_trl.endless(model, "<|never|>", tmp_path / "copy")
    read = {path.stem: json.loads(path.read_text()) for path in copy.iterdir()}
    assert read["config"] == {"eos_token_id": 9, "vocab_size": 10}
    assert read["generation_config"] == {"eos_token_id": 9}
    assert read["tokenizer_config"] == {"eos_token": "<|never|>"}
    assert json.loads((model / "config.json").read_text())["eos_token_id"] == 7


def test_rest_is_what_the_parts_leave_of_the_wall_time():
    parts = {"generation": 3.0, "grading": 1.0, "step": 2.0, "weights": 0.5, "tokens": 64.0}
    found = against_trl.medians([parts | {"wall": wall} for wall in (6.0, 7.0, 20.0)])
    assert found["wall"] == 7.0 and found["rest"] == 0.5
    assert against_trl.medians([parts | {"wall": 4.0}])["rest"] == -2.5  # they ran at the same time


def test_every_reward_function_gives_the_same_score(monkeypatch):
    for name, seconds in (("WAIT_S", 0.001), ("SHORTEST_S", 0.001), ("LONGEST_S", 0.002), ("CPU_S", 0.001)):
        monkeypatch.setattr(trl_rewards, name, seconds)
    completions = ["abab", [{"role": "assistant", "content": "abcd"}]]
    for function, raypipes in trl_rewards.REWARDS.values():
        assert raypipes in trl_rewards.REWARDS
        found = function(prompts=["p", "p"], completions=completions)
        scores = asyncio.run(found) if asyncio.iscoroutine(found) else found
        assert scores == [2 / 64, 4 / 64]


def test_sandbox_times_are_long_tailed_and_bounded():
    times = sorted(trl_rewards.sandbox_s(f"completion {i}") for i in range(2000))
    assert times[0] >= 0.5 and times[-1] == 5.0
    assert times[1000] == pytest.approx(0.5 * 2**0.7, rel=0.05)
    assert sum(seconds == 5.0 for seconds in times) == pytest.approx(2000 * 0.1 ** (1 / 0.7), rel=0.3)


def test_places_in_use_count_the_time_within_the_window_alone():
    def row(generate: tuple[float, float], grade: tuple[float, float]) -> dict[str, float]:
        names = ("generate_start", "generate_end", "grade_start", "grade_end")
        return dict(zip(names, (*generate, *grade), strict=True))

    rows = [row((8.0, 12.0), (12.0, 13.0)), row((19.0, 30.0), (30.0, 31.0)), row((1.0, 2.0), (2.0, 3.0))]
    used = overlap.in_use(rows, 10.0, 20.0, iterations=2, lanes=2)
    assert used["engine"] == pytest.approx((2.0 + 1.0) / (overlap.IN_WORK * 10.0))
    assert used["grader"] == pytest.approx(1.0 / 20.0)
    assert used["learner"] == pytest.approx(2 * overlap.TRAIN_S / 10.0)


def test_a_run_is_told_by_its_held_out_passes():
    lines = [
        {"reward/heldout_mean": 0.1, "staleness/mean": 0.0, "time/iteration_s": 9.0},
        {"staleness/mean": 1.0, "time/iteration_s": 2.0},
        {"reward/heldout_mean": 0.5, "staleness/mean": 0.5, "time/iteration_s": 4.0},
        {"reward/heldout_mean": 0.7, "time/iteration_s": 3.0},  # after the last update, held-out samples alone
    ]
    told = staleness.outcome(lines)
    assert told["heldout"] == [0.1, 0.5, 0.7] and told["last"] == 0.7
    assert told["mean"] == pytest.approx(0.6) and told["staleness"] == 0.75 and told["iteration_s"] == 3.0


def test_memory_that_wanders_is_flat_and_memory_that_grows_is_not():
    noise = np.random.default_rng(0)
    steps = np.arange(200)
    wandering = [300 + np.convolve(noise.normal(0, 4, 239), np.ones(40) / 40**0.5, "valid") for _ in range(50)]
    assert sum(memory.trend(series.tolist()).is_flat for series in wandering) >= 40
    for series in wandering:
        found = memory.trend((series + 0.5 * steps).tolist())
        assert not found.is_flat and found.slope == pytest.approx(0.5, abs=0.2)
    leak = memory.trend((100 + 0.05 * steps).tolist())
    assert not leak.is_flat and leak.added == pytest.approx(10.0)
    assert memory.trend((100 + 0.01 * steps).tolist()).is_flat  # 2 MiB in all
