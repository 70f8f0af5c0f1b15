"""Prompts: files in, chat-templated and tokenised prompts out, and the seeded order in which iterations take them.

In: the rows that `prompt_files.py` reads and `prompt_rows.py` checks. Out: a `PromptSet` in memory, and a `PromptOrder`
that maps a position in the run to prompts. The decision: all prompts are tokenised at the start, in batches, since only
their lengths tell which are over-long; tokens are packed as int32, so a prompt takes little more than its text.

A list of messages goes through the tokenizer's chat template with the generation prompt added. A prompt that is plain
text becomes one user message; where the tokenizer has no chat template (a base model) it is used as it is, with the
special tokens that the tokenizer adds to any text, such as a beginning-of-sequence token. Templated text gets none of
those, because the template has written them.
"""

import json
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raypipe.config import DataConfig
from raypipe.prompt_files import FileRow, read_rows
from raypipe.prompt_rows import Example, check_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPTS_PER_BATCH = 1024


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready to sample from.

    prompt_id: the row's id under data.id_key, else "file name:line" (JSONL) or "file name:row" (parquet).
    data_source: chooses the graders.
    prompt: JSON of the prompt as the row has it, text or messages; graders get it.
    text: after the chat template.
    ids: tokens of `text`, int32.
    ground_truth, extra_info: JSON, as graders get them.
    saved: responses that it brings along (`rollouts.py`).
    """

    prompt_id: str
    data_source: str
    prompt: str
    text: str
    ids: array
    ground_truth: str
    extra_info: str
    saved: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class PromptSet:
    """prompts: in file order. dropped: how many more were over data.max_prompt_length. files: what was read."""

    prompts: list[Prompt]
    dropped: int
    files: list[str]


def load_prompts(
    files: list[str], config: DataConfig, tokenizer: "PreTrainedTokenizerBase", base_dir: str | Path
) -> PromptSet:
    """Reads `files` (relative ones to `base_dir`), applies the chat template and tokenises.

    Raises:
        ValueError: a bad file or row (see `read_examples`); a prompt that the chat template refuses or that has no
            tokens; an over-long prompt where data.overlong is "error", or nothing left where it is "drop".
    """
    return prepare_prompts(read_rows(files, base_dir), config, tokenizer, files)


def prepare_prompts(
    rows: Iterable[FileRow], config: DataConfig, tokenizer: "PreTrainedTokenizerBase", files: Sequence[str] = ()
) -> PromptSet:
    """The same for `rows` (see `prompt_files.read_rows`); `files`: where they come from."""
    prompts: list[Prompt] = []
    dropped, shortest = 0, sys.maxsize
    examples = check_rows(rows, config)
    while batch := list(islice(examples, PROMPTS_PER_BATCH)):
        for example, prompt in zip(batch, encode(batch, tokenizer), strict=True):
            length = len(prompt.ids)
            if length <= config.max_prompt_length:
                prompts.append(prompt)
                continue
            if config.overlong == "error":
                raise ValueError(
                    f"{example.place}: the prompt has {length} tokens, over data.max_prompt_length="
                    f"{config.max_prompt_length}; raise that, shorten the prompt, or set data.overlong=drop"
                )
            dropped, shortest = dropped + 1, min(shortest, length)
    if not prompts:
        raise ValueError(
            f"{', '.join(files)}: every prompt is over data.max_prompt_length={config.max_prompt_length} (the shortest "
            f"of {dropped} has {shortest} tokens), so none is left; raise it"
        )
    return PromptSet(prompts, dropped, list(files))


def encode(examples: list[Example], tokenizer: "PreTrainedTokenizerBase") -> Iterator[Prompt]:
    """The prompts of `examples`, templated and tokenised in one go."""
    texts = [_render(example, tokenizer) for example in examples]
    encoded = tokenizer(
        texts,
        add_special_tokens=tokenizer.chat_template is None,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # no warning about prompts beyond the model's context: those are over max_prompt_length
    )
    for example, text, ids in zip(examples, texts, encoded["input_ids"], strict=True):
        if not ids:
            raise ValueError(f"{example.place}: the prompt {text[:200]!r} has no tokens; change it, or remove the row")
        yield Prompt(
            prompt_id=example.prompt_id,
            data_source=sys.intern(example.data_source),
            prompt=json.dumps(example.prompt),
            text=text,
            ids=array("i", ids),
            ground_truth=example.ground_truth,
            extra_info=example.extra_info,
        )


def _render(example: Example, tokenizer: "PreTrainedTokenizerBase") -> str:
    """The text of a prompt that the model continues."""
    prompt = example.prompt
    if tokenizer.chat_template is None:
        if not isinstance(prompt, str):
            raise ValueError(
                f"{example.place}: the prompt is a list of messages, but the model's tokenizer has no chat template; "
                "use plain text prompts, or put a chat_template.jinja into the model folder"
            )
        text = prompt
    else:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # a template is a program of the model's and may raise anything
            raise ValueError(f"{example.place}: the chat template refuses the prompt ({error}); change it") from error
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{example.place}: the prompt holds half a surrogate pair ({error.object[error.start]!r}), which is no "
            "Unicode text and has no tokens; remove it"
        ) from None
    return text


@dataclass(frozen=True)
class PromptOrder:
    """Which prompts a batch takes, as a function of its position in the run.

    The prompts of all epochs form one endless sequence, each epoch a permutation of the `n` prompts (seeded by `seed`
    and the epoch's number; file order without `shuffle`). A cursor is a position in that sequence and is all that a
    run has to keep: it resumes with the prompts that it would have taken. A batch may span the end of an epoch, and a
    batch larger than n holds prompts more than once; groups are told apart by position, not by prompt.
    """

    n: int
    batch: int
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        for name, value, lowest in (("n", self.n, 1), ("batch", self.batch, 1), ("seed", self.seed, 0)):
            if value < lowest:
                raise ValueError(f"PromptOrder: {name}={value} must be at least {lowest}")

    def batch_at(self, cursor: int) -> tuple[np.ndarray, int]:
        """Indices of `batch` prompts from position `cursor` on (int64), and the cursor of the next batch."""
        if cursor < 0:
            raise ValueError(f"cursor={cursor} is negative; a run starts at 0")
        end = cursor + self.batch
        return np.array([self.at(position) for position in range(cursor, end)], np.int64), end

    def at(self, cursor: int) -> int:
        """Index of the prompt at a position."""
        epoch, place = divmod(cursor, self.n)
        return int(shuffled(self.n, self.seed, epoch)[place]) if self.shuffle else place


@lru_cache(maxsize=2)
def shuffled(n: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(n), int64, read-only.

    Sorts raw PCG64 output, the one stream that NumPy promises never to change (`Generator.permutation` may, between
    versions), so that a run resumed under another NumPy goes on in the same order.
    """
    order = np.argsort(np.random.PCG64([seed, epoch]).random_raw(n), kind="stable")
    order.flags.writeable = False
    return order
