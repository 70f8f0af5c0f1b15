"""The program inside a sandbox that runs model code, or the tests against it. It never holds both.

The candidate's sandbox gets the model's code and, one at a time, the calls to make; an expected value never enters it.
Where a test is more than "call, compare with a literal", the test runs in a second sandbox, in which the candidate's
functions are stand-ins: each call travels, as plain data, over the grader to the candidate's sandbox and back.

To a sandbox go `marshal` frames (4 bytes of length first); from it come lines of strict JSON, since that side may lie.
Only plain values travel, each by its exact type (`encode`): a subclass of a builtin type, which could override `==`,
does not. Sent as source text, so it imports only what is quick to import.
"""

from __future__ import annotations

import builtins
import marshal
import os
import sys
from _json import encode_basestring_ascii

TYPE_CHECKING = False  # `typing` takes longer to import than Python to start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


RESULT_CHARS = 2**22  # longer results count as not plain; half of what a sandbox may send in all


class NotPlain(Exception):
    """A value that is no plain data: not None, bool, int, float, complex, str, bytes or a builtin container of them."""


class CandidateError(Exception):
    """The candidate raised an exception of its own making, or its result cannot travel."""


def encode(value: Any) -> str:
    """JSON text of a plain value; what JSON lacks is an object of one key, the type's name.

    >>> encode({1: (2.5, "a")})
    '{"dict":[[1,{"tuple":[2.5,"a"]}]]}'

    Raises:
        NotPlain: it, or something in it, is not of a builtin type.
    """
    kind = type(value)
    if value is None:
        return "null"
    if kind is bool:
        return "true" if value else "false"
    if kind is int:  # hexadecimal: linear in length, and without Python's limit on decimal digits
        return str(value) if -(2**63) < value < 2**63 else f'{{"int":"{value:x}"}}'
    if kind is float:
        return repr(value) if value - value == 0.0 else f'{{"float":"{value!r}"}}'
    if kind is str:
        return encode_basestring_ascii(value)
    if kind is list:
        return f"[{','.join([encode(item) for item in value])}]"
    if kind is tuple or kind is set or kind is frozenset:
        return f'{{"{kind.__name__}":[{",".join([encode(item) for item in value])}]}}'
    if kind is dict:
        pairs = [f"[{encode(key)},{encode(item)}]" for key, item in value.items()]
        return f'{{"dict":[{",".join(pairs)}]}}'
    if kind is bytes:
        return f'{{"bytes":"{value.hex()}"}}'
    if kind is complex:
        return f'{{"complex":[{encode(value.real)},{encode(value.imag)}]}}'
    raise NotPlain(kind.__name__)


def decode(tree: Any) -> Any:
    """The value of a tree read from `encode`'s JSON text."""
    if type(tree) is list:
        return [decode(item) for item in tree]
    if type(tree) is not dict:
        return tree
    ((kind, content),) = tree.items()
    if kind == "int":
        return int(content, 16)
    if kind == "float":
        return float(content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*decode(content))
    if kind == "dict":
        return {decode(key): decode(item) for key, item in content}
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](decode(content))


class Channel:
    """The socket to the grader."""

    def __init__(self, fd: int):
        self.fd = fd

    def read(self) -> dict[str, Any]:
        """The next message; ends the process when there is none."""
        buffer = bytearray()
        while len(buffer) < 4 or len(buffer) < 4 + int.from_bytes(buffer[:4], "big"):
            data = os.read(self.fd, 2**20)
            if not data:
                os._exit(1)
            buffer += data
        return marshal.loads(buffer[4:])

    def write(self, line: str) -> None:
        data = line.encode() + b"\n"
        while data:
            data = data[os.write(self.fd, data) :]


def run_source(source: str, name: str, namespace: dict[str, Any]) -> None:
    exec(compile(source, name, "exec", dont_inherit=True), namespace)


def main_program(channel: Channel, job: dict[str, Any]) -> None:
    """Runs {"source"} as the main program, on the sandbox's own standard streams."""
    os.close(channel.fd)
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    sys.argv = ["main.py"]
    sys.path.insert(0, os.getcwd())
    run_source(job["source"], "main.py", main.__dict__)


def attempt(action: Callable[[], Any]) -> str:
    """What came of an action: a line {"value"}, {"raised": type name} or {"not_plain"}."""
    try:
        value = action()
    except BaseException as error:
        return f'{{"raised":{encode(str(type(error).__name__))}}}'
    try:
        text = encode(value)
    except (NotPlain, RecursionError):
        return '{"not_plain":true}'
    except MemoryError:
        return '{"raised":"MemoryError"}'
    return f'{{"value":{text}}}' if len(text) <= RESULT_CHARS else '{"not_plain":true}'


def candidate(channel: Channel, job: dict[str, Any]) -> None:
    """Runs {"sources"} in one namespace, reports, then answers calls for ever.

    A call is {"name", "args"}; {"name", "expression"}, an expression that calls the function `name`; or {"encoded"},
    the JSON text of `[name, args, kwargs]`. A function that is not there is looked for in a class `Solution`.
    """
    module = type(sys)("solution")
    sys.modules["solution"] = module
    namespace = module.__dict__

    def load() -> None:
        for source in job["sources"]:
            run_source(source, "solution.py", namespace)

    def answer() -> Any:
        if "encoded" in call:
            import json

            name, args, kwargs = decode(json.loads(call["encoded"]))
        else:
            name, args, kwargs = call["name"], call.get("args"), {}
        if name not in namespace:
            if "Solution" not in namespace:
                raise NameError(name)
            namespace[name] = getattr(namespace["Solution"](), name)
        if "expression" in call:
            return eval(compile(call["expression"], "call", "eval", dont_inherit=True), namespace)
        return namespace[name](*args, **kwargs)

    channel.write(attempt(load))
    while True:
        call = channel.read()
        channel.write(attempt(answer))


def check(channel: Channel, job: dict[str, Any]) -> None:
    """Runs {"setup"}, puts stand-ins for the candidate's functions {"names"} in its place, runs {"test"}.

    Each call is a line {"call": [name, args, kwargs]}, answered by a frame {"reply": the candidate's line}; the last
    line is {"verdict": "passed" | "failed" | "broken", "detail"}. Broken: the test itself does not work.
    """
    import json

    of_candidate: list[BaseException] = []

    def stand_in(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            channel.write(f'{{"call":{encode([name, list(args), kwargs])}}}')
            reply = json.loads(channel.read()["reply"])
            if "value" in reply:
                return decode(reply["value"])
            kind: Any = getattr(builtins, str(reply.get("raised")), None)
            usual = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError)
            error = kind("raised by the candidate") if usual else CandidateError(str(reply))
            of_candidate.append(error)
            raise error

        call.__name__ = name
        return call

    namespace: dict[str, Any] = {"__name__": "check"}
    try:
        run_source(job["setup"], "setup.py", namespace)
        namespace.update((name, stand_in(name)) for name in job["names"])
        run_source(job["test"], "test.py", namespace)
        verdict, detail = "passed", ""
    except BaseException as error:
        broken = isinstance(error, NameError | ImportError | SyntaxError | NotPlain | SystemExit)
        verdict = "broken" if broken and error not in of_candidate else "failed"
        detail = f"{type(error).__name__}: {error}"
    channel.write(f'{{"verdict":{encode(verdict)},"detail":{encode(detail)}}}')


if __name__ == "__program__":
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # which come with `site`, left out to start faster
    first_channel = Channel(int(sys.argv[1]))
    first_job = first_channel.read()
    {"main_program": main_program, "candidate": candidate, "check": check}[first_job["do"]](first_channel, first_job)
