"""No source of this program evaluates or unpickles anything, but for what is listed here."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import elastic_etcd

ROOT = Path(elastic_etcd.__file__).parent
# Each module that runs what it reads, or starts what a text says.
MODULES = {
    *("_pickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "pickle", "shelve"),
    *("codeop", "imp", "runpy", "xmlrpc", "yaml"),
}
BUILTINS = {"__import__", "compile", "eval", "exec", "import_module"}
METHODS = {
    *("import_module", "load_source", "popen", "read_pickle", "spawn_main", "system"),
    # torch's: they unpickle, what is loaded or what other ranks have sent
    *("all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list"),
    *("scatter_object_list", "send_object_list", "rpc_sync"),
}
ALLOWED = {
    ("__init__.py", "import_module"): "modules of its own, from a table of its own",
    ("__main__.py", "import_module"): "commands of its own, from a list of its own",
    **dict.fromkeys(
        (
            *(("api/functions.py", f"import {name}") for name in ("pickle", "cloudpickle")),
            *(("api/functions.py", f"pickle.{name}") for name in ("load", "dumps", "Pickler")),
            *(
                ("api/functions.py", f"pickle.{name}")
                for name in ("HIGHEST_PROTOCOL", "PicklingError")
            ),
            ("api/functions.py", "cloudpickle.dumps"),
        ),
        "a function that the caller passes, and what its own workers wrote into its own folder",
    ),
    **dict.fromkeys(
        (
            *(("api/run_function.py", f"import {name}") for name in ("pickle", "cloudpickle")),
            *(("api/run_function.py", f"pickle.{name}") for name in ("load", "dump")),
            ("api/run_function.py", "pickle.HIGHEST_PROTOCOL"),
            ("api/run_function.py", "pickle.PicklingError"),
            ("api/run_function.py", "cloudpickle.dump"),
        ),
        "the function that the program wrote which has started this agent, and its value",
    ),
    **dict.fromkeys(
        (
            ("train/sharded/checkpoint_directory.py", name)
            for name in ("import pickle", "pickle.loads", "pickle.dumps")
        ),
        "ranks' records, in a directory whose `.metadata` torch itself unpickles",
    ),
    ("train/state/encoding.py", "import pickle"): "the user's own allow_pickle=True, and only then",
    ("train/state/encoding.py", "pickle.dumps"): "as above",
    ("train/state/encoding.py", "pickle.loads"): "as above",
    ("children/entry.py", "compile"): "the user's script, named on the command line",
    ("children/entry.py", "exec"): "as above",
    ("children/entry.py", "import runpy"): "the same with -m",
    ("children/entry.py", "runpy._run_module_as_main"): "as above",
    ("children/forkserver.py", "import_module"): "--preload, and what the user's script imports",
}


def suspicious(tree: ast.AST) -> Iterator[str]:
    """What in a file could run data as code."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                found = (alias.name for alias in names)
                yield from (f"import {name}" for name in found if name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                yield f"import {module}"
            case ast.Name(name) if name in BUILTINS:
                yield name
            case ast.Attribute(value=ast.Name("re"), attr="compile"):
                pass
            case ast.Attribute(value=ast.Name(module), attr=name) if module in MODULES:
                yield f"{module}.{name}"
            case ast.Attribute(value=ast.Name("torch"), attr="load"):
                yield "torch.load"
            case ast.Attribute(attr=name) if name in METHODS:
                yield name
            case ast.keyword(arg="shell" | "weights_only"):
                yield f"{node.arg}="


def found() -> set[tuple[str, str]]:
    return {
        (str(file.relative_to(ROOT)), what)
        for file in sorted(ROOT.rglob("*.py"))
        for what in suspicious(ast.parse(file.read_text()))
    }


def test_nothing_that_is_read_is_run() -> None:
    assert found() == set(ALLOWED)


@pytest.mark.parametrize(
    "source",
    [
        "eval(x)",
        "f = exec",
        "import pickle",
        "from marshal import loads",
        "torch.load(x)",
        "dist.broadcast_object_list(x)",
        "subprocess.run(x, shell=True)",
        "os.system(x)",
        "importlib.import_module(x)",
    ],
)
def test_what_would_be_found(source: str) -> None:
    assert list(suspicious(ast.parse(source)))


def test_unpickling_stands_behind_the_users_word() -> None:
    """The one call is in the branch that asks for allow_pickle."""
    tree = ast.parse((ROOT / "train/state/encoding.py").read_text())
    branches = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    behind = [
        call
        for branch in branches
        if "self.allow_pickle" in ast.unparse(branch.test) and "not" not in ast.unparse(branch.test)
        for statement in branch.body
        for call in ast.walk(statement)
        if ast.unparse(call) in ("pickle.loads", "pickle.dumps")
    ]
    everywhere = [n for n in ast.walk(tree) if ast.unparse(n) in ("pickle.loads", "pickle.dumps")]
    assert set(map(id, behind)) == set(map(id, everywhere))
