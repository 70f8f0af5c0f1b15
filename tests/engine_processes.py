"""The processes below an engine's actor."""

import psutil


def engine_cores(actor: psutil.Process) -> list[psutil.Process]:
    """vLLM's EngineCores of an engine, known by not being what else is below its actor. Their title is missing now and
    then: setproctitle does nothing in a process that has changed the variable which stands first in its environment,
    and Ray gives its workers theirs in any order."""
    return [child for child in actor.children(recursive=True) if "resource_tracker" not in " ".join(child.cmdline())]
