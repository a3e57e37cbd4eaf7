"""Sources, scripts and settings name modules and files that are there."""

import re
from pathlib import Path

import elastic_etcd

PACKAGE = Path(elastic_etcd.__file__).parent
ROOT = PACKAGE.parent
FOLDERS = ("docs", "elastic_etcd", "examples", "protos", "scripts", "tests")
GENERATED = ("elastic_etcd_rpc_pb2.py", "elastic_etcd_rpc_pb2.pyi")
SUFFIXES = {"", ".cfg", ".json", ".md", ".proto", ".py", ".sbatch", ".sh", ".toml", ".yaml", ".yml"}
INSIDE = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.is_file()]
AT_ROOT = [file for file in ROOT.iterdir() if file.is_file() and file.name != ".git"]
LEFT_OUT = {*GENERATED, Path(__file__).name}
TEXTS = [
    file
    for file in [*AT_ROOT, ROOT / ".ci" / "run", *INSIDE]
    if file.suffix in SUFFIXES and file.name not in LEFT_OUT
]
ROOMS = [str(init.parent.relative_to(PACKAGE)) for init in PACKAGE.rglob("*/__init__.py")]
BEGUN = "|".join([*FOLDERS, *ROOMS])
PATH = re.compile(rf"(?<![\w/.-])((?:{BEGUN})/[\w/-]+\.(?:py|md|sh|ya?ml))\b")
TEST = re.compile(r"(?<![\w/.-])test_\w+\.py\b")  # a page names most of them without a folder
TESTS = {file.name for file in (ROOT / "tests").rglob("test_*.py")}
DOTTED = re.compile(r"(?<![\w/.-])elastic_etcd((?:\.[A-Za-z_]\w*)+)")
# Others that begin like one of ours: a file of a checkpoint, the server's messages, torch's events.
OTHERS = {
    "__file__",
    "json",
    "rpc",
    *("divergence", "drain", "hang", "malformed", "scale", "stop", "straggler"),
}
INVENTED = {"agent/x.py", "docs/another.md"}  # by tests of such checks
SCRIPTS = {"script.py", "train.py"}  # a user's


def is_there(path: str) -> bool:
    return any((folder / path).exists() for folder in (ROOT, PACKAGE))


def leads_somewhere(dotted: str) -> bool:
    """`.cli.live`, a folder; `.core.rules`, a module; or a name that stands in one."""
    place = PACKAGE
    for part in dotted.split(".")[1:]:
        if (place / part).is_dir():
            place /= part
        elif (place / f"{part}.py").exists():
            place /= f"{part}.py"
        else:
            file = place / "__init__.py" if place.is_dir() else place
            return re.search(rf"\b{part}\b", file.read_text()) is not None
    return True


def wrong(text: str) -> set[str]:
    """The paths, modules and tests in it that are not there."""
    paths = {path for path in PATH.findall(text) if not is_there(path)}
    dotted = {name for name in DOTTED.findall(text) if not leads_somewhere(name)}
    tests = {name for name in TEST.findall(text) if name not in TESTS}
    return tests | paths - INVENTED | {name for name in dotted if name.split(".")[1] not in OTHERS}


def test_paths_and_modules_that_are_named_exist() -> None:
    found = {str(file.relative_to(ROOT)): wrong(file.read_text()) for file in TEXTS}
    assert {file: names for file, names in found.items() if names} == {}


def test_files_that_the_package_names_without_a_folder_exist() -> None:
    """`forkserver.py` in a docstring or a comment is one of the package's, or a user's script."""
    ours = {file.name for file in PACKAGE.rglob("*.py")} | SCRIPTS
    for file in PACKAGE.rglob("*.py"):
        named = set(re.findall(r"(?<![\w/.-])[a-z_]\w*\.py\b", file.read_text()))
        assert named - ours == set(), file


def test_a_name_that_leads_nowhere_is_found() -> None:
    assert wrong("elastic_etcd.core.rules.decide, agent/agent.py, test_names.py") == set()
    assert wrong("elastic_etcd.core.no_such, elastic_etcd.core.rules.no_name") == {
        ".core.no_such",
        ".core.rules.no_name",
    }
    missing = {"agent/no_such.py", "scripts/no/such.sh", "tests/unit/test_no.py", "test_none.py"}
    assert wrong(f"of {', '.join(missing)}, and others") == missing
