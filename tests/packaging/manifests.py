"""Compares Kubernetes' manifests with the schemas that packages carry; prints what it found.

Run by test_manifests.py in an environment that has these packages: manifests.py KUEUE FILE…, where
the first is the program of modules/kueue. One JSON object a manifest: its kind, and an error, or ""
if it is right.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from cloudcoil.models.prometheus_operator import v1 as monitoring
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_cluster_training_runtime import (
    TrainerV1alpha1ClusterTrainingRuntime,
)
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

VERSIONS = ("1.33", "1.37")  # the oldest that the manifests are for, the newest that is known


def built_in(manifest: dict[str, Any]) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(manifest, version, strict=True)


def jobset(manifest: dict[str, Any]) -> None:
    known = JobsetV1alpha2JobSet.from_dict(manifest)
    same(known.spec.to_dict(), manifest["spec"], "spec")
    jobs_of(manifest["spec"])


def jobs_of(spec: dict[str, Any]) -> None:
    for each in spec["replicatedJobs"]:
        built_in({"apiVersion": "batch/v1", "kind": "Job", **each["template"]})


def trainer(manifest: dict[str, Any]) -> None:
    if manifest["kind"] == "TrainJob":
        known = TrainerV1alpha1TrainJob.from_dict(manifest)
    else:
        known = TrainerV1alpha1ClusterTrainingRuntime.from_dict(manifest)
        jobs_of(manifest["spec"]["template"]["spec"])
    same(known.spec.to_dict(), manifest["spec"], "spec")


def kueue(manifest: dict[str, Any]) -> None:
    told = subprocess.check_output([sys.argv[1]], input=json.dumps([manifest]), text=True)
    (error,) = json.loads(told)
    if error:
        raise ValueError(error)


def operator(manifest: dict[str, Any]) -> None:
    known = getattr(monitoring, manifest["kind"]).model_validate(manifest)
    told = known.model_dump(mode="json", by_alias=True, exclude_unset=True)
    same(told["spec"], manifest["spec"], "spec")


def same(known: Any, given: Any, where: str) -> None:
    """Raises ValueError at what a model has not taken: it leaves out what it does not know."""
    if isinstance(given, dict):
        for key in given:
            if key not in known:
                raise ValueError(f"{where}.{key} is unknown")
            same(known[key], given[key], f"{where}.{key}")
    elif isinstance(given, list):
        for index, (a, b) in enumerate(zip(known, given, strict=True)):
            same(a, b, f"{where}[{index}]")


BY_GROUP = {
    "jobset.x-k8s.io": jobset,
    "kueue.x-k8s.io": kueue,
    "monitoring.coreos.com": operator,
    "trainer.kubeflow.org": trainer,
}


def judge(manifest: dict[str, Any]) -> str:
    group = manifest["apiVersion"].partition("/")[0]
    try:
        BY_GROUP.get(group, built_in)(manifest)
    except Exception as error:  # noqa: BLE001 - each package has its own
        return f"{type(error).__name__}: {error}"
    return ""


for path in sys.argv[2:]:
    for manifest in yaml.safe_load_all(Path(path).read_text()):
        print(json.dumps({"kind": manifest["kind"], "error": judge(manifest)}))
