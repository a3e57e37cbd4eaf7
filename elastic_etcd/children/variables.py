"""What the fork server's imports have read in the environment, and what they have left behind.

A script may set a variable before its own `import torch`, which in a forked worker comes too late:
torch was imported before. So a worker begins without torch in `sys.modules`, and gets it back when
the script imports it. If the script changes a variable before that which an import has read, the
process begins anew as a program of its own, in which the script's import is the first.

Loaded by its path, as entry.py is.
"""

from __future__ import annotations

import atexit
import builtins
import logging
import os
import sys
import time
import warnings
from contextlib import contextmanager
from copy import copy
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    Begin = Callable[[str, bool], None]  # why, and whether a learned module is at fault

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

_OWN = ("__spec__", "__loader__", "__package__", "__path__", "__file__", "__cached__")


class Group:
    """The modules that an import has loaded, and what they have to do with the rest of the process.

    Of one that was `learned` nothing is to be seen before the script's own import of it: neither
    the loggers that it has made nor the filters of warnings.
    """

    def __init__(self, *, learned: bool = False) -> None:
        self.learned = learned
        self.modules: dict[str, ModuleType] = {}
        self.read: set[str] = set()
        self.set: dict[str, tuple[str | None, str | None]] = {}  # before and after
        self.by_c = False  # libraries that read variables were loaded
        self.by_kmp = False
        self.filters: list[Any] = []  # of warnings, those that it has added before all others
        self.last_filters: list[Any] = []  # and after them
        self.loggers: dict[str, Any] = {}
        self.finders: list[Any] = []  # of sys.meta_path
        self.finds_first = False  # one of them comes before Python's own
        self.later: list[Callable[[], object]] = []  # what it registers for exits and forks
        self.needs: list[Group] = []  # what it has found there already
        self._origins: dict[str, str | None] = {}  # of its modules in no package
        self._files: dict[str, int] = {}  # of its modules, and when they were written
        self._children: list[tuple[ModuleType, str, ModuleType]] = []  # of others' packages

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
                self.read.add(name)
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
                self.set[name] = before.get(name), after.get(name)

    @contextmanager
    def collected(self, given: Sequence[Group]) -> Iterator[None]:
        """While this is open, remember what is imported and what that leaves in the process.

        What belongs to the groups that are `given` back meanwhile is not counted as this one's.
        """
        made = logging.root.manager.loggerDict
        modules, loggers, filters = set(sys.modules), set(made), list(warnings.filters)
        libraries, finders = numeric(), list(sys.meta_path)
        with self.noted(), self.kept(), self._put_off():
            yield
        for other in given:
            modules.update(other.modules)
            loggers.update(other.loggers)
            filters += other.filters + other.last_filters
            finders += other.finders
            self.set = {name: v for name, v in self.set.items() if name not in other.set}
        standard = sys.stdlib_module_names
        new = [n for n in sys.modules if n not in modules and n.partition(".")[0] not in standard]
        self.modules = {name: sys.modules[name] for name in new}
        added = [each not in filters for each in warnings.filters]
        more = [each for each, is_new in zip(warnings.filters, added, strict=True) if is_new]
        ahead = added.index(False) if False in added else len(added)
        self.filters, self.last_filters = more[:ahead], more[ahead:]
        self.loggers = {name: made[name] for name in made if name not in loggers}
        self.finders = [each for each in sys.meta_path if each not in finders]
        first = sys.meta_path[: sys.meta_path.index(PathFinder)]
        self.finds_first = any(each in first for each in self.finders)
        self.loaded(numeric() - libraries)
        tops = {name: _origin(name) for name in self.modules if "." not in name}
        self._origins = {name: origin for name, origin in tops.items() if origin}
        specs = (getattr(module, "__spec__", None) for module in self.modules.values())
        files = [spec.origin for spec in specs if spec and spec.has_location]
        self._files = {file: _written(file) for file in files}
        for name, module in self.modules.items():
            package, _, child = name.rpartition(".")
            if package not in self.modules and package in sys.modules:
                self._children.append((sys.modules[package], child, module))

    @contextmanager
    def _put_off(self) -> Iterator[None]:
        """Remember what is registered in here for exits and forks: `give` does it.

        But for the standard library's own, whose modules are not taken away.
        """
        register, at_fork = atexit.register, os.register_at_fork
        imports = True

        def recorded(call: Callable[..., Any]) -> Callable[..., Any]:
            def remember(*args: Any, **kwargs: Any) -> Any:
                who = str(sys._getframe(1).f_globals.get("__name__"))  # noqa: SLF001
                if not imports or who.partition(".")[0] in sys.stdlib_module_names:
                    return call(*args, **kwargs)
                self.later.append(partial(call, *args, **kwargs))
                return args[0] if args else None  # atexit.register is used as a decorator, too

            return remember

        atexit.register, os.register_at_fork = recorded(register), recorded(at_fork)
        try:
            yield
        finally:
            imports = False
            atexit.register, os.register_at_fork = register, at_fork

    def moved(self) -> str:
        """A module of it whose name finds another file now, or a file that has changed, or ""."""
        tops = (name for name, at in self._origins.items() if _origin(name) != at)
        files = (file for file, at in self._files.items() if _written(file) != at)
        return next(chain(tops, files), "")

    def loaded(self, libraries: set[str]) -> None:
        """These came with it."""
        self.by_c |= bool(libraries)
        self.by_kmp |= any(
            "iomp" in Path(file).name or "libomp" in Path(file).name for file in libraries
        )

    def is_read(self, name: str) -> bool:
        """Whether the imports have read this variable, as far as one can tell."""
        by_c = self.by_c and name.startswith(_READ_BY_C) and not name.startswith(_READ_LATER)
        by_c |= self.by_kmp and name.startswith(_READ_BY_KMP)
        return by_c or name in self.read or (self.learned and name in self.set)

    def take(self) -> None:
        """Leave nothing of it to be seen."""
        for name in self.modules:
            sys.modules.pop(name, None)
        for parent, child, module in self._children:
            if vars(parent).get(child) is module:
                delattr(parent, child)
        for name, (before, after) in self.set.items() if self.learned else ():
            if os.environ.get(name) == after:
                _set_variable(name, before)
        known: list[Any] = warnings.filters  # type: ignore[assignment]
        for each in self.filters + self.last_filters:
            if each in known:
                known.remove(each)
        for name in self.loggers:
            dict.pop(logging.root.manager.loggerDict, name, None)
        sys.meta_path[:] = [each for each in sys.meta_path if each not in self.finders]

    def give(self) -> None:
        """Leave the process as its import would have."""
        sys.modules.update(self.modules)
        for parent, child, module in self._children:
            vars(parent).setdefault(child, module)
        for name, (before, after) in self.set.items():
            if os.environ.get(name) == before:
                _set_variable(name, after)
        if self.filters or self.last_filters:
            _add_filters(self.filters, self.last_filters)
        dict.update(logging.root.manager.loggerDict, self.loggers)
        for logger in self.loggers.values():
            vars(logger).get("_cache", {}).clear()  # whether it shows a level, by other settings
        sys.meta_path += [each for each in self.finders if each not in sys.meta_path]
        while self.later:
            self.later.pop(0)()


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
    """The modules that were imported ahead, in groups, some of which need others."""

    def __init__(self) -> None:
        self.groups: list[Group] = []  # whose modules are not in sys.modules now
        self._given: list[Group] = []
        self._collects: Group | None = None
        self._own: dict[str, dict[str, Any]] = {}  # what the import system writes into a module
        self._undo: list[Callable[[], None]] = []
        self._begin: Begin | None = None
        self._torch: Any = None
        self._around: dict[str, object] = {}  # when the script began

    @property
    def modules(self) -> dict[str, ModuleType]:
        """Those that are not in `sys.modules` now."""
        return {name: module for group in self.groups for name, module in group.modules.items()}

    def withhold(self, group: Group) -> None:
        """Take its modules out of `sys.modules`, until one of them is imported again.

        And those that were given back meanwhile.
        """
        for each in (group, *self._given):
            each.take()
            self.groups.append(each)
        self._given.clear()
        _filters_changed()
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
            atexit.register(self.give_back)  # what is left of them ends as any module does

    @contextmanager
    def collected(self) -> Iterator[Group]:
        """A learned group of all that is imported in here, and what it needs of the others."""
        self._collects = group = Group(learned=True)
        usual = builtins.__import__

        def importing(*args: Any, **kwargs: Any) -> Any:
            module = usual(*args, **kwargs)
            if "*" in (kwargs.get("fromlist") or (args[3:4] or ((),))[0] or ()):
                self._give_below(module.__name__)
            return module

        try:
            with group.collected(self._given):
                builtins.__import__ = importing
                yield group
        finally:
            builtins.__import__ = usual
            self._collects = None

    def _give_below(self, package: str) -> None:
        """`from package import *` has what was imported of it before, as it is in the script."""
        for group in list(self.groups):
            if any(name.startswith(f"{package}.") for name in group.modules) and self._collects:
                self._collects.needs.append(group)
                self.give_back(group)

    def touch(self) -> None:
        """Copy the pages, shared until now, that `give_back` will write to: it will be quicker."""
        for group in self.groups:
            dict(group.modules)  # counts a reference in each name and module

    def differing(self, env: Mapping[str, str], seen: Mapping[str, str]) -> str:
        """A variable that a learned import has read and that is another one in `env`, or ""."""
        names = {name for group in self.groups if group.learned for name in group.read}
        return min((name for name in names if env.get(name) != seen.get(name)), default="")

    def watch(self, argv: Sequence[str], env: Mapping[str, str], tell: Callable[[], None]) -> None:
        """From now on this process is to be `argv` in `env`, anew if the script asks too late.

        `tell` is called before that if a learned module is the reason.
        """
        pid, cwd, umask = os.getpid(), os.getcwd(), os.umask(0)  # noqa: PTH109
        os.umask(umask)
        self._torch = self.modules.get("torch")
        self._around = self._surroundings()
        putenv, unsetenv = os.putenv, os.unsetenv

        def begin(why: str, learned: bool) -> None:
            if os.getpid() == pid:
                os.chdir(cwd)
                os.umask(umask)
                if learned:
                    tell()
                    self._end_if_joined(why)
                begin_anew(argv, env, why)

        def changed(name: str, value: str | None) -> None:
            readers = [group for group in self.groups if group.is_read(name)]
            if readers and env.get(name) != value:
                first = "torch" if any(group.by_c for group in readers) else _top(readers[0])
                begin(f"changes {name} before it imports {first}", all(r.learned for r in readers))

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
        self._begin = begin
        if any(group.loggers for group in self.groups):
            self._undo.append(self._watch_loggers(begin))

    def _watch_loggers(self, begin: Begin) -> Callable[[], None]:
        """A logger that a script gets before a module that makes it would not be the module's."""
        manager = logging.root.manager

        class Loggers(dict[str, Any]):
            def __setitem__(self_, name: str, value: Any) -> None:  # noqa: N805
                taken = (n for group in self.groups for n in group.loggers)
                if any(_are_related(name, other) for other in taken):
                    begin(f"gets the logger {name} before it imports what has it", True)
                dict.__setitem__(self_, name, value)

        def undo() -> None:
            manager.loggerDict = dict(manager.loggerDict)

        manager.loggerDict = Loggers(manager.loggerDict)
        return undo

    def give_back(self, wanted: Group | None = None) -> None:
        """Leave the process as after the imports of all groups, or of this one."""
        given = self._needed([wanted] if wanted else self.groups)
        self.groups = [group for group in self.groups if group not in given]
        self._given += given
        if not (self.groups or self._collects):
            atexit.unregister(self.give_back)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            for undo in self._undo:
                undo()
        for group in given:
            group.give()

    def _needed(self, wanted: Sequence[Group]) -> list[Group]:
        """These and what they need, as far as it is withheld, each after what it needs."""
        found: dict[Group, None] = {}
        seen: set[Group] = set()

        def add(group: Group) -> None:
            if group not in seen:
                seen.add(group)
                for need in group.needs:
                    add(need)
                if group in self.groups:
                    found[group] = None

        for group in wanted:
            add(group)
        return list(found)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """The module's own spec, but for the loader; the import system calls this."""
        group = self._group(fullname)
        module = group.modules[fullname] if group else None
        if group is None or module is None or module.__spec__ is None:
            return None
        self._check(group)
        spec = copy(module.__spec__)
        spec.loader = _Ahead(self, module.__spec__.loader)
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module that is there already."""
        group = self._group(spec.name)
        assert group
        module = group.modules[spec.name]
        self._own[spec.name] = {name: vars(module)[name] for name in _OWN if name in vars(module)}
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run already: give back all that its import needs."""
        name = module.__spec__.name if module.__spec__ else module.__name__
        own = self._own.pop(name)
        for each in _OWN:
            vars(module).pop(each, None)
        vars(module).update(own)
        group = self._group(name)
        if group:
            if self._collects:
                self._collects.needs.append(group)
            self.give_back(group)

    def _group(self, name: str) -> Group | None:
        return next((group for group in self.groups if name in group.modules), None)

    def _check(self, wanted: Group) -> None:
        """Begin anew where this import would find something else now than the fork server did."""
        if self._begin is None:
            return
        needed = self._needed([wanted])
        for group in needed:
            if name := group.moved():
                self._begin(f"finds another {name} than the one that was loaded ahead", True)
        now = self._surroundings() if any(group.learned for group in needed) else self._around
        if other := next((what for what in now if now[what] != self._around[what]), ""):
            self._begin(f"has another {other} before it imports {_top(wanted)}", True)

    def _surroundings(self) -> dict[str, object]:
        """What an import may look at that scripts set, beside variables."""
        torch = self._torch
        devices = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)  # local to each thread
        return {
            "sys.stdout": sys.stdout,
            "sys.stderr": sys.stderr,
            "sys.argv": sys.argv[1:],
            "working directory": os.getcwd(),  # noqa: PTH109
            "affinity to CPUs": os.sched_getaffinity(0),
            "time zone": time.tzname,
            "class of loggers": logging.getLoggerClass(),
            "default dtype": getattr(torch, "get_default_dtype", bool)(),
            "default device": getattr(devices, "device_context", None),
        }

    def _end_if_joined(self, why: str) -> None:
        """End this process where the others of its world have met it already, once only."""
        distributed = getattr(self._torch, "distributed", None)
        if distributed and distributed.is_available() and distributed.is_initialized():
            sys.stderr.write(
                f"elastic_etcd: this script {why}, which was loaded ahead (--preload auto), and "
                "is in a process group already: this worker ends, so that the next world begins "
                "without such modules\n"
            )
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def numeric() -> set[str]:
    """The libraries in this process that read a number of threads when they are loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
    return {file for file in files if any(p in Path(file).name for p in ("omp", "blas", "mkl"))}


def _top(group: Group) -> str:
    return next(iter(group.modules), "what reads it")


def _are_related(name: str, other: str) -> bool:
    """Whether one of two loggers is the other, or above it."""
    return f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.")


def _written(file: str) -> int:
    try:
        return os.stat(file).st_mtime_ns  # noqa: PTH116 - of all of a framework's
    except OSError:
        return 0


def _origin(name: str) -> str | None:
    found = PathFinder.find_spec(name)
    return found.origin if found else None


def _add_filters(first: Sequence[Any], last: Sequence[Any]) -> None:
    """As warnings.filterwarnings has added them: the newest first, and each once."""
    known: list[Any] = warnings.filters  # type: ignore[assignment]
    for each in reversed(first):
        if each in known:
            known.remove(each)
        known.insert(0, each)
    known += [each for each in last if each not in known]
    _filters_changed()


def _filters_changed() -> None:
    with warnings.catch_warnings():  # forgets what was decided by the filters before
        pass


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def begin_anew(argv: Sequence[str], env: Mapping[str, str], why: str) -> None:
    """Become `argv` in `env`, because of what the script does; returns if that can't be."""
    if env.get("ELASTIC_ETCD_LOCAL_RANK", "0") == "0":
        name = why.removeprefix("changes ").partition(" ")[0]
        hint = f"; set {name} where the launcher is started" if why.startswith("changes ") else ""
        sys.stderr.write(
            f"elastic_etcd: this script {why}, so each worker "
            f"begins anew without the modules that were loaded ahead, which takes longer{hint}\n"
        )
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(argv[0], [*argv], env)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"elastic_etcd: {argv[0]}: {error.strerror}; it goes on as it is\n")
