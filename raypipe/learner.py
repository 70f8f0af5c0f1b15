"""The learner: one Ray Train rank that turns graded rows into optimizer steps and new weights for the engines.

In: its split of each iteration's rows, as they arrive. Out: policy and critic updates, weights of version k+1 at the
engines, and a record of what happened for the driver. Gradients of micro-batches and ranks are summed and divided
once, at the optimizer step, by the count of the whole mini-batch, so the result does not depend on how rows were split
or when they came. Every rank runs the same number of micro-batches; one with less to do runs some of weight zero, so
that the collectives of FSDP always match.

Shapes: B samples, T response tokens, N response tokens of a micro-batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train.v2._internal.execution.context import get_train_context
from torch.distributed.tensor import DTensor

from raypipe import checkpoint, losses, targets
from raypipe.advantages import adaptive_kl
from raypipe.arrivals import mini_batch_of
from raypipe.batching import Batch, lay_out, pad_tokens, split
from raypipe.carry import CarryOver
from raypipe.colocate import Turns
from raypipe.config import Config, is_eval, old_logprobs
from raypipe.feed import Feed
from raypipe.losses import Metrics
from raypipe.modeling import (
    Critic,
    Policy,
    compute_dtype,
    layout,
    learning_rate,
    load_critic,
    load_policy,
    reshard,
    shard,
)
from raypipe.objectives import mismatch, policy_objective, value_objective
from raypipe.pulse import Pulse
from raypipe.run_folder import RunFolder
from raypipe.streaming import Spans, Stopped, Take, stream
from raypipe.targets import Rows, Scored
from raypipe.weights import WeightPublisher

# What a micro-batch's losses read, one value a response token, where rows have it.
COLUMNS = (
    "old_logprobs", "engine_logprobs", "ref_logprobs", "weight_versions", "advantages", "importance", "values",
    "returns",
)  # fmt: skip


def learn(job: dict[str, Any]) -> None:
    """The training function of every rank, run again on all of them when one is lost.

    Args:
        job: config, folder (of the run), and actor handles: server (PlanServer), engines, and scorers, those of each
            role.
    """
    server, rank = job["server"], dist.get_rank()
    group = ray.util.get_current_placement_group(), get_train_context().controller_actor
    agreed = [ray.get(server.begin.remote(*group)) if rank == 0 else 0]
    dist.broadcast_object_list(agreed)
    [attempt] = agreed
    spans = Spans(rank)
    pulse = Pulse(server, rank, attempt, spans)
    try:
        learner = Learner(job["config"], ray.train.torch.get_device())
        learner.stopping, learner.worked = pulse.stopping.is_set, pulse.worked
        train(job, attempt, learner, spans)
    except Exception as error:
        ray.get(server.failed.remote(attempt, rank, f"{type(error).__name__}: {error}"))
        raise
    finally:
        pulse.end()


def train(job: dict[str, Any], attempt: int, learner: "Learner", spans: Spans) -> None:
    """All iterations from the newest checkpoint to the last; fewer if the run is to stop, with a checkpoint then."""
    config, server, rank = learner.config, job["server"], dist.get_rank()
    folder = RunFolder(Path(job["folder"]), resumed=True)
    restored = checkpoint.load(folder.checkpoints, learner)
    trained = saved = restored.iteration
    writer = checkpoint.CheckpointWriter(folder.checkpoints, learner, folder.metrics)
    writer.told += restored.notes
    ray.get(server.starts_at.remote(attempt, trained, restored.under_way))
    publish = publisher(learner, job["engines"], job["scorers"], config.pipeline.inflight_update)
    turns = Turns(job["engines"], rank, learner.gather) if config.pipeline.colocate else None
    if turns:
        learner.rows_are_in = turns.sleep_engines
    if trained or attempt:  # engines may have other weights than a learner that goes on, or sleep
        with spans("update weights"):
            publish(trained)
    ahead = max(config.pipeline.plans_ahead, config.pipeline.max_staleness)
    feed = Feed(server, rank, attempt, config.run.iterations, ahead, before=int(config.rollout.carry_over > 0))
    carry = CarryOver(config, learner.gather, restored.under_way)

    def keep() -> None:
        nonlocal saved
        if trained > saved:
            with spans("checkpoint"):
                writer.save(trained, carry.positions)
            saved = trained

    def stop() -> None:
        keep()
        writer.wait()  # what cannot be written is the driver's to see, in what there is

    while trained < config.run.iterations:
        take = feed.taker(trained)
        if config.rollout.carry_over or carry.positions:
            take = carry.taker(trained, take, is_eval(config, trained, len(config.data.val_files)))
        try:
            record = learner.iterate(trained, take, spans)
        except Stopped:
            return stop()
        trained += 1
        carry.settle()
        stopped = any(learner.gather(learner.stopping()))
        if not stopped:
            with spans("update weights"):
                if turns:
                    turns.make_room()
                publish(trained)
        record["metrics"] |= writer.metrics_of_writing()
        server.report.remote(attempt, trained - 1, rank, record | {"spans": spans.collect(), "notes": writer.notes()})
        if stopped:
            return stop()
        if is_checkpoint(config, trained):
            keep()  # within the time of the next iteration: this one is over
    # The last plan holds no more than held-out prompts, sampled with the final weights.
    rows = [row for block in feed.rows(config.run.iterations) for row in block]
    record = {"rows": rows, "metrics": {}, "unsaved": writer.wait(), "notes": writer.notes()}
    ray.get(server.report.remote(attempt, trained, rank, record | {"spans": spans.collect()}))


def publisher(
    learner: "Learner", engines: list[Any], scorers: dict[str, list[Any]], in_flight: bool
) -> Callable[[int], None]:
    """A function that brings a version of the weights to all that hold a copy; all ranks call it together."""
    sources = [(learner.policy, engines)] if engines else []  # none: all responses are saved ones
    if "old_logprobs" in scorers:
        sources.append((learner.policy, scorers["old_logprobs"]))
    if learner.critic:
        sources.append((learner.critic, scorers["values"]))
    publishers = [(WeightPublisher(), trainee, receivers) for trainee, receivers in sources]

    def publish(version: int) -> None:
        for sender, trainee, receivers in publishers:
            reshard(trainee.module)
            sender.publish(trainee.module.model, version, receivers, in_flight)

    return publish


def is_checkpoint(config: Config, trained: int) -> bool:
    every = config.checkpoint.every
    return trained == config.run.iterations or (every > 0 and trained % every == 0)


@dataclass
class Trainee:
    """A model that is trained, and how."""

    module: Policy | Critic
    optimizer: torch.optim.Optimizer
    peak_lr: float
    grad_clip: float

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def step(self, denominator: int, loss: float) -> float:
        """One optimizer step with the accumulated gradient over `denominator`; returns its norm before clipping.

        A gradient that is not finite, or of nothing at all, is not applied; nor is that of a loss that is not finite,
        since where a loss is not a number its gradient may be 0.
        """
        reshard(self.module)
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(max(1, denominator))
        total = torch.nn.utils.clip_grad_norm_(parameters, self.grad_clip or math.inf)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total) if math.isfinite(loss) else loss
        if math.isfinite(norm) and denominator:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm


class Learner:
    """Args:
    config: the run's configuration.
    device: where this rank computes.
    """

    def __init__(self, config: Config, device: torch.device):
        self.config, self.device = config, device
        self.world = dist.get_world_size()
        # For small Python objects, also beside NCCL.
        self.control = dist.new_group(backend="gloo") if self.world > 1 else None
        torch.manual_seed(config.run.seed)
        if device.type == "cpu":
            torch.set_num_threads(config.train.threads or max(1, int(config.train.cpus_per_rank)))
        train, critic = config.train, config.critic
        self.policy = self.trainee(load_policy(config.model), train.lr, train.grad_clip)
        self.critic: Trainee | None = None
        if config.algorithm.adv_estimator == "gae":
            module = load_critic(critic.path or config.model.path, config.model)
            self.critic = self.trainee(module, critic.lr, critic.grad_clip)
        self.modes = {"policy": config.algorithm.loss_agg, "critic": "token_mean"}  # what their means are over
        self.kl_coef = config.algorithm.kl_coef
        modules = [trainee.module for trainee in checkpoint.trainees_of(self).values()]
        self.layout = layout(modules, config.model.attention, device, train.micro_batch_tokens)
        self.streams = not targets.why_not_streaming(config)
        self.stopping: Callable[[], bool] = lambda: False  # whether the run is to end
        self.worked: Callable[[], None] = lambda: None  # told of each micro-batch
        self.rows_are_in: Callable[[], None] = lambda: None  # told, where the learner waits for them all, on all ranks

    def trainee(self, module: Policy | Critic, lr: float, grad_clip: float) -> Trainee:
        train, dtype = self.config.train, compute_dtype(self.config.model.dtype, self.device)
        frees = train.reshard_after_forward and self.world > 1  # alone a rank holds all anyway
        module = shard(module, self.device, self.world, dtype, frees)
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(
            parameters, lr=lr, betas=(train.beta1, train.beta2), weight_decay=train.weight_decay, fused=True
        )
        return Trainee(module, optimizer, lr, grad_clip)

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values

    # -- an iteration --------------------------------------------------------------------------------------------------

    def iterate(self, iteration: int, take: Take, spans: Spans) -> dict[str, Any]:
        """Trains on an iteration's rows: epochs x mini-batches optimizer steps, the first epoch as rows arrive.

        Returns the record for the driver: this rank's `rows` with their `advantage` (the mean over tokens), and
        `metrics` (means over all ranks).
        """
        self.begin(iteration)
        if self.streams:
            rows, trained = stream(self, take, spans)
        else:
            rows, trained = self.wait_and_train(take, spans)
        with spans("train"):
            for _ in range(1, self.config.train.epochs):
                self.epoch(trained)
            metrics = self.finish(trained)
        for row in rows:
            row["advantage"] = float(row["advantages"].mean()) if "advantages" in row else None
            for name in targets.TARGETS:
                row.pop(name, None)
        return {"rows": rows, "metrics": metrics}

    def begin(self, iteration: int) -> None:
        self.iteration = iteration
        run, train = self.config.run, self.config.train
        trainees = {"policy": self.policy} if iteration >= self.config.critic.warmup else {}
        self.trainees: dict[str, Trainee] = trainees | ({"critic": self.critic} if self.critic else {})
        for trainee in self.trainees.values():
            trainee.set_lr(
                learning_rate(iteration, run.iterations, trainee.peak_lr, train.lr_warmup, train.lr_schedule)
            )
        self.parts: list[Metrics] = []
        self.norms: dict[str, list[float]] = {name: [] for name in self.trainees}
        self.largest_gap = 0.0
        self.prompts = 0
        self.untouched = True  # the weights are those that engines sampled with
        self.clear_pending()

    def wait_and_train(self, take: Take, spans: Spans) -> tuple[Rows, Rows]:
        """All rows first, then one epoch; returns the rows, and those that go into the loss."""
        rows: Rows = []
        with spans("wait for rows"):
            ended = all_ended = False
            while not all_ended:
                found, ended = ([], True) if ended else take(1.0)
                rows += found
                told = self.gather((ended, self.stopping()))
                all_ended = all(end for end, _ in told)
                if any(stop for _, stop in told):
                    raise Stopped
            self.rows_are_in()
        with spans("train"):
            rows.sort(key=lambda row: row["sample_id"])  # the order of arrival must not matter
            news = self.examine(rows)
            everyone = [sample for part in self.gather(news) for sample in part]
            trained = self.admit(rows, everyone)
            kept = sorted({sample.group_id for sample in everyone})
            if self.config.rollout.reserve_prompts:
                kept = sorted(set(kept) - targets.without_signal(everyone))
                trained = [row for row in trained if row["group_id"] in kept]
            count = self.config.train.mini_batches
            places = {group_id: mini_batch_of(place, len(kept), count) for place, group_id in enumerate(kept)}
            for row in trained:
                row["mini_batch"] = places[row["group_id"]]
            self.prompts = len({sample.group_id for sample in everyone if sample.usable} & set(kept))
            self.whiten(trained)
            self.epoch(trained)
        return rows, trained

    def examine(self, rows: Rows) -> list[Scored]:
        """What this rank tells the others of rows that have arrived; usable ones get `old_logprobs` and `kl`."""
        usable = [row for row in rows if targets.is_usable(row)]
        if old_logprobs(self.config) == "learner":
            self.recompute_logprobs(usable)
        elif old_logprobs(self.config) == "engine":
            for row in usable:
                row["old_logprobs"] = row["engine_logprobs"]
        self.parts.append(targets.assign_kl(usable, self.config))
        return [targets.scored(row, self.config, self.kl_coef) for row in rows if targets.is_told(row)]

    def admit(self, rows: Rows, everyone: list[Scored]) -> Rows:
        """Of rows whose groups are complete, those that go into the loss, with their targets.

        Args:
            everyone: these groups' samples on all ranks.
        """
        usable = [row for row in rows if targets.is_usable(row)]
        targets.assign_advantages(usable, self.config, self.kl_coef, everyone)
        trained, masked = targets.split_masked(usable, self.config)
        self.parts += [masked, targets.assign_importance(trained, self.config)]
        return trained

    def whiten(self, trained: Rows) -> None:
        over = targets.whitening(self.config)
        if over == "iteration":
            targets.whiten(trained, self.gather)
        elif over == "mini_batch":
            for mini in range(self.config.train.mini_batches):
                targets.whiten([row for row in trained if row["mini_batch"] == mini], self.gather)

    def epoch(self, trained: Rows) -> None:
        """One optimizer step a mini-batch."""
        for mini in range(self.config.train.mini_batches):
            batches = self.split([row for row in trained if row["mini_batch"] == mini])
            self.micro_steps(batches, max(self.gather(len(batches))))
            self.step()

    def finish(self, trained: Rows) -> dict[str, float]:
        """The iteration's metrics, over all ranks; steers the KL coefficient."""
        algorithm = self.config.algorithm
        means = losses.mean_metrics(losses.add_metrics(self.gather(losses.add_metrics(self.parts))))
        if math.isfinite(means.get("mismatch/mean", math.nan)):
            means["mismatch/max"] = max(self.gather(self.largest_gap))
        for name, norms in self.norms.items():
            finite = [norm for norm in norms if math.isfinite(norm)]
            prefix = "critic/" if name == "critic" else ""
            means[f"{prefix}lr"] = self.trainees[name].optimizer.param_groups[0]["lr"]
            means[f"{prefix}skipped_steps" if prefix else "train/skipped_steps"] = len(norms) - len(finite)
            if finite:
                means[f"{prefix}grad_norm"] = sum(finite) / len(finite)
        means["train/prompts"] = self.prompts
        if self.critic:
            means["critic/explained_variance"] = targets.explained_variance(trained, self.gather)
        if algorithm.kl_coef:
            means["ref/kl_coef"] = self.kl_coef
        if algorithm.kl_target and math.isfinite(means["ref/kl"]):
            self.kl_coef = adaptive_kl(
                self.kl_coef, means["ref/kl"], target=algorithm.kl_target, horizon=algorithm.kl_horizon,
                n_steps=self.config.data.train_batch_size * self.config.rollout.n,
            )  # fmt: skip
        return means

    # -- a mini-batch --------------------------------------------------------------------------------------------------

    def split(self, rows: Rows) -> list[list[Rows]]:
        """Micro-batches of `rows`, each in rows of the forward pass."""
        pairs = [(row["prompt_ids"], row["response_ids"]) for row in rows]
        plan = split(pairs, self.config.train.micro_batch_tokens, self.layout)
        return [[[rows[i] for i in line] for line in batch] for batch in plan]

    def lay_out(self, micro: list[Rows]) -> tuple[Batch, torch.Tensor, Rows]:
        """A micro-batch's tensors, its mask [B, T] and its samples; without any one of weight 0, to keep ranks in
        step."""
        samples = [row for line in micro for row in line]
        pairs = [[(row["prompt_ids"], row["response_ids"]) for row in line] for line in micro] or [[([0], [0])]]
        batch = lay_out(pairs, self.device, self.layout.shares_prompts)
        return batch, batch.response_mask_BT if samples else torch.zeros_like(batch.response_mask_BT), samples

    def micro_steps(self, batches: list[list[Rows]], count: int) -> None:
        """Forward and backward of `count` micro-batches, those that this rank lacks of weight 0."""
        for i in range(count):
            self.worked()
            batch, mask_BT, samples = self.lay_out(batches[i] if i < len(batches) else [])
            columns = {
                name: pad_tokens([row[name] for row in samples], batch)
                for name in COLUMNS
                if samples and len(samples[0].get(name, ()))
            }
            if "policy" in self.trainees:
                self.policy_step(batch, columns, mask_BT)
            if "critic" in self.trainees:
                self.critic_step(batch, columns, mask_BT)
            if samples:
                for name in self.trainees:
                    self.counts[name] += losses.count(mask_BT, self.modes[name])
                spent = batch.input_ids_RL.numel()
                padding = torch.tensor([spent - batch.n_tokens, spent], dtype=torch.float64)
                self.parts.append({"train/padding_frac": padding})

    def policy_step(self, batch: Batch, columns: dict[str, torch.Tensor], mask_BT: torch.Tensor) -> None:
        algorithm, rollout = self.config.algorithm, self.config.rollout
        with_entropy = algorithm.entropy_coef > 0
        logprobs_N, entropy_N = self.policy.module(batch, rollout.temperature, with_entropy)
        logprobs_BT, entropy_BT = batch.unpack(logprobs_N), batch.unpack(entropy_N)
        if not columns:
            (logprobs_BT.sum() * 0.0).backward()
            return
        loss, metrics = policy_objective(
            algorithm, logprobs_BT, entropy_BT, columns, mask_BT, kl_coef=self.kl_coef,
            max_response_length=rollout.max_response_length,
        )  # fmt: skip
        loss.backward()
        self.losses["policy"] += float(loss.detach())
        self.note(metrics)
        if self.untouched:
            # A token of older weights differs for another reason.
            same_BT = mask_BT & (columns["weight_versions"] == self.iteration)
            metrics, largest = mismatch(columns["engine_logprobs"], logprobs_BT, same_BT)
            self.largest_gap = max(self.largest_gap, largest)
            self.note(metrics)

    def critic_step(self, batch: Batch, columns: dict[str, torch.Tensor], mask_BT: torch.Tensor) -> None:
        assert self.critic is not None
        values_BT = batch.unpack(self.critic.module(batch))
        if not columns:
            (values_BT.sum() * 0.0).backward()
            return
        loss, metrics = value_objective(self.config.critic, values_BT, columns, mask_BT)
        loss.backward()
        self.losses["critic"] += float(loss.detach())
        self.note(metrics)

    def note(self, metrics: Metrics) -> None:
        self.parts.append({name: pair.cpu() for name, pair in metrics.items()})

    def step(self) -> None:
        """One optimizer step of each model, over all that ranks have accumulated."""
        told = self.gather((self.counts, self.losses))
        for name, trainee in self.trainees.items():
            count, loss = sum(counts[name] for counts, _ in told), sum(sums[name] for _, sums in told)
            self.norms[name].append(trainee.step(count, loss))
        self.untouched = False
        self.clear_pending()

    def clear_pending(self) -> None:
        """What waits for its step: each model's share of the denominator, and its loss."""
        self.counts, self.losses = dict.fromkeys(self.trainees, 0), dict.fromkeys(self.trainees, 0.0)

    @torch.no_grad()
    def recompute_logprobs(self, rows: Rows) -> None:
        """Gives rows `old_logprobs` [T] of the policy as it is; all ranks call it together."""
        batches = self.split(rows)
        for i in range(max(self.gather(len(batches)))):
            batch, _, samples = self.lay_out(batches[i] if i < len(batches) else [])
            logprobs_N, _ = self.policy.module(batch, self.config.rollout.temperature)
            lengths = [len(row["response_ids"]) for row in samples]
            for row, values in zip(samples, logprobs_N.cpu().split(lengths) if samples else (), strict=True):
                row["old_logprobs"] = values.numpy()
