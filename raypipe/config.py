"""The configuration: frozen dataclasses, filled from a YAML file and `key=value` arguments, checked before Ray starts.

In: a YAML path and overrides. Out: a `Config` that every other module reads as plain attributes. OmegaConf does the
merge and the type conversion; nobody past this file sees a DictConfig. Each key's `doc` is both its comment here and
its line in `--help`. Imports nothing heavy, so that `--help` answers at once.
"""

import dataclasses
import difflib
import math
import re
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException


def key(default: Any, doc: str) -> Any:
    """A config field with its default and its line in `--help`."""
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata={"doc": doc})
    return field(default=default, metadata={"doc": doc})


def section(cls: type) -> Any:
    return field(default_factory=cls)


@dataclass(frozen=True)
class RunConfig:
    name: str = key("run", "name of the run; its folder is run.dir/run.name")
    dir: str = key("runs", "folder that holds the run folders")
    resume: str = key("never", "never: refuse a name in use | auto: go on from the last checkpoint if there is one")
    seed: int = key(0, "seed of the prompt order, the sampling and the learner")
    iterations: int = key(100, "PPO iterations to run")


@dataclass(frozen=True)
class ModelConfig:
    path: str = key(MISSING, "folder of the policy in Hugging Face form (config.json, *.safetensors, tokenizer)")
    dtype: str = key("auto", "parameters in compute: auto (bfloat16 on GPU, float32 on CPU) | float32 | bfloat16")
    attention: str = key("sdpa", "attention of the learner: sdpa | eager | flash_attention_2")
    activation_checkpointing: bool = key(False, "recompute activations in the backward pass: less memory, more time")


@dataclass(frozen=True)
class DataConfig:
    train_files: list[str] = key([], "parquet or JSONL files of training prompts, relative to the config file")
    val_files: list[str] = key([], "parquet or JSONL files of held-out prompts; empty: no held-out reward")
    train_batch_size: int = key(64, "prompts an iteration; each is sampled rollout.n times")
    max_prompt_length: int = key(1024, "longest prompt in tokens, after the chat template")
    overlong: str = key("drop", "prompts over max_prompt_length: drop (and count) | error")
    columns: dict[str, str] = key(
        {}, "where a file differs from the usual names, e.g. {prompt: question, ground_truth: answer}"
    )
    id_key: str = key("", "column that holds a unique prompt id; empty: file name and row number")
    require_ground_truth: bool = key(True, "refuse rows without a ground truth; false for graders that need none")
    shuffle: bool = key(True, "seeded new order in each epoch; false: file order")


@dataclass(frozen=True)
class RolloutConfig:
    n: int = key(8, "samples of each prompt (the group)")
    max_response_length: int = key(1024, "longest response in tokens; longer ones end with finish_reason length")
    temperature: float = key(1.0, "sampling temperature, also applied to the learner's log-probs")
    top_p: float = key(1.0, "nucleus sampling bound; below 1 the learner's log-probs differ from the engine's")
    stop: list[str] = key([], "strings that end a response, kept in it")
    samples_per_block: int = key(1, "samples of one prompt that travel together, 1 to rollout.n: the streaming grain")


@dataclass(frozen=True)
class EngineConfig:
    count: int = key(1, "vLLM engines, each a resident Ray actor")
    tensor_parallel_size: int = key(1, "GPUs (or CPU workers) of one engine")
    num_gpus: float = key(-1.0, "GPUs that each engine reserves; -1: tensor_parallel_size where there are GPUs, else 0")
    num_cpus: float = key(1.0, "CPUs that each engine reserves")
    dtype: str = key("auto", "engine parameters: auto (as the learner computes) | float32 | bfloat16")
    gpu_memory_utilization: float = key(0.85, "part of a GPU's memory that vLLM takes")
    kv_cache_gib: float = key(1.0, "KV cache of an engine on CPU, GiB")
    max_num_seqs: int = key(256, "requests that one engine runs at the same time")
    enforce_eager: bool = key(False, "no CUDA graphs (nor torch.compile): slower, starts faster")
    weight_transfer: str = key("auto", "how weights reach engines: auto | nccl (GPU) | object_store (any device)")
    max_mismatch_kl: float = key(0.05, "alarm when learner and engines disagree by more, in nats of KL per token")


@dataclass(frozen=True)
class GraderConfig:
    path: str = key(MISSING, "package.module:Name or path/to/file.py:name of a grader class or reward function")
    name: str = key("", "name in metrics; empty: the part of path after the colon")
    kwargs: dict[str, Any] = key({}, "arguments of the grader's constructor")
    weight: float = key(1.0, "weight of its score in the sample's score")
    data_sources: list[str] = key([], "data sources that it grades; empty: all")
    scope: str = key("sample", "sample: graded as soon as finished | group: sees all samples of a prompt at once")
    batch: bool = key(True, "false: called with one sample at a time")
    max_batch: int = key(16, "most samples in one call")
    timeout_s: float = key(30.0, "seconds a sample may take; a call of b samples may take b times as long")


@dataclass(frozen=True)
class GradeConfig:
    graders: list[GraderConfig] = key([], "graders; a sample's score is the weighted sum over those of its data source")
    workers: str = key("1", "grader actors: a number, or min..max scaled by Ray Data")
    processes: int = key(2, "child processes of each grader actor; each reserves one CPU where there are enough")
    memory_mb: int = key(4096, "memory that a child process may hold before it is killed, MiB")
    max_failed_fraction: float = key(0.5, "stop the run when a larger part of an iteration's samples fails in grading")
    async_concurrency: int = key(64, "calls of async graders in flight in the whole run")
    async_rate: float = key(0.0, "calls of async graders started per second in the whole run; 0: no limit")
    retries: int = key(4, "times an async call is repeated, with backoff, after a connection error")


@dataclass(frozen=True)
class AlgorithmConfig:
    adv_estimator: str = key("grpo", "advantage: grpo | dr_grpo | rloo | reinforce_pp | reinforce_pp_baseline")
    gamma: float = key(1.0, "discount per token in [0, 1], for reinforce_pp")
    clip_low: float = key(0.2, "PPO clip: ratio is bounded below by 1 - clip_low")
    clip_high: float = key(0.2, "PPO clip: ratio is bounded above by 1 + clip_high")
    loss_agg: str = key("token_mean", "mean over: token_mean | seq_mean_token_sum | seq_mean_token_mean | dr_grpo")


@dataclass(frozen=True)
class TrainConfig:
    ranks: int = key(1, "learner processes of the Ray Train FSDP group")
    gpus_per_rank: float = key(-1.0, "GPUs of a rank; -1: 1 where there are GPUs, else 0")
    cpus_per_rank: float = key(1.0, "CPUs that a rank reserves")
    lr: float = key(1e-6, "peak learning rate of AdamW")
    lr_schedule: str = key("constant", "after warm-up: constant | linear | cosine, down to 0 at the last iteration")
    lr_warmup: int = key(0, "iterations over which the learning rate rises from 0")
    weight_decay: float = key(0.0, "AdamW weight decay")
    beta1: float = key(0.9, "AdamW beta1")
    beta2: float = key(0.95, "AdamW beta2")
    grad_clip: float = key(1.0, "largest norm of the gradient")
    mini_batches: int = key(1, "optimizer steps an iteration and epoch; divides data.train_batch_size")
    epochs: int = key(1, "passes over an iteration's samples")
    micro_batch_tokens: int = key(8192, "tokens (prompt and response) of one forward and backward pass")
    threads: int = key(0, "torch threads of a rank on CPU; 0: cpus_per_rank")


@dataclass(frozen=True)
class PipelineConfig:
    max_staleness: int = key(0, "how many weight versions a sample may lag behind the learner; 0: on-policy")
    plans_ahead: int = key(
        1, "plans that wait at the gate behind the one at work; more where iterations take few seconds"
    )


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = key(50, "iterations between checkpoints; 0: only at the end")
    keep_last: int = key(2, "newest checkpoints that are kept")


@dataclass(frozen=True)
class EvalConfig:
    every: int = key(0, "iterations between passes over data.val_files; 0: only before the first and after the last")
    temperature: float = key(0.0, "sampling temperature of the held-out pass; 0: greedy")


@dataclass(frozen=True)
class LogConfig:
    timelines: list[int] = key([1, 2], "iterations whose timeline is drawn, besides the last")
    samples: int = key(4, "best and worst samples that are saved each iteration")
    quiet: bool = key(False, "no progress inside an iteration")
    workers: bool = key(False, "also print what Ray's worker processes print; it is in Ray's session folder anyway")
    dashboard: bool = key(True, "start Ray's dashboard on this machine, at 127.0.0.1")


@dataclass(frozen=True)
class Config:
    run: RunConfig = section(RunConfig)
    model: ModelConfig = section(ModelConfig)
    data: DataConfig = section(DataConfig)
    rollout: RolloutConfig = section(RolloutConfig)
    engine: EngineConfig = section(EngineConfig)
    grade: GradeConfig = section(GradeConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    train: TrainConfig = section(TrainConfig)
    pipeline: PipelineConfig = section(PipelineConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    eval: EvalConfig = section(EvalConfig)
    log: LogConfig = section(LogConfig)


CHOICES = {
    "run.resume": ("never", "auto"),
    "model.dtype": ("auto", "float32", "bfloat16"),
    "model.attention": ("sdpa", "eager", "flash_attention_2"),
    "data.overlong": ("drop", "error"),
    "engine.dtype": ("auto", "float32", "bfloat16"),
    "engine.weight_transfer": ("auto", "nccl", "object_store"),
    "grade.graders.scope": ("sample", "group"),
    "algorithm.adv_estimator": ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"),
    "algorithm.loss_agg": ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "dr_grpo"),
    "train.lr_schedule": ("constant", "linear", "cosine"),
}
# Inclusive bounds; the name of a bound that is left out is None.
BOUNDS = {
    "run.iterations": (1, None),
    "data.train_batch_size": (1, None),
    "data.max_prompt_length": (1, None),
    "rollout.n": (1, None),
    "rollout.max_response_length": (1, None),
    "rollout.temperature": (0.01, None),
    "rollout.top_p": (0.01, 1),
    "rollout.samples_per_block": (1, None),
    "engine.count": (1, None),
    "engine.tensor_parallel_size": (1, None),
    "engine.num_gpus": (-1, None),
    "engine.num_cpus": (0, None),
    "engine.gpu_memory_utilization": (0.05, 1),
    "engine.kv_cache_gib": (0.1, None),
    "engine.max_num_seqs": (1, None),
    "engine.max_mismatch_kl": (0, None),
    "grade.graders.max_batch": (1, None),
    "grade.graders.timeout_s": (0.01, None),
    "grade.processes": (1, None),
    "grade.memory_mb": (16, None),
    "grade.max_failed_fraction": (0, 1),
    "grade.async_concurrency": (1, None),
    "grade.async_rate": (0, None),
    "grade.retries": (0, None),
    "algorithm.gamma": (0, 1),
    "algorithm.clip_low": (0, 1),
    "algorithm.clip_high": (0, None),
    "train.ranks": (1, None),
    "train.gpus_per_rank": (-1, None),
    "train.cpus_per_rank": (0, None),
    "train.lr": (0, None),
    "train.lr_warmup": (0, None),
    "train.weight_decay": (0, None),
    "train.beta1": (0, 1),
    "train.beta2": (0, 1),
    "train.grad_clip": (0, None),
    "train.mini_batches": (1, None),
    "train.epochs": (1, None),
    "train.micro_batch_tokens": (1, None),
    "train.threads": (0, None),
    "pipeline.max_staleness": (0, 0),
    "pipeline.plans_ahead": (1, 8),
    "checkpoint.every": (0, None),
    "checkpoint.keep_last": (1, None),
    "eval.every": (0, None),
    "eval.temperature": (0, None),
    "log.samples": (0, None),
}
GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
# reward/<name> is a metric of its own.
RESERVED_GRADER_NAMES = ("mean", "std", "heldout_mean", "heldout_samples")


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Reads `path`, applies `key=value` overrides, checks every value and resolves the paths of files.

    Raises:
        ValueError: the message names the file or key, the value, why it is wrong and what to write instead.
    """
    path = Path(path)
    cfg = OmegaConf.structured(Config)
    for node in (cfg, *(cfg[name] for name in cfg)):
        OmegaConf.set_readonly(node, False)  # OmegaConf locks nodes of frozen dataclasses, also against the merge
    merged = _read_yaml(path)
    for override in overrides or []:
        merged = _merge_override(merged, override)
    _refuse_unknown_keys(merged, Config, "", path)
    try:
        cfg = OmegaConf.merge(cfg, merged)
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise ValueError(_explain(error, merged, path)) from None
    assert isinstance(config, Config)
    try:
        check(config)
        check_across(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return _resolve_paths(config, path.parent)


def to_yaml(config: Config) -> str:
    """The config as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def help_text() -> str:
    """Every key with its type, default and meaning, one line each, grouped by section."""
    lines = []
    for part in dataclasses.fields(Config):
        lines.append(f"\n{part.name}:")
        lines += _help_lines(part.type, part.name)
    lines.append("\nEach entry of grade.graders:")
    lines += _help_lines(GraderConfig, "")
    return "\n".join(lines)


def check(config: Config) -> None:
    """Raises ValueError at the first value that is out of range."""
    for name, value in _values(config):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}={value}: not a finite number; write an ordinary number")
    for name, value in _values(config):
        plain = re.sub(r"\.\d+\.", ".", name)
        if plain in CHOICES and value not in CHOICES[plain]:
            near = difflib.get_close_matches(str(value), CHOICES[plain], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(CHOICES[plain])}{hint}")
        low, high = BOUNDS.get(plain, (None, None))
        if (low is not None and value < low) or (high is not None and value > high):
            span = f"at least {low}" if high is None else f"between {low} and {high}"
            raise ValueError(f"{name}={value} is out of range; it must be {span}")


def check_across(config: Config) -> None:
    """Raises ValueError at the first value of a run that does not go with another."""
    data, rollout, algorithm, train = config.data, config.rollout, config.algorithm, config.train
    if not config.model.path:
        raise ValueError("model.path is empty; name the folder of the model, e.g. model.path=models/Qwen2.5-0.5B")
    if not data.train_files:
        raise ValueError("data.train_files is required and empty; name at least one parquet or JSONL file")
    if not config.grade.graders:
        raise ValueError(
            "grade.graders is required and empty; add one, e.g. grade.graders: [{path: graders.math:MathGrader}]"
        )
    if rollout.n < 2 and algorithm.adv_estimator in GROUP_ESTIMATORS:
        raise ValueError(
            f"rollout.n={rollout.n} with algorithm.adv_estimator={algorithm.adv_estimator}: a group of one has no "
            "baseline and gives no learning signal; set rollout.n to 2 or more, or use reinforce_pp"
        )
    if rollout.n % rollout.samples_per_block:
        raise ValueError(
            f"rollout.samples_per_block={rollout.samples_per_block} does not divide rollout.n={rollout.n}; "
            "a block holds samples of one prompt: use a divisor of rollout.n"
        )
    if data.train_batch_size % train.mini_batches:
        raise ValueError(
            f"train.mini_batches={train.mini_batches} does not divide data.train_batch_size={data.train_batch_size}; "
            "each optimizer step takes the same number of prompts: use a divisor"
        )
    longest = data.max_prompt_length + rollout.max_response_length
    if train.micro_batch_tokens < longest:
        raise ValueError(
            f"train.micro_batch_tokens={train.micro_batch_tokens} is below the longest sample, data.max_prompt_length "
            f"+ rollout.max_response_length = {longest}; raise it to at least {longest}"
        )
    names = [grader_name(g) for g in config.grade.graders]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"grade.graders: two graders are called {name!r}; give each a name of its own (name: ...)")
        if name in RESERVED_GRADER_NAMES:
            raise ValueError(
                f"grade.graders: {name!r} is the name of a metric, reward/{name}; choose another (name: ...)"
            )
    fewest, most = grader_actors(config)
    if fewest != most and any(grader.scope == "group" for grader in config.grade.graders):
        raise ValueError(
            f"grade.workers={config.grade.workers!r} with a grader of scope: group, which needs all samples of a "
            "prompt in grading at the same time; a scaled pool holds some back: use a fixed number of workers"
        )
    if config.run.name != Path(config.run.name).name or config.run.name.startswith("."):
        raise ValueError(
            f"run.name={config.run.name!r} must be a plain folder name; use run.dir for the folder above it"
        )


def grader_name(grader: GraderConfig) -> str:
    return grader.name or grader.path.rpartition(":")[2]


def grader_actors(config: Config) -> tuple[int, int]:
    """(fewest, most) grader actors that `grade.workers` asks for."""
    found = re.fullmatch(r"\s*(\d+)\s*(?:\.\.\s*(\d+)\s*)?", config.grade.workers)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if low < 1 or high < low:
        raise ValueError(f"grade.workers={config.grade.workers!r}: write a number such as 4, or a range such as 2..8")
    return low, high


def resolve_path(name: str, base: Path) -> str:
    """`name` as an absolute path: relative names are looked for beside the config file, then in the current folder."""
    path = Path(name).expanduser()
    beside = (base / path).resolve()
    return str(beside if beside.exists() or not path.resolve().exists() else path.resolve())


def _resolve_paths(config: Config, base: Path) -> Config:
    data = dataclasses.replace(
        config.data,
        train_files=[resolve_path(name, base) for name in config.data.train_files],
        val_files=[resolve_path(name, base) for name in config.data.val_files],
    )
    graders = [dataclasses.replace(grader, path=_resolve_grader(grader.path, base)) for grader in config.grade.graders]
    model = dataclasses.replace(config.model, path=resolve_path(config.model.path, base))
    grade = dataclasses.replace(config.grade, graders=graders)
    run = dataclasses.replace(config.run, dir=str(Path(config.run.dir).expanduser().resolve()))
    return dataclasses.replace(config, run=run, model=model, data=data, grade=grade)


def _resolve_grader(path: str, base: Path) -> str:
    file, colon, name = path.rpartition(":")
    return f"{resolve_path(file, base)}:{name}" if colon and file.endswith(".py") else path


def _read_yaml(path: Path) -> Any:
    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such config file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        what = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ValueError(f"{path}{line}: this is not valid YAML for a config: {what}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: a config is UTF-8 text; {error}") from None
    except OSError as error:
        raise ValueError(f"{path}: the top level must be a mapping of sections (model:, data:, ...): {error}") from None
    if not OmegaConf.is_dict(loaded):
        raise ValueError(
            f"{path}: the top level must be a mapping of sections (model:, data:, ...), not a list or text"
        )
    return loaded


def _merge_override(merged: Any, override: str) -> Any:
    name, equals, text = override.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"{override!r} is not an override; write key=value, e.g. rollout.n=8")
    try:
        value = yaml.safe_load(text) if text.strip() else ""
        # A bare number such as 1e-5 is text to YAML 1.1; the typed merge turns it into a float.
        OmegaConf.update(merged, name.strip(), value, force_add=True)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, IndexError) as error:
        raise ValueError(f"{override!r} cannot be applied: {' '.join(str(error).split())}") from None
    return merged


def _refuse_unknown_keys(node: Any, cls: type, prefix: str, path: Path) -> None:
    known = {f.name: f for f in dataclasses.fields(cls)}
    for name in node:
        full = f"{prefix}{name}"
        if name not in known:
            raise ValueError(f"{path}: {full} is not a key{_suggest(str(name), prefix, known)}")
        kind = known[name].type
        value = node._get_node(name)
        if dataclasses.is_dataclass(kind):
            if not OmegaConf.is_dict(value) or value._is_none():
                raise ValueError(
                    f"{path}: {full} must be a mapping of its keys, {', '.join(_names(kind))}; got {value}"
                )
            _refuse_unknown_keys(value, cast(type, kind), f"{full}.", path)
        elif full == "grade.graders" and OmegaConf.is_list(value):
            for i, entry in enumerate(value):
                if not OmegaConf.is_dict(entry):
                    raise ValueError(
                        f"{path}: {full}.{i} must be a mapping such as {{path: module:Name}}; got {entry!r}"
                    )
                _refuse_unknown_keys(entry, GraderConfig, f"{full}.{i}.", path)


def _suggest(name: str, prefix: str, known: dict) -> str:
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f"; did you mean {prefix}{near[0]}?"
    elsewhere = [f"{s.name}.{name}" for s in dataclasses.fields(Config) if name in _names(s.type)]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; the keys here are {', '.join(known)}"


def _names(cls: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


def _explain(error: OmegaConfBaseException, merged: Any, path: Path) -> str:
    name = error.full_key or "config"
    what = str(error).splitlines()[0]
    if "missing mandatory value" in what.lower():
        return f"{path}: {name} is required and not set; add it to the file or write {name}=... on the command line"
    try:
        value = OmegaConf.select(merged, re.sub(r"\[(\d+)\]", r".\1", name))
    except OmegaConfBaseException:
        value = None
    hint = f"; write a list: {name}=[{value}]" if "not a ListConfig" in what else ""
    return f"{path}: {name}={value!r} has the wrong type: {what}{hint}"


def _values(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Every (full key, value) of a config, list entries by number."""
    found: list[tuple[str, Any]] = []
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        full = f"{prefix}{f.name}"
        if dataclasses.is_dataclass(value):
            found += _values(value, f"{full}.")
        elif isinstance(value, list):
            for i, entry in enumerate(value):
                found += _values(entry, f"{full}.{i}.") if dataclasses.is_dataclass(entry) else [(f"{full}.{i}", entry)]
        else:
            found.append((full, value))
    return found


def _help_lines(cls: Any, prefix: str) -> list[str]:
    names = [(f"{prefix}.{f.name}" if prefix else f.name, f) for f in dataclasses.fields(cls)]
    return [f"  {name:<32} {default_of(f):<12} {f.metadata['doc']}" for name, f in names]


def default_of(f: dataclasses.Field) -> str:
    """A key's default as text."""
    default = f.default if f.default_factory is NO_DEFAULT else f.default_factory()
    return "required" if default == MISSING else repr(default)
