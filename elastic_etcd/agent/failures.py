"""The cause of a worker's failure, by its torchelastic error file or its last words.

All of it is pure, but for reading that file and the kernel's, and for writing the agent's own.
"""

import json
import re
import signal
import time
from contextlib import suppress
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

from elastic_etcd.errors import ElasticEtcdError
from elastic_etcd.system.limits import oom_kills

_LONGEST = 1 << 13
_LARGEST = 1 << 24  # no error file is as long
# torch.distributed puts "[rank0]: " before the lines of an uncaught exception, and once more for
# each process group that there was.
_RANK = re.compile(r"^(\[rank\d+\]: ?)+")
_HEADER, _GROUP = "Traceback (most recent call last):", "  + Exception Group "
_LINKS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_IGNORED = "Exception ignored in"
_OTHER = re.compile(rf"\[?[IWEF]\d{{4}} |{_IGNORED}")  # torch's log, in C++ and in Python
# By which the interpreter and C++ begin what they say of a signal that ends the process.
_FATAL = re.compile(r"Fatal Python error: |terminate called ")
_LAST = 10  # lines
_NO_MEMORY = (
    "out of memory: the kernel has killed it, or a process that it started (oom_kill of its cgroup "
    "has grown by {}); give this node more, or let it need less: smaller batches, fewer workers"
)


def failure_message(code: int, error_file: str, stderr: bytes, oom_kills_before: int) -> str:
    """The cause of exit `code`, "" when it is not known or there was no failure; at most 8 KiB.

    `stderr` is the end of the worker's standard error, `oom_kills_before` the count at its start.
    """
    if code == 0:
        return ""
    message = _from_file(error_file) or _last_words(code, stderr.decode(errors="replace"))
    # A DataLoader says so of a process of its own.
    killed = code == -signal.SIGKILL or "killed by signal: Killed" in message
    if killed and (more := oom_kills() - oom_kills_before) > 0:
        told = _NO_MEMORY.format(more)  # before the worker's own words, which are cut for it
        message = f"{told}\n{message[len(told) + 1 - _LONGEST :]}"
    return message[-_LONGEST:].strip().encode(errors="replace").decode()  # of JSON: any surrogate


def write_error_file(path: str, error: ElasticEtcdError) -> None:
    """Tell who has started this agent why it ends, in torch's form; torchrun does so, too.

    If a worker is the cause it has what the worker's own error file has.
    """
    text = str(error)
    message, stack, when, code = error.cause or (text, text, "", error.exit_code)
    at = time.time()
    with suppress(ValueError):  # anybody may have written it
        at = datetime.fromisoformat(when).timestamp()
    extra = {"py_callstack": stack, "timestamp": str(int(at))}
    record = {"message": {"message": message, "errorCode": code, "extraInfo": extra}}
    with suppress(OSError):  # the error is also on the console
        Path(path).write_text(json.dumps(record))


def _last_words(code: int, text: str) -> str:
    """The last traceback and the lines after it, or the last lines if there is none.

    A traceback may be of an exception that was caught, long before the script gave up by
    `sys.exit("...")`, or C++ by a signal.
    """
    traceback, end = last_traceback(text)
    ended = text.splitlines(keepends=True)[end:]
    if traceback:
        ended = [*takewhile(lambda line: not line.startswith(_IGNORED), ended)]
    # A line of a progress bar that ends with a return was written over.
    said = [line.rstrip() for line in ended if line.strip() and not line.endswith("\r")]
    said = [line for line in said if not _OTHER.match(line)]
    fatal = [at for at, line in enumerate(said) if _FATAL.match(line)] if code < 0 else []
    first = fatal[-1] if fatal else max(0, len(said) - _LAST)
    return "\n".join([*([traceback] if traceback else []), *said[first : first + _LAST]])


def last_traceback(text: str) -> tuple[str, int]:
    """The last traceback, with the exceptions that led to its own, and the line after it.

    Those of exceptions that Python ignored while it shut down are no cause of anything.
    """
    lines = text.splitlines()
    bare = [_RANK.sub("", line) for line in lines]
    headers = [at for at, line in enumerate(bare) if line.removeprefix(_GROUP) == _HEADER]
    while headers:
        start = last = headers.pop()
        while headers and _before(bare, start) in _LINKS:
            start = headers.pop()
        if not (start and bare[start - 1].startswith(_IGNORED)):
            end = _end(lines, bare, last)
            return "\n".join(bare[start:end]), end
    return "", 0


def _before(bare: list[str], start: int) -> str:
    """The last line before `start`, without the empty ones."""
    return next((line for line in reversed(bare[:start]) if line.strip()), "").strip()


def _end(lines: list[str], bare: list[str], start: int) -> int:
    """The end of the traceback that begins at `start`.

    Text behind an empty line may belong to its exception's message, or be output that came after:
    that is longer. With ranks each line says to whom it belongs.
    """
    ranked = _RANK.match(lines[start]) is not None
    end = first = start + 1  # after all of it, and before its first empty line
    for at in range(start + 1, len(lines)):
        if not bare[at].strip():
            continue
        if ranked != (_RANK.match(lines[at]) is not None) or _OTHER.match(bare[at]):
            break
        first = at + 1 if first == at else first
        end = at + 1
    return end if ranked or sum(map(len, bare[first:end])) < _LONGEST else first


def _from_file(path: str) -> str:
    """The message that torch's ErrorHandler wrote there (plain strings and objects, by now)."""
    try:
        with Path(path).open("rb") as file:
            record = json.loads(file.read(_LARGEST))
    except (OSError, ValueError, RecursionError):  # none, or cut off by the worker's death
        return ""
    message = _get(record, "message")
    if isinstance(message, str):
        return message
    stack = _get(_get(message, "extraInfo"), "py_callstack")
    cause = stack if isinstance(stack, str) and stack.strip() else _get(message, "message")
    return cause if isinstance(cause, str) else ""


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None
