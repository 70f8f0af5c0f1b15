"""A reward model: a Hugging Face sequence classifier (transformers' AutoModelForSequenceClassification) as a grader.

In: a response, with the prompt in `extra_info`. Out: the model's logit for it, as float.

    graders:
      - path: graders.reward_model:RewardModelGrader
        kwargs: {model: models/Skywork-Reward-V2-Llama-3.2-1B, device: cuda, max_length: 4096}

The model reads prompt and response as a conversation in its own chat template; a prompt is a text, which becomes a user
message, or a list of messages. With `chat_template: false`, and for tokenizers that have none, prompt, response and
end of turn are one text: right for a prompt that has its template already, as has, in a run, `prompt_key: prompt_text`.

The design decision: a batch is sorted by length and cut so that no forward pass holds more than `token_budget` tokens,
padding included. So memory depends on the budget and not on the batch, and little of it is padding. Only local folders
with safetensors weights are read, and no code from them is run.
"""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

DTYPES = ("auto", "float32", "bfloat16", "float16")


class RewardModelGrader:
    """Scores responses with a sequence classifier.

    Args:
        model: its folder (config.json, *.safetensors, tokenizer).
        device: torch device; auto: cuda where there is one, else cpu.
        dtype: of weights and computation; auto: bfloat16 on cuda, else float32.
        max_length: tokens of a conversation; longer ones lose their beginning and are logged with `truncated: 1.0`.
        token_budget: tokens of one forward pass, padding included; a longer conversation is passed alone.
        chat_template: whether prompt and response are put into the tokenizer's chat template.
        prompt_key: the key of extra_info that holds the prompt.
        label: which logit is the score, for a model that has several.

    Raises:
        ValueError: a folder that holds no sequence classifier with trained weights, a label that it does not have;
            when called: a row without a prompt.

    Special tokens that a response spells out are taken out of it, so that none can end its turn and begin another.
    """

    def __init__(
        self,
        model: str,
        device: str = "auto",
        dtype: str = "auto",
        max_length: int = 4096,
        token_budget: int = 16384,
        chat_template: bool = True,
        prompt_key: str = "prompt",
        label: int = 0,
    ) -> None:
        if max_length < 1 or token_budget < 1:
            raise ValueError(f"max_length={max_length}, token_budget={token_budget}: both need at least 1 token")
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r}: choose one of {', '.join(DTYPES)}")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if dtype == "auto":
            dtype = "bfloat16" if device.startswith("cuda") else "float32"
        self.tokenizer = AutoTokenizer.from_pretrained(_folder(model), trust_remote_code=False, local_files_only=True)
        self.model = _load_classifier(model, getattr(torch, dtype)).to(device).eval()
        if not 0 <= label < self.model.config.num_labels:
            raise ValueError(f"label={label}: {model} has {self.model.config.num_labels} labels, counted from 0")
        self.max_length = max_length
        self.token_budget = token_budget
        self.chat_template = chat_template and self.tokenizer.chat_template is not None
        self.prompt_key = prompt_key
        self.label = label
        self.pad_token_id = self.model.config.get_text_config().pad_token_id
        self.special = _special_tokens(self.tokenizer)

    def __call__(
        self,
        *,
        data_sources: Sequence[str],
        solution_strs: Sequence[str],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[dict[str, Any]],
    ) -> list[float | dict[str, float]]:
        sequences = [self._encode(text, info) for text, info in zip(solution_strs, extra_infos, strict=True)]
        kept = [ids[-self.max_length :] for ids in sequences]
        scores = [0.0] * len(kept)
        for batch in batches_by_length([len(ids) for ids in kept], self.token_budget):
            for i, score in zip(batch, self._forward([kept[i] for i in batch]), strict=True):
                scores[i] = score
        return [
            {"score": score, "truncated": 1.0} if len(ids) > self.max_length else score
            for score, ids in zip(scores, sequences, strict=True)
        ]

    def _encode(self, response: str | None, info: dict[str, Any] | None) -> list[int]:
        prompt = (info or {}).get(self.prompt_key)
        if prompt is None:
            raise ValueError(f"the row has no extra_info[{self.prompt_key!r}], which holds what was responded to")
        response = _without(self.special, response or "")
        if not self.chat_template and isinstance(prompt, str):
            return self.tokenizer.encode(prompt + response + (self.tokenizer.eos_token or ""), add_special_tokens=False)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        conversation = [*messages, {"role": "assistant", "content": response}]
        text = self.tokenizer.apply_chat_template(conversation, tokenize=False)
        return self.tokenizer.encode(text, add_special_tokens=False)

    @torch.inference_mode()
    def _forward(self, sequences: list[list[int]]) -> list[float]:
        longest = max(map(len, sequences))
        pad = self.pad_token_id
        if pad is None:  # then any token will do that is in no sequence: the model takes the last other token's logit
            used = set().union(*sequences)
            pad = next(token for token in itertools.count() if token not in used)
            self.model.config.get_text_config().pad_token_id = pad
        input_ids_BT = torch.tensor([ids + [pad] * (longest - len(ids)) for ids in sequences])
        mask_BT = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in sequences])
        device = self.model.device
        output = self.model(input_ids_BT.to(device), attention_mask=mask_BT.to(device), use_cache=False)
        return output.logits[:, self.label].float().tolist()


def batches_by_length(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Indices of `lengths` in batches, longest first; longest length times count is at most `token_budget` in each."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or lengths[batches[-1][0]] * (len(batches[-1]) + 1) > token_budget:
            batches.append([])
        batches[-1].append(i)
    return batches


def _folder(model: str) -> str:
    folder = Path(model)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model={model!r}: is no model folder, it has no config.json; download the model first")
    if not list(folder.glob("*.safetensors")):
        raise ValueError(f"model={model!r}: has no *.safetensors; other weight files can run code and are not read")
    return model


def _load_classifier(model: str, dtype: torch.dtype) -> Any:
    classifier, loaded = AutoModelForSequenceClassification.from_pretrained(
        model,
        dtype=dtype,
        trust_remote_code=False,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
    )
    if missing := sorted(loaded["missing_keys"]):
        # transformers fills them with random numbers, which would be scores.
        raise ValueError(
            f"model={model!r}: is no trained sequence classifier, its weights lack {', '.join(missing[:5])}"
        )
    return classifier


def _special_tokens(tokenizer: Any) -> re.Pattern[str]:
    added = {str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special}
    longest_first = sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _without(tokens: re.Pattern[str], text: str) -> str:
    while (shorter := tokens.sub("", text)) != text:  # what is left on both sides of one may make up another
        text = shorter
    return text
