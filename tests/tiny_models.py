"""Tiny random models with a byte tokenizer, saved in Hugging Face form: real weights and files, no download."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SPECIALS = ["<|pad|>", "<|eos|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """260 tokens: the 256 bytes, then pad (256), eos (257) and the two turns of the chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|eos|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(
    family: str = "llama", tied: bool = False, seed: int = 0, layers: int = 2, hidden: int = 64
) -> PreTrainedModel:
    """A float32 model of `family` (llama | qwen2) whose logits spread over several nats, so that rounding cannot hide.

    The defaults give about 0.13 M parameters; layers=4, hidden=128 about 0.7 M.
    """
    config_cls, model_cls = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[family]
    config = config_cls(
        vocab_size=256 + len(SPECIALS),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 64),
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        pad_token_id=256,
        bos_token_id=None,
        eos_token_id=257,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_cls(config).float().eval()


def perturbed(model: PreTrainedModel, seed: int = 1, scale: float = 0.05) -> PreTrainedModel:
    """Adds seeded noise to every parameter in place, as an optimizer step would move them."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=noise))
    return model


def save_model(model: PreTrainedModel, folder: Path) -> Path:
    """Writes weights, generation config and the byte tokenizer to `folder`."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
