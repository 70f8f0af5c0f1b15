"""Everything that can be wrong is found here, before Ray, an engine or a learner starts.

In: a config whose values are already checked. Out: the prompts, and the resource plan. Cheap checks come first: grader
paths, the model folder, the data files, then what the machine has. Every mistake is a ValueError that names the key.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from raypipe import resources
from raypipe.adapters import check_grader, find_grader
from raypipe.checkpoint_files import find_origin
from raypipe.config import Config, grader_name, heldout_response_length, starts_elsewhere
from raypipe.grading.queue import check_data_sources
from raypipe.loggers import check_loggers
from raypipe.prompts import PromptSet, load_prompts
from raypipe.resources import Demand, Machine
from raypipe.rollouts import load_rollouts


@dataclass(frozen=True)
class Inputs:
    """What `preflight` found.

    train, heldout: the prompts of data.train_files and data.val_files.
    machine, demands: what is there and what the run asks for.
    lacks: what is missing, one sentence each; empty if the run fits.
    """

    train: PromptSet
    heldout: PromptSet | None
    machine: Machine
    demands: list[Demand]
    lacks: list[str]

    @property
    def heldout_count(self) -> int:
        return len(self.heldout.prompts) if self.heldout else 0

    @property
    def fits(self) -> bool:
        return not self.lacks

    def report(self, batch: int) -> str:
        """The resource plan and the data as a table for the terminal. `batch`: prompts of an iteration."""
        console = Console(width=100, record=True, file=open("/dev/null", "w"))
        columns = ("actor", "count", "CPUs each", "GPUs each", "on nodes with")
        table = Table(*columns, title="resource plan", title_justify="left")
        for d in self.demands:
            labels = ", ".join(f"{name}={value}" for name, value in d.labels.items())
            table.add_row(d.actor, str(d.count), f"{d.cpus:g}", f"{d.gpus:g}", labels)
        cpus, gpus = sum(d.count * d.cpus for d in self.demands), sum(d.count * d.gpus for d in self.demands)
        table.add_row("in all", "", f"{cpus:g}", f"{gpus:g}")
        table.add_row("there are", "", f"{self.machine.cpus:g}", f"{self.machine.gpus:g}")
        console.print(table)
        if self.machine.local and cpus > self.machine.cpus:
            console.print("More CPUs are asked for than there are: on this machine the processes share its cores.")
        for name, prompts in (("train", self.train), ("held out", self.heldout)):
            if prompts is not None:
                console.print(f"{name}: {len(prompts.prompts)} prompts, {prompts.dropped} dropped as over-long")
        if batch > len(self.train.prompts):
            console.print(f"An iteration takes data.train_batch_size={batch} prompts: some come more than once.")
        for sentence in self.lacks:
            console.print(f"does not fit: {sentence}", highlight=False)
        console.print("fits" if self.fits else "")
        return console.export_text().strip()


def preflight(config: Config) -> Inputs:
    """Checks files, model folder and graders, reads the prompts, of which each needs a grader, and compares the
    resource plan with the machine."""
    check_loggers(config.log.loggers)
    if starts_elsewhere(config):
        find_origin(config.run.resume)
    check_parts(config, config.data.train_files + config.data.rollouts + config.data.val_files)
    tokenizer = load_tokenizer(config.model.path)
    if config.data.rollouts:
        train = load_rollouts(config, tokenizer)
    else:
        train = load_prompts(config.data.train_files, config.data, tokenizer, "")
    heldout = load_prompts(config.data.val_files, config.data, tokenizer, "") if config.data.val_files else None
    used = [*train.prompts, *(heldout.prompts if heldout else ())]
    check_data_sources(config.grade.graders, {prompt.data_source for prompt in used})
    machine = resources.find_machine()
    asked = resources.demands(config, machine)
    return Inputs(train, heldout, machine, asked, resources.missing(asked, machine))


def preflight_sampling(config: Config, files: list[str]) -> tuple[PromptSet, list[Demand]]:
    """The same for a plan without a learner over the prompts of `files`.

    Raises:
        ValueError: also where the machine lacks what is asked for.
    """
    check_parts(config, files)
    prompts = load_prompts(files, config.data, load_tokenizer(config.model.path), "")
    check_data_sources(config.grade.graders, {prompt.data_source for prompt in prompts.prompts})
    machine = resources.find_machine()
    asked = resources.sampling_demands(config, machine)
    for sentence in resources.missing(asked, machine):
        raise ValueError(sentence)
    return prompts, asked


def check_parts(config: Config, files: list[str]) -> None:
    """Raises ValueError unless all graders, own stages, the model folder and the prompt files are there."""
    for i, grader in enumerate(config.grade.graders):
        try:
            check_grader(grader.path, grader.kwargs)
        except ValueError as error:
            told = str(error).removeprefix(f"{grader.path!r}: ")
            raise ValueError(f"grade.graders.{i}.path={grader.path!r} ({grader_name(grader)}): {told}") from None
    for i, stage in enumerate(config.pipeline.stages):
        try:
            find_grader(stage.path)
        except ValueError as error:
            told = str(error).removeprefix(f"{stage.path!r}: ")
            raise ValueError(f"pipeline.stages.{i}.path={stage.path!r}: {told}") from None
    check_model_folder(config.model.path)
    check_context(config)
    for name in files:
        if not Path(name).is_file():
            raise ValueError(
                f"data.train_files, data.val_files or data.rollouts: {name} does not exist; paths are relative to the "
                "config file"
            )


def check_model_folder(path: str) -> None:
    folder = Path(path)
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ValueError(
            f"model.path={path} {what}; name a local folder in Hugging Face form (config.json, *.safetensors, "
            "tokenizer), for instance made with `hf download NAME --local-dir FOLDER`"
        )
    try:
        json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        inside = [*folder.glob("hf"), *folder.glob("step_*/hf"), *folder.glob("checkpoints/step_*/hf")]
        newest = max(inside, key=lambda found: found.stat().st_mtime, default=None)
        hint = f"; did you mean {newest}?" if newest else ""
        raise ValueError(f"model.path={path} is no model folder: config.json cannot be read: {error}{hint}") from None
    if not list(folder.glob("*.safetensors")):
        raise ValueError(
            f"model.path={path} holds no *.safetensors; other weight files can run code when loaded and are not read: "
            "convert them with save_pretrained(..., safe_serialization=True)"
        )


def check_context(config: Config) -> None:
    """Raises ValueError if the longest sample does not fit into the model's positions, where its config.json says
    plainly how many there are."""
    told = json.loads((Path(config.model.path) / "config.json").read_text())
    positions, rope = told.get("max_position_embeddings"), told.get("rope_scaling") or told.get("rope_parameters") or {}
    longest = config.data.max_prompt_length + max(config.rollout.max_response_length, heldout_response_length(config))
    if isinstance(positions, int) and rope.get("rope_type", "default") == "default" and longest > positions:
        raise ValueError(
            f"data.max_prompt_length={config.data.max_prompt_length} and the longest response make samples of "
            f"{longest} tokens, but the model in {config.model.path} has {positions} positions "
            "(max_position_embeddings); lower data.max_prompt_length, rollout.max_response_length or "
            "eval.max_response_length"
        )


def load_tokenizer(path: str):
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises many kinds; each means that the folder's tokenizer is unusable
        raise ValueError(f"model.path={path}: its tokenizer cannot be loaded: {error}") from None
