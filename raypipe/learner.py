"""The learner: one Ray Train rank that turns graded rows into optimizer steps and new weights for the engines.

In: its split of each iteration's rows. Out: policy updates, weights of version k+1 at the engines, and a record of what
happened for the driver. Gradients of micro-batches and ranks are summed, with the denominator of the whole mini-batch
in the loss, so the result does not depend on how rows were split. Every rank runs the same number of micro-batches; one
with less to do runs some of weight zero, so that the collectives of FSDP always match.

Shapes: B samples, T response tokens, N response tokens of a micro-batch.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from raypipe import checkpoint, losses
from raypipe.batching import micro_batches, pack_batch, pad_batch, pad_tokens, padded_micro_batches
from raypipe.config import Config
from raypipe.feed import Feed
from raypipe.modeling import compute_dtype, learning_rate, load_policy, shard
from raypipe.targets import Rows, assign_advantages
from raypipe.weights import WeightPublisher


def learn(job: dict[str, Any]) -> None:
    """The training function of every rank.

    Args:
        job: config, folder (of the run), attempt, and the actor handles server (PlanServer) and engines.
    """
    config: Config = job["config"]
    rank = ray.train.get_context().get_world_rank()
    learner = Learner(config, ray.train.torch.get_device())
    checkpoints = Path(job["folder"]) / "checkpoints"
    start = checkpoint.load(checkpoints, learner.policy, learner.optimizer)
    engines = job["engines"]
    publisher = WeightPublisher()
    if start:
        publisher.publish(learner.policy.model, start, engines)
    feed = Feed(job["server"], rank, job["attempt"], config.run.iterations, config.pipeline.plans_ahead)
    for iteration in range(start, config.run.iterations):
        spans = Spans(rank)
        with spans("wait for rows"):
            rows = [row for block in feed.rows(iteration) for row in block]
        with spans("train"):
            record = learner.iterate(iteration, rows)
        with spans("update weights"):
            publisher.publish(learner.policy.model, iteration + 1, engines)
        if is_checkpoint(config, iteration + 1):
            with spans("checkpoint"):
                checkpoint.save(
                    checkpoints, iteration + 1, learner.policy, learner.optimizer, config.model.path,
                    config.checkpoint.keep_last,
                )  # fmt: skip
        job["server"].report.remote(iteration, rank, {**record, "spans": spans.spans})
    # The last plan holds no more than held-out prompts, sampled with the final weights.
    rows = [row for block in feed.rows(config.run.iterations) for row in block]
    ray.get(job["server"].report.remote(config.run.iterations, rank, {"rows": rows, "metrics": {}, "spans": []}))


def is_checkpoint(config: Config, trained: int) -> bool:
    every = config.checkpoint.every
    return trained == config.run.iterations or (every > 0 and trained % every == 0)


class Spans:
    """Collects what a rank did when: `with spans("train"): ...`."""

    def __init__(self, rank: int) -> None:
        self.lane = f"learner-{rank}"
        self.spans: list[dict[str, Any]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.time()
        yield
        self.spans.append({"lane": self.lane, "name": name, "start": start, "end": time.time()})


class Learner:
    """Args:
    config: the run's configuration.
    device: where this rank computes.
    """

    def __init__(self, config: Config, device: torch.device):
        self.config = config
        self.world = dist.get_world_size()
        # For small Python objects, also beside NCCL.
        self.control = dist.new_group(backend="gloo") if self.world > 1 else None
        torch.manual_seed(config.run.seed)
        if device.type == "cpu":
            torch.set_num_threads(config.train.threads or max(1, int(config.train.cpus_per_rank)))
        model, train = config.model, config.train
        policy = load_policy(model.path, model.attention, model.activation_checkpointing)
        self.policy = shard(policy, device, self.world, compute_dtype(model.dtype, device))
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=train.lr, betas=(train.beta1, train.beta2), weight_decay=train.weight_decay
        )
        # Variable-length attention reads packed samples without padding; the others would compute the whole square of
        # a packed row, so they get samples of like length side by side.
        self.packed = model.attention == "flash_attention_2"
        self.split = micro_batches if self.packed else padded_micro_batches
        self.lay_out = (
            (lambda rows: pack_batch(rows, device)) if self.packed else (lambda rows: pad_batch(rows, 0, device))
        )

    def iterate(self, iteration: int, rows: Rows) -> dict[str, Any]:
        """Trains on an iteration's rows: epochs x mini-batches optimizer steps.

        Returns the record for the driver: this rank's `rows` with their `advantage` (the mean over tokens), and
        `metrics` (means over all ranks).
        """
        train = self.config.train
        rows = sorted(rows, key=lambda row: row["sample_id"])  # the order of arrival must not matter
        usable = assign_advantages(rows, self.config, self.gather)
        lr = learning_rate(iteration, self.config.run.iterations, train.lr, train.lr_warmup, train.lr_schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        parts, norms = [], []
        self.largest_gap = 0.0
        for epoch in range(train.epochs):
            for mini in range(train.mini_batches):
                chosen = [row for row in usable if self.mini_batch(row["group_id"]) == mini]
                metrics, norm = self.step(chosen, untouched=epoch == mini == 0)
                parts.append(metrics)
                norms.append(norm)
        for row in rows:
            row["advantage"] = float(row.pop("advantages").mean()) if "advantages" in row else None
        means = losses.mean_metrics(losses.add_metrics(self.gather(losses.add_metrics(parts))))
        finite = [norm for norm in norms if math.isfinite(norm)]
        means["mismatch/max"] = max(self.gather(self.largest_gap))
        means |= {"lr": lr, "train/skipped_steps": len(norms) - len(finite)}
        if finite:
            means["grad_norm"] = sum(finite) / len(finite)
        return {"rows": rows, "metrics": means}

    def mini_batch(self, group_id: int) -> int:
        """Which of the iteration's mini-batches a prompt belongs to: by its number, so the same on every rank."""
        return group_id * self.config.train.mini_batches // self.config.data.train_batch_size

    def step(self, rows: Rows, untouched: bool) -> tuple[losses.Metrics, float]:
        """One optimizer step over this rank's part of a mini-batch; returns summed metrics and the gradient's norm.

        A gradient that is not finite is not applied. `untouched`: the weights are those that engines sampled with.
        """
        lengths = [len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows]
        batches = self.split(lengths, self.config.train.micro_batch_tokens)
        by_tokens = self.config.algorithm.loss_agg == "token_mean"
        own = sum(len(row["response_ids"]) for row in rows) if by_tokens else len(rows)
        owns, counts = zip(*self.gather((own, len(batches))), strict=True)
        parts: list[losses.Metrics] = []
        for i in range(max(counts)):
            micro = [rows[j] for j in batches[i]] if i < len(batches) else []
            parts.append(self.micro_step(micro, sum(owns), untouched))
        total = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.train.grad_clip or math.inf)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        if math.isfinite(norm) and any(owns):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return losses.add_metrics(parts), norm

    def micro_step(self, rows: Rows, denominator: int, untouched: bool) -> losses.Metrics:
        """Forward and backward of one micro-batch; without rows one of weight 0, to keep ranks in step."""
        algorithm, rollout = self.config.algorithm, self.config.rollout
        batch = self.lay_out([(row["prompt_ids"], row["response_ids"]) for row in rows] or [([0], [0])])
        mask_BT = batch.response_mask_BT if rows else torch.zeros_like(batch.response_mask_BT)
        logprobs_N, entropy_N = self.policy(batch, self.packed, rollout.temperature)
        logprobs_BT = batch.unpack(logprobs_N)
        weights_BT = losses.token_weights(mask_BT, algorithm.loss_agg, denominator, rollout.max_response_length)
        if not rows:
            losses.weighted_sum(logprobs_BT, weights_BT).backward()
            return {}
        engine_BT = pad_tokens([row["engine_logprobs"] for row in rows], batch)
        advantages_BT = pad_tokens([row["advantages"] for row in rows], batch)
        loss, metrics = losses.ppo_clip(
            logprobs_BT, engine_BT, advantages_BT, mask_BT, weights_BT,
            clip_low=algorithm.clip_low, clip_high=algorithm.clip_high,
        )  # fmt: skip
        loss.backward()
        found = {f"policy/{name}": pair for name, pair in metrics.items()}
        found["policy/kl"] = found.pop("policy/approx_kl")
        found["policy/entropy"] = losses.tally(batch.unpack(entropy_N), mask_BT)
        if untouched:
            gap_BT = losses.log_ratio(engine_BT, logprobs_BT.detach(), mask_BT)
            self.largest_gap = max(self.largest_gap, float(gap_BT.abs().max()))
            found |= {
                "mismatch/mean": losses.tally(gap_BT.abs(), mask_BT),
                "mismatch/kl": losses.tally(losses.k3(gap_BT), mask_BT),  # of KL(engine || learner), per token
            }
        return {name: pair.cpu() for name, pair in found.items()}

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values
