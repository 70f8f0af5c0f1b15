"""A run is a folder: its resolved config, one line of metrics an iteration, samples, timelines and checkpoints.

    runs/<name>/
        config.yaml             as resolved; secrets are left out
        metrics.jsonl           one JSON object an iteration
        stages.jsonl            the same of the timeline: busy lanes, what bounds, and advice
        samples/it_000012.jsonl
        timelines/it_000012.png and .json
        checkpoints/step_12/    see checkpoint.py

In: the config. Out: a `RunFolder` that knows where everything is. Decision: a name belongs to one run. A name in use is
refused unless the run is to go on, and then what the run wrote past the iteration at which it goes on is cut, so that a
folder never holds two histories.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from raypipe.checkpoint_files import STARTED_FROM, find_origin, write_text
from raypipe.config import Config, starts_elsewhere
from raypipe.timeline import Summary

_SECRET = (
    r"(^|[_-])(api_?key|secret|password|passwd|credentials?|private_?key|access_?key|(auth|access|api|bearer)_?token)$"
)
SECRET_KEY = re.compile(_SECRET + "|^token$", re.IGNORECASE)  # eos_token is none
SECRET_VARIABLE = re.compile(_SECRET + "|_TOKEN$", re.IGNORECASE)
# A shorter value would also stand in the config by chance.
MIN_SECRET_LENGTH = 8
# More than a line of metrics.
TAIL_BYTES = 1 << 20


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run's folder, and its metrics. `resumed`: the folder was there before; `changes`: settings that differ
    from those it had then, such as "train.lr: 1e-06 -> 2e-06"."""

    path: Path
    resumed: bool
    changes: tuple[str, ...] = ()

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def stages(self) -> Path:
        return self.path / "stages.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def samples(self, iteration: int) -> Path:
        return self.path / "samples" / f"it_{iteration:06d}.jsonl"

    def timeline(self, iteration: int, suffix: str) -> Path:
        """`suffix`: .png or .json"""
        return self.path / "timelines" / f"it_{iteration:06d}{suffix}"

    def append_metrics(self, line: Mapping[str, float]) -> None:
        """Adds one iteration's line (finite numbers), and flushes it."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def append_stages(self, iteration: int, summary: Summary) -> None:
        """Adds what an iteration's timeline says: the report shows it."""
        told = {name: getattr(summary, name) for name in ("wall_s", "efficiency", "bounding", "advice", "busy")}
        with self.stages.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"iteration": iteration, **told}) + "\n")

    def read_metrics(self) -> list[dict[str, float]]:
        """The lines so far."""
        return read_lines(self.metrics)

    def give_back(self) -> None:
        """Frees the name of a new run that could not start."""
        if not self.resumed and not self.read_metrics() and not any(self.checkpoints.glob("step_*")):
            shutil.rmtree(self.path)

    def resume_at(self, iteration: int) -> None:
        """Cuts what was written for `iteration` and later ones: the run does them (again)."""
        for path in (self.metrics, self.stages):
            kept = [json.dumps(line) + "\n" for line in read_lines(path) if line["iteration"] < iteration]
            write_text(path, "".join(kept))
        for path in [*self.path.glob("samples/it_*"), *self.path.glob("timelines/it_*")]:
            if int(re.findall(r"[0-9]+", path.name)[0]) >= iteration:
                path.unlink()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one a line; none where there is no file. What is no object is no line: a killed
    process leaves half of one at the end."""
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            lines.append(value)
    return lines


def last_iteration(metrics: Path) -> int:
    """The iteration of the last whole line of a metrics.jsonl; -1 if there is none. Reads the file's end alone."""
    if not metrics.is_file():
        return -1
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - TAIL_BYTES))
        lines = file.read().split(b"\n")
    for text in reversed(lines[:-1]):
        with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
            return int(json.loads(text)["iteration"])
    return -1


def open_run(cfg: Config, config_dict: Mapping[str, Any]) -> RunFolder:
    """Makes the folder of a new run, or opens that of a run which is to go on (then `resume_at` must follow).

    Args:
        cfg: the config; `run.dir`, `run.name` and `run.resume` are read. A checkpoint that run.resume names is noted in
            the new run's folder, so that it goes on from there until it has one of its own.
        config_dict: the resolved config as plain values, for config.yaml.

    Raises:
        ValueError: the name is in use and run.resume is not auto, is no name of a folder, or cannot be made; or
            run.resume names no checkpoint.
    """
    path = Path(cfg.run.dir) / cfg.run.name
    if cfg.run.name in ("", ".", "..") or "/" in cfg.run.name or "\0" in cfg.run.name:
        raise ValueError(
            f"run.name={cfg.run.name!r} is not the name of one folder: use letters, digits, - and _ "
            "(run.dir says where the folder goes)"
        )
    resumed = path.is_dir() and any(path.iterdir())
    if resumed and cfg.run.resume != "auto":
        raise _in_use(path)
    origin = find_origin(cfg.run.resume).path if starts_elsewhere(cfg) else None
    try:
        for name in ("samples", "timelines", "checkpoints"):
            (path / name).mkdir(parents=True, exist_ok=resumed)
        changes = _write_config(path, config_dict)
        for name in ("metrics.jsonl", "stages.jsonl"):
            (path / name).touch()
        if origin:
            write_text(path / "checkpoints" / STARTED_FROM, str(origin))
    except FileExistsError:  # another run of this name has just started
        raise _in_use(path) from None
    except OSError as error:
        raise ValueError(
            f"run.dir={cfg.run.dir!r}: the run's folder {path} cannot be written ({error.strerror}); set run.dir to a "
            "folder that you may write"
        ) from None
    return RunFolder(path, resumed, tuple(changes))


def _in_use(path: Path) -> ValueError:
    done = len(RunFolder(path, True).read_metrics())
    free = next(i for i in range(2, 1 << 30) if not path.with_name(f"{path.name}-{i}").exists())
    return ValueError(
        f"run.name={path.name!r} is in use: {path} holds a run ({done} iteration{'' if done == 1 else 's'} done). "
        f"Choose another name (run.name={path.name}-{free}) or let it go on from its last checkpoint (run.resume=auto)"
    )


def _write_config(path: Path, config_dict: Mapping[str, Any]) -> list[str]:
    """Writes config.yaml; returns the settings that differ from the run's so far. A config that differs stays beside it
    as config.1.yaml, config.2.yaml, ..."""
    target, plain = path / "config.yaml", without_secrets(dict(config_dict))
    text, changes = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), []
    if target.is_file() and (former := target.read_text(encoding="utf-8")) != text:
        found = _differences(yaml.safe_load(former), yaml.safe_load(text), "")
        changes = [line for line in found if not line.startswith("run.resume:")]  # that it goes on is no news
        number = next(i for i in range(1, 1 << 30) if not (path / f"config.{i}.yaml").exists())
        target.rename(path / f"config.{number}.yaml")
    write_text(target, text)
    return changes


def _differences(former: Any, now: Any, key: str) -> list[str]:
    if isinstance(former, dict) and isinstance(now, dict):
        names = [f"{name}" for name in {**former, **now}]
        found = [_differences(former.get(name), now.get(name), f"{key}.{name}" if key else name) for name in names]
        return [line for lines in found for line in lines]
    return [] if former == now else [f"{key}: {former!r} -> {now!r}"]


def without_secrets(value: Any) -> Any:
    """A copy of `value` in which no secret stands.

    What a secret-looking environment variable holds (OPENAI_API_KEY, HF_TOKEN, ...) becomes a reference to it, which
    resolves again when the file is used as a config; a string under a secret-looking key becomes "<secret>".
    """
    known = {
        secret: f"${{oc.env:{name}}}"
        for name, secret in os.environ.items()
        if SECRET_VARIABLE.search(name) and len(secret) >= MIN_SECRET_LENGTH
    }
    return _redact(value, known)


def _redact(value: Any, known: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _redact_entry(str(key), item, known) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redact(item, known) for item in value]
    if isinstance(value, str):
        for secret in sorted(known, key=len, reverse=True):
            value = value.replace(secret, known[secret])
    return value


def _redact_entry(key: str, value: Any, known: Mapping[str, str]) -> Any:
    replaced = _redact(value, known)
    is_literal = isinstance(value, str) and value != "" and replaced == value and not value.startswith("${")
    return "<secret>" if is_literal and SECRET_KEY.search(key) else replaced
