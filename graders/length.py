"""Overlong penalty: a long response costs a little, before it is cut off and costs everything.

In: a response's length in tokens. Out: 0 up to `max_length - buffer`, then falling linearly to `-penalty` at
`max_length`, and `-penalty` past it (soft overlong punishment, DAPO, arXiv:2503.14476, equation 13, where
max_length = L_max, buffer = L_cache and penalty = 1). Add it to a correctness grader:

    graders:
      - path: graders.math:MathGrader
      - path: graders.length:LengthPenaltyGrader
        kwargs: {max_length: 20480, buffer: 4096, tokenizer: models/qwen}

The length is `extra_info["response_length"]` where the row has it, else the number of tokens that the text has for
`tokenizer`, without special tokens. Text that was decoded and encoded again may differ from what was sampled by a token
or two, which moves the penalty by as many parts of `buffer`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


class LengthPenaltyGrader:
    """Scores between -penalty and 0 by length.

    Args:
        max_length: tokens; from here on the penalty is whole.
        buffer: tokens before `max_length` over which the penalty grows. 0: a step past `max_length`.
        penalty: the whole penalty, at least 0.
        tokenizer: model folder whose tokenizer counts; None: every row has `extra_info["response_length"]`.

    Raises:
        ValueError: a bound outside its range, no tokenizer in the folder; when called: a row without a length.
    """

    def __init__(self, max_length: int, buffer: int, penalty: float = 1.0, tokenizer: str | None = None) -> None:
        if max_length < 1:
            raise ValueError(f"max_length={max_length}: needs at least 1 token")
        if not 0 <= buffer <= max_length:
            raise ValueError(f"buffer={buffer}: needs 0 to max_length={max_length} tokens")
        if penalty < 0:
            raise ValueError(f"penalty={penalty}: needs at least 0; it is subtracted")
        self.max_length = max_length
        self.buffer = buffer
        self.penalty = penalty
        self.tokenizer = None if tokenizer is None else _load_tokenizer(tokenizer)

    def __call__(
        self,
        *,
        data_sources: Sequence[str],
        solution_strs: Sequence[str],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[dict[str, Any]],
    ) -> list[dict[str, float]]:
        lengths = [self._length(text, info or {}) for text, info in zip(solution_strs, extra_infos, strict=True)]
        return [{"score": 0.0 - self.penalty * self._excess(length), "length": float(length)} for length in lengths]

    def _length(self, text: str | None, info: dict[str, Any]) -> int:
        if (length := info.get("response_length")) is not None:
            return int(length)
        if self.tokenizer is None:
            raise ValueError('the row has no extra_info["response_length"]: give the grader kwargs.tokenizer')
        return len(self.tokenizer.encode(text or "", add_special_tokens=False).ids)

    def _excess(self, length: int) -> float:
        """How much of the buffer is used up, in [0, 1]."""
        over = length - (self.max_length - self.buffer)
        if self.buffer == 0:
            return float(over > 0)
        return min(max(over / self.buffer, 0.0), 1.0)


def _load_tokenizer(folder: str) -> Any:
    from tokenizers import Tokenizer

    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"tokenizer={folder!r}: has no tokenizer.json; name a model folder with a fast tokenizer")
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
