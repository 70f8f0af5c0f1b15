"""IFEval and IFBench: does the response follow the verifiable instructions in its prompt?

In: a response and its instructions, `extra_info` or `ground_truth` with the columns of the data set google/IFEval:
`instruction_id_list` (such as "keywords:forbidden_words") and `kwargs`, one dict an instruction. Out: 1.0 where all are
followed, or the followed fraction. The checkers are those of the package `if-verifiable` (IFEval: Zhou et al. 2023,
arXiv:2311.07911; IFBench: arXiv:2507.02833).

    graders:
      - path: graders.ifeval:IFEvalGrader
        kwargs: {reward: partial_strict}

The design decision: a score must be repeatable. The package fills a missing argument with a random one, skips unknown
instructions, and detects languages with an unseeded sampler; here the first two are errors, and the sampler is seeded.

Two IFEval instructions (number_sentences, capital_word_frequency) and many of IFBench split text with NLTK's data:
`python -m nltk.downloader punkt_tab stopwords averaged_perceptron_tagger_eng`, once per machine. Importing the package
takes about 2 s, so the constructor does it.
"""

import difflib
import importlib
import json
from collections.abc import Sequence
from typing import Any

from graders.exact import after_thinking

REWARDS = ("binary_strict", "binary_loose", "partial_strict", "partial_loose")
BENCHMARKS = ("ifeval", "ifbench")


class IFEvalGrader:
    """Scores how far responses follow their instructions.

    Args:
        reward: `binary`: 1.0 where all instructions are followed, else 0.0; `partial`: the followed fraction. `strict`:
            the response past its thinking, as it is; `loose`: also without its first or last line or its asterisks.
        benchmark: whose instructions they are: `ifeval` or `ifbench`.

    Each result is a dict: `score`, and all four rewards by name.

    Raises:
        ValueError: unknown `reward` or `benchmark`; when called: a row without instructions, or with one unknown
            or lacks an argument.
        RuntimeError: an instruction needs NLTK data that this machine lacks.
    """

    def __init__(self, reward: str = "binary_strict", benchmark: str = "ifeval") -> None:
        if reward not in REWARDS:
            raise ValueError(f"reward={reward!r} is unknown: choose one of {', '.join(REWARDS)}")
        if benchmark not in BENCHMARKS:
            raise ValueError(f"benchmark={benchmark!r} is unknown: choose one of {', '.join(BENCHMARKS)}")
        from if_verifiable.common import evaluate_instructions
        from langdetect import DetectorFactory, detector_factory

        DetectorFactory.seed = 0
        detector_factory.init_factory()  # takes a second, which the first sample would pay
        self.reward = reward
        self.evaluate = evaluate_instructions
        self.checkers = importlib.import_module(f"if_verifiable.{benchmark}.instructions_registry").INSTRUCTION_DICT

    def __call__(
        self,
        *,
        data_sources: Sequence[str],
        solution_strs: Sequence[str],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[dict[str, Any]],
    ) -> list[dict[str, float]]:
        samples = zip(solution_strs, ground_truths, extra_infos, strict=True)
        return [self._score(response, key, info or {}) for response, key, info in samples]

    def _score(self, response: str | None, key: Any, info: dict[str, Any]) -> dict[str, float]:
        instructions = self._instructions(key, info)
        text = after_thinking(response) or ""
        followed = [self._follows(text, name, arguments, info) for name, arguments in instructions]
        strict, loose = ([row[i] for row in followed] for i in (0, 1))
        rewards = {
            "binary_strict": float(all(strict)),
            "binary_loose": float(all(loose)),
            "partial_strict": sum(strict) / len(strict),
            "partial_loose": sum(loose) / len(loose),
        }
        return {"score": rewards[self.reward], **rewards}

    def _instructions(self, key: Any, info: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        row = info
        if "instruction_id_list" not in row:
            row = json.loads(key) if isinstance(key, str) and key.lstrip().startswith("{") else key
        names = row.get("instruction_id_list") if isinstance(row, dict) else None
        if not names or not isinstance(names, list):
            raise ValueError(
                "the row has no instructions: extra_info or ground_truth needs the lists instruction_id_list and kwargs"
            )
        arguments = row.get("kwargs") or [{}] * len(names)
        if len(arguments) != len(names):
            raise ValueError(f"{len(names)} in instruction_id_list but {len(arguments)} in kwargs: one dict for each")
        # Parquet gives every dict all keys of the column and fills them with null.
        given = [{k: v for k, v in (a or {}).items() if v is not None} for a in arguments]
        for name, values in zip(names, given, strict=True):
            self._check(name, values)
        return list(zip(names, given, strict=True))

    def _check(self, name: str, values: dict[str, Any]) -> None:
        if name not in self.checkers:
            near = difflib.get_close_matches(name, self.checkers) or sorted(self.checkers)
            raise ValueError(f"instruction {name!r} is unknown; near: {', '.join(near[:5])}")
        checker = self.checkers[name](name)
        if missing := set(checker.get_instruction_args_keys()) - values.keys():
            raise ValueError(f"instruction {name!r} lacks {sorted(missing)} in its kwargs, which have {sorted(values)}")
        try:
            checker.build_description(**values)
        except Exception as error:  # the package checks few of its arguments, so that many kinds are raised
            raise ValueError(f"instruction {name!r} cannot have kwargs {values}: {error}") from error

    def _follows(self, text: str, name: str, values: dict[str, Any], info: dict[str, Any]) -> tuple[bool, bool]:
        """Whether the text follows one instruction: (strict, loose)."""
        try:
            results, _ = self.evaluate(text, [name], [values], _asked(info.get("prompt")), self.checkers)
        except Exception as error:
            if type(error) is LookupError:  # what NLTK raises, and no subclass such as KeyError
                need = "punkt_tab stopwords averaged_perceptron_tagger_eng"
                raise RuntimeError(f"{name} needs NLTK data: run `python -m nltk.downloader {need}`") from error
            return False, False  # checkers index into the response, which may have no such part
        return (results[0].strict_pass, results[0].loose_pass) if results else (False, False)


def _asked(prompt: Any) -> str:
    """What was asked last, of a prompt that is text or messages."""
    if isinstance(prompt, list):
        prompt = prompt[-1].get("content") if prompt else None
    return str(prompt or "")
