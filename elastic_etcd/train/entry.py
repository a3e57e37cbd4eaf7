"""How a process that has already begun becomes `python -u script.py ...` or `python -u -m module`.

Loaded by its path: it uses the standard library only, and what others have imported.
"""

from __future__ import annotations

import ctypes
import io
import os
import pkgutil
import runpy
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

_BLAS_SETTERS = [
    f"{scipy}openblas_set_num_threads{bits}" for scipy in ("", "scipy_") for bits in ("", "64_")
]


class Entry:
    """What a worker's command line asks Python to run."""

    def __init__(self, command: list[str]) -> None:
        rest = command[1:]
        self.command = command
        self.safe_path = bool(getattr(sys.flags, "safe_path", False))
        while rest[0] in ("-u", "-P"):
            self.safe_path |= rest.pop(0) == "-P"
        self.is_module = rest[0] == "-m"
        if self.is_module:
            rest.pop(0)
        self.target = rest[0]
        self.argv = ["-m", *rest[1:]] if self.is_module else rest
        # As Python does it: the way is not normalised.
        self.file = "" if self.is_module else str(Path.cwd()) + "/" + self.target
        if self.target.startswith("/"):
            self.file = self.target
        self.is_package = not self.is_module and pkgutil.get_importer(self.file) is not None

    @property
    def folder(self) -> str | None:
        """What Python puts before the other places of `sys.path`, if anything."""
        if self.is_package:
            return self.file
        if self.safe_path:
            return None
        return str(Path.cwd() if self.is_module else Path(self.file).resolve().parent)

    def take_place(self) -> None:
        """Make the process look as it does when the entry's first line is about to run."""
        sys.argv = self.argv.copy()
        sys.orig_argv = self.command.copy()
        main = ModuleType("__main__")
        vars(main)["__annotations__"] = {}
        vars(main)["__builtins__"] = sys.modules["builtins"]
        if not self.is_module and not self.is_package:
            vars(main).update(__file__=self.file, __cached__=None)
            main.__loader__ = SourceFileLoader("__main__", self.file)
        sys.modules["__main__"] = main

    def run(self) -> None:
        """Run it in `sys.modules["__main__"]`; what it raises is shown without our frames.

        The rest is the interpreter's: exit codes, SystemExit, KeyboardInterrupt, atexit.
        """
        try:
            if self.is_module:  # SLF001: it is what the interpreter itself calls
                runpy._run_module_as_main(self.target)  # type: ignore[attr-defined]  # noqa: SLF001
            elif self.is_package:
                runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]  # noqa: SLF001
            else:
                code: CodeType | bytes = self._read()
                if isinstance(code, bytes):
                    code = compile(code, self.file, "exec", dont_inherit=True)
                exec(code, vars(sys.modules["__main__"]))  # noqa: S102 - it is the user's script
        except SystemExit:
            raise
        except BaseException as error:
            here = error.__traceback__
            show_from(error, here.tb_next if here else None)
            raise

    def _read(self) -> CodeType | bytes:
        try:
            with io.open_code(self.file) as file:
                return pkgutil.read_code(file) or Path(self.file).read_bytes()
        except OSError as error:
            self._cannot_open(error)

    def _cannot_open(self, error: OSError) -> NoReturn:
        what = f"[Errno {error.errno}] {error.strerror}"
        sys.stderr.write(f"{sys.executable}: can't open file {self.file!r}: {what}\n")
        raise SystemExit(2)


def show_from(error: BaseException, start: TracebackType | None) -> None:
    """Let the interpreter hand `error` to the excepthook with the traceback that begins there."""
    hook = sys.excepthook

    def without_ours(
        kind: type[BaseException], raised: BaseException, shown: TracebackType | None
    ) -> None:
        if raised is error:
            shown = sys.last_traceback = start
            raised.__traceback__ = start
        hook(kind, raised, shown)

    sys.excepthook = without_ours


class Environment:
    """The environment variables of a process that had others when it began."""

    def __init__(self) -> None:
        self._omp = os.environ.get("OMP_NUM_THREADS")
        self._blas: list[Callable[[int], object]] = []

    def imported(self) -> None:
        """Look for each OpenBLAS that was loaded: it is to be told its number of threads."""
        maps = Path("/proc/self/maps").read_text().splitlines()
        for path in {line.split(maxsplit=5)[5] for line in maps if "openblas" in line}:
            library: Any = ctypes.CDLL(path)
            self._blas += [getattr(library, n) for n in _BLAS_SETTERS if hasattr(library, n)][:1]

    def become(self, env: dict[str, str]) -> None:
        """Have exactly `env`, also for libraries that looked at it when they were loaded."""
        for name in os.environ.keys() - env.keys():
            del os.environ[name]
        for name, value in env.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        threads = _count(env.get("OMP_NUM_THREADS"))
        if threads and env["OMP_NUM_THREADS"] != self._omp:
            sys.modules["torch"].set_num_threads(threads)
        blas = _count(env.get("OPENBLAS_NUM_THREADS")) or threads or len(os.sched_getaffinity(0))
        if blas > 1:
            for set_num_threads in self._blas:
                set_num_threads(blas)


def _count(text: str | None) -> int:
    """The first number of a *_NUM_THREADS variable ("4,2" for nested regions), else 0."""
    first = (text or "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def fresh_randomness() -> None:
    """What exec'd processes don't share; `random` sees to itself, torch's seed is a constant."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing" in sys.modules:
        sys.modules["multiprocessing"].current_process().authkey = os.urandom(32)
