"""The report: what it reads from run folders, and the page in a real browser, with hostile text in every place."""

import datetime
import html.parser
import json
import random
import sys
from pathlib import Path

import pytest
from simulated_runs import HOSTILE, simulated_run

from raypipe import report, report_data
from raypipe.report_data import grader_table, read_run, read_samples, read_trace, stage_table

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import browser  # noqa: E402

MADE = datetime.datetime(2026, 1, 2, 3, 4)
HOSTILE_GRADER = "<img src=x onerror=window.pwned=1>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    simulated_run(folder / "first", 12)
    simulated_run(folder / "second", 6, seed=1, gain=0.2, timelines=())
    hostile = folder / "<script>window.pwned=1<\u202e&quot;"
    run = simulated_run(hostile, 6, seed=2, graders=("math", HOSTILE_GRADER), hostile=True)
    (hostile / "config.yaml").write_text("a: </pre><script>window.pwned = 1</script>\n")
    lines = [json.loads(line) for line in run.samples(5).read_text().splitlines()]
    lines += [lines[0] | {"kind": name, "response": text, "prompt": text, "sample_id": name, "ground_truth": text,
                          "data_source": text[:200], "iteration": 5, "generate_error": text}
              for name, text in HOSTILE.items()]  # fmt: skip
    run.samples(5).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def read(path: Path, most: int = 10_000):
    return read_run(path, most)


def test_metrics_are_columns_with_gaps(runs):
    run = read(runs / "first")
    assert run["name"] == "first" and run["iterations"] == list(range(12))
    held = run["metrics"]["reward/heldout_mean"]
    assert [i for i, value in enumerate(held) if value is not None] == [0, 4, 8]
    assert run["legend"]["policy/kl"][0] == "nats"


def test_a_folder_without_metrics_is_refused(tmp_path, capsys):
    assert report.main([str(tmp_path), "--out", str(tmp_path / "r.html")]) == 1
    assert "is no run folder" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_an_out_that_cannot_be_written_is_named(runs, tmp_path, capsys):
    assert report.main([str(runs / "first"), "--out", str(tmp_path / "no" / "r.html")]) == 1
    assert "--out" in capsys.readouterr().err


def test_a_run_that_has_just_begun_gives_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    run = read(tmp_path)
    assert run["samples"] == [] and run["metrics"] == {} and run["config"] == ""
    assert "%%" not in report.page([run], MADE).replace("data", "")[:3000]


def test_broken_lines_are_passed_over(tmp_path):
    for name in ("samples", "timelines"):
        (tmp_path / name).mkdir()
    good = '{"iteration": 0, "reward/mean": 0.5}'
    bad = [
        "",
        "{",
        "[1]",
        '"x"',
        '{"iteration": "one"}',
        '{"iteration": true}',
        "[" * 5000,
        '{"reward/mean": 1}',
        "\x00",
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*bad, good]) + '\n{"iteration": 1, "rew')
    odd = {"prompt": 3, "response": ["x"], "score": "high", "grades": [1, {"score": [], "values": {"a": None}}]}
    (tmp_path / "samples" / "it_000000.jsonl").write_text("\n".join([*bad, json.dumps(odd)]))
    for i, text in enumerate(["", "[]", "{}", '{"traceEvents": 1}', '{"traceEvents": [{"ph": "X"}]}']):
        (tmp_path / "timelines" / f"it_{i:06d}.json").write_text(text)
    run = read(tmp_path)
    assert run["iterations"] == [0] and run["metrics"] == {"reward/mean": [0.5]}
    sample = run["samples"][-1]
    assert (sample["prompt"], sample["response"], sample["score"]) == ("3", '["x"]', None)
    assert sample["grades"][1]["values"] == '{"a": null}'
    assert run["timelines"] == []


def test_stage_table_leaves_out_the_first_iteration_and_counts_what_bounds():
    lines = [
        {"reward/mean": 1, "idle/generate": 0.9, "time/generate_s": 50, "idle/learner": 0.0, "time/train_s": 9},
        {"reward/mean": 1, "idle/generate": 0.2, "time/generate_s": 4, "idle/learner": 0.7, "time/train_s": 2,
         "time/update_weights_s": 0.5},
        {"reward/mean": 1, "idle/generate": 0.4, "time/generate_s": 6, "idle/learner": 0.5, "time/train_s": 4,
         "time/update_weights_s": 0.5},
    ]  # fmt: skip
    bounds = [{"bounding": "Generate"}, {"bounding": "Learner"}, {"bounding": "Generate"}]
    table = {row["stage"]: row for row in stage_table(lines, bounds)}
    assert list(table) == ["Generate", "Learner"], "no row for a stage that did not run"
    assert table["Generate"] == {"stage": "Generate", "idle": pytest.approx(0.3), "seconds": 5, "bounds": 2}
    assert table["Learner"]["seconds"] == 3.5 and table["Learner"]["bounds"] == 1


def test_grader_table_adds_up_statuses():
    lines = [
        {"grade/math/ok": 6.0, "grade/math/timeout": 2.0, "reward/math": 0.25, "grade/ok_frac": 1.0},
        {"grade/math/ok": 8.0, "grade/judge/abstain": 8.0, "reward/math": 0.5, "grade/seconds_mean": 1.0},
    ]
    assert grader_table(lines) == [
        {"grader": "judge", "statuses": {"abstain": 8}, "first": None, "last": None},
        {"grader": "math", "statuses": {"ok": 14, "timeout": 2}, "first": 0.25, "last": 0.5},
    ]


def test_too_many_samples_are_thinned_by_whole_iterations(tmp_path):
    files = []
    for i in range(101):
        files.append(tmp_path / f"it_{i:06d}.jsonl")
        files[-1].write_text("".join(json.dumps({"iteration": i}) + "\n" for _ in range(4)))
    everything, available = read_samples(files, 1000)
    assert len(everything) == available == 404
    found, available = read_samples(files, 100)
    kept = sorted({sample["iteration"] for sample in found})
    assert available == 404 and 60 <= len(found) <= 100
    assert kept[0] == 0 and kept[-1] == 100, "the first and the last iteration stay"
    assert {sum(s["iteration"] == i for s in found) for i in kept} == {4}
    gaps = {b - a for a, b in zip(kept[1:], kept[2:], strict=False)}
    assert len(gaps) == 1


def test_a_trace_becomes_lanes(runs):
    timeline = read_trace(runs / "first" / "timelines" / "it_000001.json")
    assert timeline["iteration"] == 1
    assert [(lane["stage"], lane["lane"]) for lane in timeline["lanes"]][:2] == [
        ("Generate", "engine-0"), ("Generate", "engine-1"),
    ]  # fmt: skip
    learner = next(lane for lane in timeline["lanes"] if lane["stage"] == "Learner")
    assert [span[3] for span in learner["spans"]] == ["wait for rows", "train", "update weights"]
    assert learner["spans"][1][2] == pytest.approx(2500, abs=0.01), "milliseconds"
    assert timeline["spans_of"] == sum(len(lane["spans"]) for lane in timeline["lanes"])


def test_long_texts_are_cut(runs):
    run = read(next(path for path in runs.iterdir() if "script" in path.name))
    longest = max(len(sample["response"]) for sample in run["samples"])
    assert longest < report_data.MAX_TEXT + 100
    assert any("more characters]" in sample["response"] for sample in run["samples"])


def test_runs_of_one_name_are_told_apart():
    runs = [{"name": "a", "path": "/x/mine/a"}, {"name": "a", "path": "/x/yours/a"}, {"name": "b", "path": "/x/b"}]
    assert [run["name"] for run in report.distinct(runs)] == ["x/mine/a", "x/yours/a", "b"]


def test_nothing_in_the_data_can_begin_a_tag_and_it_reads_back():
    draw = random.Random(0)
    alphabet = "<>&/!-\"'\\ script\n\u2028\u202e\x00\ud800%é数"
    texts = ["".join(draw.choices(alphabet, k=40)) for _ in range(500)] + list(HOSTILE.values())
    embedded = report._embedded(texts)
    assert not set("<>&\u2028\u202e\x00\ud800") & set(embedded)
    assert json.loads(embedded) == texts


class Elements(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.found: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_the_page_has_no_other_element_whatever_the_runs_hold(runs):
    def elements(*folders: Path) -> list[tuple[str, dict]]:
        parser = Elements()
        parser.feed(report.page([read(folder) for folder in folders], MADE))
        return parser.found

    everything = elements(*runs.iterdir())
    assert everything == elements(runs / "first")
    policy = next(attrs["content"] for _, attrs in everything if "http-equiv" in attrs)
    assert "default-src 'none'" in policy and "require-trusted-types-for 'script'" in policy
    assert "unsafe" not in policy
    assert not [attrs for _, attrs in everything if attrs.keys() & {"src", "href", "style"}], "nothing is loaded"


# In the browser

needs_browser = pytest.mark.skipif(
    browser.PROGRAM is None, reason="no chromium here (Debian: apt-get install chromium)"
)


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    """The page of three runs, one of them hostile, as the command wrote it."""
    out = tmp_path_factory.mktemp("page") / "report.html"
    assert report.main([*map(str, sorted(runs.iterdir())), "--out", str(out), "--max-samples", "10000"]) == 0
    with browser.Browser(tmp_path_factory.mktemp("profile")) as opened:
        opened.open(out)
        yield opened


@pytest.fixture
def fresh(page):
    """The page without filters."""
    page.type_into('[data-filter="text"] input', "")
    for name in ("run", "status", "kind", "purpose", "sort"):
        page.choose(f"select[name={name}]", "iteration" if name == "sort" else "")
    for number in ("iterations", "score"):
        page.value(
            f"document.querySelectorAll('[data-filter={number}] input')"
            ".forEach(e => { e.value = ''; e.dispatchEvent(new Event('input')); })"
        )
    return page


def listed(page) -> int:
    return int(page.value("document.getElementById('sample-count').textContent").split(" ")[0].replace(",", ""))


@needs_browser
def test_every_part_is_drawn_for_every_run(page):
    assert page.complaints() == []
    assert page.value("document.querySelectorAll('#overview .card').length") == 3
    assert page.value("document.querySelectorAll('[data-metric=\"reward/mean\"] path.curve').length") == 3
    assert page.value("document.querySelectorAll('#stages .panel').length") == 3
    assert page.value("document.querySelectorAll('#timelines canvas').length") == 2, "one run has no timeline"
    assert page.value("document.querySelectorAll('#graders .panel').length") == 3
    texts = page.value("document.getElementById('main').innerText")
    for part in ("What bounds: ", "generation bounds", "Efficiency", "12 of 12 iterations", HOSTILE_GRADER):
        assert part in texts
    assert "<script>window.pwned=1<\\u202e&quot;" in page.value("document.title")


@needs_browser
def test_a_curve_is_where_its_values_are(page):
    path = page.value("document.querySelector('[data-metric=\"lr\"] path.curve').getAttribute('d')")
    points = [tuple(map(float, part.split(" "))) for part in path.replace("M", "L").split("L")[1:]]
    assert len({y for _, y in points}) == 1, "a constant is a level line"
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    rising = page.value("document.querySelectorAll('[data-metric=\"reward/math\"] path.curve')[1].getAttribute('d')")
    heights = [float(part.split(" ")[1]) for part in rising.replace("M", "L").split("L")[1:]]
    assert heights[-1] < heights[0], "up is more"


@needs_browser
def test_hostile_text_is_shown_and_does_nothing(fresh):
    for name, text in HOSTILE.items():
        fresh.choose("select[name=kind]", name)
        assert listed(fresh) == 1
        shown = fresh.value("document.querySelector('.detail pre.response').textContent")
        assert not set(shown) & set("\x00\x1b\x07\u202e\u2066\u200b\ufeff\u2028"), name
        printable = [part for part in text[:2000].split("\x00")[0].splitlines() if part.isprintable() and part]
        assert all(part in shown for part in printable), name
    assert fresh.value("typeof window.pwned") == "undefined"
    assert fresh.complaints() == []
    fresh.choose("select[name=kind]", "bidi")
    assert "safe\\u202etxt.exe" in fresh.value("document.querySelector('.detail pre.response').textContent")
    fresh.choose("select[name=kind]", "nulls")
    assert "\\x00 x 5000" in fresh.value("document.querySelector('.detail pre.response').textContent")


@needs_browser
def test_no_text_widens_the_page(fresh):
    for name in HOSTILE:
        fresh.choose("select[name=kind]", name)
        assert fresh.value("document.documentElement.scrollWidth <= window.innerWidth"), name


@needs_browser
def test_markup_from_a_string_is_impossible_in_the_page(page):
    before = len(page.complaints())
    refused = "(() => { try { document.body.innerHTML = '<b>x</b>'; return 'made'; } catch (e) { return e.name; } })()"
    assert page.value(refused) == "TypeError"
    page.value("(() => { const s = document.createElement('img'); s.src = 'http://127.0.0.1:9/'; })()")
    page.wait_for(lambda: any("Content Security Policy" in text for text in page.complaints()[before:]))
    page.events.clear()


@needs_browser
def test_filters_of_samples(fresh):
    everything = listed(fresh)
    fresh.choose("select[name=status]", "timeout")
    assert 0 < listed(fresh) < everything
    assert set(fresh.value("[...document.querySelectorAll('.item .pill')].map(e => e.textContent)")) == {"timeout"}
    fresh.choose("select[name=status]", "")
    fresh.choose("select[name=purpose]", "heldout")
    held = listed(fresh)
    assert 0 < held < everything
    fresh.type_into('[data-filter="iterations"] input', "8")
    assert 0 < listed(fresh) < held
    fresh.type_into('[data-filter="text"] input', "no such text")
    assert listed(fresh) == 0
    assert "No sample passes" in fresh.value("document.querySelector('.detail').textContent")


@needs_browser
def test_search_marks_what_it_finds(fresh):
    fresh.type_into('[data-filter="text"] input', "THE ANSWER IS 12")
    assert listed(fresh) > 0
    assert fresh.value("document.querySelector('.detail mark').textContent") == "the answer is 12"


@needs_browser
def test_best_and_worst_come_first_by_the_order(fresh):
    scores = "[...document.querySelectorAll('.item .pill')].map(e => Number(e.textContent)).filter(n => !isNaN(n))"
    fresh.choose("select[name=sort]", "best")
    best = fresh.value(scores)
    fresh.choose("select[name=sort]", "worst")
    worst = fresh.value(scores)
    assert best == sorted(best, reverse=True) and worst == sorted(worst) and best[0] > worst[0]


@needs_browser
def test_keys_move_through_the_list_and_more_are_loaded(fresh):
    assert fresh.value("document.querySelectorAll('.item').length") == 100
    fresh.value("document.querySelector('.item').focus()")
    for _ in range(2):
        fresh.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowDown", windowsVirtualKeyCode=40)
    chosen = "[...document.querySelectorAll('.item')].findIndex(e => e.getAttribute('aria-selected') === 'true')"
    assert fresh.value(chosen) == 2
    fresh.value("document.querySelector('.list .more').click()")
    assert fresh.value("document.querySelectorAll('.item').length") > 100


@needs_browser
def test_a_run_can_be_hidden_everywhere(fresh):
    before = listed(fresh)
    fresh.value("document.querySelectorAll('.chip')[1].click()")
    assert fresh.value("document.querySelectorAll('[data-metric=\"reward/mean\"] path.curve').length") == 2
    assert fresh.value("document.querySelectorAll('.timeline:not([hidden])').length") == 1
    assert listed(fresh) < before
    fresh.value("document.querySelectorAll('.chip')[1].click()")
    assert listed(fresh) == before


@needs_browser
def test_the_timeline_tells_what_is_under_the_pointer_and_zooms(fresh):
    box = fresh.value(
        "(() => { const c = document.querySelectorAll('#timelines canvas')[1];"
        "c.scrollIntoView({block: 'end', behavior: 'instant'});"
        "const b = c.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
    )
    left, top, width, height = box
    y = top + height - 32  # the learner's lane, above the axis
    fresh.mouse("mouseMoved", left + width - 8, y)
    tip = "document.querySelectorAll('#timelines .tip')[1]"
    assert "update weights" in fresh.value(f"{tip}.textContent") and not fresh.value(f"{tip}.hidden")
    picture = "document.querySelectorAll('#timelines canvas')[1].toDataURL()"
    whole = fresh.value(picture)
    fresh.mouse("mousePressed", left + width / 2, y, button="left", clickCount=1)
    fresh.mouse("mouseMoved", left + width - 80, y, button="left")
    fresh.mouse("mouseReleased", left + width - 80, y, button="left", clickCount=1)
    assert fresh.value(picture) != whole
    fresh.value("document.querySelectorAll('#timelines canvas')[1].dispatchEvent(new Event('dblclick'))")
    assert fresh.value(picture) == whole


@needs_browser
def test_light_and_dark(page):
    color = "getComputedStyle(document.body).backgroundColor"
    first = page.value(color)
    page.value("document.getElementById('theme').click()")
    assert page.value(color) != first
    page.value("document.getElementById('theme').click()")
    assert page.value(color) == first


@needs_browser
def test_an_empty_run_is_a_page_too(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert report.main([str(tmp_path / "run"), "--out", str(tmp_path / "r.html")]) == 0
    with browser.Browser(tmp_path / "profile") as opened:
        opened.open(tmp_path / "r.html")
        assert opened.complaints() == []
        assert opened.value("document.querySelectorAll('.none').length") == 5
