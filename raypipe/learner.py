"""The learner: one Ray Train rank that turns graded rows into optimizer steps and new weights for the engines.

In: its split of each iteration's rows. Out: policy updates, weights of version k+1 at the engines, and a record of what
happened for the driver. Ranks exchange only (group, score, length) of every sample, so each computes the same
advantages and the same denominators; every rank runs the same number of micro-batches, a rank with less to do runs
some of weight zero, so the collectives of FSDP always match.

Shapes: B samples, T response tokens, L tokens of prompt and response, N response tokens of a micro-batch.
"""

import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist

from raypipe import advantages, checkpoint, losses
from raypipe.batching import micro_batches, pad_batch
from raypipe.config import Config
from raypipe.feed import Feed
from raypipe.modeling import Policy, learning_rate, load_policy, shard
from raypipe.weights import WeightPublisher

Rows = list[dict[str, Any]]


def learn(job: dict[str, Any]) -> None:
    """The training function of every rank; `job` holds config, server (PlanServer), engines (names) and folder."""
    config: Config = job["config"]
    context = ray.train.get_context()
    device = ray.train.torch.get_device()
    learner = Learner(config, device)
    checkpoints = Path(job["folder"]) / "checkpoints"
    start = checkpoint.load(checkpoints, learner.policy, learner.optimizer)
    publisher = WeightPublisher([ray.get_actor(name) for name in job["engines"]])
    if start:
        publisher.publish(learner.policy.model, start)
    feed = Feed(job["server"], context.get_world_rank(), attempt=job["attempt"], last=config.run.iterations)
    for iteration in range(start, config.run.iterations):
        spans = Spans()
        with spans("wait for rows"):
            rows = [row for block in feed.rows(iteration) for row in block]
        with spans("train"):
            record = learner.iterate(iteration, rows)
        with spans("update weights"):
            publisher.publish(learner.policy.model, iteration + 1)
        if is_checkpoint(config, iteration + 1):
            with spans("checkpoint"):
                checkpoint.save(
                    checkpoints, iteration + 1, learner.policy, learner.optimizer, config.model.path,
                    config.checkpoint.keep_last,
                )  # fmt: skip
        job["server"].report.remote(iteration, context.get_world_rank(), {**record, "spans": spans.spans})
    last = [row for block in feed.rows(config.run.iterations) for row in block]
    report = job["server"].report.remote(config.run.iterations, context.get_world_rank(), {"rows": last, "spans": []})
    ray.get(report)


def is_checkpoint(config: Config, trained: int) -> bool:
    every = config.checkpoint.every
    return trained == config.run.iterations or (every > 0 and trained % every == 0)


class Spans:
    """Collects what the learner did when: `with spans("train"): ...`."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []

    @contextmanager
    def __call__(self, name: str):
        start = time.time()
        yield
        self.spans.append({"lane": "learner", "name": name, "start": start, "end": time.time()})


class Learner:
    """Args:
    config: the run's configuration.
    device: where this rank computes.
    """

    def __init__(self, config: Config, device: torch.device):
        self.config, self.device = config, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.control = dist.new_group(backend="gloo")  # for small Python objects, also beside NCCL
        torch.manual_seed(config.run.seed)
        if device.type == "cpu":
            torch.set_num_threads(config.train.threads or max(1, int(config.train.cpus_per_rank)))
        dtype = compute_dtype(config, device)
        policy = load_policy(config.model.path, config.model.attention, config.model.activation_checkpointing)
        self.policy: Policy = shard(policy, device, self.world, dtype)
        train = config.train
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=train.lr, betas=(train.beta1, train.beta2), weight_decay=train.weight_decay
        )

    def iterate(self, iteration: int, rows: Rows) -> dict[str, Any]:
        """Trains on an iteration's rows: epochs x mini-batches optimizer steps.

        Returns the record for the driver: `rows` (this rank's, each with its advantage), `metrics` (means over all
        ranks), both without token ids.
        """
        rows = sorted(rows, key=lambda row: row["sample_id"])  # arrival order must not matter
        advantage = self.exchange_advantages(rows)
        for row in rows:
            row["advantage"] = advantage.get(row["sample_id"], 0.0)
        usable = [row for row in rows if row["sample_id"] in advantage]
        train = self.config.train
        parts: list[losses.Metrics] = []
        lr = learning_rate(iteration, self.config.run.iterations, train.lr, train.lr_warmup, train.lr_schedule)
        norms, skipped = [], 0
        for epoch in range(train.epochs):
            for mini in range(train.mini_batches):
                chosen = [row for row in usable if self.mini_batch(row["group_id"]) == mini]
                metrics, norm = self.step(chosen, lr, first=epoch == mini == 0)
                parts.append(metrics)
                norms.append(norm)
                skipped += not torch.isfinite(torch.tensor(norm))
        metrics = self.reduce(losses.add_metrics(parts))
        metrics |= {"grad_norm": sum(norms) / len(norms), "lr": lr, "train/skipped_steps": float(skipped)}
        return {"rows": rows, "metrics": metrics}

    def mini_batch(self, group_id: int) -> int:
        """Which of the iteration's mini-batches a prompt belongs to: by its number, so the same on every rank."""
        return group_id * self.config.train.mini_batches // self.config.data.train_batch_size

    def exchange_advantages(self, rows: Rows) -> dict[str, float]:
        """Advantages by sample id of every usable sample of the iteration, computed alike on every rank."""
        mine = [
            (row["sample_id"], row["group_id"], row["score"], row["grade_status"] == "ok" and len(row["response_ids"]) > 0)
            for row in rows
            if row["purpose"] == "train"
        ]
        everyone = sorted(sample for part in self.gather(mine) for sample in part)
        if not everyone:
            return {}
        ids, groups, scores, valid = zip(*everyone, strict=True)
        estimate = advantages.ESTIMATORS[self.config.algorithm.adv_estimator]
        values_B = estimate(
            torch.tensor(scores, dtype=torch.float64), torch.tensor(groups), torch.tensor(valid, dtype=torch.bool)
        )
        return {name: value for name, value, ok in zip(ids, values_B.tolist(), valid, strict=True) if ok}

    def step(self, rows: Rows, lr: float, first: bool) -> tuple[losses.Metrics, float]:
        """One optimizer step on this rank's part of a mini-batch; returns summed metrics and the gradient's norm."""
        config = self.config
        lengths = [len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows]
        batches = micro_batches(lengths, config.train.micro_batch_tokens)
        mode = config.algorithm.loss_agg
        own = sum(len(row["response_ids"]) if mode == "token_mean" else 1 for row in rows)
        counts = self.gather((own, len(batches)))
        denominator = sum(own for own, _ in counts)
        parts = []
        for i in range(max(batches for _, batches in counts)):
            parts.append(self.micro_step([rows[j] for j in batches[i]] if i < len(batches) else [], denominator, first))
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), config.train.grad_clip or float("inf"))
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if torch.isfinite(torch.tensor(norm)):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return losses.add_metrics(parts), norm

    def micro_step(self, rows: Rows, denominator: float, first: bool) -> losses.Metrics:
        """Forward and backward of one micro-batch; without rows, a forward and backward of weight zero."""
        config = self.config
        batch = pad_batch(rows or [{"prompt_ids": [0], "response_ids": [0]}], 0, self.device)
        raise SystemExit(batch, denominator, first, config)

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values

    def reduce(self, metrics: losses.Metrics) -> dict[str, float]:
        """Means of [sum, count] metrics over all ranks."""
        return losses.mean_metrics(
            losses.add_metrics(self.gather({name: pair.cpu() for name, pair in metrics.items()}))
        )


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    if config.model.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, config.model.dtype)
