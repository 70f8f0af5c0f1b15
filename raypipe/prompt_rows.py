"""Prompt rows: a row of a file in, a checked `Example` out.

All checks of a row are made here, so nothing behind this file meets a bad one. Two shapes of row are read, also mixed:

    verl's schema    data_source, prompt (messages), ability, reward_model.ground_truth, extra_info
    simple rows      prompt (text or messages) and ground_truth or answer

`data.columns` maps our four names (COLUMNS) to other columns, with dots for nested ones: `prompt: meta.question`. A
column that is mapped must be in every row. A row without data_source gets "default".

Graders get as extra_info the row's `extra_info` as it is (an object, or text that holds a JSON object), and with it
every other column that is not null, under its own name, unless extra_info has that key already: verl's graders look
into extra_info, TRL's into columns. Left out are only the prompt, the ground truth, data_source and `reward_model`.

Ground truth and extra_info travel as JSON, because rows disagree on their types: integers of any size stay exact, 4
and 4.0 stay apart, NaN is written as Python's json writes it. From parquet, dates become ISO text, decimals and UUIDs
text; bytes are refused.
"""

import datetime
import decimal
import json
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypipe.config import DataConfig
from raypipe.prompt_files import FileRow, from_json, located, read_rows, shown

# Where each of our columns is looked for, the first that is not null, unless data.columns says otherwise.
COLUMNS = {
    "prompt": ("prompt",),
    "ground_truth": ("reward_model.ground_truth", "ground_truth", "answer"),
    "data_source": ("data_source",),
    "extra_info": ("extra_info",),
}
ROLES = ("system", "user", "assistant", "tool")
ABSENT = object()


@dataclass(frozen=True, slots=True)
class Example:
    """A row that passed all checks. `ground_truth` and `extra_info` are JSON; `place` is for later errors."""

    place: str
    prompt_id: str
    data_source: str
    prompt: str | list[dict[str, Any]]
    ground_truth: str
    extra_info: str


def read_examples(files: list[str], config: DataConfig, base_dir: str | Path) -> Iterator[Example]:
    """Yields the rows of `files` (relative ones to `base_dir`) in order, checked.

    Raises:
        ValueError: a bad file (see `read_rows`) or row, or an id that two rows share. The message names the file, the
            line (from 1, JSONL) or row (from 0, parquet), the value, the reason and the fix.
    """
    yield from check_rows(read_rows(files, base_dir), config)


def check_rows(rows: Iterable[FileRow], config: DataConfig) -> Iterator[Example]:
    """Yields `rows` in order, checked as `read_examples` does."""
    for name in config.columns:
        if name not in COLUMNS:
            known = ", ".join(COLUMNS)
            raise ValueError(f"data.columns.{name} is not known; it has the keys {known} (for ids use data.id_key)")
    places: dict[str, str] = {}
    for row in rows:
        with located(row.place):
            prompt_id = _prompt_id(row.values, config.id_key) if config.id_key else row.default_id
            if config.id_key and places.setdefault(prompt_id, row.place) != row.place:
                raise ValueError(
                    f"duplicate id {prompt_id} (data.id_key={config.id_key}), first in {places[prompt_id]}; make ids "
                    "unique, or leave data.id_key empty"
                )
            example = _example(row, prompt_id, config)
        yield example


def _example(row: FileRow, prompt_id: str, config: DataConfig) -> Example:
    values = row.values
    prompt_column, prompt = _pick(values, "prompt", config.columns)
    truth_column, truth = _pick(values, "ground_truth", config.columns)
    source_column, source = _pick(values, "data_source", config.columns)
    extra_column, extra = _pick(values, "extra_info", config.columns)
    if prompt is ABSENT:
        raise ValueError(f"no prompt among the columns {shown(list(values))}; set data.columns.prompt to one of them")
    _check_prompt(prompt, prompt_column)
    if config.require_ground_truth and (truth is ABSENT or truth is None):
        found = f"{truth_column} is null" if truth is None else f"none among the columns {shown(list(values))}"
        raise ValueError(
            f"no ground_truth: {found}; fill it in, set data.columns.ground_truth, or, for graders that need none, "
            "data.require_ground_truth=false"
        )
    used = {prompt_column, truth_column, source_column, extra_column, "reward_model"}
    others = {name: value for name, value in values.items() if name not in used and value is not None}
    return Example(
        place=row.place,
        prompt_id=prompt_id,
        data_source=_data_source(source, source_column),
        prompt=prompt,
        ground_truth=_to_json(None if truth is ABSENT else truth, "ground_truth"),
        extra_info=_extra_json(others | _extra_info(extra, extra_column)),
    )


def _pick(row: dict[str, Any], name: str, columns: dict[str, str]) -> tuple[str, Any]:
    """The column that holds `name`, and its value: ABSENT if there is none, None if all there are hold null."""
    if name in columns:
        value = _lookup(row, columns[name])
        if value is ABSENT:
            raise ValueError(
                f"data.columns.{name}={columns[name]} names no column of this row, which has {shown(list(row))}; "
                "correct the name, or give every row the column"
            )
        return columns[name], value
    found: tuple[str, Any] = (name, ABSENT)
    for path in COLUMNS[name]:
        value = _lookup(row, path)
        if value is not ABSENT and value is not None:
            return path, value
        if value is None:
            found = (path, None)
    return found


def _lookup(row: dict[str, Any], path: str) -> Any:
    """The value at `path`: a column of that very name, or a walk down nested objects, one per dot."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return ABSENT
        value = value[part]
    return value


def _prompt_id(row: dict[str, Any], id_key: str) -> str:
    value = _lookup(row, id_key)
    if value is ABSENT:
        raise ValueError(f"no column {id_key!r} (data.id_key) among {shown(list(row))}; give every row an id")
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ValueError(f"data.id_key={id_key} is {shown(value)} here; an id is text or an integer")
    return _utf8(str(value), id_key)


def _check_prompt(prompt: Any, column: str) -> None:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError(f"{column} is blank ({prompt!r}); write the prompt, or remove the row")
    elif isinstance(prompt, list):
        if not prompt:
            raise ValueError(f"{column} holds no messages; write at least one, or remove the row")
        for i, message in enumerate(prompt):
            _check_message(message, f"{column}[{i}]")
    else:
        found = "null" if prompt is None else f"{shown(prompt)} ({type(prompt).__name__})"
        raise ValueError(f"{column} is {found}; a prompt must be text, or a list of messages with role and content")


def _check_message(message: Any, name: str) -> None:
    """Blank content is refused, save where it says something: an empty system message replaces a template's own, a
    tool's output may be empty, and a call of tools needs no words."""
    if not isinstance(message, dict):
        raise ValueError(f"{name} is {shown(message)}; a message is an object with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(f"{name}.role is {shown(role)}; a role is one of {', '.join(ROLES)}")
    calls_tools = role == "assistant" and bool(message.get("tool_calls"))
    if content is None and calls_tools:
        return
    if not isinstance(content, str):
        found = "missing or null" if content is None else shown(content)
        raise ValueError(f"{name}.content is {found}; the content of a message is text")
    if not content.strip() and role in ("user", "assistant") and not calls_tools:
        raise ValueError(f"{name}.content is blank ({content!r}); write it, or remove the message")


def _data_source(source: Any, column: str) -> str:
    if source is ABSENT or source is None:
        return "default"
    if not isinstance(source, str) or not source:
        raise ValueError(f"{column} is {shown(source)}; a data source is a name (text)")
    return _utf8(source, column)


def _extra_info(extra: Any, column: str) -> dict[str, Any]:
    if extra is ABSENT or extra is None:
        return {}
    value = from_json(extra) if isinstance(extra, str) else extra
    if not isinstance(value, dict):
        raise ValueError(f"{column} is {shown(extra)}; it must be an object, or text that holds a JSON object")
    return value


def _extra_json(extra: dict[str, Any]) -> str:
    try:
        return _to_json(extra, "extra_info")
    except ValueError:
        for name, value in extra.items():
            _to_json(value, name)  # raises with the name of the guilty column
        raise


def _to_json(value: Any, what: str) -> str:
    """JSON in ASCII, which holds whatever JSON text can hold, halves of surrogate pairs too."""
    try:
        return json.dumps(value, default=_json_text)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"{what} cannot be carried as JSON: {error}; write it as text, or remove the column") from None


def _json_text(value: Any) -> str:
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | uuid.UUID):
        return str(value)
    raise TypeError(f"it holds {shown(value)} ({type(value).__name__})")


def _utf8(text: str, what: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} is {shown(text)}; half of a surrogate pair is no Unicode text, remove it") from None
    return text
