"""Names of a job's keys in etcd and the JSON objects that they hold.

Every value is a JSON object with "v": 1 and sorted keys, so that
`etcdctl get --prefix /elastic_etcd/JOB` reads well. Unknown fields are ignored, malformed
values are reported by key and treated as absent. docs/keys.md shows each with an example.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VERSION = 1
PREFIX = "/elastic_etcd"
# A job or a part of a prefix that is called so could lie among another job's keys.
PARTS = frozenset(
    ("spec", "members", "generation", "round", "acks", "reports", "history", "outcome")
)
_JOB = re.compile(r"[A-Za-z0-9._-]{1,128}")
_PREFIX = re.compile(r"(/[A-Za-z0-9._-]+)+")


def valid_job(job: str) -> bool:
    """Whether `job` can be a path segment: 1 to 128 letters, digits, '.', '_' or '-'.

    None of PARTS is one: the root of one job is then never inside a folder of another's.
    """
    return _JOB.fullmatch(job) is not None and job not in (".", "..") and job not in PARTS


def valid_prefix(prefix: str) -> bool:
    """Whether `prefix` is a path of such segments: it starts with '/' and ends without."""
    whole = _PREFIX.fullmatch(prefix) is not None
    return whole and all(map(valid_job, prefix[1:].split("/")))


def hexed(lease: int) -> str:
    """A lease id as etcdctl prints it."""
    return format(lease, "016x")


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one job under `root`, which is PREFIX/JOB."""

    root: str

    @property
    def spec(self) -> str:
        return f"{self.root}/spec"

    @property
    def members(self) -> str:
        return f"{self.root}/members/"

    def member(self, lease: int) -> str:
        return f"{self.root}/members/{hexed(lease)}"

    @property
    def generation(self) -> str:
        return f"{self.root}/generation"

    @property
    def round(self) -> str:
        return f"{self.root}/round"

    def acks(self, generation: int | None = None) -> str:
        return self._of("acks", generation)

    def ack(self, generation: int, lease: int) -> str:
        return self._of("acks", generation) + hexed(lease)

    def reports(self, generation: int | None = None) -> str:
        return self._of("reports", generation)

    def report(self, generation: int, lease: int) -> str:
        return self._of("reports", generation) + hexed(lease)

    def history(self, generation: int | None = None) -> str:
        return f"{self.root}/history/" + ("" if generation is None else str(generation))

    @property
    def outcome(self) -> str:
        return f"{self.root}/outcome"

    def _of(self, kind: str, generation: int | None) -> str:
        return f"{self.root}/{kind}/" + ("" if generation is None else f"{generation}/")


def encode(fields: Mapping[str, Any]) -> str:
    """The value that a key holds: one JSON object, keys sorted; UTF-8, whatever a worker said."""
    value = json.dumps({"v": VERSION, **fields}, sort_keys=True, ensure_ascii=False)
    return value if value.isascii() else value.encode(errors="replace").decode()


def decode(value: str) -> dict[str, Any]:
    """The object in `value`; ValueError when it is none that this version understands."""
    try:
        fields = json.loads(value)
        # Half of a surrogate pair could be neither written again nor shown.
        escaped = "\\ud" in value or "\\uD" in value
        (json.dumps(fields, ensure_ascii=False) if escaped else value).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("not UTF-8") from None
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    if fields.get("v") != VERSION:
        version = str(fields.get("v"))[:40]
        raise ValueError(f"format version {version}, this program knows {VERSION}")
    return fields
