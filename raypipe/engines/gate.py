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
        # What each waiter asks for and its place, in order of arrival (dicts keep it), with removal in constant time.
        self._waiters: dict[asyncio.Future[None], tuple[int, int]] = {}

    @property
    def waiting(self) -> int:
        """Requests that wait at the gate."""
        return len(self._waiters)

    async def wait(self, min_version: int, place: int = 0) -> int:
        """Returns the version once it is `min_version` or newer. Of those that wait, lower places pass first, and of
        one place the first to come; may be cancelled."""
        # A loop, since the gate may close again between the wake-up and the waiter's turn to run.
        while self.version is None or self.version < min_version:
            opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters[opened] = (min_version, place)
            try:
                await opened
            finally:
                self._waiters.pop(opened, None)
        return self.version

    def close(self) -> None:
        """Holds every new request, whatever it asks for, until the next `open`."""
        self.version = None

    def open(self, version: int) -> None:
        """Lets pass, by place and arrival, all that `version` satisfies. Lower than before after a learner's resume."""
        self.version = version
        for opened, (min_version, _) in sorted(self._waiters.items(), key=lambda waiter: waiter[1][1]):
            if min_version <= version and not opened.done():
                opened.set_result(None)
