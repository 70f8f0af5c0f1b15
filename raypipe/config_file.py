"""A YAML file and `key=value` arguments to a checked `Config`.

In: a path and overrides. Out: a `Config`, its relative paths resolved. OmegaConf does the merge and the type
conversion; nobody past this file sees a DictConfig. Imports nothing heavy, so that `--help` answers at once.
"""

import dataclasses
import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING as NO_DEFAULT
from pathlib import Path
from typing import Any, cast, get_args, get_origin

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from raypipe.config import Config, GraderConfig, StageConfig, starts_elsewhere
from raypipe.config_checks import check, check_across

# Keys that are lists of mappings.
LISTS: dict[str, type] = {"grade.graders": GraderConfig, "pipeline.stages": StageConfig}
# What lists and mappings hold, in words.
NAMES: dict[Any, str] = {str: "a text", int: "a whole number"}


def load_config(
    path: str | Path, overrides: list[str] | None = None, across: Callable[[Config], None] = check_across
) -> Config:
    """Reads `path`, applies `key=value` overrides, checks every value and resolves the paths of files.

    `across` checks what goes with what: by default, for training.

    Raises:
        ValueError: the message names the file or key, the value, why it is wrong and what to write instead.
    """
    path = Path(path)
    cfg = OmegaConf.structured(Config)
    for node in (cfg, *(cfg[name] for name in cfg)):
        OmegaConf.set_readonly(node, False)  # OmegaConf locks nodes of frozen dataclasses, also against the merge
    merged = _read_yaml(path)
    try:
        _refuse_unknown_keys(merged, Config, "", path)
        for override in overrides or []:
            merged = _merge_override(merged, override)
            _refuse_unknown_keys(merged, Config, "", repr(override))
        cfg = OmegaConf.merge(cfg, merged)
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise ValueError(_explain(error, merged, path)) from None
    except RecursionError:
        raise ValueError(f"{path}: the config holds itself, by an alias such as &a [*a]; write values out") from None
    assert isinstance(config, Config)
    try:
        _refuse_other_containers(config, "")
        check(config)
        across(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return _resolve_paths(config, path.parent)


def resolve(
    config: Config | str | Path, overrides: Sequence[str] = (), across: Callable[[Config], None] = check_across
) -> Config:
    """A checked `Config`. One that was made in Python is taken as it is: `dataclasses.replace` changes it."""
    if not isinstance(config, Config):
        return load_config(config, list(overrides), across)
    if overrides:
        raise ValueError(f"{overrides[0]!r}: overrides go with a file; change a Config with dataclasses.replace")
    check(config)
    across(config)
    return config


def to_yaml(config: Config) -> str:
    """The config as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def help_text() -> str:
    """Every key with its type, default and meaning, one line each, grouped by section."""
    lines = []
    for part in dataclasses.fields(Config):
        lines.append(f"\n{part.name}:")
        lines += _help_lines(part.type, part.name)
    for name, cls in LISTS.items():
        lines += [f"\nEach entry of {name}:", *_help_lines(cls, "")]
    return "\n".join(lines)


def resolve_path(name: str, base: Path) -> str:
    """`name` as an absolute path: relative names are looked for beside the config file, then in the current folder."""
    path = Path(name).expanduser()
    beside = (base / path).resolve()
    return str(beside if beside.exists() or not path.resolve().exists() else path.resolve())


def _resolve_paths(config: Config, base: Path) -> Config:
    data = dataclasses.replace(
        config.data,
        train_files=[resolve_path(name, base) for name in config.data.train_files],
        val_files=[resolve_path(name, base) for name in config.data.val_files],
        rollouts=[resolve_path(name, base) for name in config.data.rollouts],
    )
    graders = [dataclasses.replace(grader, path=_resolve_code(grader.path, base)) for grader in config.grade.graders]
    stages = [dataclasses.replace(stage, path=_resolve_code(stage.path, base)) for stage in config.pipeline.stages]
    model = dataclasses.replace(config.model, path=resolve_path(config.model.path, base))
    grade = dataclasses.replace(config.grade, graders=graders)
    resume = resolve_path(config.run.resume, base) if starts_elsewhere(config) else config.run.resume
    run = dataclasses.replace(config.run, dir=str(Path(config.run.dir).expanduser().resolve()), resume=resume)
    pipeline = dataclasses.replace(config.pipeline, stages=stages)
    return dataclasses.replace(config, run=run, model=model, data=data, grade=grade, pipeline=pipeline)


def _resolve_code(path: str, base: Path) -> str:
    file, colon, name = path.rpartition(":")
    return f"{resolve_path(file, base)}:{name}" if colon and file.endswith(".py") else path


def _read_yaml(path: Path) -> Any:
    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such config file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        what = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ValueError(f"{path}{line}: this is not valid YAML for a config: {what}") from None
    except RecursionError:
        raise ValueError(f"{path}: the config holds itself, by an alias such as &a [*a]; write values out") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: a config is UTF-8 text; {error}") from None
    except ValueError as error:  # a number of too many digits, say
        raise ValueError(f"{path}: a value cannot be read: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise ValueError(f"{path}: the top level must be a mapping of sections (model:, data:, ...): {error}") from None
    if not OmegaConf.is_dict(loaded):
        raise ValueError(
            f"{path}: the top level must be a mapping of sections (model:, data:, ...), not a list or text"
        )
    return loaded


def _merge_override(merged: Any, override: str) -> Any:
    name, equals, text = override.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"{override!r} is not an override; write key=value, e.g. rollout.n=8")
    try:
        value = yaml.safe_load(text) if text.strip() else ""
        # A bare number such as 1e-5 is text to YAML 1.1; the typed merge turns it into a float.
        OmegaConf.update(merged, name.strip(), value, force_add=True)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"{override!r} cannot be applied: {' '.join(str(error).split())}") from None
    return merged


def _refuse_unknown_keys(node: Any, cls: type, prefix: str, source: str | Path) -> None:
    """`source`: the file, or the argument, that is to blame."""
    known = {f.name: f for f in dataclasses.fields(cls)}
    for name in node:
        full = f"{prefix}{name}"
        if name not in known:
            raise ValueError(f"{source}: {full} is not a key{_suggest(str(name), prefix, known)}")
        kind = known[name].type
        value = node._get_node(name)
        if dataclasses.is_dataclass(kind):
            if not OmegaConf.is_dict(value) or value._is_none():
                raise ValueError(
                    f"{source}: {full} must be a mapping of its keys, {', '.join(_names(kind))}; got {value}"
                )
            _refuse_unknown_keys(value, cast(type, kind), f"{full}.", source)
        elif full in LISTS and OmegaConf.is_list(value):
            for i, entry in enumerate(value):
                if not OmegaConf.is_dict(entry):
                    raise ValueError(
                        f"{source}: {full}.{i} must be a mapping such as {{path: module:Name}}; got {entry!r}"
                    )
                _refuse_unknown_keys(entry, LISTS[full], f"{full}.{i}.", source)


def _refuse_other_containers(config: Any, prefix: str) -> None:
    """What a reference such as ${oc.env:HOME} stands for is known only at the end, and OmegaConf does not compare it
    with the type of a list, a mapping or an entry of LISTS, nor a list or mapping with that of an entry."""
    for f in dataclasses.fields(config):
        value, full = getattr(config, f.name), f"{prefix}{f.name}"
        kind: Any = get_origin(f.type) or f.type
        if kind in (list, dict) and not isinstance(value, kind):
            raise ValueError(
                f"{full}={value!r} has the wrong type: it must be a {'list' if kind is list else 'mapping'}"
            )
        entry_type: Any = (get_args(f.type) or [None])[-1]
        if entry_type in NAMES:
            for at, entry in value.items() if kind is dict else enumerate(value):
                if not isinstance(entry, entry_type):
                    raise ValueError(f"{full}.{at}={entry!r} has the wrong type: it must be {NAMES[entry_type]}")
        if dataclasses.is_dataclass(value):
            _refuse_other_containers(value, f"{full}.")
        for i, entry in enumerate(value if full in LISTS else ()):
            if not isinstance(entry, LISTS[full]):
                raise ValueError(f"{full}.{i} must be a mapping such as {{path: module:Name}}; got {entry!r}")
            _refuse_other_containers(entry, f"{full}.{i}.")


def _suggest(name: str, prefix: str, known: dict) -> str:
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f"; did you mean {prefix}{near[0]}?"
    elsewhere = [f"{s.name}.{name}" for s in dataclasses.fields(Config) if name in _names(s.type)]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; the keys here are {', '.join(known)}"


def _names(cls: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


def _explain(error: OmegaConfBaseException, merged: Any, path: Path) -> str:
    name = error.full_key or "config"
    what = str(error).splitlines()[0]
    if "missing mandatory value" in what.lower():
        return f"{path}: {name} is required and not set; add it to the file or write {name}=... on the command line"
    try:
        value = OmegaConf.select(merged, re.sub(r"\[(\d+)\]", r".\1", name))
    except OmegaConfBaseException:
        value = None
    hint = f"; write a list: {name}=[{value}]" if "not a ListConfig" in what else ""
    return f"{path}: {name}={value!r} has the wrong type: {what}{hint}"


def _help_lines(cls: Any, prefix: str) -> list[str]:
    names = [(f"{prefix}.{f.name}" if prefix else f.name, f) for f in dataclasses.fields(cls)]
    return [f"  {name:<32} {default_of(f):<12} {f.metadata['doc']}" for name, f in names]


def default_of(f: dataclasses.Field) -> str:
    """A key's default as text."""
    default = f.default if f.default_factory is NO_DEFAULT else f.default_factory()
    return "required" if default == MISSING else repr(default)
