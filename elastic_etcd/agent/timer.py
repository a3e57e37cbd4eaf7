"""The one way in which an agent's parts wait for a moment of the event loop's clock."""

import asyncio
from collections.abc import Callable


class Timer:
    """Calls once after some seconds, unless it is cancelled or set anew before that."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    def start(self, seconds: float, call: Callable[..., object], *args: object) -> None:
        """Set it anew."""
        self.cancel()
        self._handle = asyncio.get_running_loop().call_later(seconds, call, *args)

    def start_once(self, seconds: float, call: Callable[..., object], *args: object) -> None:
        """Set it, unless it is set and was not cancelled, even if it has called since."""
        if self._handle is None:
            self.start(seconds, call, *args)

    def cancel(self) -> None:
        """Take it back."""
        if self._handle:
            self._handle.cancel()
            self._handle = None


class Respawn:
    """Starts a process again when it has died: more and more slowly, if it dies soon each time."""

    def __init__(self, start: Callable[[], object], quiet: float, slowest: float) -> None:
        self._start = start
        self._quiet = quiet  # seconds: one that has lived so long is replaced at once
        self._slowest = slowest
        self._delay = self._since = 0.0
        self._timer = Timer()

    def started(self) -> None:
        """Count its life from here on."""
        self._since = asyncio.get_running_loop().time()

    def again(self) -> str:
        """Start it again, soon; gives the words for when."""
        if asyncio.get_running_loop().time() - self._since > self._quiet:
            self._delay = 0.0
        when = f"in {self._delay:.0f} s" if self._delay else "now"
        self._timer.start(self._delay, self._start)
        self._delay = min(self._slowest, max(1.0, 2 * self._delay))
        return when

    def cancel(self) -> None:
        """Start it no more."""
        self._timer.cancel()
