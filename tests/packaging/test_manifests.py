"""The manifests among the examples, and what the chart and the overlay make, compared with schemas.

Kubernetes' own schemas are in kubernetes-validate, JobSet's and Trainer's in kubeflow-trainer-api,
those of the Prometheus operator in cloudcoil's models. Kueue's types, a Go module, read its own.
"""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.charts import BASE, MODULES, kustomize, template
from tests.support.go_programs import built_or_skip, pinned
from tests.support.venv import ROOT, venv_or_skip

pytestmark = [
    pytest.mark.timeout(1800),  # the first time, pip has to download, and Go to build
    pytest.mark.nightly(part="kubernetes"),
]

PROGRAM = Path(__file__).with_name("manifests.py")
PACKAGES = (
    "kubernetes-validate==1.37.*",
    "kubeflow-trainer-api==2.3.*",
    "cloudcoil.models.prometheus-operator==0.80.*",
)
EXAMPLES = ROOT / "examples"
SPOILT = {
    "kubernetes/etcd.yaml": ("podManagementPolicy: Parallel", "podManagementPolicy: [Parallel]"),
    "kubernetes/etcd-tls.yaml": ("podSelector", "podSelectors"),
    "kubernetes/job-tls.yaml": ("secretName", "secretNames"),
    "kubernetes/job.yaml": ("podReplacementPolicy", "podReplacementPolicies"),
    "kubernetes/jobset.yaml": ("maxRestarts", "maxRestart"),
    "kubernetes/kueue.yaml": ("nominalQuota", "nominalQuotas"),
    "kubernetes/monitoring.yaml": ("podMetricsEndpoints", "podMetricEndpoints"),
    "kubeflow/runtime.yaml": ("livenessProbe", "livelinessProbe"),
    "kubeflow/trainjob.yaml": ("resourcesPerNode:", "resourcesByNode:"),
}


def judged(*paths: Path) -> dict[str, list[str]]:
    """What is wrong with each kind of manifest, "" where nothing is."""
    python = venv_or_skip("manifests", *PACKAGES)
    source = hashlib.sha256((MODULES / "kueue" / "main.go").read_bytes()).hexdigest()[:8]
    version = pinned(MODULES / "kueue", "sigs.k8s.io/kueue")
    kueue = built_or_skip(MODULES / "kueue", f"kueue-{version}-{source}", {"kueue": "."}) / "kueue"
    argv = [python, PROGRAM, kueue, *paths]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        told = json.loads(line)
        found.setdefault(told["kind"], []).append(told["error"])
    return found


def test_manifests_are_what_their_schemas_ask_for(tmp_path: Path) -> None:
    folders = (BASE, EXAMPLES / "kubeflow")
    paths = [p for folder in folders for p in folder.iterdir() if p.name != "kustomization.yaml"]
    for kind, errors in judged(*paths).items():
        assert set(errors) == {""}, kind
    assert {str(path.relative_to(EXAMPLES)) for path in paths} == set(SPOILT)
    for name, (right, wrong) in SPOILT.items():
        text = (EXAMPLES / name).read_text()
        assert right in text
        (tmp_path / Path(name).name).write_text(text.replace(right, wrong))
    of_spoilt = judged(*sorted(tmp_path.iterdir()))
    wrong_kinds = {kind: [e for e in errors if e] for kind, errors in of_spoilt.items()}
    assert {kind: len(errors) for kind, errors in wrong_kinds.items() if errors} == {
        "StatefulSet": 1,
        "NetworkPolicy": 1,
        "Job": 2,
        "JobSet": 1,
        "PodMonitor": 1,
        "ClusterQueue": 1,
        "ClusterTrainingRuntime": 1,
        "TrainJob": 1,
    }, of_spoilt


def test_what_is_rendered_is_what_schemas_ask_for(tmp_path: Path) -> None:
    everything = "tls.enabled=true,monitoring.enabled=true,kueue.queue=training"
    operated = "forget.enabled=true,serve.enabled=true,monitoring.enabled=true"
    made = {
        "chart": template(),
        "chart-with-all": template("--set", everything),
        "chart-with-commands": template("--set", operated),
        "overlay": kustomize(EXAMPLES / "kustomize" / "overlay"),
    }
    for name, manifests in made.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump_all(manifests))
    errors = judged(*tmp_path.iterdir())
    assert {"Job", "StatefulSet", "PodMonitor", "CronJob", "Deployment"} < errors.keys()
    assert {error for found in errors.values() for error in found} == {""}, errors
