"""The configuration's schema: frozen dataclasses that every other module reads as plain attributes.

Each key's `doc` is its comment here, its line in `--help` and its row in the README. `config_file.py` fills a `Config`
from a YAML file and `key=value` arguments, `config_checks.py` says which values are right. Imports nothing heavy.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


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
    dir: str = key("runs", "folder that holds the run folders, relative to the current folder")
    resume: str = key(
        "never",
        "never: refuse a name in use | auto: go on from the last checkpoint if there is one | PATH of a checkpoint or "
        "run: a new run that goes on from there",
    )
    seed: int = key(0, "seed of the prompt order, the sampling and the learner")
    iterations: int = key(100, "PPO iterations to run")


@dataclass(frozen=True)
class ModelConfig:
    path: str = key(MISSING, "folder of the policy in Hugging Face form (config.json, *.safetensors, tokenizer)")
    dtype: str = key("auto", "parameters in compute: auto (bfloat16 on GPU, float32 on CPU) | float32 | bfloat16")
    attention: str = key("sdpa", "attention of the learner: sdpa | eager | flash_attention_2")
    activation_checkpointing: bool = key(False, "recompute activations in the backward pass: less memory, more time")
    lora_rank: int = key(0, "rank of LoRA adapters, which are then all that is trained; 0: train all weights")
    lora_alpha: float = key(32.0, "LoRA scale: adapters are multiplied by lora_alpha / lora_rank")
    lora_targets: list[str] = key(["all-linear"], "names of the layers with adapters; all-linear: all but the head")


@dataclass(frozen=True)
class DataConfig:
    train_files: list[str] = key([], "parquet or JSONL files of training prompts, relative to the config file")
    val_files: list[str] = key([], "parquet or JSONL files of held-out prompts; empty: no held-out reward")
    rollouts: list[str] = key([], "files of saved samples to train on, instead of sampling data.train_files")
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
    reserve_prompts: int = key(
        0, "dynamic sampling: further prompts an iteration that may replace those whose samples all have one score"
    )
    overprovision: float = key(
        0.0,
        "further prompts an iteration, as a fraction of data.train_batch_size, that start with the others; once "
        "train_batch_size are graded the rest is cut off: no wait for stragglers, but a bias towards short responses",
    )
    carry_over: float = key(
        0.0,
        "prompts, as a fraction of data.train_batch_size, that an iteration leaves under way and the next one takes; "
        "needs pipeline.inflight_update, with which their responses run on through the weight update",
    )
    samples_per_block: int = key(
        0, "samples of one prompt that travel to the learner together, 1 to rollout.n; 0: all; grading never waits"
    )


@dataclass(frozen=True)
class EngineConfig:
    count: int = key(1, "vLLM engines, each a resident Ray actor")
    tensor_parallel_size: int = key(1, "GPUs (or CPU workers) of one engine")
    num_gpus: float = key(-1.0, "GPUs that each engine reserves; -1: tensor_parallel_size where there are GPUs, else 0")
    num_cpus: float = key(1.0, "CPUs that each engine reserves")
    node_labels: dict[str, str] = key(
        {}, "labels of the cluster's nodes that engines run on, e.g. {ray.io/accelerator-type: H100}; see Placement"
    )
    dtype: str = key("auto", "engine parameters: auto (as the learner computes) | float32 | bfloat16")
    gpu_memory_utilization: float = key(0.85, "part of a GPU's memory that vLLM takes")
    kv_cache_gib: float = key(1.0, "KV cache of an engine on CPU, GiB")
    max_num_seqs: int = key(256, "requests that one engine runs at the same time")
    enforce_eager: bool = key(False, "no CUDA graphs (nor torch.compile): slower, starts faster; CPU is always eager")
    sleep_level: int = key(
        2,
        "weights of a sleeping engine (pipeline.colocate): 1: to host memory | 2: dropped; new ones come anyway",
    )
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
    timeout_s: float = key(30.0, "seconds a sample may take alone; a call that lasts too long is repeated in parts")


@dataclass(frozen=True)
class GradeConfig:
    graders: list[GraderConfig] = key([], "graders; a sample's score is the weighted sum over those of its data source")
    workers: str = key("1", "grader actors: a number, or min..max scaled by Ray Data")
    processes: int = key(2, "child processes of each grader actor; each reserves one CPU where there are enough")
    node_labels: dict[str, str] = key({}, "labels of the nodes that graders run on, e.g. {pool: cpu}")
    memory_mb: int = key(4096, "memory that a child process may hold before it is killed, MiB")
    max_failed_fraction: float = key(
        0.5, "stop the run when an engine, a scorer, grading or one grader fails on a larger part of its samples"
    )
    async_concurrency: int = key(64, "calls of async graders in flight in the whole run")
    async_rate: float = key(0.0, "calls of async graders started per second in the whole run; 0: no limit")
    retries: int = key(4, "times an async call is repeated, with backoff, after a connection error")


@dataclass(frozen=True)
class AlgorithmConfig:
    adv_estimator: str = key("grpo", "advantage: gae | grpo | dr_grpo | rloo | reinforce_pp | reinforce_pp_baseline")
    gamma: float = key(1.0, "discount per token in [0, 1], for gae and reinforce_pp")
    lam: float = key(1.0, "lambda of gae in [0, 1]: 1 trusts the rewards alone, 0 the critic's next value")
    whiten: str = key(
        "auto", "advantages to mean 0, variance 1 over: none | mini_batch | iteration; auto: as the estimator's paper"
    )
    policy_loss: str = key("ppo_clip", "ppo_clip | gspo (a ratio a sequence) | cispo (clipped ratio as a weight)")
    clip_low: float = key(0.2, "clip: ratio is bounded below by 1 - clip_low")
    clip_high: float = key(0.2, "clip: ratio is bounded above by 1 + clip_high")
    dual_clip: float = key(
        0.0, "ppo_clip: with a negative advantage the loss is at most dual_clip * -A; 0: off, else > 1"
    )
    loss_agg: str = key("token_mean", "mean over: token_mean | seq_mean_token_sum | seq_mean_token_mean | dr_grpo")
    entropy_coef: float = key(0.0, "weight of the entropy bonus in the loss")
    kl_coef: float = key(0.0, "weight of the KL from the reference, the model of model.path; 0: no reference is loaded")
    kl_in: str = key("loss", "where the KL counts: loss | reward")
    kl_estimator: str = key("k3", "estimate of the KL: k1 | k2 | k3 | abs; k1 in the loss regularises nothing")
    kl_target: float = key(0.0, "KL per token, in nats, that kl_coef is steered towards; 0: kl_coef stays as it is")
    kl_horizon: float = key(10000.0, "samples over which kl_coef changes by a factor of e^0.2 at most")
    old_logprobs: str = key(
        "auto",
        "log-probs that the ratio starts from: engine (as sampled) | scorer (recomputed in the Score stage by a copy "
        "of the policy) | learner (recomputed before the first optimizer step); auto: engine, with staleness learner",
    )
    tis: str = key(
        "auto",
        "truncated importance weights old / engine: none | token | sequence; needs recomputed old_logprobs; auto: "
        "none, with staleness token",
    )
    tis_cap: float = key(2.0, "largest such weight")
    seq_ratio_low: float = key(
        0.0, "drop sequences whose mean ratio old / engine is lower; needs recomputed old_logprobs; 0: off"
    )
    seq_ratio_high: float = key(0.0, "drop sequences whose mean ratio old / engine is higher, likewise; 0: off")
    token_ratio_low: float = key(0.0, "drop sequences with a single ratio old / engine below this, likewise; 0: off")
    mask_truncated: bool = key(False, "leave responses cut at rollout.max_response_length out of the loss")


@dataclass(frozen=True)
class CriticConfig:
    path: str = key("", "folder of the critic's initial weights; empty: model.path, with a value head of zeros")
    lr: float = key(1e-5, "peak learning rate of the critic's AdamW; schedule and betas as the policy's")
    grad_clip: float = key(1.0, "largest norm of the critic's gradient")
    warmup: int = key(0, "first iterations in which the critic learns alone")
    value_clip: float = key(0.5, "a value moves at most this far from the one that was scored, in the loss; 0: off")


@dataclass(frozen=True)
class ScorerConfig:
    count: int = key(1, "scorers of each kind that the algorithm needs: reference, policy at rollout, critic")
    num_gpus: float = key(-1.0, "GPUs that each scorer reserves; -1: 1 where there are GPUs, else 0")
    num_cpus: float = key(1.0, "CPUs that each scorer reserves")
    node_labels: dict[str, str] = key({}, "labels of the nodes that scorers run on")
    micro_batch_tokens: int = key(16384, "tokens (prompt and response) of one forward pass")


@dataclass(frozen=True)
class TrainConfig:
    ranks: int = key(1, "learner processes of the Ray Train FSDP group")
    gpus_per_rank: float = key(-1.0, "GPUs of a rank; -1: 1 where there are GPUs, else 0")
    cpus_per_rank: float = key(1.0, "CPUs that a rank reserves")
    node_labels: dict[str, str] = key({}, "labels of the nodes that learner ranks run on")
    lr: float = key(1e-6, "peak learning rate of AdamW")
    lr_schedule: str = key("constant", "after warm-up: constant | linear | cosine, down to 0 at the last iteration")
    lr_warmup: int = key(0, "iterations over which the learning rate rises from 0")
    weight_decay: float = key(0.0, "AdamW weight decay")
    beta1: float = key(0.9, "AdamW beta1")
    beta2: float = key(0.95, "AdamW beta2")
    grad_clip: float = key(1.0, "largest norm of the gradient")
    max_bad_steps: int = key(10, "stop after so many steps in a row were skipped, their gradients not being finite")
    max_restarts: int = key(
        3, "times in a row that the learner may be started again, from the last checkpoint, with no iteration between"
    )
    mini_batches: int = key(1, "optimizer steps an iteration and epoch; divides data.train_batch_size")
    epochs: int = key(1, "passes over an iteration's samples")
    micro_batch_tokens: int = key(8192, "tokens (prompt and response) of one forward and backward pass")
    stream: bool = key(True, "train on samples while others are still made, where the algorithm allows it")
    threads: int = key(0, "torch threads of a rank on CPU; 0: cpus_per_rank")
    reshard_after_forward: bool = key(
        True, "free gathered weights after each forward and backward; false: a step's micro-batches share them"
    )


@dataclass(frozen=True)
class StageConfig:
    path: str = key(MISSING, "package.module:Name or path/to/file.py:name of a class or function of pyarrow tables")
    after: str = key("grade", "the stage that it follows: generate | grade | score")
    kwargs: dict[str, Any] = key({}, "arguments of the class's constructor")
    actors: int = key(1, "processes that run it, each one block at a time unless it is async")


@dataclass(frozen=True)
class PipelineConfig:
    max_staleness: int = key(
        0, "iterations that are generated while the learner trains, on weights up to so many versions old; 0: on-policy"
    )
    inflight_update: bool = key(
        False, "running requests go on with new weights; false: they finish first (differs where max_staleness > 0)"
    )
    colocate: bool = key(
        False, "engines and learner take turns on the same GPUs: engines sleep while the learner trains; one rank a GPU"
    )
    plans_ahead: int = key(
        1, "plans that are open behind the one at work, max_staleness at least; more where iterations take few seconds"
    )
    stages: list[StageConfig] = key([], "stages of your own in the plan, in their order")


@dataclass(frozen=True)
class WatchdogConfig:
    stall_s: float = key(300.0, "seconds without any progress after which the log says who waits for what")
    fail_s: float = key(3600.0, "seconds without any progress after which the run saves its state and ends")
    sample_s: float = key(
        1800.0, "seconds that a sample may take in an engine or scorer; then it is made once more, then marked failed"
    )
    stop_s: float = key(15.0, "seconds that the learner has for its checkpoint after Ctrl-C or SIGTERM")


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = key(50, "iterations between checkpoints; 0: only at the end")
    keep_last: int = key(2, "newest checkpoints that are kept")
    keep_every: int = key(0, "checkpoints whose iteration is a multiple of this are kept too; 0: none")


@dataclass(frozen=True)
class EvalConfig:
    every: int = key(0, "iterations between passes over data.val_files; 0: only before the first and after the last")
    n: int = key(1, "samples of each held-out prompt")
    temperature: float = key(0.0, "sampling temperature of the held-out pass; 0: greedy")
    top_p: float = key(1.0, "nucleus sampling bound of the held-out pass")
    max_response_length: int = key(0, "longest held-out response in tokens; 0: rollout.max_response_length")
    pass_score: float = key(1.0, "score from which a sample passes, for pass@k and maj@k of raypipe.evaluate")


@dataclass(frozen=True)
class LogConfig:
    timelines: list[int] = key([1, 2], "iterations whose timeline is drawn, besides the last")
    samples: int = key(4, "best and worst samples that are saved each iteration")
    loggers: list[str] = key(
        ["tensorboard"], "other places where metrics go: tensorboard, prometheus, wandb, mlflow, trackio"
    )
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
    critic: CriticConfig = section(CriticConfig)
    scorer: ScorerConfig = section(ScorerConfig)
    train: TrainConfig = section(TrainConfig)
    pipeline: PipelineConfig = section(PipelineConfig)
    watchdog: WatchdogConfig = section(WatchdogConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    eval: EvalConfig = section(EvalConfig)
    log: LogConfig = section(LogConfig)


def old_logprobs(config: Config) -> str:
    """engine | scorer | learner"""
    if config.algorithm.old_logprobs != "auto":
        return config.algorithm.old_logprobs
    return "learner" if config.pipeline.max_staleness else "engine"


def importance(config: Config) -> str:
    """none | token | sequence"""
    if config.algorithm.tis != "auto":
        return config.algorithm.tis
    return "token" if config.pipeline.max_staleness and old_logprobs(config) != "engine" else "none"


def heldout_response_length(config: Config) -> int:
    """Longest response in tokens of a held-out sample."""
    return config.eval.max_response_length or config.rollout.max_response_length


def is_eval(config: Config, iteration: int, heldout: int) -> bool:
    """Whether an iteration's plan also samples the held-out prompts: before the first update, after the last, and
    every `eval.every` in between. Iteration `run.iterations` holds nothing else."""
    every = config.eval.every
    return heldout > 0 and (iteration in (0, config.run.iterations) or (every > 0 and iteration % every == 0))


def starts_elsewhere(config: Config) -> bool:
    """Whether run.resume names a checkpoint."""
    return config.run.resume not in ("never", "auto")


def extra_prompts(config: Config) -> int:
    """Prompts of an iteration past train_batch_size that `rollout.overprovision` asks for."""
    return math.ceil(round(config.rollout.overprovision * config.data.train_batch_size, 6))


def carried_prompts(config: Config) -> int:
    """Prompts that an iteration leaves to the next one (`rollout.carry_over`)."""
    return math.ceil(round(config.rollout.carry_over * config.data.train_batch_size, 6))


def reserve_size(config: Config) -> int:
    """Prompts in an iteration's reserve: those that start at once (`extra_prompts`), then those that wait."""
    return extra_prompts(config) + config.rollout.reserve_prompts


def scorer_roles(config: Config) -> tuple[str, ...]:
    """The models that score samples after grading, by what they add to a row; empty: the plan has no Score stage."""
    algorithm = config.algorithm
    needed = {
        "ref_logprobs": algorithm.kl_coef > 0,
        "old_logprobs": old_logprobs(config) == "scorer",
        "values": algorithm.adv_estimator == "gae",
    }
    return tuple(role for role, is_needed in needed.items() if is_needed)


def grader_name(grader: GraderConfig) -> str:
    return grader.name or grader.path.rpartition(":")[2]


def engine_count(config: Config) -> int:
    """Engines that a run needs: none where all its responses are saved ones."""
    return 0 if config.data.rollouts and not config.data.val_files else config.engine.count


def stage_name(stage: StageConfig) -> str:
    """Its name on Ray's dashboard."""
    return stage.path.rpartition(":")[2]


def grader_actors(config: Config) -> tuple[int, int]:
    """(fewest, most) grader actors that `grade.workers` asks for."""
    found = re.fullmatch(r"\s*(\d+)\s*(?:\.\.\s*(\d+)\s*)?", config.grade.workers)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if low < 1 or high < low:
        raise ValueError(f"grade.workers={config.grade.workers!r}: write a number such as 4, or a range such as 2..8")
    return low, high
