"""Prompt files: parquet and JSONL in, numbered rows of plain Python values out, streamed.

Each kind of file gives records one by one, and a record becomes a row only when it is taken, so that an error has its
line (from 1, JSONL) or row (from 0, parquet). JSONL is UTF-8, one object a line; blank lines, byte-order marks and
Windows line ends do no harm.

Parquet gives all rows one schema: a struct field that a row lacks comes back as null. So a null field of a struct is
taken to be absent, at any depth; nulls in lists and maps stay, and so do nulls of JSONL. Columns of Arrow's JSON type
(as `datasets` writes its Json feature) are parsed and exact. The index column that pandas may add is left out.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PANDAS_INDEX = re.compile(r"__index_level_\d+__")
ROWS_PER_READ = 1024


@dataclass(frozen=True, slots=True)
class FileRow:
    """A row: `place` for error messages, `default_id` unique among the files read together, and its columns."""

    place: str
    default_id: str
    values: dict[str, Any]


def read_rows(files: list[str], base_dir: str | Path) -> Iterator[FileRow]:
    """Yields the rows of `files` (relative ones to `base_dir`) in order.

    Raises:
        ValueError: a file that is missing, empty, unreadable or of an unknown kind, or a line or row that cannot be
            decoded. The message names the file, the line or row, the reason and the fix.
    """
    for path, label in _find_files(files, base_dir):
        unit, read, decode = KINDS[path.suffix.lower()]
        number = None
        for number, record in read(path):
            place = f"{path}, {unit} {number}"
            with located(place):
                values = decode(record)
            yield FileRow(place, f"{label}:{number}", values)
        if number is None:
            raise ValueError(f"{path}: the file is empty (no rows); write at least one or leave it out of the list")


def file_rows(rows: Iterable[Mapping[str, Any]]) -> list[FileRow]:
    """Rows given in Python as `read_rows` gives those of files."""
    return [FileRow(f"row {i}", f"row:{i}", dict(row)) for i, row in enumerate(rows)]


@contextmanager
def located(place: str) -> Iterator[None]:
    """Puts `place` in front of an error about a row."""
    try:
        yield
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{place}: {error}") from None


def _find_files(files: list[str], base_dir: str | Path) -> list[tuple[Path, str]]:
    """The files' paths, each with the name that its rows' ids begin with: short, and unique among the files."""
    if not files:
        raise ValueError("no prompt files; name at least one .parquet or .jsonl file in data.train_files")
    paths = [Path(base_dir, name) for name in files]
    for i, path in enumerate(paths):
        if path.suffix.lower() not in KINDS:
            kind = f"files of kind {path.suffix!r} are" if path.suffix else "a file without an extension is"
            raise ValueError(f"{path}: {kind} not read; the known kinds are {', '.join(KINDS)}: convert or rename it")
        if not path.exists():
            raise ValueError(f"{path}: the file does not exist; relative paths start at {base_dir}")
        if not path.is_file():
            raise ValueError(f"{path}: not a file; name the files in it one by one")
        if path.resolve() in [other.resolve() for other in paths[:i]]:
            raise ValueError(f"{path}: the file is listed twice; its prompts would be mixed up: list it once")
    names = [path.name for path in paths]
    return [(path, path.name if names.count(path.name) == 1 else str(path)) for path in paths]


def _read_jsonl(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                line = line.removeprefix(BYTE_ORDER_MARK).strip()
                if line:
                    yield number, line
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None


def _decode_line(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        bad = line[error.start : error.end]
        raise ValueError(f"not UTF-8 ({error.reason} {bad!r}); save the file as UTF-8") from None
    row = from_json(text)
    if not isinstance(row, dict):
        raise ValueError(f'JSON, but not an object: {shown(row)}; write one object a line, as in {{"prompt": ...}}')
    return row


def _read_parquet(path: Path) -> Iterator[tuple[int, dict[str, pa.Scalar]]]:
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := {name for name in names if names.count(name) > 1}:
                raise ValueError(f"the columns {sorted(twice)} occur twice; rename or remove one of each")
            number = 0
            for batch in file.iter_batches(ROWS_PER_READ):
                pairs = zip(names, batch.columns, strict=True)
                columns = [(name, column) for name, column in pairs if not PANDAS_INDEX.fullmatch(name)]
                for i in range(batch.num_rows):
                    yield number, {name: column[i] for name, column in columns}
                    number += 1
    except Exception as error:  # damaged bytes surface as whatever the decoder trips over
        raise ValueError(f"{path}: cannot be read as parquet: {error}; write the file again, or rename it") from error


def _decode_scalars(record: dict[str, pa.Scalar]) -> dict[str, Any]:
    return {name: _plain(scalar.as_py(), scalar.type) for name, scalar in record.items()}


def _plain(value: Any, dtype: pa.DataType) -> Any:
    """A value without the struct fields that are null, with maps as dicts and Arrow's JSON type parsed."""
    if isinstance(value, dict):
        return {field.name: _plain(value[field.name], field.type) for field in dtype if value[field.name] is not None}
    if isinstance(value, list) and pa.types.is_map(dtype):
        return {key: _plain(item, dtype.item_type) for key, item in value}
    if isinstance(value, list):
        return [_plain(item, dtype.value_type) for item in value]
    if isinstance(value, str) and isinstance(dtype, pa.JsonType):
        return from_json(value)
    return value


def from_json(text: str) -> Any:
    """Parses JSON. Raises ValueError, also for a key that an object holds twice (the later would win silently)."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        where = f"{error.msg} at character {error.pos + 1}"
        raise ValueError(f"not valid JSON: {where} of {shown(text)}; write one whole object") from None
    except (ValueError, RecursionError) as error:  # integers of over 4300 digits and too deep nesting
        raise ValueError(f"not valid JSON ({error}): {shown(text)}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice in an object")
    return value


def shown(value: Any) -> str:
    """A value in an error message."""
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


# By extension: what a record is called in errors, the records with their numbers, and how one becomes a row.
KINDS: dict[str, tuple[str, Callable[[Path], Iterator[tuple[int, Any]]], Callable[[Any], dict[str, Any]]]] = {
    ".jsonl": ("line", _read_jsonl, _decode_line),
    ".parquet": ("row", _read_parquet, _decode_scalars),
}
