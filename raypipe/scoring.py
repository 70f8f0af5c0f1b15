"""A model that scores finished samples: the part of a scorer that needs torch.

In: prompt and response ids. Out: one float a response token: log-probs of a policy or reference, or values of a critic.
"""

import dataclasses
from typing import Any

import torch

from raypipe.batching import lay_out, split
from raypipe.config import Config
from raypipe.modeling import compute_dtype, layout, load_critic, load_policy
from raypipe.weights import Bucket, load_bucket


class ScoringModel:
    """Args:
    role: ref_logprobs | old_logprobs | values.
    config: the run's.
    """

    def __init__(self, role: str, config: Config):
        self.config, self.is_critic = config, role == "values"
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cpu":
            torch.set_num_threads(max(1, int(config.scorer.num_cpus)))
        model = dataclasses.replace(config.model, lora_rank=0, activation_checkpointing=False)
        module: Any = load_critic(config.critic.path or model.path, model) if self.is_critic else load_policy(model)
        self.dtype = compute_dtype(model.dtype, self.device)
        self.module = module.to(self.device, self.dtype).eval().requires_grad_(False)
        self.layout = layout([self.module], model.attention, self.device, config.scorer.micro_batch_tokens)

    @torch.no_grad()
    def forward(self, samples: list[dict[str, Any]]) -> list[list[float]]:
        """One float a response token of each sample, in micro-batches of scorer.micro_batch_tokens."""
        pairs = [(sample["prompt_ids"], sample["response_ids"]) for sample in samples]
        found: list[list[float]] = [[] for _ in samples]
        for rows in split(pairs, self.config.scorer.micro_batch_tokens, self.layout):
            indices = [i for row in rows for i in row]
            batch = lay_out([[pairs[i] for i in row] for row in rows], self.device, self.layout.shares_prompts)
            if self.is_critic:
                values_N = self.module(batch)
            else:
                values_N, _ = self.module(batch, self.config.rollout.temperature)
            parts = values_N.cpu().split([len(samples[i]["response_ids"]) for i in indices])
            for i, values in zip(indices, parts, strict=True):
                found[i] = values.tolist()
        return found

    def load(self, bucket: Bucket) -> None:
        """Takes in one bucket of new weights. Raises ValueError for a name or shape that the model does not have."""
        load_bucket(self.module.model, bucket)
