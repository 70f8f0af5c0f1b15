"""Checks Ray's dashboard and Prometheus while the demo trains, and takes the README's picture of the dashboard.

A real Prometheus scrapes Ray, every query of examples/grafana/raypipe.json is put to it, and a real browser opens the
job's page on Ray's dashboard. Out: dashboard.png in `--out`, and which queries have data; status 1 if a query is not
understood, or fewer than `--least` of them have data.

Needs: `python examples/make_demo.py`, chromium and prometheus (Debian: apt-get install chromium prometheus).

    python examples/dashboard.py [--out docs]
"""

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from browser import PROGRAM, Browser

ROOT = Path(__file__).resolve().parents[1]
# Where Ray writes what Prometheus is to scrape. (The file of this name in /tmp/ray may be of a session that is over.)
TARGETS = "/tmp/ray/session_latest/prom_metrics_service_discovery.json"
# Until a second iteration and the rates over a minute are there.
DEADLINE_S = 240
TEXT = "document.body ? document.body.innerText : ''"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def prometheus(folder: Path, port: int) -> Iterator[None]:
    """Prometheus on loopback, scraping Ray every 2 s."""
    config = {
        "global": {"scrape_interval": "2s"},
        "scrape_configs": [{"job_name": "ray", "file_sd_configs": [{"files": [TARGETS], "refresh_interval": "2s"}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    process = subprocess.Popen(
        ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb",
         f"--web.listen-address=127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def training(folder: Path, prometheus_port: int) -> Iterator[Path]:
    """The demo, long enough to be looked at; the file of what it prints."""
    log = folder / "log.txt"
    command = [
        sys.executable, "-m", "raypipe.train", "--config", str(ROOT / "configs" / "demo.yaml"), f"run.dir={folder}",
        "run.name=demo", "run.iterations=10000", "checkpoint.every=0", "log.timelines=[]", "log.dashboard=true",
        "log.loggers=[prometheus]",
    ]  # fmt: skip
    environment = os.environ | {"RAY_PROMETHEUS_HOST": f"http://127.0.0.1:{prometheus_port}"}
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env=environment)
    try:
        yield log
    finally:
        process.terminate()
        process.wait(60)


def wait_for(condition: Any, what: str) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        if time.monotonic() > deadline:
            sys.exit(f"not within {DEADLINE_S} s: {what}")
        time.sleep(0.5)
    return found


def ask(port: int, query: str) -> dict[str, Any]:
    url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)
    except OSError:
        return {"status": "down"}


def queries() -> list[str]:
    """Of the Grafana dashboard, for all runs."""
    text = (ROOT / "examples" / "grafana" / "raypipe.json").read_text()
    panels = json.loads(text)["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    return [query.replace("$run", ".*") for query in found]


def picture_of_job(page: Browser, address: str, job: str, file: Path) -> None:
    """The job's datasets on Ray's dashboard, the stages of the newest unfolded."""
    token = (Path.home() / ".ray" / "auth_token").read_text().strip()
    page.call("Network.setCookie", name="ray-authentication-token", value=token, url=address)
    page.call("Page.navigate", url=f"{address}/#/jobs/{job}")
    page.wait_for(lambda: "Ray Data Overview" in page.value(TEXT))
    page.value("[...document.querySelectorAll('h4')].find(e => e.innerText === 'Ray Data Overview').click()")
    page.wait_for(lambda: "demo.0" in page.value(TEXT))
    # The newest dataset's row unfolds to its operators.
    page.value(
        "[...document.querySelectorAll('svg')].find(e => (e.querySelector('title')?.textContent || '')"
        ".startsWith('Expand Dataset')).dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    )
    page.wait_for(lambda: "Generate" in page.value(TEXT))
    page.value("document.querySelector('table').scrollIntoView({block: 'center', behavior: 'instant'})")
    page.picture(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder for the picture")
    parser.add_argument("--least", type=int, default=30, help="queries that must have data")
    options = parser.parse_args()
    for program in (PROGRAM, shutil.which("prometheus")):
        if program is None:
            parser.error("chromium or prometheus is missing (Debian: apt-get install chromium prometheus)")
    options.out.mkdir(parents=True, exist_ok=True)
    port = free_port()
    with tempfile.TemporaryDirectory() as name, training(Path(name), port) as log, prometheus(Path(name), port):
        wait_for(lambda: "dashboard: http" in log.read_text(), "the dashboard's address")
        address = re.search(r"dashboard: (http://[\w.:]+)", log.read_text()).group(1)
        wait_for(
            lambda: (ask(port, "ray_raypipe_reward_mean").get("data") or {}).get("result"), "ray_raypipe_reward_mean"
        )
        time.sleep(60)  # for rates over a minute
        answers = {query: ask(port, query) for query in queries()}
        with Browser(Path(name) / "profile", 1400, 1000) as page:
            picture_of_job(page, address, "01000000", options.out / "dashboard.png")
    wrong = [query for query, answer in answers.items() if answer["status"] != "success"]
    filled = [query for query, answer in answers.items() if answer["status"] == "success" and answer["data"]["result"]]
    print(f"{len(filled)} of {len(answers)} queries have data; without:")
    for query in answers.keys() - set(filled):
        print(f"  {query}")
    print(json.dumps({"check": "dashboard", "queries": len(answers), "with_data": len(filled), "wrong": wrong}))
    return 1 if wrong or len(filled) < options.least else 0


if __name__ == "__main__":
    raise SystemExit(main())
