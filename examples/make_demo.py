"""The model and the data of the demo: a tiny Llama that spells words backward, but carelessly.

    python examples/make_demo.py

Out: .cache/demo/model (0.5 M parameters, its own tokenizer and chat template), train.jsonl and heldout.jsonl. All of it
is made here in about a minute on a CPU; nothing is downloaded. The task is reasoning-gym's spell_backward.

The decision: a short supervised warm-up cannot leave off halfway, with a model that reinforcement learning then
completes in a few iterations; what RL does well is choose among what a model already can. So the warm-up teaches the
task from answers by a careless speller who mistakes some letters for others (HABITS) more often than not. The model
learns the spelling with the habits, and is seldom right; the reward for right words alone then breaks the habits, also
for words it never saw. Warm-up, training and held-out words are all different.
"""

import argparse
import hashlib
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from make_reasoning_gym import unique_entries, verl_row, write_split
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "demo"
TASK, SETTINGS = "spell_backward", {"min_word_len": 3, "max_word_len": 6}
WARM_UP, TRAIN, HELDOUT = 8000, 4000, 128
INSTRUCTION = "Answer with the reversed word alone."
# Each of these letters is written as the other with this probability, and never the other way round.
HABITS, CARELESSNESS = {"e": "i", "a": "o", "n": "m", "s": "z", "t": "d"}, 0.65

PAD, EOS = "<|pad|>", "<|eos|>"
# Text that stands in every prompt is one token each, so that prompts are short.
PHRASES = ["Spell this word backward (example: sun -> nus):", INSTRUCTION]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}<|eos|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def demo_tokenizer() -> PreTrainedTokenizerFast:
    """262 tokens: the 256 bytes (so any text), pad, eos, the two turns of the chat template, and PHRASES."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, EOS, "<|user|>", "<|assistant|>"])
    tokenizer.add_tokens(PHRASES)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, model_max_length=512)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def demo_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> PreTrainedModel:
    """An untrained Llama: 2 layers of width 128, 4 heads of 32, 0.5 M parameters in float32."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.04,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float()


def careless(word: str, rng: random.Random) -> str:
    """`word` as the careless speller writes it."""
    return "".join(HABITS[c] if c in HABITS and rng.random() < CARELESSNESS else c for c in word)


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    entries: Sequence[dict[str, Any]],
    steps: int = 300,
    batch: int = 64,
    lr: float = 2e-3,
    seed: int = 0,
) -> float:
    """Trains `model` in place on careless answers to `entries`, the loss on the answers alone; returns the last loss.

    AdamW, the learning rate rising over 30 steps and falling to 0 over the last third. A word is spelled anew each
    time it is drawn.
    """
    rng = random.Random(seed)
    prompts = [prompt_ids(tokenizer, entry) for entry in entries]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 30, (steps - step) / (steps / 3))
    )
    model.train()
    loss = torch.zeros(())
    for _ in range(steps):
        drawn = rng.choices(range(len(entries)), k=batch)
        answers = [tokenizer.encode(careless(entries[i]["answer"], rng) + EOS) for i in drawn]
        ids_BL, labels_BL = padded([prompts[i] for i in drawn], answers, tokenizer.pad_token_id)
        logits_BLV = model(input_ids=ids_BL).logits[:, :-1]
        loss = cross_entropy(logits_BLV.flatten(0, 1), labels_BL[:, 1:].flatten())  # -100 is ignored
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    return loss.item()


def prompt_ids(tokenizer: PreTrainedTokenizerFast, entry: dict[str, Any]) -> list[int]:
    """The prompt exactly as the run will send it."""
    messages = verl_row(entry, 0, INSTRUCTION)["prompt"]
    text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    return tokenizer.encode(text, add_special_tokens=False)


def padded(prompts: list[list[int]], answers: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels of prompt + answer, padded on the right; labels are -100 outside the answers."""
    length = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids_BL = torch.full((len(prompts), length), pad)
    labels_BL = torch.full((len(prompts), length), -100)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids_BL[i, :end] = torch.tensor(prompt + answer)
        labels_BL[i, len(prompt) : end] = torch.tensor(answer)
    return ids_BL, labels_BL


def make_demo(folder: Path = FOLDER, steps: int = 300) -> bool:
    """Makes model and data in `folder`; False if they are there already, made by this version of the code.

    A folder is there whole or not at all: it is made under another name and renamed.
    """
    sources = [Path(__file__), Path(__file__).with_name("make_reasoning_gym.py")]
    made_by = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    if (folder / "made_by").is_file() and (folder / "made_by").read_text() == made_by:
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-partial-") as partial:
        new = Path(partial) / folder.name
        entries = unique_entries(TASK, WARM_UP + TRAIN + HELDOUT, 0, SETTINGS)
        write_split(entries[WARM_UP:], HELDOUT, new, INSTRUCTION)
        tokenizer = demo_tokenizer()
        model = demo_model(tokenizer)
        warm_up(model, tokenizer, entries[:WARM_UP], steps)
        model.save_pretrained(new / "model")
        tokenizer.save_pretrained(new / "model")
        (new / "made_by").write_text(made_by)
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to make (default: .cache/demo)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # faster than two for so small a model
    made = make_demo(options.out)
    print(f"demo model and data {'made' if made else 'are there already'}: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
