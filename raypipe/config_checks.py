"""Which values of a config are right: known names, bounds, and what goes with what.

In: a `Config`. Out: nothing, or a ValueError that names the key, the value, why it is wrong and what to write instead.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raypipe.config import Config, GraderConfig, grader_actors, grader_name, importance, old_logprobs, scorer_roles
from raypipe.placement import check_labels

CHOICES = {
    "model.dtype": ("auto", "float32", "bfloat16"),
    "model.attention": ("sdpa", "eager", "flash_attention_2"),
    "data.overlong": ("drop", "error"),
    "engine.dtype": ("auto", "float32", "bfloat16"),
    "engine.weight_transfer": ("auto", "nccl", "object_store"),
    "grade.graders.scope": ("sample", "group"),
    "algorithm.adv_estimator": ("gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"),
    "algorithm.whiten": ("auto", "none", "mini_batch", "iteration"),
    "algorithm.policy_loss": ("ppo_clip", "gspo", "cispo"),
    "algorithm.kl_in": ("loss", "reward"),
    "algorithm.kl_estimator": ("k1", "k2", "k3", "abs"),
    "algorithm.old_logprobs": ("auto", "engine", "scorer", "learner"),
    "algorithm.tis": ("auto", "none", "token", "sequence"),
    "algorithm.loss_agg": ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "dr_grpo"),
    "pipeline.stages.after": ("generate", "grade", "score"),
    "train.lr_schedule": ("constant", "linear", "cosine"),
}
# Inclusive bounds; the name of a bound that is left out is None.
BOUNDS = {
    "run.iterations": (1, None),
    "model.lora_rank": (0, None),
    "model.lora_alpha": (0, None),
    "data.train_batch_size": (1, None),
    "data.max_prompt_length": (1, None),
    "rollout.n": (1, None),
    "rollout.max_response_length": (1, None),
    "rollout.temperature": (0.01, None),
    "rollout.top_p": (0.01, 1),
    "rollout.reserve_prompts": (0, None),
    "rollout.overprovision": (0, 4),
    "rollout.carry_over": (0, 1),
    "rollout.samples_per_block": (0, None),
    "engine.count": (1, None),
    "engine.tensor_parallel_size": (1, None),
    "engine.num_gpus": (-1, None),
    "engine.num_cpus": (0, None),
    "engine.gpu_memory_utilization": (0.05, 1),
    "engine.kv_cache_gib": (0.1, None),
    "engine.max_num_seqs": (1, None),
    "engine.sleep_level": (1, 2),
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
    "algorithm.lam": (0, 1),
    "algorithm.clip_low": (0, 1),
    "algorithm.clip_high": (0, None),
    "algorithm.dual_clip": (0, None),
    "algorithm.entropy_coef": (0, None),
    "algorithm.kl_coef": (0, None),
    "algorithm.kl_target": (0, None),
    "algorithm.kl_horizon": (1, None),
    "algorithm.tis_cap": (0, None),
    "algorithm.seq_ratio_low": (0, 1),
    "algorithm.seq_ratio_high": (0, None),
    "algorithm.token_ratio_low": (0, 1),
    "critic.lr": (0, None),
    "critic.grad_clip": (0, None),
    "critic.warmup": (0, None),
    "critic.value_clip": (0, None),
    "scorer.count": (1, None),
    "scorer.num_gpus": (-1, None),
    "scorer.num_cpus": (0, None),
    "scorer.micro_batch_tokens": (1, None),
    "train.ranks": (1, None),
    "train.gpus_per_rank": (-1, None),
    "train.cpus_per_rank": (0, None),
    "train.lr": (0, None),
    "train.lr_warmup": (0, None),
    "train.weight_decay": (0, None),
    "train.beta1": (0, 1),
    "train.beta2": (0, 1),
    "train.grad_clip": (0, None),
    "train.max_bad_steps": (0, None),
    "train.max_restarts": (0, None),
    "train.mini_batches": (1, None),
    "train.epochs": (1, None),
    "train.micro_batch_tokens": (1, None),
    "train.threads": (0, None),
    "pipeline.max_staleness": (0, 8),
    "pipeline.plans_ahead": (1, 8),
    "pipeline.stages.actors": (1, None),
    "watchdog.stall_s": (1, None),
    "watchdog.fail_s": (1, None),
    "watchdog.sample_s": (0.1, None),
    "watchdog.stop_s": (0, 600),
    "checkpoint.every": (0, None),
    "checkpoint.keep_last": (1, None),
    "checkpoint.keep_every": (0, None),
    "eval.every": (0, None),
    "eval.n": (1, None),
    "eval.temperature": (0, None),
    "eval.top_p": (0.01, 1),
    "eval.max_response_length": (0, None),
    "log.samples": (0, None),
}
GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
# reward/<name> is a metric of its own.
RESERVED_GRADER_NAMES = ("mean", "std", "heldout_mean", "heldout_samples")


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
        if name.endswith(".node_labels"):
            check_labels(name, value)


def check_across(config: Config) -> None:
    """Raises ValueError at the first value of a training run that does not go with another."""
    check_plan(config)
    data, rollout, algorithm, train = config.data, config.rollout, config.algorithm, config.train
    if data.rollouts and data.train_files:
        raise ValueError(
            f"data.rollouts={data.rollouts} with data.train_files={data.train_files}: saved rollouts bring their "
            "prompts; leave one of the two out"
        )
    if not data.train_files and not data.rollouts:
        raise ValueError("data.train_files is required and empty; name at least one parquet or JSONL file")
    if rollout.n < 2 and algorithm.adv_estimator in GROUP_ESTIMATORS:
        raise ValueError(
            f"rollout.n={rollout.n} with algorithm.adv_estimator={algorithm.adv_estimator}: a group of one has no "
            "baseline and gives no learning signal; set rollout.n to 2 or more, or use reinforce_pp"
        )
    if data.train_batch_size % train.mini_batches:
        raise ValueError(
            f"train.mini_batches={train.mini_batches} does not divide data.train_batch_size={data.train_batch_size}; "
            "each optimizer step takes the same number of prompts: use a divisor"
        )
    if rollout.overprovision and rollout.samples_per_block not in (0, rollout.n):
        raise ValueError(
            f"rollout.overprovision={rollout.overprovision:g} with rollout.samples_per_block="
            f"{rollout.samples_per_block}: a group is cut off as a whole, so its samples travel together; set "
            "rollout.samples_per_block to 0"
        )
    if rollout.carry_over:
        check_carry_over(config)
    longest = data.max_prompt_length + rollout.max_response_length
    if train.micro_batch_tokens < longest:
        raise ValueError(
            f"train.micro_batch_tokens={train.micro_batch_tokens} is below the longest sample, data.max_prompt_length "
            f"+ rollout.max_response_length = {longest}; raise it to at least {longest}"
        )
    check_algorithm(config)
    if config.pipeline.colocate:
        check_colocated(config)


def check_carry_over(config: Config) -> None:
    """Raises ValueError at the first value that keeps samples from being finished in the next iteration."""
    value = f"rollout.carry_over={config.rollout.carry_over:g}"
    if not (config.pipeline.max_staleness and config.pipeline.inflight_update):
        raise ValueError(
            f"{value} with pipeline.max_staleness={config.pipeline.max_staleness} and pipeline.inflight_update="
            f"{str(config.pipeline.inflight_update).lower()}: what is carried over runs on through a weight update, "
            "and is a version old then; set pipeline.max_staleness to at least 1 and pipeline.inflight_update=true"
        )
    for name in ("overprovision", "reserve_prompts"):
        if getattr(config.rollout, name):
            raise ValueError(
                f"{value} with rollout.{name}={getattr(config.rollout, name):g}: either prompts beyond the batch are "
                "finished later, or they are cut off or replaced; leave one of the two out"
            )


def check_colocated(config: Config) -> None:
    """Raises ValueError at the first value that keeps engines and learner from taking turns on the same GPUs."""
    engine, train, scorer = config.engine, config.train, config.scorer
    if config.pipeline.max_staleness:
        raise ValueError(
            f"pipeline.max_staleness={config.pipeline.max_staleness} with pipeline.colocate: engines sleep while the "
            "learner trains, so nothing is generated then; set it to 0, or give engines GPUs of their own"
        )
    for name, value in (("engine.num_gpus", engine.num_gpus), ("train.gpus_per_rank", train.gpus_per_rank)):
        if value >= 0:
            raise ValueError(
                f"{name}={value:g} with pipeline.colocate, which shares each GPU between an engine and a rank by "
                f"itself; leave {name} out"
            )
    gpus = engine.count * engine.tensor_parallel_size
    if train.ranks != gpus:
        raise ValueError(
            f"train.ranks={train.ranks} with pipeline.colocate: each GPU of the engines has one rank, and engine.count "
            f"* engine.tensor_parallel_size = {gpus}; set train.ranks={gpus}"
        )
    if engine.weight_transfer == "nccl":
        raise ValueError(
            "engine.weight_transfer=nccl with pipeline.colocate: NCCL refuses two members on one GPU; use object_store"
        )
    if scorer_roles(config) and scorer.num_gpus > 0 and scorer.num_gpus % 1:
        raise ValueError(
            f"scorer.num_gpus={scorer.num_gpus:g} with pipeline.colocate: a scorer does not sleep, and would keep its "
            "share of a GPU that engine and learner need in turn; give it whole GPUs of its own, or 0 for the CPU"
        )


def check_plan(config: Config) -> None:
    """Raises ValueError at the first value of generation and grading, with or without a learner, that does not go with
    another."""
    rollout = config.rollout
    if not config.model.path:
        raise ValueError("model.path is empty; name the folder of the model, e.g. model.path=models/Qwen2.5-0.5B")
    if not config.grade.graders:
        raise ValueError(
            "grade.graders is required and empty; add one, e.g. grade.graders: [{path: graders.math:MathGrader}]"
        )
    if rollout.samples_per_block and rollout.n % rollout.samples_per_block:
        raise ValueError(
            f"rollout.samples_per_block={rollout.samples_per_block} does not divide rollout.n={rollout.n}; "
            "a block holds samples of one prompt: use a divisor of rollout.n, or 0 for all of them"
        )
    if config.eval.n > 1 and config.eval.temperature == 0:
        raise ValueError(
            f"eval.n={config.eval.n} with eval.temperature=0: greedy samples of one prompt are all the same; set "
            "eval.temperature, e.g. to 0.6, or eval.n=1"
        )
    slowest = max(config.grade.graders, key=lambda grader: grader.timeout_s)
    if config.watchdog.fail_s <= max(slowest.timeout_s, config.watchdog.sample_s):
        raise ValueError(
            f"watchdog.fail_s={config.watchdog.fail_s:g} is not above the time that one sample may take: "
            f"watchdog.sample_s={config.watchdog.sample_s:g}, timeout_s={slowest.timeout_s:g} of {slowest.path}; raise "
            "watchdog.fail_s, or a slow sample ends the run"
        )
    check_names(config.grade.graders)
    for name in map(grader_name, config.grade.graders):
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


def check_algorithm(config: Config) -> None:
    """Raises ValueError at the first setting of the algorithm that lacks what it builds on."""
    algorithm = config.algorithm
    if 0 < algorithm.dual_clip <= 1:
        raise ValueError(f"algorithm.dual_clip={algorithm.dual_clip:g} must be above 1 (3 is usual), or 0 for off")
    if old_logprobs(config) == "engine":
        corrections = {
            "tis": importance(config) != "none",
            "seq_ratio_low": algorithm.seq_ratio_low > 0,
            "seq_ratio_high": algorithm.seq_ratio_high > 0,
            "token_ratio_low": algorithm.token_ratio_low > 0,
        }
        for name, used in corrections.items():
            if used:
                raise ValueError(
                    f"algorithm.{name}={getattr(algorithm, name)!r} compares recomputed log-probs with the "
                    f"engine's, but algorithm.old_logprobs={algorithm.old_logprobs} takes the engine's; set "
                    "algorithm.old_logprobs to scorer or learner"
                )
    if 0 < algorithm.seq_ratio_high < 1:
        raise ValueError(f"algorithm.seq_ratio_high={algorithm.seq_ratio_high:g} must be above 1, or 0 for off")
    if algorithm.kl_in == "loss" and algorithm.kl_coef > 0 and algorithm.kl_estimator == "k1":
        raise ValueError(
            "algorithm.kl_estimator=k1 with algorithm.kl_in=loss: its gradient has mean 0 and regularises nothing; use "
            "k2 or k3, or kl_in=reward"
        )
    if algorithm.kl_target > 0 and algorithm.kl_coef == 0:
        raise ValueError(
            f"algorithm.kl_target={algorithm.kl_target:g} steers algorithm.kl_coef, which is 0 and would stay 0; set a "
            "start value, e.g. algorithm.kl_coef=0.01"
        )
    if algorithm.adv_estimator != "gae" and (config.critic.path or config.critic.warmup):
        name, value = ("path", config.critic.path) if config.critic.path else ("warmup", config.critic.warmup)
        raise ValueError(
            f"critic.{name}={value} with algorithm.adv_estimator={algorithm.adv_estimator}, which has no critic; use "
            f"algorithm.adv_estimator=gae or leave critic.{name} out"
        )
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    if scorer_roles(config) and config.scorer.micro_batch_tokens < longest:
        raise ValueError(
            f"scorer.micro_batch_tokens={config.scorer.micro_batch_tokens} is below the longest sample, "
            f"data.max_prompt_length + rollout.max_response_length = {longest}; raise it to at least {longest}"
        )
    if config.rollout.reserve_prompts and config.rollout.n < 2:
        raise ValueError(
            f"rollout.reserve_prompts={config.rollout.reserve_prompts} with rollout.n={config.rollout.n}: a single "
            "sample always has one score, so every prompt would be replaced; set rollout.n to 2 or more"
        )


def check_names(graders: Sequence[GraderConfig]) -> None:
    """Raises ValueError if two graders have one name, under which their scores would be mixed up."""
    names = [grader_name(grader) for grader in graders]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"grade.graders: two graders are called {name!r}; give each a name of its own (name: ...)")


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
