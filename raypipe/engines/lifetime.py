"""Ties vLLM's processes to the engine actor: however the actor ends, no EngineCore stays behind with its memory.

vLLM ends its processes when its front end closes in good order, and Ray ends the children of an actor that dies.
Neither helps when Ray's own daemon goes down at the same time (`ray stop --force`, a node out of memory), and an
orphaned EngineCore holds a whole GPU. So every vLLM worker process watches the actor's process itself.
"""

import contextlib
import os
import select
import signal
import threading

# Environment variable through which vLLM's processes know the engine actor's process id.
ENGINE_PID = "RAYPIPE_ENGINE_PID"


def die_with_engine() -> None:
    """Starts a thread that kills this process, and the EngineCore it works for, once the engine actor is gone."""
    engine, parent = int(os.environ[ENGINE_PID]), os.getppid()
    try:
        handle = os.pidfd_open(engine)
    except ProcessLookupError:  # gone before this process was up
        os.kill(os.getpid(), signal.SIGKILL)
        return
    threading.Thread(target=_watch, args=(handle, engine, parent), name="die-with-engine", daemon=True).start()


def _watch(handle: int, engine: int, parent: int) -> None:
    gone = select.poll()
    gone.register(handle, select.POLLIN)
    gone.poll()
    # With tensor parallelism the parent is the EngineCore. Were it dead, getppid() would be a stranger (init, say).
    if parent != engine and os.getppid() == parent:
        with contextlib.suppress(ProcessLookupError):
            os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
