"""What a flag's text may be, and what it means; a bad one says what would be good."""

from __future__ import annotations

import math
import re
import signal
from argparse import ArgumentTypeError

from elastic_etcd.agent.config import StreamChoice, Streams
from elastic_etcd.core.keys import PARTS, valid_job, valid_prefix
from elastic_etcd.core.values import valid_host

_PARTS = ", ".join(sorted(PARTS))
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def nnodes(text: str) -> tuple[int, int]:
    """`N` or `MIN:MAX`."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if match is None:
        raise ArgumentTypeError(f"{text} is neither a number nor MIN:MAX; for example 2:8")
    least, most = int(match[1]), int(match[2] or match[1])
    if least < 1:
        raise ArgumentTypeError(f"{text}: at least 1 node is needed to train")
    if least > most:
        raise ArgumentTypeError(f"{text}: MIN is above MAX; did you mean {most}:{least}?")
    return least, most


def job_id(text: str) -> str:
    """A job's id, which is one part of a key in etcd."""
    if not valid_job(text):
        raise ArgumentTypeError(
            f"{text[:140]!r}: a job id is 1 to 128 letters, digits, '.', '_' or '-'; it becomes a "
            f"part of a key in etcd, where {_PARTS} mean something else"
        )
    return text


def prefix(text: str) -> str:
    """A prefix of keys: `/a` or `/a/b`."""
    if not valid_prefix(text):
        raise ArgumentTypeError(
            f"{text[:140]!r}: a prefix is '/' and letters, digits, '.', '_' or '-', once or "
            f"several times, without a '/' at its end; for example /elastic_etcd. {_PARTS} are "
            "parts of a job's own keys"
        )
    return text


def name(text: str) -> str:
    """A name that is shown in logs."""
    if not text.strip() or not text.isprintable() or len(text) > 255:
        raise ArgumentTypeError(
            f"{text[:140]!r} is empty, longer than 255, or has characters that cannot be shown"
        )
    return text


def label(text: str) -> str:
    """A name, or none."""
    return name(text) if text else text


def address(text: str) -> str:
    """What other nodes can connect to, without a port."""
    if not valid_host(text):
        raise ArgumentTypeError(f"{text[:140]!r} is neither a host name nor an IP address")
    return text


def natural(text: str) -> int:
    """An integer of at least 0."""
    if not re.fullmatch(r"\d+", text.strip()):
        raise ArgumentTypeError(f"{text} is not a whole number of at least 0")
    return int(text)


def count(text: str) -> int:
    """An integer of at least 1."""
    if natural(text) < 1:
        raise ArgumentTypeError(f"{text} is below 1")
    return int(text)


def seconds(text: str) -> float:
    """A time of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ArgumentTypeError(f"{text} is not a number of seconds of at least 0")
    return value


def key_values(text: str) -> dict[str, str]:
    """`key=value,key=value`, as in torchrun's --rdzv-conf."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if any(not key.strip() or not value.strip() for key, _, value in pairs):
        raise ArgumentTypeError(f"{text} is not KEY=VALUE,KEY=VALUE")
    return {key.strip(): value.strip() for key, _, value in pairs}


def streams(text: str) -> StreamChoice:
    """`3`, or by local rank `0:3,1:2`, as in torchrun's --redirects."""
    if re.fullmatch(r"[0-3]", text):
        return StreamChoice(Streams(int(text)))
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise ArgumentTypeError(
            f"{text}: give 0 none, 1 stdout, 2 stderr or 3 both, or by local rank like 0:3,1:2"
        )
    pairs = (pair.split(":") for pair in text.split(","))
    return StreamChoice(by_local_rank=tuple((int(rank), Streams(int(s))) for rank, s in pairs))


def ranks(text: str) -> frozenset[int] | None:
    """Local ranks, `0,1`; empty means all."""
    if not text:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ArgumentTypeError(f"{text} is not a list of local ranks like 0,1,2")
    return frozenset(int(rank) for rank in text.split(","))


def signals(text: str) -> tuple[signal.Signals, ...]:
    """Names of signals, `SIGTERM,SIGINT`."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [part for part in names if part not in signal.Signals.__members__]
    if unknown or {"SIGKILL", "SIGSTOP", "SIGCHLD"} & set(names):
        raise ArgumentTypeError(f"{text}: not all are names of signals that can be handled")
    return tuple(dict.fromkeys(signal.Signals[part] for part in names))


def modules(text: str) -> list[str]:
    """Names of modules, with commas between them."""
    names = [name.strip() for name in text.split(",")]
    wrong = [name for name in names if not all(part.isidentifier() for part in name.split("."))]
    if wrong:
        raise ArgumentTypeError(f"{wrong[0]!r} is no module's name")
    return names


def log_level(text: str) -> str:
    """A level of Python's logging, in any case."""
    if text.upper() not in _LOG_LEVELS:
        raise ArgumentTypeError(f"{text}: give one of {', '.join(_LOG_LEVELS).lower()}")
    return text.upper()


def truth(text: str) -> bool:
    """`1` or `0`: torchrun's switches in the environment."""
    if not re.fullmatch(r"\d+", text):
        raise ArgumentTypeError("give 1 or 0")
    return int(text) != 0
