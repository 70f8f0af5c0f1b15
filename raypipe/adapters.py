"""Finds a grader by its path and gives every kind of reward function the one interface of `graders/contract.py`.

In: "package.module:Name" or "path/to/file.py:name", and the config's kwargs. Out: a callable with the contract's four
lists. A path may name, told apart by the names of the arguments:

    f(data_sources, solution_strs, ...)         the contract itself, and verl's batch form
    f(data_source, solution_str, ...)           verl's compute_score: one sample a call
    f(prompts, completions, **columns)          TRL's reward functions; `async def` and None (no opinion) too
    a class, or a function with none of these   called once with kwargs; what it returns is then one of the above

A function's kwargs go into every call, like verl's `reward_kwargs`, which may be given by that name, too. TRL's columns
are the keys of extra_info, and the ground truth as `ground_truth`, `answer` and `solution`. As in TRL, prompts are what
the data has, and completions are messages where prompts are; besides, where the function's annotation says so
(`list[list[dict]]`) or with `conversational: true`.

The design decision: functions are used unchanged, and what does not fit is said before the run starts. Imports nothing
but the standard library, since every grader process starts with it.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Collection, Sequence
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import Any

Rows = dict[str, Sequence[Any]]  # the contract's four lists by name
Parameters = dict[str, Parameter]
# What a kind of reward function makes of a batch: the arguments of each call, and how the results become scores.
Form = Callable[[Rows], tuple[list[dict[str, Any]], Callable[[list[Any]], list[Any]]]]

# verl's names for one sample, and the contract's (and verl's) for a batch.
PLURALS = {
    "data_source": "data_sources",
    "solution_str": "solution_strs",
    "ground_truth": "ground_truths",
    "extra_info": "extra_infos",
}
# TRL's trainer says completion_ids, its documentation also completions_ids.
TOKENS = ("completion_ids", "completions_ids")
RECOGNISED = ("solution_strs", "solution_str", "completions", *TOKENS)
# What a run adds to extra_infos (`grading/child.py`), and no column of the data.
ADDED = ("prompt", "prompt_text", "response_ids", "response_length")
WANTED = "solution_strs (a batch), solution_str (verl) or completions (TRL)"


def find_grader(path: str) -> Any:
    """The class or function that `path` names. Raises ValueError if there is none, saying what is near."""
    source, _, name = path.rpartition(":")
    if source.endswith(".py") and name.isidentifier():
        module = _load_file(path, Path(source).expanduser())
    elif name.isidentifier() and all(part.isidentifier() for part in source.split(".")):
        module = _load_module(path, source)
    else:
        raise ValueError(f"{path!r} is not package.module:Name or path/to/file.py:name")
    if not hasattr(module, name):
        public = sorted(n for n, value in vars(module).items() if not n.startswith("_") and callable(value))
        near = difflib.get_close_matches(name, public) or public[:10]
        raise ValueError(f"{path!r}: {source} has no {name!r}; it has {', '.join(near) or 'nothing callable'}")
    found = getattr(module, name)
    if not callable(found):
        raise ValueError(
            f"{path!r} names a {type(found).__name__}, which is not callable; name a grader class or a reward function"
        )
    return found


def check_grader(path: str, kwargs: dict[str, Any]) -> tuple[Any, Callable[..., Any] | None]:
    """What `path` names, checked as far as is possible before it is made, and the grader where none has to be made.

    Raises:
        ValueError: there is none, it does not take `kwargs`, or its arguments are those of no known form.
    """
    found = find_grader(path)
    names = _parameters(path, found)
    if inspect.isclass(found):
        _check_kwargs(path, "constructor", names, kwargs, filled=())
    elif names.keys() & set(RECOGNISED):
        return found, _adapt(path, found, dict(kwargs))
    elif lacking := [n for n, parameter in names.items() if _is_required(parameter) and n not in kwargs]:
        raise ValueError(
            f"{path!r} takes {', '.join(names)}: a reward function takes {WANTED}, and a function that returns one "
            f"gets its arguments from kwargs, which lack {', '.join(lacking)}"
        )
    else:
        _check_kwargs(path, "function", names, kwargs, filled=())
    return found, None


def load_grader(path: str, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The grader that `path` names, ready to be called with the contract's four lists; async where the function is.

    Raises:
        ValueError: as `check_grader`, or what was made is no grader.
    What a constructor raises itself is left as it is.
    """
    found, ready = check_grader(path, kwargs)
    if ready:
        return ready
    made = found(**kwargs)
    if not callable(made) or inspect.isclass(made):
        what = "its instances are" if inspect.isclass(found) else f"it takes no {WANTED}, and what it returned is"
        raise ValueError(f"{path!r}: {what} not callable ({type(made).__name__}); a grader has a __call__ method")
    return _adapt(path, made, {})


def _adapt(path: str, function: Callable[..., Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
    names = _parameters(path, function)
    if isinstance(kwargs.get("reward_kwargs"), dict) and "reward_kwargs" not in names:
        kwargs |= kwargs.pop("reward_kwargs")
    filled: Collection[str] | None  # arguments that calls fill; None: only known with the data
    if "solution_strs" in names or _takes_any(names) and len(names) == 1:
        form, filled = _batch_form(names, kwargs), PLURALS.values()
    elif "solution_str" in names:
        form, filled = _sample_form(names, kwargs), PLURALS.keys()
    elif names.keys() & set(RECOGNISED):
        conversational = kwargs.pop("conversational", None) if "conversational" not in names else None
        form, filled = _trl_form(path, names, kwargs, conversational), None
    else:
        raise ValueError(
            f"{path!r}: the arguments {', '.join(names) or '()'} are those of no grader; it needs {WANTED}"
        )
    _check_kwargs(path, "function", names, kwargs, filled)
    if not kwargs and "solution_strs" in names and (_takes_any(names) or names.keys() >= set(PLURALS.values())):
        return function
    return _grader(function, form)


def _grader(function: Callable[..., Any], form: Form) -> Callable[..., Any]:
    def grade(**rows: Sequence[Any]) -> list[Any]:
        calls, scores_of = form(rows)
        return scores_of([function(**arguments) for arguments in calls])

    async def grade_async(**rows: Sequence[Any]) -> list[Any]:
        from asyncio import gather  # here, since most grader processes never need it

        calls, scores_of = form(rows)
        return scores_of(list(await gather(*(function(**arguments) for arguments in calls))))

    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return grade_async if is_async else grade


def _batch_form(names: Parameters, kwargs: dict[str, Any]) -> Form:
    return lambda rows: ([{**_accepted(names, rows), **kwargs}], lambda results: results[0])


def _sample_form(names: Parameters, kwargs: dict[str, Any]) -> Form:
    def form(rows: Rows) -> tuple[list[dict[str, Any]], Callable[[list[Any]], list[Any]]]:
        samples = zip(*(rows[plural] for plural in PLURALS.values()), strict=True)
        calls = [{**_accepted(names, dict(zip(PLURALS, sample, strict=True))), **kwargs} for sample in samples]
        return calls, lambda results: results

    return form


def _trl_form(path: str, names: Parameters, kwargs: dict[str, Any], conversational: bool | None) -> Form:
    if conversational is None and "completions" in names:
        annotation = str(names["completions"].annotation).replace("typing.", "").lower()
        conversational = "list[list[" in annotation
    if "trainer_state" in names and _is_required(names["trainer_state"]) and "trainer_state" not in kwargs:
        raise ValueError(f"{path!r} needs trainer_state, the state of TRL's trainer, which does not exist here")

    def form(rows: Rows) -> tuple[list[dict[str, Any]], Callable[[list[Any]], list[Any]]]:
        infos = [info or {} for info in rows["extra_infos"]]
        columns = _trl_columns(rows, infos, bool(conversational))
        logged: dict[str, list[Any]] = {}
        columns["log_extra"] = lambda name, values: logged.update({name: list(values)})
        columns["log_metric"] = lambda name, value: logged.update({name: [value] * len(infos)})
        arguments = {**_accepted(names, columns), **kwargs}
        if missing := [n for n, parameter in names.items() if _is_required(parameter) and n not in arguments]:
            raise ValueError(f"{path!r} needs the columns {missing}; the rows have {sorted(columns)}")

        def scores_of(results: list[Any]) -> list[Any]:
            scores = list(results[0])
            if not logged or len(scores) != len(infos):
                return scores
            values = [dict(zip(logged, row, strict=True)) for row in zip(*logged.values(), strict=True)]
            return [{**value, "score": score} for value, score in zip(values, scores, strict=True)]

        return [arguments], scores_of

    return form


def _trl_columns(rows: Rows, infos: list[dict[str, Any]], conversational: bool) -> dict[str, Any]:
    prompts = [info.get("prompt", "") for info in infos]
    completions: list[Any] = list(rows["solution_strs"])
    if conversational or any(isinstance(prompt, list) for prompt in prompts):
        prompts = [p if isinstance(p, list) else [{"role": "user", "content": p}] for p in prompts]
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    keys = dict.fromkeys(key for info in infos for key in info if key not in ADDED)
    tokens = [info["response_ids"] for info in infos if "response_ids" in info]
    return {
        **({name: tokens for name in TOKENS} if len(tokens) == len(infos) else {}),
        "data_source": list(rows["data_sources"]),
        **{name: list(rows["ground_truths"]) for name in ("ground_truth", "answer", "solution")},
        **{key: [info.get(key) for info in infos] for key in keys},
        "prompts": prompts,
        "completions": completions,
    }


def _parameters(path: str, function: Callable[..., Any]) -> Parameters:
    try:
        names = dict(inspect.signature(function).parameters)
    except (ValueError, TypeError):
        raise ValueError(f"{path!r}: the arguments of {function!r} are unknown; wrap it in a Python function") from None
    if {p.kind for p in names.values()} == {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}:
        raise ValueError(f"{path!r} takes (*args, **kwargs), which says nothing; put functools.wraps on its decorator")
    return names


def _check_kwargs(
    path: str, role: str, names: Parameters, kwargs: dict[str, Any], filled: Collection[str] | None
) -> None:
    """Raises ValueError where kwargs names no argument, or where one is neither in kwargs nor `filled` by calls."""
    own = [n for n, parameter in names.items() if parameter.kind is not Parameter.VAR_KEYWORD]
    if not _takes_any(names) and (unknown := [name for name in kwargs if name not in own]):
        near = difflib.get_close_matches(unknown[0], own) or own
        raise ValueError(f"{path!r}: its {role} has no argument {unknown[0]!r}; it has {', '.join(near) or 'none'}")
    required = [n for n, parameter in names.items() if _is_required(parameter) and n not in kwargs]
    if filled is not None and (lacking := [n for n in required if n not in filled]):
        raise ValueError(f"{path!r}: its {role} needs {', '.join(lacking)}: give it in kwargs")


def _accepted(names: Parameters, given: Rows | dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in names or _takes_any(names)}


def _takes_any(names: Parameters) -> bool:
    return any(parameter.kind is Parameter.VAR_KEYWORD for parameter in names.values())


def _is_required(parameter: Parameter) -> bool:
    variadic = parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return parameter.default is Parameter.empty and not variadic


def _load_module(path: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{name}.".startswith(f"{missing}."):
            raise ValueError(f"{path!r}: importing {name} needs {missing!r}, which is not installed") from error
        parent, _, last = missing.rpartition(".")
        folder = getattr(sys.modules.get(parent), "__path__", None) if parent else None
        siblings = [module.name for module in pkgutil.iter_modules(folder)] if folder else []
        near = difflib.get_close_matches(last, siblings) or siblings[:10]
        where = f"{parent} has {', '.join(near)}" if near else "install it, or start where it can be imported"
        raise ValueError(f"{path!r}: there is no module {missing!r}; {where}") from None
    except Exception as error:
        raise ValueError(f"{path!r}: importing {name} failed: {type(error).__name__}: {error}") from error


def _load_file(path: str, file: Path) -> ModuleType:
    if not file.is_file():
        raise ValueError(f"{path!r}: there is no file {file.absolute()}")
    file = file.resolve()
    name = f"grader_file_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # last, so that no file beside it hides another module of that name
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):
            raise
        hint = "; name it as package.module:name" if "relative import" in str(error) else ""
        raise ValueError(f"{path!r}: running {file} failed: {type(error).__name__}: {error}{hint}") from error
    return module
