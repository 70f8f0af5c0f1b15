"""Checkpoints as folders: which one a run goes on from, and how a new one becomes whole, or is not there at all.

    checkpoints/
        step_8/   hf/  critic/  adapter/  state/  progress.json      see checkpoint.py
        latest          "step_8"
        started_from    where a run that began with run.resume=PATH began

In: a run's `checkpoints` folder. Out: the checkpoint to go on from, and notes on those that are passed over. Decision:
a checkpoint is written under another name, flushed to the disk, and renamed; `latest` is moved last. `progress.json`
lists its files with their sizes, so that a torn one (a file missing or cut) is known before anything is loaded, and the
one before it serves. Imports nothing heavy.
"""

import errno
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRESS, LATEST, STARTED_FROM = "progress.json", "latest", "started_from"


class Unreadable(Exception):
    """A checkpoint cannot be used; the text names the file and the reason."""


@dataclass(frozen=True)
class Start:
    """Where a run begins or goes on.

    path: the checkpoint, None for the first model.
    iteration: iterations that it has behind it.
    notes: what was passed over and why, for the user.
    """

    path: Path | None
    iteration: int
    notes: tuple[str, ...] = ()


def find_start(folder: Path) -> Start:
    """The checkpoint that `latest` names, or the newest whole one before it.

    Raises:
        ValueError: there are checkpoints, and none of them is whole.
    """
    found, notes = candidates(folder)
    for path in found:
        try:
            return Start(path, read_progress(path)["iteration"], tuple(notes))
        except Unreadable as error:
            notes.append(f"{path} is passed over: {error}")
    if found:
        raise ValueError(
            f"no checkpoint in {folder} can be read: {'; '.join(notes)}. Start a new run (run.name), from an older "
            "checkpoint if there is one elsewhere (run.resume=PATH)"
        )
    return Start(None, 0, tuple(notes))


def candidates(folder: Path) -> tuple[list[Path], list[str]]:
    """Checkpoints to go on from, the best first, whole or not; and notes."""
    found, notes = steps(folder)[::-1], []
    try:
        newest = folder / (folder / LATEST).read_text(encoding="utf-8").strip()
        if number(newest) < 0:
            raise ValueError("it names no checkpoint")
    except (OSError, ValueError) as error:
        if found:
            notes.append(f"{folder / LATEST} cannot be read ({_reason(error)}); the newest whole checkpoint is taken")
    else:
        if newest not in found:
            notes.append(f"{newest}, which {folder / LATEST} names, is missing")
        # A newer one was left behind when someone moved `latest` back.
        found = [path for path in found if number(path) <= number(newest)] or found
    origin = folder / STARTED_FROM
    return [*found, *([Path(origin.read_text(encoding="utf-8"))] if origin.is_file() else [])], notes


def steps(folder: Path) -> list[Path]:
    """Checkpoints in `folder` by iteration, whole or not."""
    return sorted((path for path in folder.glob("step_*") if number(path) >= 0), key=number)


def number(path: Path) -> int:
    """N of step_N; -1 for another name."""
    digits = path.name.removeprefix("step_")
    return int(digits) if path.name.startswith("step_") and digits.isdecimal() else -1


def read_progress(path: Path) -> dict[str, Any]:
    """progress.json of a whole checkpoint: iteration, kl_coef, under_way (positions of prompts, see `carry.py`), files.
    Raises Unreadable if it is not whole."""
    progress = path / PROGRESS
    try:
        told = json.loads(progress.read_text(encoding="utf-8"))
        for name, size in told["files"].items():
            file = path / name
            if (there := file.stat().st_size) != size:
                raise Unreadable(f"{file} has {there} bytes and should have {size}")
        return {
            "iteration": int(told["iteration"]),
            "kl_coef": float(told["kl_coef"]),
            "under_way": [int(position) for position in told.get("under_way", [])],
            "files": told["files"],
        }
    except OSError as error:
        raise Unreadable(f"{error.filename}: {_reason(error)}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"{progress} is damaged: {type(error).__name__}: {error}") from None


def find_origin(path: str) -> Start:
    """The checkpoint that run.resume=PATH names: a checkpoint's folder, or that of a run.

    Raises:
        ValueError: there is none, or it is not whole.
    """
    folder, problem = Path(path).expanduser().resolve(), f"run.resume={path}"
    if not folder.is_dir():
        raise ValueError(
            f"{problem} is no folder; name a checkpoint (runs/NAME/checkpoints/step_N) or a run (runs/NAME), or write "
            "auto or never"
        )
    if (folder / "checkpoints").is_dir():
        try:
            found = find_start(folder / "checkpoints")
        except ValueError as error:
            raise ValueError(f"{problem}: {error}") from None
        if found.path is None:
            raise ValueError(f"{problem}: this run has no checkpoint yet; name another")
        return found
    if not (folder / PROGRESS).is_file() and not (folder / "state").is_dir():
        raise ValueError(
            f"{problem} is no checkpoint: it holds no {PROGRESS}; name the folder step_N. To start from weights alone, "
            "set model.path to a folder such as step_N/hf"
        )
    try:
        return Start(folder, read_progress(folder)["iteration"])
    except Unreadable as error:
        raise ValueError(f"{problem} cannot be used: {error}; name another checkpoint") from None


def commit(partial: Path, iteration: int, progress: dict[str, Any], keep_last: int, keep_every: int) -> Path:
    """Makes a checkpoint out of the folder `partial`, in which all is written, and deletes older ones.

    Kept are the `keep_last` newest and those whose iteration is a multiple of `keep_every`, if that is not 0. Raises
    OSError; then the older ones are all still there.

    Args:
        progress: what else progress.json says (see `read_progress`).
    """
    folder = partial.parent
    target = folder / f"step_{iteration}"
    files = {str(file.relative_to(partial)): file.stat().st_size for file in partial.rglob("*") if file.is_file()}
    write_text(partial / PROGRESS, json.dumps({"iteration": iteration, **progress, "files": files}))
    for path in partial.rglob("*"):
        flush(path)
    flush(partial)
    discard(target)  # of a history that was cut
    partial.rename(target)
    flush(folder)
    write_text(folder / LATEST, target.name)
    older = [path for path in steps(folder) if number(path) <= iteration]
    for path in older[:-keep_last]:
        if not (keep_every and number(path) % keep_every == 0):
            discard(path)
    return target


def partial_folder(folder: Path, iteration: int) -> Path:
    return folder / f".step_{iteration}.partial"


def clear_partials(folder: Path) -> None:
    """Deletes what interrupted writing has left; it never raises."""
    for path in folder.glob(".step_*"):
        shutil.rmtree(path, ignore_errors=True)


def discard(path: Path) -> None:
    """Deletes a checkpoint so that half of one is never seen under its name."""
    if path.exists():
        doomed = path.with_name(f".{path.name}.deleted")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Replaces a file, all or nothing, also when the process is killed or the power fails."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Brings a file or a folder's names from the cache to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot flush a folder
            raise
    finally:
        os.close(handle)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
