"""The manifests of examples/kubernetes, compared with the schemas that packages carry.

Kubernetes' own schemas are in kubernetes-validate, JobSet's in kubeflow-trainer-api, those of the
Prometheus operator in cloudcoil's models. Nothing that pip or npm can get has Kueue's.
"""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.venv import ROOT, venv_or_skip

pytestmark = [
    pytest.mark.timeout(600),  # the first time, pip has to download
    pytest.mark.nightly(part="kubernetes"),
]

PROGRAM = Path(__file__).with_name("manifests.py")
FOLDER = ROOT / "examples" / "kubernetes"
PACKAGES = (
    "kubernetes-validate==1.37.*",
    "kubeflow-trainer-api==2.3.*",
    "cloudcoil.models.prometheus-operator==0.80.*",
)
WITHOUT_SCHEMA = {"ResourceFlavor", "ClusterQueue", "LocalQueue"}
SPOILT = {
    "etcd.yaml": ("podManagementPolicy: Parallel", "podManagementPolicy: [Parallel]"),
    "etcd-tls.yaml": ("podSelector", "podSelectors"),
    "job-tls.yaml": ("secretName", "secretNames"),
    "job.yaml": ("podReplacementPolicy", "podReplacementPolicies"),
    "jobset.yaml": ("maxRestarts", "maxRestart"),
    "kueue.yaml": ("livenessProbe", "livelinessProbe"),
    "monitoring.yaml": ("podMetricsEndpoints", "podMetricEndpoints"),
}


def judged(*paths: Path) -> dict[str, list[str | None]]:
    """What is wrong with each kind of manifest: "", or None where there is no schema."""
    python = venv_or_skip("manifests", *PACKAGES)
    argv = [python, PROGRAM, *paths]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str | None]] = {}
    for line in done.stdout.splitlines():
        told = json.loads(line)
        found.setdefault(told["kind"], []).append(told["error"])
    return found


def test_manifests_are_what_their_schemas_ask_for(tmp_path: Path) -> None:
    paths = sorted(FOLDER.iterdir())
    for kind, errors in judged(*paths).items():
        assert set(errors) == ({None} if kind in WITHOUT_SCHEMA else {""}), kind
    assert {path.name for path in paths} == set(SPOILT)
    for name, (right, wrong) in SPOILT.items():
        text = (FOLDER / name).read_text()
        assert right in text
        (tmp_path / name).write_text(text.replace(right, wrong))
    of_spoilt = judged(*sorted(tmp_path.iterdir()))
    wrong_kinds = {kind: [e for e in errors if e] for kind, errors in of_spoilt.items()}
    assert {kind: len(errors) for kind, errors in wrong_kinds.items() if errors} == {
        "StatefulSet": 1,
        "NetworkPolicy": 1,
        "Job": 3,
        "JobSet": 1,
        "PodMonitor": 1,
    }, of_spoilt
