"""Checkpoints: the state to go on from.

In: a learner. Out: `checkpoints/step_N/` with `state/` (torch distributed checkpoint: models, optimizers, random number
generators; loads on any number of ranks), and beside it the models in Hugging Face form (`export.py`). What else there
is to go on from follows from the number of iterations in `progress.json`: the prompts, the learning rate, the metrics'
last line.

Decision: training waits only while each rank copies its part to the CPU. A thread on each rank writes the copy; when
all have, rank 0 makes a checkpoint of it (`checkpoint_files.commit`), and until then the ones before are the newest.
(dcp.async_save has such a thread too, but what must follow it, on rank 0 alone, would need a second one.) A checkpoint
that cannot be written costs itself only: the run says so and goes on, unless it was the last.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from raypipe.checkpoint_files import candidates, clear_partials, commit, partial_folder, read_progress
from raypipe.export import exports_of
from raypipe.run_folder import last_iteration

if TYPE_CHECKING:
    from raypipe.learner import Learner, Trainee

# Seconds that a whole checkpoint waits for the metrics of its last iteration, see `CheckpointWriter`.
METRICS_PATIENCE_S = 60.0
# Copies to ordinary memory of the CPU, complete when it returns.
STAGING = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)


class CheckpointWriter:
    """Writes a learner's checkpoints behind its back; every rank has one, and all call it together.

    Args:
        folder: of the run's checkpoints.
        learner: this rank's.
        metrics: the run's metrics.jsonl. A checkpoint counts only when the last iteration behind it is written there,
            so that a run that goes on from it lacks no line. None: it does not wait.
    """

    def __init__(self, folder: Path, learner: "Learner", metrics: Path | None = None):
        self.folder, self.learner, self.metrics = folder, learner, metrics
        self.rank = dist.get_rank()
        # The threads of the ranks talk to one another beside the learners, so on a group of their own.
        self.group = dist.new_group(backend="gloo")
        self.thread: threading.Thread | None = None
        self.failure = ""
        self.told: list[str] = []
        self.figures: dict[str, float] = {}

    def save(self, iteration: int, under_way: Sequence[int] = ()) -> None:
        """Begins to write `step_{iteration}`; `iteration` iterations have been trained, and the prompts at `under_way`
        are (see `carry.py`). Returns when the learner may change again. Waits for the checkpoint before, of which a
        failure is told in `notes`."""
        self.wait()
        self.failure = ""  # told already
        if self.rank == 0:
            clear_partials(self.folder)
        partial = partial_folder(self.folder, iteration)
        state = DefaultStager(STAGING).stage(state_of(self.learner))
        exports = exports_of(self.learner, partial, write=self.rank == 0)
        progress = {"kl_coef": self.learner.kl_coef, "under_way": list(under_way)}
        self.thread = threading.Thread(
            target=self._write, args=(partial, iteration, state, exports, progress), daemon=True, name="checkpoint"
        )
        self.thread.start()

    def wait(self) -> str:
        """Returns when nothing is being written: what the last checkpoint failed with, or nothing."""
        if self.thread:
            self.thread.join()
        return self.failure

    def notes(self) -> list[str]:
        """What the user should know of checkpoints since the last call; rank 0 has it."""
        told, self.told = self.told, []
        return told

    def metrics_of_writing(self) -> dict[str, float]:
        """Of checkpoints that were written since the last call; rank 0 has them."""
        figures, self.figures = self.figures, {}
        return figures

    def _write(
        self,
        partial: Path,
        iteration: int,
        state: dict[str, Any],
        exports: list[Callable[[], None]],
        progress: dict[str, Any],
    ) -> None:
        begin = time.perf_counter()
        keep = self.learner.config.checkpoint
        try:
            dcp.save(state, checkpoint_id=partial / "state", process_group=self.group)  # raises alike on all ranks
            if self.rank == 0:
                for export in exports:
                    export()
                self._wait_for_metrics(iteration)
                commit(partial, iteration, progress, keep.keep_last, keep.keep_every)
        except (Exception, CheckpointException) as error:
            self.failure = (
                f"checkpoint step_{iteration} could not be written; older ones in {self.folder} are as they were: "
                f"{first_cause(error)}"
            )
            if self.rank == 0:
                clear_partials(self.folder)
                self.told.append(self.failure)
                self.figures["checkpoint/failures"] = self.figures.get("checkpoint/failures", 0) + 1
        else:
            self.figures["checkpoint/write_s"] = time.perf_counter() - begin

    def _wait_for_metrics(self, iteration: int) -> None:
        deadline = time.monotonic() + METRICS_PATIENCE_S
        while (
            self.metrics
            and last_iteration(self.metrics) < iteration - 1
            and not self.learner.stopping()  # then the driver writes them when the learner has ended
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)


def trainees_of(learner: "Learner") -> "dict[str, Trainee]":
    return {"policy": learner.policy, **({"critic": learner.critic} if learner.critic else {})}


def state_of(learner: "Learner") -> dict[str, Any]:
    """Models, optimizers and this rank's random number generators, as DCP takes them; tensors are the learner's own.

    An optimizer that has not taken a step has no state, and gets none.
    """
    parts: dict[str, Any] = {}
    for name, trainee in trainees_of(learner).items():
        if trainee.optimizer.state:
            model, optimizer = get_state_dict(trainee.module, trainee.optimizer)
            parts[name] = {"model": model, "optimizer": optimizer}
        else:
            parts[name] = {"model": get_model_state_dict(trainee.module)}
    generators = {"cpu": torch.get_rng_state()}
    if learner.device.type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(learner.device)
    return {**parts, "random": {str(dist.get_rank()): generators}}


@dataclass(frozen=True)
class Restored:
    """iteration: iterations behind the checkpoint that was loaded; 0 where there is none.
    under_way: positions of the prompts that were under way then, see `carry.py`.
    notes: checkpoints that could not be loaded, and why."""

    iteration: int
    under_way: list[int]
    notes: list[str]


def load(folder: Path, learner: "Learner") -> Restored:
    """Restores the newest checkpoint that can be read into the learner; all ranks call it.

    Raises:
        RuntimeError: there are some, and none can be read.
    """
    found, notes = learner.gather(candidates(folder))[0]  # as rank 0 sees them
    for path in found:
        read, problem = _together(learner, _read, path)
        if not problem:
            _, problem = _together(learner, _load_state, path, learner, read[1])
        if not problem:
            learner.kl_coef = read[0]["kl_coef"]
            return Restored(read[0]["iteration"], read[0]["under_way"], notes)
        notes.append(f"{path} is passed over: {problem}")
    if found:
        raise RuntimeError(f"no checkpoint in {folder} can be loaded: {'; '.join(notes)}")
    return Restored(0, [], notes)


def _together(learner: "Learner", call: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """Calls on all ranks: what this one's call returned, and what that of any rank failed with."""
    returned, problem = None, ""
    try:
        returned = call(*args)
    except (Exception, CheckpointException) as error:
        problem = first_cause(error)
    return returned, next(filter(None, learner.gather(problem)), "")


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """progress.json, and what is known of each value in `state`, by its key."""
    return read_progress(path), dcp.FileSystemReader(path / "state").read_metadata().state_dict_metadata


def _load_state(path: Path, learner: "Learner", written: dict[str, Any]) -> None:
    parts: dict[str, Any] = {}
    for name, trainee in trainees_of(learner).items():
        if any(key.startswith(f"{name}.optimizer.") for key in written):
            model, optimizer = get_state_dict(trainee.module, trainee.optimizer)
            parts[name] = {"model": model, "optimizer": optimizer}
        else:
            parts[name] = {"model": get_model_state_dict(trainee.module)}
    # A rank that was not there when it was written goes on with the generators that it has.
    own = f"random.{dist.get_rank()}."
    saved = {key.removeprefix(own): value for key, value in written.items() if key.startswith(own)}
    generators = {name: torch.empty(value.size, dtype=value.properties.dtype) for name, value in saved.items()}
    found = parts | ({"random": {str(dist.get_rank()): generators}} if generators else {})
    dcp.load(found, checkpoint_id=path / "state", process_group=learner.control)
    for name, part in parts.items():
        _restore(trainees_of(learner)[name], part)
    if "cpu" in generators:
        torch.set_rng_state(generators["cpu"])
    if "cuda" in generators and learner.device.type == "cuda":
        torch.cuda.set_rng_state(generators["cuda"], learner.device)


def _restore(trainee: "Trainee", part: dict[str, Any]) -> None:
    """Gives a model and its optimizer what was loaded; settings such as betas stay those of the config."""
    optimizer = trainee.optimizer
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    if "optimizer" in part:
        set_state_dict(trainee.module, optimizer, model_state_dict=part["model"], optim_state_dict=part["optimizer"])
    else:
        set_model_state_dict(trainee.module, part["model"])
        optimizer.state.clear()
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def first_cause(error: BaseException) -> str:
    """What went wrong, in a line; of a failure that DCP tells to all ranks, that of the first rank which had it."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        return f"rank {rank}: {first_cause(cause)}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
