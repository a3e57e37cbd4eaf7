"""How a process that has already begun becomes `python -u script.py ...` or `python -u -m module`.

Loaded by its path: it uses the standard library only, and what others have imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import os
import pkgutil
import runpy
import sys
import threading
import warnings
import weakref
from functools import partial, wraps
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elastic_etcd.protocol import activity


def load(path: Path) -> Any:
    """A file of this package, as a module in nobody's sys.modules."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if not TYPE_CHECKING:
    activity = load(Path(__file__).parents[1] / "protocol" / "activity.py")

_OPTIMIZER = "torch.optim.optimizer"
_DDP = "torch.nn.parallel.distributed"
_ALONE = 2  # references to an object's variables: its own, and who counts
_MODULE = "torch.nn.modules.module"
_C10D = "torch.distributed.distributed_c10d"
_RENDEZVOUS = "torch.distributed.rendezvous"
_TRACKER = "multiprocessing.resource_tracker"
_SAMPLE_RATE = "_set_ddp_runtime_logging_sample_rate"  # which only DistributedDataParallel has
_BLAS_SETTERS = [
    f"{scipy}openblas_set_num_threads{bits}" for scipy in ("", "scipy_") for bits in ("", "64_")
]


class Entry:
    """The script or module that a worker's command line asks Python to run."""

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
        self.file = "" if self.is_module else self.target
        if self.file and not self.file.startswith("/"):
            self.file = f"{Path.cwd()}/{self.file}"  # as Python does it: the way is not normalised
        self.is_package = not self.is_module and pkgutil.get_importer(self.file) is not None

    @property
    def folder(self) -> str | None:
        """The folder that Python puts first in `sys.path`, if any."""
        if self.is_package:
            return self.file
        if self.safe_path:
            return None
        return str(Path.cwd() if self.is_module else Path(self.file).resolve().parent)

    def install_as_main(self) -> None:
        """Make the process look as it does when the entry's first line is about to run."""
        sys.argv = self.argv.copy()
        sys.orig_argv = self.command.copy()
        # A fresh module: this process's own has the names of the program that it was.
        main = ModuleType("__main__")
        if sys.version_info < (3, 14):  # from there on it has annotations when they are asked for
            vars(main)["__annotations__"] = {}
        vars(main)["__builtins__"] = sys.modules["builtins"]
        if not self.is_module and not self.is_package:
            vars(main).update(__file__=self.file, __cached__=None)
            compiled = self.file.endswith(".pyc")
            loader = SourcelessFileLoader if compiled else SourceFileLoader
            main.__loader__ = loader("__main__", self.file)
        sys.modules["__main__"] = main
        if "__mp_main__" in sys.modules:  # by which multiprocessing finds pickled classes
            sys.modules["__mp_main__"] = main

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
                code: CodeType | bytes = self._read_script()
                if isinstance(code, bytes):
                    code = compile(code, self.file, "exec", dont_inherit=True)
                exec(code, vars(sys.modules["__main__"]))  # noqa: S102 - it is the user's script
        except SystemExit:
            raise
        except BaseException as error:
            here = error.__traceback__
            show_from(error, here.tb_next if here else None)
            raise
        finally:
            activity.done()  # threads and what is registered for the exit may take long

    def compile_ahead(self) -> None:
        """Compile the script for those that are forked: they use it if its text is still that."""
        if not Path(self.file).is_file():  # what is a pipe is read once, where it runs
            return
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("error")  # what Python says of it is said where it runs
            text = Path(self.file).read_bytes()
            _ahead[self.file, text] = compile(text, self.file, "exec", dont_inherit=True)

    def _read_script(self) -> CodeType | bytes:
        try:
            with io.open_code(self.file) as file:
                text = file.read()  # once: it may be a pipe
        except OSError as error:
            self._cannot_open(error)
        code: CodeType | None = pkgutil.read_code(io.BytesIO(text))
        return _ahead.get((self.file, text), text) if code is None else code

    def _cannot_open(self, error: OSError) -> NoReturn:
        what = f"[Errno {error.errno}] {error.strerror}"
        sys.stderr.write(f"{sys.executable}: can't open file {self.file!r}: {what}\n")
        raise SystemExit(2)


_ahead: dict[tuple[str, bytes], CodeType] = {}  # of a file with that text


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
        self._omp_threads = os.environ.get("OMP_NUM_THREADS")
        self._omp: list[Callable[[int], object]] = []
        self._blas: list[Callable[[int], object]] = []

    def imported(self) -> None:
        """Look for the libraries that have read their number of threads when they were loaded."""
        self._omp = _functions("omp", ["omp_set_num_threads"])
        self._blas = _functions("openblas", _BLAS_SETTERS)

    def become(self, env: dict[str, str]) -> None:
        """Have exactly `env`, and the CPUs and numbers of threads that it asks for."""
        if cpus := env.get("ELASTIC_ETCD_CPUS"):
            os.sched_setaffinity(0, map(int, cpus.split(",")))
        for name in os.environ.keys() - env.keys():
            del os.environ[name]
        for name, value in env.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        cores = len(os.sched_getaffinity(0))  # more than that neither MKL nor OpenBLAS take
        omp = _count(env.get("OMP_NUM_THREADS"))
        if omp and env["OMP_NUM_THREADS"] != self._omp_threads:
            for set_num_threads in self._omp:
                set_num_threads(min(omp, cores))
        blas = min(_count(env.get("OPENBLAS_NUM_THREADS")) or omp or cores, cores)
        if blas > 1:
            for set_num_threads in self._blas:
                set_num_threads(blas)


def _functions(part: str, names: list[str]) -> list[Callable[[int], object]]:
    """The first of `names` in each loaded library with `part` in its file's name."""
    found: list[Any] = []
    for file in mapped_files():
        if part in Path(file).name and ".so" in file:
            library = ctypes.CDLL(file)
            found += [getattr(library, name) for name in names if hasattr(library, name)][:1]
    return found


def mapped_files() -> set[str]:
    """The files that are mapped into this process; its libraries are among them."""
    lines = Path("/proc/self/maps").read_text(errors="surrogateescape").split("\n")
    return {line.split(maxsplit=5)[5] for line in lines if "/" in line}


def _count(text: str | None) -> int:
    """The first number of a *_NUM_THREADS variable ("4,2" for nested regions), else 0."""
    first = (text or "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def show_stacks() -> None:
    """Let the agent see where this process stands: it asks by a signal, which needs no GIL.

    It shows the main thread only: to read the frames of another that runs may crash the process.
    """
    with contextlib.suppress(OSError, RuntimeError):  # stderr is closed
        faulthandler.register(activity.DUMP_STACKS, file=2, all_threads=False)


def mend_libraries() -> None:
    """Let the agent see a worker's steps, and mend libraries, as soon as they are imported."""
    waits = _Waits()
    _when_imported(_MODULE, waits.look)
    _when_imported(_OPTIMIZER, partial(_count_steps, waits))
    _when_imported(_C10D, _see_the_groups_start)
    _when_imported(_C10D, _see_the_groups_end)
    _when_imported(_DDP, _end_reducers_first)
    _when_imported(_RENDEZVOUS, _serve_own_ports)
    _when_imported(_TRACKER, _set_tracker_apart)


def _when_imported(name: str, then: Callable[[], None]) -> None:
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))


class _Waits:
    """How long this rank waits for others, as DistributedDataParallel measures it itself.

    That is from the last gradient that it has computed to the end of its last all-reduce; on a GPU
    it is the GPU's time, for which the host has to wait: there it is asked for more seldom.
    """

    def __init__(self) -> None:
        # By id, since a script's class may have no hash; and up to which iteration it is known.
        self._modules: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._steps = 0
        self._every = activity.EVERY

    def look(self) -> None:
        """See each module that is wrapped from here on."""
        sys.modules[_MODULE].register_module_module_registration_hook(self._see)

    def _see(self, module: Any, name: str, wrapped: Any) -> None:
        if name != "module" or not hasattr(type(module), _SAMPLE_RATE):
            return
        with contextlib.suppress(Exception):  # a script may make of its modules what it likes
            self._modules[id(module)] = weakref.ref(module), 0
            if any(parameter.device.type != "cpu" for parameter in wrapped.parameters()):
                self._every = activity.EVERY_ON_GPUS

    def step(self) -> None:
        """A step has ended; what it costs is spread over some."""
        self._steps += 1
        if self._steps % self._every or not self._modules:
            return
        with contextlib.suppress(Exception):  # as above
            if (page := activity.measured()) and not _in_backward():
                found = [self._since(known) for known in list(self._modules)]
                if any(found):
                    page.waited(sum(found))

    def _since(self, known: int) -> int:
        """Nanoseconds since the last time, as far as some of its iterations show; 0: none do."""
        ref, before = self._modules[known]
        module = ref()
        if module is None:
            del self._modules[known]
            return 0
        if getattr(module, "logger", None) is None:  # it could not be made
            return 0
        if not before:
            getattr(module, _SAMPLE_RATE)(self._every)
        data = module.logger._get_ddp_logging_data().ints_map  # noqa: SLF001 - nothing else tells
        iteration = data.get("iteration", 0)
        communicates = data.get("backward_comm_time", 0)
        if not communicates:
            return 0
        # It begins with each of the first ten.
        now = iteration - iteration % self._every
        self._modules[known] = ref, now
        computes = data["backward_compute_comm_overlap_time"]  # of that time
        return (now - before) * (communicates - computes) if before else 0


def _in_backward() -> bool:
    """Whether DistributedDataParallel may call this, which then holds its reducer's lock."""
    running: int = sys.modules["torch"]._C._current_graph_task_id()  # noqa: SLF001
    return running != -1 or threading.current_thread() is not threading.main_thread()


def _count_steps(waits: _Waits) -> None:
    """Torch may be in the middle of its import."""
    torch = sys.modules["torch"]

    def step(*_: object) -> None:
        if not torch.compiler.is_compiling():  # a compiled optimizer is not seen
            activity.step(told=False)
            waits.step()

    sys.modules[_OPTIMIZER].register_optimizer_step_post_hook(step)


def _see_the_groups_start() -> None:
    """It takes until all ranks are there."""
    init = sys.modules[_C10D].init_process_group

    @wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        with activity.during(activity.Doing.INIT):
            init(*args, **kwargs)

    _replace_in_torch(init_process_group)


def _see_the_groups_end() -> None:
    """Without a process group no rank waits for this one: an export is no step."""
    c10d: Any = sys.modules[_C10D]
    destroy = c10d.destroy_process_group

    @wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        destroy(*args, **kwargs)
        if not c10d.is_initialized():
            activity.done()

    _replace_in_torch(destroy_process_group)


def _replace_in_torch(function: Callable[..., None]) -> None:
    for module in (sys.modules[_C10D], sys.modules["torch.distributed"]):
        if hasattr(module, function.__name__):  # the package takes its names from c10d, maybe later
            setattr(module, function.__name__, function)


def _end_reducers_first() -> None:
    """Let a DDP module that outlives destroy_process_group free its reducer before the group.

    A reducer's end keeps the GIL; with the group's last reference it waits there for gloo's
    threads, one of which may wait for the GIL (torch 2.13). The group's own end does not keep it.
    """

    def __del__(self: Any) -> None:  # noqa: N807 - it becomes the class's
        if sys.getrefcount(vars(self)) <= _ALONE:  # else they live on in another object
            for name in ("logger", "reducer"):  # the logger holds the reducer
                vars(self).pop(name, None)

    sys.modules[_DDP].DistributedDataParallel.__del__ = __del__


def _serve_own_ports() -> None:
    """Let rank 0 serve the store of a script that meets at a port of its own.

    The agent's store is at MASTER_PORT only; torch 2.13 makes all ranks clients of any.
    """
    rendezvous: Any = sys.modules[_RENDEZVOUS]
    create, has_agent_s = rendezvous._create_c10d_store, rendezvous._torchelastic_use_agent_store  # noqa: SLF001 - no other way
    asked = threading.local()

    def create_c10d_store(hostname: str, port: int, *args: Any, **kwargs: Any) -> Any:
        asked.port = str(port)
        return create(hostname, port, *args, **kwargs)

    def use_agent_store() -> bool:
        port = getattr(asked, "port", None)
        return has_agent_s() and port in (None, os.environ.get("MASTER_PORT"))

    rendezvous._create_c10d_store = create_c10d_store  # noqa: SLF001 - as above
    rendezvous._torchelastic_use_agent_store = use_agent_store  # noqa: SLF001 - as above


def _set_tracker_apart() -> None:
    """Have Python's resource tracker in a session of its own, where no signal to a group ends it.

    It removes what its process has left in shared memory, once that has ended, and ends then.
    """
    tracker: Any = sys.modules[_TRACKER]
    util = tracker.util

    def spawnv_passfds(path: str, args: list[str], fds: list[int]) -> int:
        *rest, code = args
        pid: int = util.spawnv_passfds(path, [*rest, f"import os; os.setsid(); {code}"], fds)
        return pid

    tracker.util = SimpleNamespace(**vars(util) | {"spawnv_passfds": spawnv_passfds})


class _AfterImport:
    """Does something as soon as a module has been imported."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def be_another(withheld: Mapping[str, ModuleType]) -> None:
    """Give a forked process keys, random states and a thread id that no sibling has.

    `withheld` are the modules that are not in `sys.modules` yet. `random` sees to its own.
    """
    for name in ("multiprocessing", "numpy.random", "threading", "torch"):
        module: Any = sys.modules.get(name, withheld.get(name))
        if module is None:
            continue
        if name == "multiprocessing":
            module.current_process().authkey = os.urandom(32)
        elif name == "numpy.random":
            module.seed()
        elif name == "threading":
            module.main_thread()._set_native_id()  # noqa: SLF001 - as a Thread does when it starts
        else:
            module.default_generator.seed()
