"""The environment variables that the fork server's imports have read and set.

A script may set a variable before its own `import torch`, which in a forked worker comes too late:
torch was imported before. So a worker begins without torch in `sys.modules`, and gets it back when
the script imports it, and what torch does not import (torch._dynamo, what --preload names) when it
imports that. If the script changes a variable before that which an import has read, the process
begins anew as a program of its own, in which the script's import is the first.

Loaded by its path, as entry.py is.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import contextmanager, suppress
from copy import copy
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

# What C libraries read when they are loaded can't be seen here: OpenMP, MKL, oneDNN, OpenBLAS,
# NumPy, Kineto, c10 (PYTORCH_CUDA_ALLOC_CONF names the allocator when it is loaded).
_READ_BY_C = (
    *("TORCH_", "PYTORCH_", "KINETO_", "ATEN_", "OMP_", "GOMP_", "MKL_", "MKLDNN_"),
    *("DNNL_", "ONEDNN_", "OPENBLAS_", "NPY_"),
)
# By LLVM's and Intel's OpenMP only, which torch seldom has (scikit-learn sets them).
_READ_BY_KMP = "KMP_"
# These are read when a process group is made, a model is fetched, or a GPU is asked for (Lightning
# sets that before it imports torch).
_READ_LATER = ("TORCH_NCCL_", "TORCH_FR_", "TORCH_HOME", "PYTORCH_NVML_BASED_CUDA_CHECK")

_TOO_LATE = (
    "modules that were loaded ahead have read it, and this process has threads or children that "
    "would begin twice. Set it at the script's beginning, or add --start-method exec"
)
_OWN = ("__spec__", "__loader__", "__package__", "__path__", "__file__", "__cached__")


class _Ahead(Loader):
    """Gives a module that is there already, and is the module's own loader in all else."""

    def __init__(self, imports: Imports, own: object) -> None:
        self._imports = imports
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module that is there already."""
        return self._imports.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Give back all that its import needs."""
        self._imports.exec_module(module)

    def __getattr__(self, name: str) -> Any:  # as of runpy, pkgutil and importlib.resources
        return getattr(self._own, name)


class Imports(MetaPathFinder):
    """The modules that were imported ahead, and the variables that their imports read and set."""

    def __init__(self) -> None:
        self.modules: dict[str, ModuleType] = {}  # those that are not in `sys.modules` now
        self._read: set[str] = set()
        self._torchs_modules: set[str] = set()  # all that are there after `import torch`
        self._torchs_read: set[str] = set()
        self._set: dict[str, tuple[str | None, str | None]] = {}  # before and after
        self._by_c = False  # libraries that read variables were loaded
        self._by_kmp = False
        self._own: dict[str, dict[str, Any]] = {}  # what the import system writes into a module
        self._undo: Callable[[], None] | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Remember the variables that Python reads in here."""
        environ = type(os.environ)
        get, iterate = environ.__getitem__, environ.__iter__
        copied = set[str]()  # by who reads all of them, as `os.environ.copy()` does

        def noting(self_: os._Environ[str], name: str) -> str:
            if name in copied:
                copied.discard(name)
            else:
                self._read.add(name)
            return get(self_, name)

        def iterating(self_: os._Environ[str]) -> Iterator[str]:
            copied.update(iterate(self_))
            return iterate(self_)

        environ.__getitem__ = noting  # type: ignore[method-assign]
        environ.__iter__ = iterating  # type: ignore[method-assign]
        try:
            yield
        finally:
            environ.__getitem__ = get  # type: ignore[method-assign]
            environ.__iter__ = iterate  # type: ignore[method-assign]

    def torch_is_there(self) -> None:
        """It has been imported, and nothing else yet."""
        self._torchs_modules, self._torchs_read = set(sys.modules), self._read.copy()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Remember the variables that are set in here: a worker's imports set them, too."""
        before = dict(os.environ)
        yield
        after = dict(os.environ)
        for name in before.keys() | after.keys():
            if before.get(name) != after.get(name):
                self._set[name] = before.get(name), after.get(name)

    def withhold(self, names: Iterable[str], files: Iterable[str]) -> None:
        """Take these modules out of `sys.modules`, until one of them is imported again.

        Libraries that may have read variables are among the `files` that are mapped into memory.
        """
        self.modules = {name: sys.modules.pop(name) for name in names}
        libraries = [Path(file).name for file in files]
        self._by_c = any(part in name for name in libraries for part in ("omp", "blas", "mkl"))
        self._by_kmp = any(part in name for name in libraries for part in ("iomp", "libomp"))
        sys.meta_path.insert(0, self)
        atexit.register(self.give_back)  # what is left of them ends as any module does

    def touch(self) -> None:
        """Copy the pages, shared until now, that `give_back` will write to: it will be quicker."""
        dict(self.modules)  # counts a reference in each name and module

    def watch(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """From now on this process is to be `argv` in `env`, anew if the script asks too late."""
        pid, cwd, umask = os.getpid(), Path("/proc/self/cwd").readlink(), os.umask(0)
        os.umask(umask)
        putenv, unsetenv, told, alone = os.putenv, os.unsetenv, set[str](), company()

        def changed(name: str, value: str | None) -> None:
            if os.getpid() != pid or not self._is_read(name) or env.get(name) == value:
                return
            if company() > alone:  # a tracker's run, say, would begin twice
                if name not in told:
                    say_once_a_node(env, f"{name} is changed too late: {_TOO_LATE}")
                told.add(name)
                return
            os.chdir(cwd)
            os.umask(umask)
            begin_anew(argv, env, name)

        def put(name: bytes | str, value: bytes | str) -> None:
            changed(os.fsdecode(name), os.fsdecode(value))
            putenv(name, value)

        def unset(name: bytes | str) -> None:
            changed(os.fsdecode(name), None)
            unsetenv(name)

        def undo() -> None:
            os.putenv, os.unsetenv = putenv, unsetenv

        # os.environ calls them by these names, with bytes.
        os.putenv, os.unsetenv = put, unset  # type: ignore[assignment]
        self._undo = undo

    def _is_read(self, name: str) -> bool:
        """Whether the imports have read this variable, as far as one can tell."""
        by_c = self._by_c and name.startswith(_READ_BY_C) and not name.startswith(_READ_LATER)
        by_kmp = self._by_kmp and name.startswith(_READ_BY_KMP)
        return by_c or by_kmp or name in self._read

    def give_back(self, asked: str = "") -> None:
        """Leave the process as after the import of torch, if that imports `asked`, else of all."""
        if asked in self._torchs_modules:
            own = self._torchs_modules & self.modules.keys()
            sys.modules.update({each: self.modules.pop(each) for each in own})
            self._read -= self._torchs_read
            self._by_c = self._by_kmp = False
            return
        atexit.unregister(self.give_back)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if self._undo:
            self._undo()
        sys.modules.update(self.modules)
        self.modules = {}
        for name, (before, after) in self._set.items():
            if os.environ.get(name) != before:
                continue
            if after is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = after

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """The module's own spec, but for the loader; the import system calls this."""
        module = self.modules.get(fullname)
        if module is None or module.__spec__ is None:
            return None
        spec = copy(module.__spec__)
        spec.loader = _Ahead(self, module.__spec__.loader)
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module that is there already."""
        module = self.modules[spec.name]
        self._own[spec.name] = {name: vars(module)[name] for name in _OWN if name in vars(module)}
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run already: give back all that its import gives."""
        name = module.__spec__.name if module.__spec__ else module.__name__
        own = self._own.pop(name)
        for each in _OWN:
            vars(module).pop(each, None)
        vars(module).update(own)
        self.give_back(name)


def company() -> int:
    """The number of this process's threads and children."""
    tasks = list(Path("/proc/self/task").iterdir())
    count = len(tasks)
    for task in tasks:
        with suppress(FileNotFoundError):  # it has ended, or this kernel does not tell
            count += len((task / "children").read_text().split())
    return count


def begin_anew(argv: Sequence[str], env: Mapping[str, str], name: str) -> None:
    """Become `argv` in `env`, since the script changes this variable; returns if that can't be."""
    say_once_a_node(
        env,
        f"this script changes {name} before it imports what has read it, so each worker begins "
        "anew without the modules that were loaded ahead, which takes longer; "
        f"set {name} where the launcher is started",
    )
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(argv[0], [*argv], env)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"elastic_etcd: {argv[0]}: {error.strerror}; it goes on as it is\n")


def say_once_a_node(env: Mapping[str, str], text: str) -> None:
    """Write this line to stderr, on one worker of the node."""
    if env.get("ELASTIC_ETCD_LOCAL_RANK", "0") == "0":
        sys.stderr.write(f"elastic_etcd: {text}\n")
