r"""Multiple choice: which one of the choices does the response name?

In: a response, the choices (`extra_info["choices"]`) and the key, a label or a zero-based index. Out: 1.0 or 0.0.

    graders:
      - path: graders.choice:ChoiceGrader
        kwargs: {labels: ABCDE}   # for rows that carry no choices
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from graders.choice_reader import Reader


class ChoiceGrader:
    """Scores 1.0 where the response names the right choice and no other, else 0.0.

    `extra_info["choices"]` is a dict label -> text, a list of texts (labelled A, B, ...) or a dict of two lists `label`
    and `text`. `ground_truth` is a label (any case) or an int, the zero-based index; null or blank: nothing is right.

    Args:
        labels: the labels of rows without choices, one character each.

    Raises:
        ValueError: labels that are not distinct letters or digits; when called: a row whose choices have none of these
            forms, or whose key is not among them.
    """

    def __init__(self, labels: str = "ABCD") -> None:
        if len(set(labels.upper())) < len(labels):
            raise ValueError(f"labels={labels!r}: a label occurs twice")
        self.default = json.dumps(dict.fromkeys(labels, ""))
        _reader(self.default)  # raises for labels that cannot be read

    def __call__(
        self,
        *,
        data_sources: Sequence[str],
        solution_strs: Sequence[str],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[dict[str, Any]],
    ) -> list[float]:
        samples = zip(solution_strs, ground_truths, extra_infos, strict=True)
        return [self._score(response, key, (info or {}).get("choices")) for response, key, info in samples]

    def _score(self, response: str | None, key: Any, choices: Any) -> float:
        if key is None or not str(key).strip():
            return 0.0
        reader = _reader(self.default if choices is None else json.dumps(_by_label(choices)))
        return float(reader.read(response) == reader.index_of(key))


def _by_label(choices: Any) -> dict[str, Any]:
    if isinstance(choices, Mapping) and choices.keys() == {"label", "text"} and isinstance(choices["label"], list):
        choices = dict(zip(choices["label"], choices["text"], strict=True))
    elif isinstance(choices, list | tuple):
        choices = {chr(ord("A") + i): text for i, text in enumerate(choices)}
    if not isinstance(choices, Mapping):
        raise ValueError(f'extra_info["choices"]={choices!r}: needs a dict label -> text or a list of texts')
    return {label: text for label, text in choices.items() if text is not None}  # parquet fills absent keys with null


@lru_cache(maxsize=1024)  # samples of one prompt share their choices
def _reader(choices_json: str) -> "Reader":
    return Reader(json.loads(choices_json))
