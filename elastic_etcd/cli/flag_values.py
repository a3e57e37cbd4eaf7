"""The texts that flags may have: each function makes a value of its text.

All of them raise ArgumentTypeError, which argparse reports with the flag's name. The Python API and
torchrun's handler read them with the flags, in their users' programs: nothing here loads the agent.
"""

from __future__ import annotations

import ipaddress
import math
import re
import signal
from argparse import ArgumentTypeError
from typing import TYPE_CHECKING

from msgspec import structs

from elastic_etcd.core import schema
from elastic_etcd.errors import UsageError

if TYPE_CHECKING:
    from elastic_etcd.agent.config import StreamChoice

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def nnodes(text: str) -> schema.Limits:
    """`N`, `MIN:MAX`, or all sizes that a world may have, `2,4,8`."""
    if not re.fullmatch(r"\d{1,9}(:\d{1,9}|(,\d{1,9})+)?", text.strip()):
        raise ArgumentTypeError(
            f"{text[:140]} is neither a number nor MIN:MAX; for example 2:8, or the list 2,4,8"
        )
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    least, most = numbers[0], numbers[-1]
    if not all(numbers):
        raise ArgumentTypeError(f"{text}: at least 1 node is needed to train")
    if "," in text:
        return schema.Limits(least, most, sizes=_ascending(text, numbers))
    if least > most:
        raise ArgumentTypeError(f"{text}: MIN is above MAX; did you mean {most}:{least}?")
    return schema.Limits(least, most)


def _ascending(text: str, numbers: list[int]) -> tuple[int, ...]:
    """These sizes, if each is above the one before it."""
    right = sorted(set(numbers))
    if len(right) > schema.MOST_SIZES:
        raise ArgumentTypeError(f"{len(right)} sizes are more than {schema.MOST_SIZES}")
    if numbers != right:
        meant = ",".join(map(str, right))
        raise ArgumentTypeError(f"{text}: each size once, from small to large: {meant}")
    return tuple(numbers)


def in_multiples(asked: schema.Limits, step: int) -> schema.Limits:
    """These limits with multiples of `step` only. Raises UsageError if none is asked for."""
    if step == 1:
        return asked
    least, most = asked.min_nodes, asked.max_nodes
    if asked.sizes:
        raise UsageError("--nnodes lists all sizes, --nodes-multiple-of says others; give one")
    first, last = least + -least % step, most - most % step
    if first > last:
        both = f"--nnodes {least}:{most} --nodes-multiple-of {step}"
        raise UsageError(f"{both}: no multiple of {step} is from {least} to {most}")
    return structs.replace(asked, min_nodes=first, max_nodes=last, multiple_of=step)


def job_id(text: str) -> str:
    """A job's id, which is one part of a key in etcd."""
    if not schema.valid_job(text):
        means = f", where {text} means something else" if text in schema.PARTS else ""
        raise ArgumentTypeError(
            f"{text[:140]!r}: a job id is 1 to 128 letters, digits, '.', '_' or '-'; it becomes a "
            f"part of a key in etcd{means}"
        )
    return text


def prefix(text: str) -> str:
    """A prefix of keys: `/a` or `/a/b`."""
    if not schema.valid_prefix(text):
        parts = [part for part in text.split("/") if part in schema.PARTS]
        own = f"; {parts[0]} is a part of a job's own keys" if parts else ""
        raise ArgumentTypeError(
            f"{text[:140]!r}: a prefix is '/' and letters, digits, '.', '_' or '-', once or "
            f"several times, without a '/' at its end; for example /elastic_etcd{own}"
        )
    return text


def printable(text: str) -> str:
    """A name that logs may show."""
    if not text.strip() or not text.isprintable() or len(text) > 255:
        raise ArgumentTypeError(
            f"{text[:140]!r} is empty, longer than 255, or has characters that cannot be shown"
        )
    return text


def filled(text: str) -> str:
    """Any text but an empty one, which a shell makes of a variable that is not set."""
    if not text.strip():
        raise ArgumentTypeError("its value is empty: is a variable not set?")
    return text


def label(text: str) -> str:
    """A name, or an empty text."""
    return printable(text) if text else text


def address(text: str) -> str:
    """A host that others can connect to, without a port; an interface; or a network with a /."""
    if "/" in text:
        try:
            return str(ipaddress.ip_network(text, strict=False))
        except ValueError:
            raise ArgumentTypeError(f"{text[:140]!r} is no network in CIDR form") from None
    if not schema.valid_address(text):
        raise ArgumentTypeError(f"{text[:140]!r} is neither a host name nor an IP address")
    _check_labels(text)
    return text


def _check_labels(host: str) -> None:
    if why := schema.wrong_label(host):
        raise ArgumentTypeError(f"{host[:140]!r}: {why}")


def listening(text: str) -> tuple[str, int]:
    """`PORT` on the loopback, `HOST:PORT` or `[IPV6]:PORT`; port 0 is any that is free."""
    host, colon, port = text.rpartition(":")
    if colon and not host:
        raise ArgumentTypeError(f"{text}: say 0.0.0.0{text} for all addresses of this machine")
    host = host.removeprefix("[").removesuffix("]") if colon else "127.0.0.1"
    if not schema.valid_address(host) or natural(port) >= 1 << 16:
        raise ArgumentTypeError(f"{text[:140]} is neither PORT nor HOST:PORT")
    _check_labels(host)
    return host, natural(port)


def notices(text: str) -> str:
    """The file of a notice of this machine's end: PATH of file:PATH."""
    if text in ("aws", "gcp", "azure"):
        raise ArgumentTypeError(
            f"{text} is gone: run examples/spot/{text}.py, which makes a file of the notice, and "
            "watch that file: file:PATH"
        )
    if not (path := text.removeprefix("file:")) or path == text:
        raise ArgumentTypeError(f"{text[:140]} is not file:PATH")
    return path


def natural(text: str) -> int:
    """An integer of at least 0."""
    if not re.fullmatch(r"\d{1,30}", text.strip()) or int(text) > schema.LARGEST:
        raise ArgumentTypeError(f"{text[:140]} is not a whole number of at least 0")
    return int(text)


def count(text: str) -> int:
    """An integer of at least 1."""
    if natural(text) < 1:
        raise ArgumentTypeError(f"{text} is below 1")
    return int(text)


def exit_code(text: str) -> int:
    """An exit status: 0 to 255."""
    if natural(text) > 255:
        raise ArgumentTypeError(f"{text} is above 255")
    return int(text)


def no_progress(text: str) -> int:
    """A number of restarts: 0 to MOST_STALLED."""
    if natural(text) > schema.MOST_STALLED:
        raise ArgumentTypeError(f"{text} is above {schema.MOST_STALLED}")
    return int(text)


def hang_timeout(text: str) -> float | None:
    """Seconds above 0; None for auto, infinity for off."""
    if text in ("auto", "off"):
        return None if text == "auto" else math.inf
    if math.isnan(_number(text)):
        raise ArgumentTypeError(
            f"{text} is neither a number of seconds, such as 60, nor auto or off"
        )
    if not (value := seconds(text)):
        raise ArgumentTypeError("0 would tell of every step; give more, or off")
    return value


def compare_every(text: str) -> str:
    """A number of commits, at least 1; auto or off."""
    if text in ("auto", "off"):
        return text
    if not 1 <= natural(text) < 10**9:
        raise ArgumentTypeError(f"{text} is not a number of commits, auto or off")
    return str(natural(text))


def straggler_factor(text: str) -> float:
    """A number above 1; 0 for off."""
    value = 0.0 if text == "off" else _number(text)
    if value and not 1 < value < schema.MOST_SECONDS:
        raise ArgumentTypeError(f"{text} is not a number above 1, or off")
    return value


def seconds(text: str) -> float:
    """A number of seconds of at least 0."""
    value = _number(text)
    if not 0 <= value < schema.MOST_SECONDS:
        raise ArgumentTypeError(f"{text} is not a number of seconds of at least 0")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def key_values(text: str) -> dict[str, str]:
    """`key=value,key=value`, as in torchrun's --rdzv-conf."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if any(not key.strip() or not value.strip() for key, _, value in pairs):
        raise ArgumentTypeError(f"{text} is not KEY=VALUE,KEY=VALUE")
    return {key.strip(): value.strip() for key, _, value in pairs}


def streams(text: str) -> StreamChoice:
    """`3`, or by local rank `0:3,1:2`, as in torchrun's --redirects."""
    from elastic_etcd.agent.config import StreamChoice, Streams  # noqa: PLC0415 - see above

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
    names = [part.strip() for part in filled(text).split(",") if part.strip()]
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


def on_or_off(text: str) -> bool:
    """`on` or `off`."""
    if text not in ("on", "off"):
        raise ArgumentTypeError(f"{text} is neither on nor off")
    return text == "on"


def truth(text: str) -> bool:
    """`1` or `0`, as torchrun's switches are written in the environment."""
    if not re.fullmatch(r"\d+", text):
        raise ArgumentTypeError("give 1 or 0")
    return int(text) != 0
