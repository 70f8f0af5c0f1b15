"""The weight gate: a request passes when the engine's weights are as new as it asks for, and waits until then.

In: the lowest weight version a request may use. Out: the version it will run with. This one rule gives strict on-policy
rollouts (each request asks for the learner's version) and bounded staleness k (it asks for the version k steps back).
While new weights are loaded the gate is closed to everyone, so no request starts on half of them.
"""

import asyncio


class Gate:
    """A gate for coroutines of one event loop.

    Args:
        version: weights that the engine starts with; None leaves the gate closed until the first `open`.
    """

    def __init__(self, version: int | None = 0):
        self.version = version
        # What each waiter asks for, in order of arrival (dicts keep it), with removal in constant time.
        self._waiters: dict[asyncio.Future[None], int] = {}

    @property
    def waiting(self) -> int:
        """Requests that wait at the gate."""
        return len(self._waiters)

    async def wait(self, min_version: int) -> int:
        """Returns the version once it is `min_version` or newer. First come, first served; may be cancelled."""
        # A loop, since the gate may close again between the wake-up and the waiter's turn to run.
        while self.version is None or self.version < min_version:
            opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters[opened] = min_version
            try:
                await opened
            finally:
                self._waiters.pop(opened, None)
        return self.version

    def close(self) -> None:
        """Holds every new request, whatever it asks for, until the next `open`."""
        self.version = None

    def open(self, version: int) -> None:
        """Lets pass, in order of arrival, all that `version` satisfies. Lower than before after a learner's resume."""
        self.version = version
        for opened, min_version in list(self._waiters.items()):
            if min_version <= version and not opened.done():
                opened.set_result(None)
