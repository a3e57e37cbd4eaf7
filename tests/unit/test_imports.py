"""Who may import whom: the order that keeps the rules pure and the agent small."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import elastic_etcd

ROOT = Path(elastic_etcd.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# On the ground floor: the standard library, msgspec, and each other.
GROUND = {"errors", "times", "version", "system", "protocol"}
BELOW_AGENT = {"etcd", "core", *GROUND}
COMMANDS = {"cli", "launch"}
# Each room with the rooms that it may import: those below it.
MAY_IMPORT = {
    "errors": set[str](),
    "times": set[str](),
    "version": set[str](),
    "system": {"system", "errors", "times"},
    "protocol": {"protocol", "system"},
    "core": {"core", "times", "errors"},
    "etcd": BELOW_AGENT,
    "agent": {"agent", "children", *BELOW_AGENT},
    "children": {"children", *BELOW_AGENT},  # CHILDREN says more
    "train": {"train", "core", "protocol", "system", "times", "errors", "version"},
    "cli": {*COMMANDS, "agent", *BELOW_AGENT},
    "launch": {*COMMANDS, "agent", *BELOW_AGENT},
    "__main__": {*COMMANDS, "agent", *BELOW_AGENT},
    "plugin": {"plugin", "launch", "cli", "agent", *BELOW_AGENT},
    "launcher": {
        "api",
        "cli",
        "agent",
        "protocol",
        "system",
        "errors",
    },  # loaded into its user's program
    "api": {"api", "launch", "agent", *BELOW_AGENT},
    "__init__": {"train", "errors", "version"},  # what a script uses, and loaded only when it does
}
# Modules that are loaded into somebody else's program, and all that they import of this package.
IN_OTHER_PROGRAMS = {
    # Of cli the table of flags, of system the standard streams.
    "plugin/torchrun.py": {"cli", "protocol", "system", "times"},
    "api/functions.py": {"errors"},
    "api/child_failed.py": {"protocol", "errors"},
}
# The programs that are run by their path, which no import shows, and who runs them.
RUN_BY_PATH: dict[str, str | tuple[str, ...]] = {
    "system/trampoline.py": "system/child_process.py",
    "children/entry.py": ("children/forkserver.py", "children/run_script.py"),
    "children/variables.py": "children/forkserver.py",
    "children/forkserver.py": "agent/prefork.py",
    "children/guardian_process.py": "agent/guardian.py",
    "api/run_function.py": "launcher.py",
    "children/run_script.py": ("agent/worker.py", "children/forkserver.py"),
    "children/store_server.py": "agent/store.py",
    "children/timer_server.py": "agent/file_timers.py",
    "children/node_probe.py": "agent/node_checks.py",
}
# The programs that are run as `python -m`, and who runs them.
RUN_BY_NAME = {
    "api/child.py": "launcher.py",
    "plugin/torchrun_agent.py": "plugin/torchrun.py",
}
# Who starts a child without the trampoline says why; all others call system/child_process.py.
STARTERS = {"system/child_process.py", "agent/guardian.py", "launcher.py", "plugin/torchrun.py"}
# What they import beside the standard library, and not at their start: their interpreter may not
# have it, or they would grow by it.
CHILDREN = {
    "children/entry.py": {
        "elastic_etcd.protocol.activity"
    },  # for the type checker, as the next two
    "children/forkserver.py": {
        "elastic_etcd.children.entry",
        "elastic_etcd.children.variables",
        "elastic_etcd.system.process_title",
    },
    "children/run_script.py": {"elastic_etcd.children.entry"},
    "api/run_function.py": {"cloudpickle"},
    "children/variables.py": set[str](),
    "children/guardian_process.py": {
        "elastic_etcd.errors",
        "elastic_etcd.etcd.client",
        "elastic_etcd.etcd.access",
        "elastic_etcd.system.processes",
        "elastic_etcd.system.leftovers",
        "elastic_etcd.times",
    },
    "children/store_server.py": {"torch"},
    "children/timer_server.py": {"torch"},
    "children/node_probe.py": {"torch"},
    "system/trampoline.py": set[str](),
}
# Classes of one name in two files or more, and why; every other name has one meaning.
SAME_CLASS: dict[str, str] = {}
# All others know the agent's life by core/lifecycle.py alone.
BUILDS_FOLLOWERS = {"agent/agent.py", "plugin/torchrun_agent.py"}
# The rules get time, randomness and the outside world as arguments.
NOT_IN_CORE = {"asyncio", "time", "os", "random", "logging", "threading", "socket", "subprocess"}


def named(file: Path) -> str:
    return str(file.relative_to(ROOT))


def part(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file) for file in FILES}


def imports(file: Path, *, at_its_start: bool = False) -> Iterator[str]:
    """Every module that the file names in an import, wherever in it, or when it is loaded."""
    for node in _nodes(file, at_its_start=at_its_start):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} imports relatively"
            yield from (_module(f"{node.module}.{alias.name}") for alias in node.names)


@cache
def _nodes(file: Path, *, at_its_start: bool = False) -> list[ast.AST]:
    """All nodes of the file, or those that are run when it is loaded."""
    tree = ast.parse(file.read_text())
    return list(_outer(tree) if at_its_start else ast.walk(tree))


def _module(name: str) -> str:
    """The module that `from a import b` loads: a.b, or a, which has b."""
    if name in MODULES or not name.startswith("elastic_etcd."):
        return name
    return name.rpartition(".")[0]


def _outer(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that are run at the start: in no function, and not for the type checker only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for other in node.orelse:
                yield from (other, *_outer(other))
            continue
        yield from (node, *_outer(node))


def parts_of(names: Iterator[str]) -> set[str]:
    """The parts of this package among modules."""
    return {name.split(".")[1] for name in names if name.startswith("elastic_etcd.")}


@pytest.mark.parametrize("file", FILES, ids=named)
def test_parts_import_only_what_lies_below_them(file: Path) -> None:
    assert parts_of(imports(file)) <= MAY_IMPORT[part(file)]


@pytest.mark.parametrize("file", FILES, ids=named)
def test_followers_are_imported_where_they_are_built_only(file: Path) -> None:
    """An agent runs without each of them, and what begins as a follower may go again."""
    room = "elastic_etcd.agent.followers"
    follows = named(file).startswith("agent/followers/") or named(file) in BUILDS_FOLLOWERS
    assert follows or not any(name.startswith(room) for name in imports(file))


@pytest.mark.parametrize("file", IN_OTHER_PROGRAMS)
def test_another_program_loads_little_of_this_one(file: str) -> None:
    assert parts_of(imports(ROOT / file)) == IN_OTHER_PROGRAMS[file]


def test_there_are_no_circles() -> None:
    """Not even of imports that come late or are the type checker's."""
    ours = {module_of(file): {name for name in imports(file) if name in MODULES} for file in FILES}
    try:
        order = list(TopologicalSorter(ours).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
    assert set(order) == MODULES


def test_a_circle_would_be_found() -> None:
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"c"}, "c": {"a"}}).prepare()


@pytest.mark.parametrize("file", [f for f in FILES if part(f) == "core"], ids=named)
def test_core_has_no_clock_chance_or_outside(file: Path) -> None:
    assert {name.split(".")[0] for name in imports(file)} & NOT_IN_CORE == set()


@pytest.mark.parametrize("file", [f for f in FILES if part(f) in GROUND], ids=named)
def test_the_ground_floor_needs_no_library_but_msgspec(file: Path) -> None:
    libraries = {name.split(".")[0] for name in imports(file)} - sys.stdlib_module_names
    assert libraries <= {"msgspec", "elastic_etcd"}


@pytest.mark.parametrize(
    ("library", "only"),
    [("grpc", {"etcd"}), ("torch", {"train", "children", "plugin", "api"})],
)
def test_a_library_is_imported_by_some_parts_only(library: str, only: set[str]) -> None:
    assert {part(file) for file in users(library)} == only


def users(library: str) -> set[Path]:
    return {f for f in FILES for name in imports(f) if name.split(".")[0] == library}


@pytest.mark.parametrize(
    ("library", "only"),
    [
        ("grpc", "etcd/_grpc.py"),
        ("tenacity", "etcd/retry.py"),
        ("prometheus_client", "agent/followers/metrics.py"),
        ("starlette", "cli/live/web.py"),
        ("uvicorn", "cli/live/serve.py"),
        ("shtab", "__main__.py"),
    ],
)
def test_a_library_stands_behind_one_door(library: str, only: str) -> None:
    assert {named(file) for file in users(library)} == {only}


def test_one_room_asks_the_kernel_for_pidfds_and_memory_files() -> None:
    """But for programs that run without this package."""
    asks = {"pidfd_open", "memfd_create", "F_ADD_SEALS", "prctl"}
    asked = {part(f) for f in FILES for n in _nodes(f) if getattr(n, "attr", "") in asks}
    assert asked == {"system", "children"}


def test_every_program_that_is_run_by_its_path_has_one_who_runs_it() -> None:
    children = {named(f) for f in FILES if part(f) == "children" and f.stem != "__init__"}
    elsewhere = {"api/run_function.py", "system/trampoline.py"}
    assert RUN_BY_PATH.keys() == CHILDREN.keys() == children | elsewhere
    for program, runners in RUN_BY_PATH.items():
        found = {named(file) for file in FILES if _names(file, ROOT / program)}
        assert found == ({runners} if isinstance(runners, str) else set(runners))


def _names(file: Path, program: Path) -> bool:
    """Whether `file` imports the program, or has its file name as a text."""
    return module_of(program) in imports(file) or program.name in texts_of(file)


def texts_of(file: Path) -> Iterator[object]:
    """All that stands in the file as a constant."""
    return (node.value for node in _nodes(file) if isinstance(node, ast.Constant))


def test_every_program_that_is_run_by_its_name_has_one_who_runs_it() -> None:
    modules = {module_of(ROOT / program) for program in RUN_BY_NAME}
    found = [(t, named(f)) for f in FILES for t in texts_of(f) if t in modules]
    assert sorted(found) == [(module_of(ROOT / p), by) for p, by in sorted(RUN_BY_NAME.items())]


def test_children_are_started_by_one_function_but_for_some() -> None:
    assert {named(file) for file in FILES if _starts_children(file)} == STARTERS


def _starts_children(file: Path) -> bool:
    calls = (ast.unparse(node.func) for node in _nodes(file) if isinstance(node, ast.Call))
    return bool({"subprocess.Popen", "Popen"} & set(calls))


@pytest.mark.parametrize("program", CHILDREN)
def test_a_program_that_is_run_by_its_path_begins_with_the_standard_library(program: str) -> None:
    def foreign(*, at_its_start: bool) -> set[str]:
        names = imports(ROOT / program, at_its_start=at_its_start)
        return {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}

    assert foreign(at_its_start=True) == set()
    late = {name if name in MODULES else name.split(".")[0] for name in foreign(at_its_start=False)}
    assert late == CHILDREN[program]


def test_a_class_has_a_name_of_its_own() -> None:
    found: dict[str, set[Path]] = {}
    for file in FILES:
        if file.parent.name != "pb":
            classes = (node for node in _nodes(file) if isinstance(node, ast.ClassDef))
            for node in classes:
                found.setdefault(node.name, set()).add(file)
    assert {name for name, files in found.items() if len(files) > 1} == SAME_CLASS.keys()


def test_a_private_name_says_whose_it_is() -> None:
    """In a stack trace and in a search: of functions and methods, in no more than four files."""
    found: dict[str, set[Path]] = {}
    for file in FILES:
        for node in _nodes(file):
            if isinstance(node, ast.Module | ast.ClassDef):
                for name in _private_functions(node):
                    found.setdefault(name, set()).add(file)
    assert {name: len(files) for name, files in found.items() if len(files) > 4} == {}


def _private_functions(of: ast.Module | ast.ClassDef) -> Iterator[str]:
    names = (n.name for n in of.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return (name for name in names if name.startswith("_") and not name.startswith("__"))


def loaded(code: str, *flags: str) -> set[str]:
    """The modules of a process that has run `code`."""
    command = [sys.executable, *flags, "-c", f"import sys; {code}; print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_what_would_hold_a_group_for_ever_is_loaded_before_there_is_one() -> None:
    """The first DDP module imports it else, in each worker that is not forked."""
    assert "torch._dynamo" in loaded("import elastic_etcd.train.process_group", "-W", "ignore")


def test_a_worker_does_without_numpy_as_torch_does() -> None:
    train = [name for name in MODULES if name.startswith("elastic_etcd.train.")]
    shuffled = "elastic_etcd.train.data.permutation.Listed(range(4), 4).digest()"
    loaded(f"sys.modules['numpy'] = None; import {', '.join(train)}; {shuffled}", "-W", "ignore")


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("elastic_etcd", {"torch", "grpc", "asyncio", "msgspec", "elastic_etcd.train"}),
        ("elastic_etcd.errors", {"torch", "grpc", "asyncio", "msgspec", "logging"}),
        ("elastic_etcd.times", {"torch", "grpc", "asyncio", "msgspec", "logging"}),
        ("elastic_etcd.protocol.messages", {"torch", "grpc", "asyncio", "socket", "logging"}),
        ("elastic_etcd.system.child_process", {"torch", "grpc", "msgspec", "elastic_etcd.etcd"}),
        ("elastic_etcd.launch", {"torch", "grpc", "rich", "asyncio"}),
        ("elastic_etcd.launcher", {"torch", "grpc", "asyncio", "elastic_etcd.agent"}),
        ("elastic_etcd.cli.flags", {"torch", "grpc", "asyncio", "rich", "elastic_etcd.agent"}),
        (
            "elastic_etcd.agent.agent",
            {
                *("torch", "numpy", "rich", "prometheus_client"),
                *("http.client", "hashlib"),
                *("elastic_etcd.agent.goodput", "elastic_etcd.agent.followers.health_check"),
            },
        ),
        ("elastic_etcd.core.rules", {"grpc", "asyncio", "logging"}),
        # A handler of SIGTERM asks `ee.leaving`, also in the middle of this import.
        ("elastic_etcd.train.heartbeat", {"torch", "elastic_etcd.train.agent_channel"}),
        ("elastic_etcd.train.agent_channel", {"torch", "grpc", "asyncio", "elastic_etcd.agent"}),
    ],
)
def test_importing_does_not_load(module: str, without: set[str]) -> None:
    assert loaded(f"import {module}") & without == set()


def test_an_agent_does_without_openssl() -> None:
    agent = (
        "from elastic_etcd import launch; launch._import_asyncio(); "
        "from elastic_etcd.agent import agent, peer_links"  # which one of several nodes loads, too
    )
    assert {"asyncio", "ssl", "_ssl", "_hashlib"} & loaded(agent) == {"asyncio"}
    assert {"asyncio", "_ssl"} <= loaded(f"{agent}; import ssl; ssl.create_default_context()")


@pytest.mark.parametrize(
    ("program", "without"),
    [
        ("system/trampoline.py", {"asyncio", "socket", "signal", "json", "typing", "elastic_etcd"}),
        ("children/guardian_process.py", {"asyncio", "socket", "json", "typing", "elastic_etcd"}),
    ],
)
def test_a_program_is_small_while_it_waits(program: str, without: set[str]) -> None:
    code = f"exec(open({str(ROOT / program)!r}).read(), {{'__name__': 'program'}})"
    assert loaded(code, "-I", "-S") & without == set()
