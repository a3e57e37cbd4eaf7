"""Compares Kubernetes' manifests with the schemas that packages carry; prints what it found.

Run by test_manifests.py in an environment that has these packages. One JSON object a manifest:
its kind, and an error, or "" if it is right, or null where no package knows the kind.
"""

import json
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from cloudcoil.models.prometheus_operator import v1 as monitoring
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

VERSIONS = ("1.33", "1.37")  # the oldest that the manifests are for, the newest that is known


def built_in(manifest: dict[str, Any]) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(manifest, version, strict=True)


def jobset(manifest: dict[str, Any]) -> None:
    known = JobsetV1alpha2JobSet.from_dict(manifest)
    same(known.spec.to_dict(), manifest["spec"], "spec")
    for each in manifest["spec"]["replicatedJobs"]:
        built_in({"apiVersion": "batch/v1", "kind": "Job", **each["template"]})


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


def judge(manifest: dict[str, Any]) -> str | None:
    group = manifest["apiVersion"].partition("/")[0]
    by_group = {"jobset.x-k8s.io": jobset, "monitoring.coreos.com": operator}
    if group == "kueue.x-k8s.io":
        return None
    try:
        by_group.get(group, built_in)(manifest)
    except Exception as error:  # noqa: BLE001 - each package has its own
        return f"{type(error).__name__}: {error}"
    return ""


for path in sys.argv[1:]:
    for manifest in yaml.safe_load_all(Path(path).read_text()):
        print(json.dumps({"kind": manifest["kind"], "error": judge(manifest)}))
