"""What the fork server's imports have read in the environment, and what they have set in it.

A script may set a variable before its own `import torch`, which in a forked worker comes too late:
torch was imported before. So a worker begins without torch in `sys.modules`, and gets it back when
the script imports it. If the script changes a variable before that which an import has read, the
process begins anew as a program of its own, in which the script's import is the first.

Loaded by its path, as entry.py is.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import contextmanager
from copy import copy
from importlib.abc import Loader, MetaPathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

# What C libraries read when they are loaded can't be seen here: OpenMP, MKL, oneDNN, OpenBLAS,
# NumPy, Kineto, c10 (PYTORCH_CUDA_ALLOC_CONF names the allocator when it is loaded).
_READ_BY_C = (
    *("TORCH_", "PYTORCH_", "KINETO_", "ATEN_", "OMP_", "GOMP_", "KMP_", "MKL_", "MKLDNN_"),
    *("DNNL_", "ONEDNN_", "OPENBLAS_", "NPY_"),
)
# These are read when a process group is made, or a model is fetched.
_READ_LATER = ("TORCH_NCCL_", "TORCH_FR_", "TORCH_HOME")


class Imports(Loader, MetaPathFinder):
    """The modules that were imported ahead, and what they have to do with the environment."""

    def __init__(self) -> None:
        self.modules: dict[str, ModuleType] = {}  # those that are not in sys.modules now
        self._read: set[str] = set()
        self._set: dict[str, tuple[str | None, str | None]] = {}  # before and after
        self._specs: dict[str, ModuleSpec | None] = {}
        self._undo: list[Callable[[], None]] = []

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

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Remember the variables that are set in here: a worker's imports set them, too."""
        before = dict(os.environ)
        yield
        after = dict(os.environ)
        for name in before.keys() | after.keys():
            if before.get(name) != after.get(name):
                self._set[name] = before.get(name), after.get(name)

    def withhold(self, names: Sequence[str]) -> None:
        """Take these modules out of `sys.modules`, until one of them is imported again."""
        self.modules = {name: sys.modules.pop(name) for name in names}
        sys.meta_path.insert(0, self)
        atexit.register(self.give_back)  # what is left of them ends as any module does

    def touch(self) -> None:
        """Copy the pages, shared until now, that `give_back` will write to: it will be quicker."""
        dict(self.modules)  # counts a reference in each name and module

    def watch(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """From now on this process is to be `argv` in `env`, anew if the script asks too late."""
        pid, cwd, umask = os.getpid(), os.getcwd(), os.umask(0)  # noqa: PTH109
        os.umask(umask)
        putenv, unsetenv = os.putenv, os.unsetenv

        def changed(name: str, value: str | None) -> None:
            if self.is_read(name) and env.get(name) != value and os.getpid() == pid:
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
        self._undo.append(undo)

    def is_read(self, name: str) -> bool:
        """Whether the imports have read this variable, as far as one can tell."""
        by_c = name.startswith(_READ_BY_C) and not name.startswith(_READ_LATER)
        return by_c or name in self._read

    def give_back(self) -> None:
        """Leave `sys.modules` and the environment as after the imports, and watch no longer."""
        atexit.unregister(self.give_back)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for undo in self._undo:
            undo()
        sys.modules.update(self.modules)
        self.modules = {}
        for name, (before, after) in self._set.items():
            if os.environ.get(name) == before:
                _set_variable(name, after)

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
        spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module that is there already."""
        module = self.modules[spec.name]
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run already: give everything back."""
        module.__spec__ = self._specs.pop(module.__name__)
        self.give_back()


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def begin_anew(argv: Sequence[str], env: Mapping[str, str], name: str) -> None:
    """Become `argv` in `env`, since the script sets `name`; returns if that can't be."""
    if env.get("ELASTIC_ETCD_LOCAL_RANK", "0") == "0":
        sys.stderr.write(
            f"elastic_etcd: this script changes {name} before it imports torch, so each worker "
            "begins anew without the modules that were loaded ahead, which takes longer; "
            f"set {name} where the launcher is started\n"
        )
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(argv[0], [*argv], env)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"elastic_etcd: {argv[0]}: {error.strerror}; {name} comes too late\n")
