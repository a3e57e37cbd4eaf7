"""The parts of a release as CycloneDX 1.6, on standard output: scripts/sbom.py FILE...

The files are the release's own. The parts are those of scripts/locked.txt, which the node image
installs, with the hashes that the index has of them, and torch, of which any build may be taken.
Their licences are those of the packages in .venv, by which this has to be run.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OURS = "elastic-etcd"
TORCH = "torch"


def purl(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version}"


def licences(name: str) -> list[dict[str, Any]]:
    """An SPDX expression, or else the words by which the package itself names it."""
    told = importlib.metadata.metadata(name)
    if expression := told["License-Expression"]:
        return [{"expression": expression}]
    kinds = [each.rpartition(" :: ")[2] for each in told.get_all("Classifier", [])]
    named = [each for each in kinds if "License" in each] or [told["License"]]
    return [{"license": {"name": each}} for each in named]


def component(name: str, version: str) -> dict[str, Any]:
    reference = purl(name, version)
    named = {"name": name, "version": version, "purl": reference, "bom-ref": reference}
    return {"type": "library", **named, "licenses": licences(name)}


def distribution(url: str, hashes: list[str]) -> dict[str, Any]:
    summed = [{"alg": "SHA-256", "content": each} for each in hashes]
    return {"type": "distribution", "url": url, "hashes": summed}


def version_of(name: str, file: str, pattern: str) -> str:
    found = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
    assert found, f"{file} has no version of {name}"
    return found[1]


def locked() -> list[tuple[str, str, list[str], list[str]]]:
    """Of each package that has hashes: its name, version and hashes, and who asks for it."""
    found = []
    text = (ROOT / "scripts/locked.txt").read_text()
    for block in re.split(r"^(?=\w)", text, flags=re.MULTILINE)[1:]:
        name, version = block.split()[0].split("==")
        askers = re.findall(r"# +(?:via )?([\w.-]+)(?: \(setup\.cfg\))?$", block, re.MULTILINE)
        hashes = re.findall(r"--hash=sha256:(\w{64})", block)
        found.append((name, version, hashes, [each for each in askers if each != "via"]))
    return found


def bom(files: list[Path]) -> dict[str, Any]:
    ours = component(OURS, version_of(OURS, "elastic_etcd/version.py", r'__version__ = "(.+)"'))
    ours["externalReferences"] = [
        distribution(file.name, [hashlib.sha256(file.read_bytes()).hexdigest()]) for file in files
    ]
    torch = component(TORCH, version_of(TORCH, "scripts/constraints.txt", r"^torch==(.+)$"))
    known, asked_by = {OURS: ours, TORCH: torch}, {TORCH: [OURS]}
    for name, version, hashes, askers in locked():
        known[name] = component(name, version)
        page = f"https://pypi.org/project/{name}/{version}/#files"
        known[name]["externalReferences"] = [distribution(page, hashes)]
        asked_by[name] = askers
    needs = {
        each: sorted(known[name]["bom-ref"] for name in asked_by if each in asked_by[name])
        for each in known
    }
    dated = time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH") or time.time()))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", dated),
            "component": ours,
        },
        "components": [each for name, each in known.items() if name != OURS],
        "dependencies": [
            {"ref": known[name]["bom-ref"], "dependsOn": on} for name, on in needs.items()
        ],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="the wheel, the sdist")
    print(json.dumps(bom(parser.parse_args().files), indent=2))
