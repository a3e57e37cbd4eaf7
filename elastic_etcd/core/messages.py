"""What an agent and its workers say to each other: one JSON object a line, at most 64 KiB.

docs/channel.md shows each message. Both ends check what they hear against these tables: each
field that must be there, with its type; what else is there is ignored.
"""

import json
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, TypeAlias

VERSION = 1
LONGEST = 1 << 16
_TEXT = 1 << 12  # characters, each of which may become twelve bytes
Table: TypeAlias = Mapping[str, Mapping[str, type | UnionType]]

FROM_WORKER: Table = {
    "hello": {"v": int, "pid": int, "local_rank": int, "generation": int},
    "elastic": {},
    "parked": {"generation": int, "error": str},
    "keep": {"id": int, "name": str},
    "recall": {"id": int, "name": str},
    "current": {"id": int},
}
FROM_AGENT: Table = {
    "welcome": {"v": int},
    "kept": {"id": int, "name": str},
    "recalled": {"id": int, "name": str, "found": bool},
    "current": {"id": int, "current": bool | None, "reason": str},
    "change": {"generation": int, "reason": str, "leaving": bool},
    "interrupt": {"generation": int, "reason": str},
    "world": {"generation": int, "reason": str, "env": dict},
    "bye": {"reason": str},
}


def encode(message: Mapping[str, Any]) -> bytes:
    """One line; a long reason or error is cut. Raises ValueError for a line above LONGEST."""
    cut = {name: message[name][:_TEXT] for name in ("reason", "error") if name in message}
    message = {**message, **cut}
    line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
    if len(line) > LONGEST:
        raise ValueError(f"a {message.get('type')} of {len(line)} bytes, {LONGEST} are allowed")
    return line


def decode(line: bytes, table: Table) -> dict[str, Any]:
    """The message in a line. Raises ValueError that says what is wrong with it."""
    try:
        message = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError("no JSON object")
    fields = table.get(str(message.get("type")))
    if fields is None:
        raise ValueError(f"no such type: {str(message.get('type'))[:40]!r}")
    for name, kind in fields.items():
        value = message.get(name, ...)
        # To Python True is an int.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{message['type']} with a wrong or missing {name!r}")
    return message


class Lines:
    """Cuts a stream of bytes into lines. Raises ValueError for one longer than LONGEST."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def __bool__(self) -> bool:
        """Whether a line has begun and not ended."""
        return bool(self._rest)

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The lines that are complete with this chunk, without their ends."""
        self._rest += chunk
        while (end := self._rest.find(b"\n")) >= 0:
            line = bytes(self._rest[:end])
            del self._rest[: end + 1]
            if end >= LONGEST:
                break
            yield line
        else:
            end = len(self._rest)
        if end >= LONGEST:
            raise ValueError(f"a line of more than {LONGEST} bytes")
