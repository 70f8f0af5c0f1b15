"""What benches put where a run has a grader or a model of its own: graders that take a given time, a model of nothing.

In: seconds. Out: a grader's path for a config, or a model folder. Graders are loaded by the path of this file, so it
imports nothing heavy.
"""

import asyncio
import random
import zlib
from pathlib import Path

INSTANT = f"{__file__}:InstantGrader"
WAITING = f"{__file__}:WaitingGrader"


class InstantGrader:
    def __call__(self, *, data_sources, solution_strs, ground_truths, extra_infos):
        return [1.0] * len(solution_strs)


class WaitingGrader:
    """Waits, as a sandbox or a judge elsewhere makes one wait; scores 0 or 1, by the response.

    Args:
        seconds: of the wait; with a tail, half of the waits are shorter.
        sigma: of a log-normal tail; 0: every wait is alike.
        most: seconds that no wait is above.
    """

    def __init__(self, seconds: float, sigma: float = 0.0, most: float = 60.0):
        self.seconds, self.sigma, self.most = seconds, sigma, most

    async def __call__(self, *, data_sources, solution_strs, ground_truths, extra_infos):
        draws = [random.Random(zlib.crc32(text.encode())) for text in solution_strs]
        waits = [self.seconds * draw.lognormvariate(0.0, self.sigma) for draw in draws]
        await asyncio.sleep(min(self.most, max(waits)))
        return [float(draw.random() < 0.5) for draw in draws]


def make_tiny_model(folder: Path) -> Path:
    """A random 0.6 M-parameter Llama with the byte tokenizer's files that vLLM asks for."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(256)}, unk_token="t1"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t0").save_pretrained(folder)
    return folder
