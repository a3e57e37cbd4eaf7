"""Memory of a sharded state's last commit: what `status` and metrics say of it."""

import json
from typing import Any

from elastic_etcd.__main__ import main
from tests.support.job import ROOT, Job
from tests.support.prometheus import address_of, values

EXAMPLE = str(ROOT / "examples" / "fsdp2_elastic.py")
SMALL = ("--epochs=100000", "--samples=512", "--width=64", "--depth=2", "--commit-every=1")


def test_status_and_metrics_say_what_each_node_holds(job: Job, capsys: Any) -> None:
    def status(*arguments: str) -> str:
        assert main(["status", job.name, "--etcd", str(job.endpoint), *arguments]) == 0
        return str(capsys.readouterr().out)

    def copied() -> bool:
        told: dict[str, Any] = json.loads(status("--json"))
        held = [node["commit_bytes"] for node in told["nodes"]]
        full = len(held) == 2 and all(each and whole(**each) for each in held)
        return full and told["commit_nodes"] == 2

    def whole(own: int, copies: int) -> bool:
        """Both have the same number of commits, which is not so within one: own is written first.

        A node's own has the replicated values, too.
        """
        return 1 << 18 < copies < own < 2 * copies

    def alone() -> str | None:
        told = status()
        return told if "each piece of the last one is on 1 node" in told else None

    n1, n2 = (job.start(name, script=(EXAMPLE, *SMALL), metrics_addr=0) for name in ("n1", "n2"))
    job.said(n1, "generation 1 (", 180)
    job.wait("both hold copies", copied, 180)
    shown = status()
    assert "the last commits are in " in shown
    assert " of its own, " in shown
    assert "each piece of the last one is on 2 nodes" in shown
    found = values(address_of(job, n1))
    assert found["elastic_etcd_commit_nodes"] == 2
    assert found['elastic_etcd_commit_bytes{of="own"}'] > 1 << 18
    assert found['elastic_etcd_commit_bytes{of="copies"}'] > 1 << 18
    n2.node_kill()
    job.wait("n1 goes on alone", alone, 180)
    job.abandoned = True
    n1.terminate()
    job.exits(n1, 143)
