"""The files from which a release and its image are made agree with each other."""

import json
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import yaml
from packaging.requirements import Requirement

from elastic_etcd import __version__

ROOT = Path(__file__).parents[2]


def pinned(file: str) -> dict[str, str]:
    """The version of each package, by its name as an index has it."""
    lines = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / file).read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in lines}


def test_o11_hashes_are_those_of_the_versions_that_are_tested() -> None:
    locked = pinned("scripts/locked.txt")
    assert locked.items() <= pinned("scripts/constraints.txt").items(), "scripts/lock"
    assert {"grpcio", "msgspec", "prometheus-client", "protobuf", "xxhash"} <= locked.keys()
    assert "torch" not in locked


def test_o11_the_parts_are_all_that_is_locked_and_torch() -> None:
    made = json.loads(subprocess.check_output([sys.executable, ROOT / "scripts" / "sbom.py"]))
    for each in made["components"]:
        assert all(each["licenses"]), each["name"]
        if each["name"] != "torch":
            assert each["externalReferences"][0]["hashes"]
    parts = {each["name"]: each["version"] for each in made["components"]}
    torch = {"torch": pinned("scripts/constraints.txt")["torch"]}
    assert parts == pinned("scripts/locked.txt") | torch
    needs = {each["ref"]: each["dependsOn"] for each in made["dependencies"]}
    wheel = made["metadata"]["component"]
    assert wheel["licenses"] == [{"expression": "Apache-2.0"}]
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    of_image = [extras[name] for name in ("metrics", "web")]
    asked = "".join([setup["options"]["install_requires"], *of_image])
    names = {Requirement(line).name for line in asked.splitlines() if line}
    known = {each["bom-ref"]: each["name"] for each in made["components"]}
    assert {known[each] for each in needs[wheel["bom-ref"]]} == names, "scripts/lock"
    reached, rest = set(), [wheel["bom-ref"]]
    while rest:
        reached.add(part := rest.pop())
        rest += [each for each in needs[part] if each not in reached]
    of_examples = {"joblib", "narwhals", "numpy", "scikit-learn", "scipy", "threadpoolctl"}
    unreached = {each["name"] for each in made["components"] if each["bom-ref"] not in reached}
    assert unreached <= of_examples | {"cloudpickle"}


def test_o11_the_image_takes_its_base_by_digest_and_packages_by_hash() -> None:
    recipe = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^ARG BASE=debian:bookworm-slim@sha256:[0-9a-f]{64}$", recipe, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+)", recipe, re.MULTILINE)) == {
        *("$BASE", "python", "dependencies")
    }
    assert "--require-hashes --no-deps --requirement /wheels/locked.txt" in recipe


def test_o11_there_is_one_recipe_for_the_image() -> None:
    """That of the compose file is what the chart and the manifests ask a registry for."""
    node = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["x-node"]
    assert (node["build"]["context"], node["build"]["target"]) == (".", "node")
    assert re.search(r"^FROM python AS node$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    examples = ROOT / "examples"
    asking = [f for f in examples.rglob("*.y*ml") if "registry.example.com/" in f.read_text()]
    assert {"values.yaml", "job.yaml", "trainjob.yaml", "node.dstack.yml"} <= {
        file.name for file in asking
    }
    for file in asking:
        images = re.findall(r"registry\.example\.com/\S+", file.read_text())
        ours = [image for image in images if not image.startswith("registry.example.com/vision/")]
        names = {image.removesuffix(f":{__version__}") for image in ours}
        assert names == {f"registry.example.com/{node['image']}"}, file
