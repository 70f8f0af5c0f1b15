"""The documentation builds without a warning, holds what it should, and asks nothing of the network."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from raypipe.config_file import LISTS
from raypipe.metrics import METRICS

ROOT = Path(__file__).resolve().parent.parent
pytest.importorskip("mkdocs", reason="pip install '.[docs]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Built with a proxy that nobody answers, so that a download would fail."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    offline = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
    environment = {**os.environ, **offline, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=400, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def page(site: Path, name: str) -> str:
    return (site / name / "index.html").read_text()


def test_every_page_is_in_the_navigation(site):
    named = set(re.findall(r"([\w]+)\.md", (ROOT / "mkdocs.yml").read_text()))
    assert named == {path.stem for path in (ROOT / "docs").glob("*.md")}
    start = (site / "index.html").read_text()
    for name in named - {"index"}:
        assert f'href="{name}/"' in start


def test_what_is_kept_elsewhere_is_in_its_page(site):
    assert not [path for path in site.rglob("*.html") if re.search(r"\{\{ (readme|file)", path.read_text())]
    config, metrics = page(site, "config"), page(site, "metrics")
    assert all(f"{name}[].path" in config for name in LISTS) and "rollout.reserve_prompts" in config
    assert all(html.escape(name) in metrics for name in METRICS)
    assert "ppo_mini_batch_size" in page(site, "from_verl") and "num_generations" in page(site, "from_trl")
    assert "Natural batches" in page(site, "grader")


def test_docstrings_are_the_reference(site):
    api = page(site, "api")
    for name in (
        "api.train",
        "api.evaluate",
        "api.grade",
        "interactive.Pipeline.generate",
        "advantages.gae",
        "losses.ppo_clip",
    ):
        assert f'id="raypipe.{name}"' in api, name


def test_pages_load_nothing_from_outside(site):
    for path in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe)[^>]*\ssrc="([^"]+)"|<link[^>]*href="([^"]+)"', path.read_text())
        outside = [url for pair in loaded for url in pair if url.startswith(("http:", "https:", "//"))]
        assert not outside, (path.name, outside)


def test_a_section_that_is_gone_breaks_the_build(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import pages

    with pytest.raises(ValueError, match="no section 'Graders'; it has .*Write a grader"):
        pages.readme("Graders")
