"""Failures that another start would only repeat: they end the job while restarts are left.

A UsageError says itself what the script does wrong. A script that can't be read stays so. Any other
error may be one node's or one moment's: a file system that is lost, a service that does not answer.
So it has to come twice in a row, the same at the same place, before the run has trained any step.
"""

from elastic_etcd.core.peers import blames_peers
from elastic_etcd.core.schema import Failure

TRAINED = "trained"  # in place of an error: what has run once may run again
_USAGE = "elastic_etcd.errors.UsageError: "
_UNREADABLE = ("SyntaxError: ", "IndentationError: ", "TabError: ")
# Another process, also of the world before, may have a device or its memory a while longer.
_BUSY = ("CUDA error", "HIP error", "out of memory")
_HEADER = "Traceback (most recent call last):"
_FRAME = "  File "
_LONG = 600.0  # seconds; a script has trained by then, though nobody may see its steps
_LONGEST = 400  # characters of an error that is kept


def is_usage_error(failure: Failure) -> bool:
    """Whether a worker has ended by a UsageError of this package."""
    return _error(failure)[0].startswith(_USAGE)


def noted(before: str, failure: Failure, trained: float) -> str:
    """The error that is remembered until the next failure.

    `before` is the one until now, `trained` are the seconds of all worlds since that together.
    """
    if before == TRAINED or failure.step or trained >= _LONG:
        return TRAINED
    if failure.hang or failure.code < 0 or not failure.message or blames_peers(failure):
        return ""
    error, place = _error(failure)
    if any(words in error for words in _BUSY):
        return ""
    return f"exit code {failure.code}: {error} {place}"[:_LONGEST].strip()


def why_final(before: str, now: str, failure: Failure) -> str:
    """The reason for which another start would not help, "" if it may.

    `before` and `now` are the errors that were remembered before this failure, and with it.
    """
    if is_usage_error(failure):
        return "a UsageError, which no restart mends"
    if now in ("", TRAINED):
        return ""
    if _error(failure)[0].startswith(_UNREADABLE):
        return "a script that can't be read, which no restart mends"
    return "the same error twice before the first step" if now == before else ""


def _error(failure: Failure) -> tuple[str, str]:
    """The line of the error that a worker has ended by, and where that was raised, if it says so.

    After a traceback there may be more, such as what is said at exit.
    """
    lines = failure.message.rpartition(_HEADER)[2].splitlines()
    frames = [at for at, line in enumerate(lines) if line.startswith(_FRAME)]
    if not frames:
        return next((line.strip() for line in reversed(lines) if line.strip()), ""), ""
    after = (line for line in lines[frames[-1] :] if line.strip() and not line.startswith(" "))
    return next(after, ""), lines[frames[-1]].strip()
