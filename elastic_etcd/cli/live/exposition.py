"""Jobs as Prometheus reads them from `elastic-etcd serve`, also when no agent is left to tell."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from elastic_etcd.cli import query
from elastic_etcd.protocol.messages import UNCOUNTED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Those of which agents tell, too, have the same meaning there: agent/followers/metrics.py.
_GAUGES = {
    "job_state": "1; what the job does, or how it has ended.",
    "generation": "The newest generation of the job.",
    "world_size": "Ranks of the world that trains; 0: none.",
    "nodes": "Nodes by state.",
    "restart_budget_left": "Failures that the job still survives.",
    "outcome_timestamp_seconds": "When the job has ended, by its outcome, in seconds since 1970.",
}


def exposition(jobs: Iterable[dict[str, Any]]) -> str:
    """These jobs, as `status.in_short` gives them, in Prometheus' text format."""
    lines: dict[str, list[str]] = {name: [] for name in _GAUGES}
    for short in jobs:
        for name, state, value in _samples(short):
            labels = {"training_job": short["job"]} | ({"state": state} if state else {})
            of = ",".join(f"{label}={_quoted(value_of)}" for label, value_of in labels.items())
            lines[name].append(f"elastic_etcd_{name}{{{of}}} {value}")
    return "".join(
        f"# HELP elastic_etcd_{name} {text}\n# TYPE elastic_etcd_{name} gauge\n"
        + "".join(f"{line}\n" for line in lines[name])
        for name, text in _GAUGES.items()
    )


def _quoted(text: str) -> str:
    """A label's value: of what can be shown JSON quotes the same characters as Prometheus."""
    return json.dumps(query.in_one_line(text), ensure_ascii=False)


def _samples(short: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """The name, the label `state` and the value of each that there is of a job."""
    state = short["state"]
    yield "job_state", state, 1
    if state not in ("training", "forming", "deserted"):
        yield "outcome_timestamp_seconds", state, query.seconds_of(short["since"]) or 0
    if state not in ("training", "forming"):
        return
    yield "generation", "", short["generation"]
    yield "world_size", "", short["world_size"]
    for each, count in short["nodes"].items():
        yield "nodes", each, count
    most = short["limits"]["max_restarts"] if short["limits"] else 0
    if 0 < most < UNCOUNTED:
        yield "restart_budget_left", "", most - short["restarts"]
