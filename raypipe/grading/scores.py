"""What a grader returned or raised, as bounded JSON.

In: whatever a call returned, or its exception. Out: one entry a sample, {"score": float | None, "values": {...}} or
{"error": text}; for an exception, the status of the whole call. Runs in the grader process.
"""

import json
import traceback
from collections.abc import Iterator
from typing import Any

# Exceptions that mean "the other side could not be reached", by class name, so that no client library is imported:
# built in and requests; aiohttp; httpx; openai; urllib; DNS.
CONNECTION_ERRORS = {
    "ConnectionError", "ClientConnectionError", "NetworkError", "RemoteProtocolError", "ConnectTimeout",
    "APIConnectionError", "URLError", "gaierror",
}  # fmt: skip
# Their subclasses that mean something else: an HTTP answer; a slow one.
OTHER_ERRORS = {"HTTPError", "APITimeoutError", "ReadTimeout", "ServerTimeoutError"}

MAX_TEXT = 2000
MAX_ITEMS = 100
MAX_VALUES_BYTES = 16_384


def entries(result: Any, count: int) -> list[dict[str, Any]]:
    """The entries of a call of `count` samples. Raises ValueError if it returned no list of `count` scores."""
    if isinstance(result, str | bytes | dict | set | frozenset) or not (
        hasattr(result, "__len__") and hasattr(result, "__iter__")
    ):
        raise ValueError(f"the grader returned {type(result).__name__}, not a list of {count} scores")
    scores = list(result)
    if len(scores) != count:
        raise ValueError(f"the grader returned {len(scores)} scores for {count} samples")
    return [entry(score) for score in scores]


def entry(result: Any) -> dict[str, Any]:
    """One sample's score and named values, or what is wrong with it."""
    try:
        score, values = result, {}
        if isinstance(result, dict):
            if "score" not in result:
                return {
                    "error": f'the grader returned a dict without "score": {sorted(map(str, result))[:10]}'[:MAX_TEXT]
                }
            score = result["score"]
            values = plain({key: value for key, value in result.items() if key != "score"})
            if len(json.dumps(values)) > MAX_VALUES_BYTES:
                values = {"left_out": f"named values of more than {MAX_VALUES_BYTES} bytes"}
        if score is None:
            error = result.get("error") if isinstance(result, dict) else None
            return {"error": str(error)[:MAX_TEXT]} if error else {"score": None, "values": values}
        if hasattr(score, "item"):  # a scalar of numpy or torch
            score = score.item()
        if isinstance(score, str | bytes):
            return {"error": f"the grader returned {score!r:.100}, not a number"}
        number = float(score)
        if number - number != 0.0:
            return {"error": f"the grader returned {number}, not a finite number"}
        return {"score": number, "values": values}
    except Exception as error:
        return {"error": f"the grader returned {type(result).__name__}, not a score: {describe(error)}"}


def plain(value: Any, depth: int = 4) -> Any:
    """A named value as bounded JSON: text is cut, NaN becomes null, other types their text."""
    if hasattr(value, "item"):  # a scalar of numpy or torch
        try:
            value = value.item()
        except Exception:
            return str(value)[:MAX_TEXT]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 63 else str(value)[:MAX_TEXT]
    if isinstance(value, float):
        return float(value) if value - value == 0.0 else None
    if isinstance(value, str):
        return value[:MAX_TEXT]
    if depth and isinstance(value, dict):
        return {str(key)[:MAX_TEXT]: plain(item, depth - 1) for key, item in list(value.items())[:MAX_ITEMS]}
    if depth and isinstance(value, list | tuple):
        return [plain(item, depth - 1) for item in value[:MAX_ITEMS]]
    return str(value)[:MAX_TEXT]


def failure(error: BaseException) -> dict[str, Any]:
    """How an exception ends a call. One that is no `Exception`, such as SystemExit, would have ended the process."""
    return {
        "status": "error" if isinstance(error, Exception) else "crash",
        "error": describe(error),
        "retry": any(map(is_connection_error, causes(error))),
    }


def describe(error: BaseException) -> str:
    """The message of an exception and the line that raised it."""
    try:
        text = f"{type(error).__name__}: {error}"[:MAX_TEXT]
    except BaseException:
        text = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    return text + (f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else "")


def causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(10):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def is_connection_error(error: BaseException) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}
    return bool(names & CONNECTION_ERRORS) and not names & OTHER_ERRORS
