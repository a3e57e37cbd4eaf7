"""A real Prometheus scrapes a job: what agents show, the dashboard and the alerts of examples/."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.debian import NotToBeHad
from tests.support.job import ELASTIC, Job
from tests.support.prometheus import EXAMPLES, Prometheus, address_of, get, values

pytestmark = [pytest.mark.timeout(600), pytest.mark.nightly(part="jobs")]

DEADLINE = 180.0
GRAFANAS = {"$__rate_interval": "30s", "$__range": "5m", "$job": ".+"}


def drawn() -> list[str]:
    """Each expression of the dashboard, as Grafana asks it."""
    board = json.loads((EXAMPLES / "grafana.json").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    for name, value in GRAFANAS.items():
        found = [expression.replace(name, value) for expression in found]
    return found


def compared() -> list[str]:
    """Each expression of the alerts, without the comparison in which it ends."""
    text = (EXAMPLES / "alerts.yml").read_text()
    return re.findall(r"expr: (.*) (?:==|<|>=?) [\d.]+$", text, re.MULTILINE)


def have_data(prometheus: Prometheus, expressions: list[str]) -> None:
    left = expressions
    deadline = time.monotonic() + DEADLINE
    while left := [expression for expression in left if not prometheus.query(expression)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


def test_a_job_that_is_watched(job: Job, tmp_path: Path) -> None:
    script = (ELASTIC, "--dir", str(job.directory))
    n1, n2 = (job.start(n, script=script, metrics_addr=0) for n in ("n1", "n2"))
    g = job.trains(2, seconds=180)
    spare = job.start("n3", script=script, metrics_addr=0, start_method="exec")
    agents = [address_of(job, agent) for agent in (n1, n2, spare)]
    try:
        prometheus = Prometheus(tmp_path, agents)
    except NotToBeHad as reason:
        pytest.skip(str(reason))
    assert "SUCCESS" in prometheus.promtool("check", "config", "prometheus.yml")
    checked = prometheus.promtool("check", "rules", "alerts.yml")
    assert f"{len(compared())} rules found" in checked
    with prometheus.running():
        have_data(prometheus, ['count(elastic_etcd_nodes{state="spare"} == 1)', "sum(up) == 3"])
        assert get(agents[2], "/readyz") == (200, "ok\n")
        os.kill(job.worker(g, rank=1).pid, signal.SIGKILL)
        job.trains(2, after=g, seconds=180)
        have_data(prometheus, [*drawn(), *compared()])
        (rules,) = (group["rules"] for group in prometheus.ask("rules")["groups"])
        assert {rule["health"] for rule in rules} == {"ok"}
    for address in agents[:2]:
        assert [get(address, path)[0] for path in ("/healthz", "/readyz")] == [200, 200]
        seen = values(address)
        assert seen["elastic_etcd_generation"] == g + 1
        assert seen["elastic_etcd_world_size"] == 2
        assert seen['elastic_etcd_restarts_total{cause="failure"}'] == 1
        assert seen['elastic_etcd_lost_seconds_total{cause="failure"}'] > 0
        for phase in ("detect", "stop", "rendezvous", "start", "first_step"):
            assert seen[f'elastic_etcd_recovery_seconds_count{{phase="{phase}"}}'] == 1
        assert seen["elastic_etcd_steps_total"] > seen["elastic_etcd_step"] > 0
        assert seen["elastic_etcd_commit_seconds_count"] > seen["elastic_etcd_step"]
        assert 0 < seen["elastic_etcd_lease_ttl_remaining_seconds"] <= 2
    assert values(agents[2])["elastic_etcd_world_size"] == 0
    job.finish(n1, n2, spare, seconds=120)
