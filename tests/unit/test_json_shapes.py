"""The shapes of what `--json` prints: docs/look.schema.json has them, and each command keeps to it.

`REWRITE=1 python -m pytest tests/unit/test_json_shapes.py` writes the schema; git shows what has
changed. A field that goes, or means something else, makes query.JSON_VERSION another one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NotRequired, TypedDict

import msgspec
import pytest

from elastic_etcd.cli import query
from elastic_etcd.core.schema import Limits, Outcome, Spec, encode
from tests.support.etcd import EtcdServer
from tests.support.job import ROOT
from tests.support.jobs import FAILURE, KEYS, OVER, RUNNING

SCHEMA = ROOT / "docs" / "look.schema.json"


class Pace(TypedDict):
    step: int
    per_second: float
    doing: str


class Node(TypedDict):
    node: str
    lease: str
    state: str
    why: str
    address: str | None
    nproc: int
    group_rank: int | None
    ranks: list[int]


class NodeOfTop(Node):
    pace: Pace | None


class TrainingPlace(TypedDict):
    step: int
    commit: NotRequired[int]
    epoch: NotRequired[int]
    batch: NotRequired[int]
    indices: list[int]


class Failure(TypedDict):
    node: str
    rank: int
    local_rank: int
    pid: int
    code: int
    uptime: float
    message: str
    at: str
    hang: NotRequired[str]
    step: NotRequired[int]
    place: NotRequired[TrainingPlace]


class Ended(TypedDict):
    state: str
    reason: str
    run: str
    generation: int
    exit_code: int
    failure: Failure | None
    at: str
    command: str


class Unfit(TypedDict):
    node: str
    why: str
    at: str


class Suspect(TypedDict):
    node: str
    failed: int
    went: int
    since: float
    why: str


class World(TypedDict):
    generation: int
    run: NotRequired[str]
    began: NotRequired[str]
    began_at: NotRequired[str]
    coordinator: NotRequired[str]
    nodes: NotRequired[list[str]]
    world_size: NotRequired[int]
    restarts: NotRequired[int]
    ended: NotRequired[str]
    ended_at: NotRequired[str]
    failures: NotRequired[list[Failure]]
    hangs: NotRequired[list[str]]
    hung_at: NotRequired[list[str]]
    stragglers: NotRequired[list[str]]
    divergences: NotRequired[list[str]]
    outcome: NotRequired[Ended]
    spent: NotRequired[dict[str, float]]
    spent_before: NotRequired[dict[str, float]]


class Told(TypedDict):
    """The first fields of each."""

    version: int
    job: str
    state: str
    since: str | None
    hangs_since: str | None
    why: str
    last_words: str


class HangFile(TypedDict):
    node: str
    rank: int
    file: str


class Job(Told):
    hang_files: list[HangFile]
    repeated: str
    revision: int
    phase: str
    generation: int
    reason: str
    world_size: int
    restarts: int
    limits: dict[str, Any] | None
    coordinator: str | None
    master: str | None
    history: list[World]
    suspects: list[Suspect]
    unfit: list[Unfit]
    wanted: dict[str, Any] | None
    outcome: Ended | None
    newer: int
    malformed: list[str]


class Status(Job):
    nodes: list[Node]


class Top(Job):
    nodes: list[NodeOfTop]
    steps_per_second: float | None
    summary: list[str]
    events: list[str]


class TopOfAll(Told):
    phase: str
    generation: int
    reason: str
    restarts: int
    limits: dict[str, Any] | None
    world_size: int
    nodes: dict[str, int]
    steps_per_second: float | None


class Report(TypedDict):
    version: int
    job: str
    state: str
    run: str
    generation: int
    goodput: float | None
    seconds: float
    trained: float
    going_on: float
    hangs: float
    lost: dict[str, float]
    unknown: float
    worlds: int
    restarts: int
    planned: int
    pause: float
    steps: int
    commits: int


class Steered(TypedDict):
    version: int
    job: str
    changed: bool
    told: str


class Drained(Steered):
    node: str
    deadline: float
    left: bool


class Undrained(Steered):
    node: str


class Scaled(Steered):
    nnodes: str
    nodes: int


class Stopped(Steered):
    state: str | None


class Serve(TypedDict):
    version: int
    url: str
    shown: str


SHAPES: dict[str, Any] = {
    "status": Status,
    "wait": Status,
    "top": Top,
    "top --all": TopOfAll,
    "report": Report,
    "drain": Drained,
    "undrain": Undrained,
    "scale": Scaled,
    "stop": Stopped,
    "forget": Steered,
    "serve": Serve,
}


def schema() -> str:
    shapes = list(dict.fromkeys(SHAPES.values()))
    refs, components = msgspec.json.schema_components(shapes, ref_template="#/$defs/{name}")
    of = dict(zip(shapes, refs, strict=True))
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"elastic-etcd COMMAND --json, version {query.JSON_VERSION}",
        "properties": {command: of[shape] for command, shape in SHAPES.items()},
        "$defs": components,
    }
    return json.dumps(whole, indent=1) + "\n"


def test_the_schema_is_that_of_the_documents() -> None:
    if os.environ.get("REWRITE"):
        SCHEMA.write_text(schema())
    assert SCHEMA.read_text() == schema()


def keeps_to(shape: Any, text: str) -> Any:
    """The object in this text, which has the fields of its shape and no others."""
    read = json.loads(text)
    assert msgspec.to_builtins(msgspec.convert(read, shape, strict=True)) == read
    assert read["version"] == query.JSON_VERSION
    return read


@pytest.fixture
def call(etcd: EtcdServer, prefix: str) -> Iterator[Callable[..., str]]:
    """Runs a command in a Python that has no torch, and gives what it prints."""
    failed = Outcome("failed", "why", "r", 2, 1, FAILURE, "2026-11-21T10:03:06+00:00")
    spec = {KEYS.spec: encode(Spec("r", Limits(1, 8)))}
    for job, values in (
        ("j", RUNNING | spec),
        ("over", OVER),
        ("bad", {KEYS.outcome: encode(failed)}),
    ):
        for key, value in values.items():
            etcd.ctl("put", key.replace(KEYS.root, f"{prefix}/{job}"), value)

    def run(*argv: str) -> str:
        where = ("--etcd", etcd.endpoint, "--prefix", prefix, "--timeout", "60")
        command = [sys.executable, "-c", WITHOUT_TORCH, *argv, *where, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == (argv[:2] == ("wait", "bad")), done
        return done.stdout

    yield run
    etcd.ctl("del", "--prefix", prefix)


# As on the machine of who operates jobs and trains none.
WITHOUT_TORCH = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "rich"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from elastic_etcd.__main__ import main
sys.exit(main())
"""


def test_o12_every_command_keeps_to_its_shape_and_needs_no_torch(call: Callable[..., str]) -> None:
    for job in ("j", "over", "bad"):
        keeps_to(Status, call("status", job))
        keeps_to(Top, call("top", job))
    assert keeps_to(Status, call("wait", "bad"))["last_words"] == "RuntimeError: why"
    for line in call("top", "--all").splitlines():
        keeps_to(TopOfAll, line)
    for job in ("j", "over"):
        keeps_to(Report, call("report", job))
    assert all(json.loads(line) for line in call("events", "j").splitlines())
    keeps_to(Drained, call("drain", "j", "n1"))
    keeps_to(Scaled, call("scale", "j", "1:4"))
    keeps_to(Undrained, call("undrain", "j", "n9"))
    keeps_to(Stopped, call("stop", "j"))
    keeps_to(Steered, call("forget", "over"))
