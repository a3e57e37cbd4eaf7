"""Reads flight records of format version 1, whose rounds and ledgers counted in place of a log.

A log is made up from which the policies find those very counters, so that a recorded run is decided
once more. What is decided is compared by the counters, too: the log itself has more.
"""

import json
from typing import Any

import msgspec
from msgspec import Struct

from elastic_etcd.core.failure_policies import rapid_failures, seconds_since_restart, suspects
from elastic_etcd.core.schema import FailureKind, Ledger, Limits, Past, PastFailure, plain


def is_of_it(content: bytes) -> bool:
    """True if a flight record is of version 1."""
    return b'"rapid_failures":' in content


def converted(line: bytes) -> bytes:
    """Return a line with logs in place of counters. Raises ValueError where these fit no log."""
    return json.dumps(_walk(json.loads(line), _with_log)).encode()


def in_short(values: list[Any] | None, limits: Limits | None) -> list[Any] | None:
    """Return these actions as plain data, with counters in place of logs."""
    asked = limits or Limits(1, 1)

    def counted(fields: dict[str, Any]) -> dict[str, Any]:
        if not {"failures", "trained", "restarts"} <= fields.keys():
            return fields
        names = ("failures", "trained", "restarts")
        past = msgspec.convert({name: fields[name] for name in names}, Ledger)
        return {**fields, **dict.fromkeys(names), "counters": _counters(past, asked)}

    return values if values is None else [_walk(_plain(value), counted) for value in values]


def _plain(value: Struct) -> Any:
    return msgspec.to_builtins(value, enc_hook=int)


def _walk(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        return change({name: _walk(field, change) for name, field in value.items()})
    if isinstance(value, list | tuple):
        return [_walk(item, change) for item in value]
    return value


def _counters(past: Past, limits: Limits) -> tuple[Any, ...]:
    known = [plain(suspect) for suspect in suspects(past, limits).values()]
    since = round(seconds_since_restart(past), 3)
    return past.restarts, rapid_failures(past), since, known


def _with_log(fields: dict[str, Any]) -> dict[str, Any]:
    if "rapid_failures" not in fields:
        return fields
    of_1 = ("rapid_failures", "suspects", "early", "stalled")
    counters = {name: fields.pop(name) for name in of_1 if name in fields}
    since, known = fields["trained"], counters["suspects"]
    clock = max([since, *(suspect["since"] for suspect in known)])
    failed = [(s["node"], clock - s["since"]) for s in known for _ in range(s["failed"])]
    went = [(s["node"], clock - s["since"]) for s in known for _ in range(s["went"])]
    log = [PastFailure(node, FailureKind.GONE, at) for node, at in went]
    log += [PastFailure(node, FailureKind.ERROR, at, rapid=True) for node, at in failed]
    log.sort(key=lambda failure: failure.at)
    past = Ledger(restarts=fields["restarts"], trained=clock, failures=tuple(log))
    told = fields["restarts"], counters["rapid_failures"], since, known
    if len(counters) > 2 or _counters(past, Limits(1, 1)) != told:
        raise ValueError(f"no log has these counters: {told}, {counters}")
    return {**fields, "trained": clock, "failures": _plain(past)["failures"]}
