"""A real Prometheus scrapes a job: what agents show, the dashboard and the alerts of examples/."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from elastic_etcd.core.schema import PREFIX, History, Outcome, encode
from tests.support.debian import NotToBeHad
from tests.support.etcd import EtcdServer
from tests.support.job import ELASTIC, Agent, Job
from tests.support.prometheus import EXAMPLES, Prometheus, address_of, get, values

pytestmark = [pytest.mark.timeout(600), pytest.mark.nightly(part="jobs")]

DEADLINE = 180.0
AGENT = 'training_job="JOB",node="n1",instance="n1:9464",job="elastic_etcd"'
SERVED = 'training_job="JOB",instance="login1:8484",job="elastic_etcd_serve"'
OF_SERVE = 'instance="JOB:8484",job="elastic_etcd_serve"'
# By alert, the series by which it fires after 40 minutes, in promtool's notation.
FIRES = {
    "JobFailed": {f'outcome_timestamp_seconds{{state="failed",{SERVED}}}': "_x25 1500x60"},
    "JobDeserted": {f'job_state{{state="deserted",{SERVED}}}': "_x20 1x60"},
    "JobHangs": {f"hanging{{{AGENT}}}": "0x30 1x60"},
    "BudgetLow": {f"restart_budget_left{{{AGENT}}}": "2x20 0x60"},
    "JobDoesNotTrain": {f"world_size{{{AGENT}}}": "2x20 0x60"},
    "JobMakesNoSteps": {f"steps_total{{{AGENT}}}": "0+9x10 90x60"},
    "JobFailsOften": {f'restarts_total{{cause="failure",{AGENT}}}': "0+1x9 9x60"},
    "JobLosesTime": {f'lost_seconds_total{{cause="failure",{AGENT}}}': "0+30x60"},
    "LeaseIsNotRenewed": {f"lease_ttl_remaining_seconds{{{AGENT}}}": "5x20 0.5x60"},
    "EtcdIsAway": {f"etcd_up{{{OF_SERVE}}}": "1x20 0x60"},
    "EtcdIsSlow": {
        f'etcd_request_seconds_bucket{{le="{le}",{AGENT}}}': f"0+{each}x60"
        for le, each in (("0.5", 0), ("1.0", 9), ("+Inf", 9))
    },
}
HEALTHY = {
    f'job_state{{state="training",{SERVED}}}': "1x60",
    f'outcome_timestamp_seconds{{state="succeeded",{SERVED}}}': "1500x60",
    f'outcome_timestamp_seconds{{state="failed",{SERVED}}}': "-2000x60",
    f"hangs_total{{{AGENT}}}": "1x60",
    f"hanging{{{AGENT}}}": "1x20 0x60",
    f"etcd_up{{{OF_SERVE}}}": "1x60",
    f"restart_budget_left{{{AGENT}}}": "1x60",
    f"world_size{{{AGENT}}}": "0x20 2x60",
    f"steps_total{{{AGENT}}}": "0+9x60",
    f'restarts_total{{cause="failure",{AGENT}}}': "2x60",
    f'lost_seconds_total{{cause="failure",{AGENT}}}': "0+1x60",
    f"lease_ttl_remaining_seconds{{{AGENT}}}": "0.5x20 3.5x60",
}
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


def series(of: dict[str, str], job: str) -> list[dict[str, str]]:
    return [
        {"series": f"elastic_etcd_{name}".replace("JOB", job), "values": values}
        for name, values in of.items()
    ]


def test_o3_each_alert_fires_for_the_job_that_is_meant(tmp_path: Path) -> None:
    """Beside another one with which nothing is wrong, or not any more."""
    prometheus = had(tmp_path)
    firing = 'max by (alertname, training_job) (ALERTS{alertstate="firing"})'
    tests = [
        {
            "interval": "1m",
            "input_series": [*series(bad, "bad"), *series(HEALTHY, "healthy")],
            "promql_expr_test": [
                {
                    "expr": firing,
                    "eval_time": "40m",
                    "exp_samples": [
                        {"labels": f'{{alertname="{alert}"{of_job(alert)}}}', "value": 1}
                    ],
                }
            ],
        }
        for alert, bad in FIRES.items()
    ]
    (tmp_path / "prometheus/tests.yml").write_text(
        json.dumps({"rule_files": ["alerts.yml"], "tests": tests})
    )
    assert "SUCCESS" in prometheus.promtool("test", "rules", "tests.yml")
    text = (EXAMPLES / "alerts.yml").read_text()
    assert re.findall(r"alert: (\w+)", text) == list(FIRES)


def of_job(alert: str) -> str:
    return "" if alert == "EtcdIsAway" else ', training_job="bad"'


def had(folder: Path, *arguments: Any) -> Prometheus:
    try:
        return Prometheus(folder, *arguments)
    except NotToBeHad as reason:
        pytest.skip(str(reason))


def have_data(prometheus: Prometheus, expressions: list[str]) -> None:
    left = expressions
    deadline = time.monotonic() + DEADLINE
    while left := [expression for expression in left if not prometheus.query(expression)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


def test_a_job_that_is_watched(job: Job, etcd: EtcdServer, tmp_path: Path) -> None:
    script = (ELASTIC, "--dir", str(job.directory))
    n1, n2 = (job.start(n, script=script, metrics_addr=0) for n in ("n1", "n2"))
    g = job.trains(2, seconds=180)
    spare = job.start("n3", script=script, metrics_addr=0, start_method="exec")
    agents = [address_of(job, agent) for agent in (n1, n2, spare)]
    etcd.ctl("put", f"{PREFIX}/left/history/1", encode(History(1, "r", "the job begins")))
    over = Outcome("failed", "why", "r", 1, 3, at=datetime.now(UTC).isoformat())
    etcd.ctl("put", f"{PREFIX}/over/outcome", encode(over))
    command = [
        sys.executable,
        "-m",
        "elastic_etcd",
        "serve",
        "--listen=0",
        f"--etcd={job.endpoint}",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serve:
        try:
            assert serve.stdout
            address = serve.stdout.readline().split()[-1].removeprefix("http://").rstrip("/")
            is_scraped(job, had(tmp_path, agents, address), [n1, n2, spare], agents, g)
        finally:
            serve.kill()


def is_scraped(
    job: Job, prometheus: Prometheus, started: list[Agent], agents: list[str], g: int
) -> None:
    assert "SUCCESS" in prometheus.promtool("check", "config", "prometheus.yml")
    checked = prometheus.promtool("check", "rules", "alerts.yml")
    assert f"{len(compared())} rules found" in checked
    with prometheus.running():
        have_data(prometheus, ['count(elastic_etcd_nodes{state="spare"} == 1)', "sum(up) == 4"])
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
    job.finish(*started, seconds=120)
