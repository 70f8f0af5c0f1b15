"""Saved rollouts as prompts that bring their responses: training from files of samples instead of an engine.

In: files of samples (`sample_files.py`), as `raypipe.generate` writes them or from anywhere. Out: a `PromptSet` whose
prompts hold `saved` responses, `rollout.n` each. Decision: the plan stays what it is. Generate passes a saved response
on where it would ask an engine; it is graded, scored and trained on like any other, so another grader gives another
training run of the same rollouts.

Tokens are those of the file if it has them, else the text's, with an end of sequence unless the response was cut.
Log-probs of the sampling policy are the file's, else NaN; then the algorithm must recompute them.
"""

import math
from array import array
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raypipe.config import Config, importance, old_logprobs
from raypipe.prompt_files import located, read_rows
from raypipe.prompts import PromptSet, encode
from raypipe.sample_files import Sample, read_samples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_rollouts(config: Config, tokenizer: "PreTrainedTokenizerBase") -> PromptSet:
    """The prompts of data.rollouts, each with its first `rollout.n` responses.

    Raises:
        ValueError: a bad file or row, a prompt with too few responses, one that is too long, or log-probs that the
            algorithm needs and the file lacks.
    """
    data = config.data
    groups: dict[Any, list[Sample]] = {}
    for sample in read_samples(read_rows(data.rollouts, ""), data.columns):
        if sample.made.get("finish_reason") != "failed":
            groups.setdefault(str(sample.group), []).append(sample)
    firsts = [samples[0].example for samples in groups.values()]
    prompts, dropped = [], 0
    for prompt, samples in zip(encode(firsts, tokenizer), groups.values(), strict=True):
        with located(samples[0].example.place):
            if len(samples) < config.rollout.n:
                raise ValueError(
                    f"its prompt has {len(samples)} responses in data.rollouts, but rollout.n={config.rollout.n}; "
                    "lower it, or add responses"
                )
        if len(prompt.ids) > data.max_prompt_length:
            dropped += 1
            continue
        saved = tuple(_response(sample, config, tokenizer) for sample in samples[: config.rollout.n])
        prompts.append(replace(prompt, prompt_id=samples[0].made.get("prompt_id", prompt.prompt_id), saved=saved))
    if not prompts:
        raise ValueError(
            f"data.rollouts: every prompt is over data.max_prompt_length={data.max_prompt_length}; raise it"
        )
    return PromptSet(prompts, dropped, list(data.rollouts))


def _response(sample: Sample, config: Config, tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """What GENERATE_COLUMNS hold of a saved response. Weight version -1: no version of this run made it."""
    finish = sample.made.get("finish_reason") or "stop"
    ids = sample.made.get("response_ids")
    logprobs = sample.made.get("engine_logprobs")
    if not ids:
        ids = tokenizer(sample.response, add_special_tokens=False)["input_ids"]
        ids = ids if finish == "length" else [*ids, tokenizer.eos_token_id]
        logprobs = None
    with located(sample.example.place):
        if len(ids) > config.rollout.max_response_length:
            raise ValueError(
                f"the response has {len(ids)} tokens, over rollout.max_response_length="
                f"{config.rollout.max_response_length}; raise that, or remove the row"
            )
        if not logprobs and (old_logprobs(config) == "engine" or importance(config) != "none"):
            raise ValueError(
                "the file has no engine_logprobs of this response, from which the importance ratio starts; set "
                "algorithm.old_logprobs=learner and algorithm.tis=none, or use parquet files of raypipe.generate"
            )
    return {
        "response_text": sample.response,
        "response_ids": array("i", ids),
        "engine_logprobs": array("f", logprobs or [math.nan] * len(ids)),
        "weight_versions": array("i", [-1] * len(ids)),
        "finish_reason": finish,
    }
