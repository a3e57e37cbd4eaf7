"""What helm and kustomize make of the examples: both are Go modules, pinned in tests/packaging."""

import functools
import os
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.support.go_programs import built_or_skip, pinned
from tests.support.venv import ROOT

MODULES = ROOT / "tests" / "packaging" / "modules"
BASE = ROOT / "examples" / "kubernetes"
COMPONENTS = ROOT / "examples" / "kustomize" / "components"
CHART = ROOT / "examples" / "helm" / "elastic-etcd"
KUBERNETES = "1.33"  # a helm that is built without its makefile takes itself for an old one
PACKAGES = {
    "helm": ("helm.sh/helm/v3", "helm.sh/helm/v3/cmd/helm"),
    "kustomize": ("sigs.k8s.io/kustomize/kustomize/v5",) * 2,
}

Manifest = dict[str, Any]


@functools.cache
def program(name: str) -> Path:
    module, package = PACKAGES[name]
    version = pinned(MODULES / name, module)
    return built_or_skip(MODULES / name, f"{name}-{version}", {name: package}) / name


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = (program("helm"), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def template(*flags: str) -> list[Manifest]:
    """The chart as the release `digits`."""
    done = helm("template", "digits", CHART, "--kube-version", KUBERNETES, *flags)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def kustomize(folder: Path) -> list[Manifest]:
    command = (program("kustomize"), "build", folder)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def with_components(folder: Path, *names: str) -> list[Manifest]:
    """The base with components, as an overlay in this folder."""
    written = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(BASE, folder)],
        "components": [os.path.relpath(COMPONENTS / name, folder) for name in names],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(written))
    return kustomize(folder)
