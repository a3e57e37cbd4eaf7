"""Jobs as Prometheus reads them from `elastic-etcd serve`, also when no agent is left to tell."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from elastic_etcd.cli import query
from elastic_etcd.core.schema import seconds_of
from elastic_etcd.protocol.messages import UNCOUNTED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Those of which agents tell, too, have the same meaning there: agent/followers/metrics.py.
_GAUGES = {
    "job_state": "1; what the job does, or how it has ended.",
    "generation": "The newest generation of the job.",
    "world_size": "Ranks of the world that trains; 0: none.",
    "hanging": "1: workers of the job hang now, as far as they were told to; 0: none.",
    "nodes": "Nodes by state.",
    "restart_budget_left": "Failures that the job still survives.",
    "outcome_timestamp_seconds": "When the job has ended, by its outcome, in seconds since 1970.",
}


def exposition(jobs: Sequence[dict[str, Any]], *, etcd_up: bool) -> str:
    """These jobs, as `status.in_short` gives them, in Prometheus' text format."""
    samples = [sample for short in jobs for sample in _samples(short)]
    up = "elastic_etcd_etcd_up"
    text = "1: etcd answers; 0: what is told of jobs is as it was before."
    lines = [f"# HELP {up} {text}", f"# TYPE {up} gauge", f"{up} {int(etcd_up)}"]
    for name, text in _GAUGES.items():
        lines += [f"# HELP elastic_etcd_{name} {text}", f"# TYPE elastic_etcd_{name} gauge"]
        for job, of, state, value in samples:
            # Of what can be shown JSON quotes the same characters as Prometheus.
            quoted = json.dumps(query.in_one_line(state), ensure_ascii=False)
            more = f",state={quoted}" if state else ""
            if of == name:
                lines.append(f'elastic_etcd_{name}{{training_job="{job}"{more}}} {value}')
    return "".join(f"{line}\n" for line in lines)


def _samples(short: dict[str, Any]) -> Iterator[tuple[str, str, str, float]]:
    """The job, the name, the label `state` and the value of each that there is of a job."""
    job, state = short["job"], short["state"]
    yield job, "job_state", state, 1
    if state not in ("training", "forming", "deserted"):
        yield job, "outcome_timestamp_seconds", state, seconds_of(short["since"]) or 0
    if state not in ("training", "forming"):
        return
    yield job, "generation", "", short["generation"]
    yield job, "world_size", "", short["world_size"]
    yield job, "hanging", "", int(short["hangs_since"] is not None)
    yield from ((job, "nodes", each, count) for each, count in short["nodes"].items())
    most = short["limits"]["max_restarts"] if short["limits"] else 0
    if 0 < most < UNCOUNTED:
        yield job, "restart_budget_left", "", most - short["restarts"]
