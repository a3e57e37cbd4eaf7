"""The one way in which an agent's parts wait for a moment of the event loop's clock."""

import asyncio
from collections.abc import Callable


class Timer:
    """Calls once after some seconds, unless it is cancelled or set anew before that."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    @property
    def at(self) -> float | None:
        """The moment that it is set to, also when that is over; None unless it is set."""
        return self._handle.when() if self._handle else None

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
