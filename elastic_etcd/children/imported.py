"""What a script imports: its worker tells the agent, and a fork server loads it ahead next time.

Only what is installed counts: packages in a folder called site-packages or dist-packages. Each is
tried in a child of the fork server first, and left out if its import does more than to import.
Loaded by its path, as entry.py is.
"""

from __future__ import annotations

import builtins
import ctypes
import faulthandler
import gc
import json
import locale
import logging
import multiprocessing
import operator
import os
import random
import re
import resource
import select
import signal
import socket
import sys
import threading
import time
import warnings
import weakref
from contextlib import suppress
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from elastic_etcd.children.variables import Group

_FOLDERS = ("site-packages", "dist-packages")
_MOST_BAD = 128  # modules that are left out, until no more are tried
_MOST = 512  # modules that are loaded
_MOST_CHARACTERS = 1 << 15  # of their names
_LONGEST_NAME = 256
_LONGEST = 1 << 24  # bytes of what a worker tells
_PATIENCE = 1.0
_TOGETHER = 2
_PR_SET_PDEATHSIG = 1
_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
_SWITCHES = ("_enabled", "_allow_", "cudnn_benchmark", "deterministic", "matmul", "warnAlways")
_PRECISIONS = [("generic", "all"), ("cuda", "all"), ("mkldnn", "all")]
_PRECISIONS += [(of, what) for of in ("cuda", "mkldnn") for what in ("matmul", "conv", "rnn")]
_REPLACED = sys.stdlib_module_names | {"torch"}  # whose functions others replace
_DEEP = 2  # in the names of modules


# --- in a worker --------------------------------------------------------------------------


def tell(known: set[str], before: Mapping[str, str], env: Mapping[str, str]) -> None:
    """Tell the agent which modules were imported beside the `known` ones, in their order, if any.

    It is told the variables that differ from `before`, too: an import that reads one of them can't
    be done ahead. `env` says where the agent is.
    """
    now = dict(os.environ)
    names = sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))
    modules = [name for name in _installed_now() if name not in known]
    if not modules:
        return
    found = {
        "modules": modules,
        "changed": {name: now.get(name) for name in names},
    }
    fd = os.memfd_create("imported", os.MFD_CLOEXEC)
    try:
        os.write(fd, json.dumps(found).encode())
        call(env, "imported", fd)
    finally:
        os.close(fd)


def call(env: Mapping[str, str], kind: str, *fds: int) -> None:
    """Send the agent one message (docs/channel.md), if it is there."""
    whose = {name: int(env.get(f"ELASTIC_ETCD_{name.upper()}", -1)) for name in _WHOSE}
    hello = {"type": "hello", "v": 1, "pid": os.getpid(), **whose}
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.settimeout(_PATIENCE)
        channel.connect(env.get("ELASTIC_ETCD_SOCKET", ""))
        channel.send(json.dumps(hello).encode())
        channel.recv(_LONGEST)  # what is left unread would end the connection before it is read
        socket.send_fds(channel, [json.dumps({"type": kind}).encode()], fds)


_WHOSE = ("local_rank", "generation")


def _installed_now() -> Iterator[str]:
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if spec is not None and spec.name == name and is_installed(spec) and _is_name(name):
            yield name


class Late:
    """Finds nothing: it sees what is imported while this process has a process group.

    Where such a module were loaded ahead and this script then did something before its import that
    the module looks at, the process could not begin anew: the others have met it.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, name: str, *_: object) -> None:
        """The import system calls this first, for each module that is not there."""
        distributed: Any = sys.modules.get("torch.distributed")
        initialized = getattr(distributed, "is_initialized", None)  # torch may be half imported
        if self.names or (initialized and initialized()):
            self.names.add(name)


def _is_name(name: str) -> bool:
    return len(name) <= _LONGEST_NAME and all(part.isidentifier() for part in name.split("."))


def is_installed(spec: ModuleSpec) -> bool:
    """Whether all of its files are installed ones, and not from a folder of the user's own."""
    files = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    folders = [folder for folder in sys.path if Path(folder).name in _FOLDERS]
    inside = tuple(f"{folder}/" for folder in folders)
    found = bool(files) and all(str(file).startswith(inside) for file in files)
    return found and not any(spec.name.partition(".")[0] in _own(each) for each in folders)


@cache
def _own(folder: str) -> frozenset[str]:
    """The modules there that pip has installed from this machine: `pip install .` in an image.

    They may read at their import what changes between two of them, such as their configuration.
    """
    found = set[str]()
    for file in Path(folder).glob("*.dist-info/direct_url.json"):  # conda has it for all packages
        with suppress(OSError, ValueError, KeyError):
            url, by = json.loads(file.read_text())["url"], file.with_name("INSTALLER").read_text()
            if url.startswith("file:") and by.strip() != "conda":
                lines = file.with_name("RECORD").read_text().splitlines()
                found.update(re.split(r"[/.,]", line)[0] for line in lines)
    return frozenset(found - {""})


# --- in the fork server -------------------------------------------------------------------


def read(fd: int) -> tuple[list[str], dict[str, str | None]]:
    """The modules and the variables of `tell`; what is not like that is left out."""
    found = json.loads(os.pread(fd, _LONGEST, 0))
    names = [n for n in found["modules"] if isinstance(n, str) and _is_name(n)]
    return names, dict(found["changed"])


class Spoilt(Exception):
    """An import was harmless in its trial, and not in this process, which is of no use any more."""


class Learned:
    """Loads modules that scripts have imported, those that are harmless, in their order.

    `has(name)` says whether one is there already, `load(name, trial)` imports it and gives what
    speaks against that, "" if nothing does; `left_out(name, why)` is told of those. A trial may
    take `patience` seconds for each module, and all together `_TOGETHER` times as much, of CPU time
    or of waiting: what is left then is not learned.
    """

    def __init__(
        self,
        has: Callable[[str], bool],
        load: Callable[[str, bool], str],
        left_out: Callable[[str, str], None],
        patience: float,
    ) -> None:
        self.names: list[str] = []
        self._has = has
        self._load = load
        self._left_out = left_out
        self._patience = patience
        self._bad: list[str] = []
        self._left = _TOGETHER * patience

    def load(self, names: Sequence[str]) -> None:
        """Load them. Raises Spoilt."""
        names = _packages_first(names)
        while names and len(self._bad) < _MOST_BAD and self._left > 0:
            good, why = self._try(names)
            for name in names[:good]:
                if self._has(name) or self._is_full(name):
                    continue
                if fault := self._load(name, False):
                    raise Spoilt(f"{name}: {fault}")
                self.names.append(name)
            if not why:
                names = names[good:]
                continue
            other, rest = names[good], names[good + 1 :]
            below = [name for name in rest if name.startswith(f"{other}.")]
            self._bad.append(other)
            self._left_out(other, why)
            names = [name for name in rest if name not in below]
        if names and self._left <= 0:
            self._left_out(
                names[0], "the trials take too long, so neither it nor the rest is tried"
            )

    def _is_full(self, name: str) -> bool:
        together = sum(map(len, self.names)) + len(name)
        return len(self.names) >= _MOST or together > _MOST_CHARACTERS

    def _try(self, names: Sequence[str]) -> tuple[int, str]:
        """How many of them, from the first, a child could load, and what was wrong then."""
        ours, theirs = os.pipe()
        child = os.fork()
        if not child:
            self._live_as_child(names, theirs)
        os.close(theirs)
        poll = select.poll()
        poll.register(ours)
        _, begun = _activity(child)
        good, why, used = 0, "", 0.0
        with open(ours, "rb", buffering=0) as file:  # noqa: PTH123 - a descriptor
            while not why and good < len(names) and begun < self._left:
                if not poll.poll(self._patience * 1000):
                    # On a busy machine it may be its turn seldom, but it comes.
                    before, (state, now) = used, _activity(child)
                    used = now - begun
                    if (idle := state != "R" and used <= before) or used > self._patience:
                        self._left -= self._patience * idle
                        why = f"its import takes more than {self._patience:g} s"
                elif told := file.read(1):
                    good, why = (good + 1, "") if told == b"+" else (good, _rest(file))
                    (_, begun), used = _activity(child), 0.0
                else:
                    why = "its import ends the process"
        os.kill(child, signal.SIGKILL)
        _, _, usage = os.wait4(child, 0)
        self._left -= usage.ru_utime + usage.ru_stime
        return good, why

    def _live_as_child(self, names: Sequence[str], theirs: int) -> None:
        """What its imports print is looked at by `_load`, and nothing else leaves this process."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        os.nice(19)
        try:
            output = os.memfd_create("output", os.MFD_CLOEXEC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            for name in names:
                why = "" if self._has(name) else self._load(name, True)
                os.write(theirs, f"-{why}"[:1000].encode(errors="replace") if why else b"+")
                if why:
                    break
        finally:
            os._exit(0)


def _packages_first(names: Sequence[str]) -> list[str]:
    """Each after the packages that it is in: `sys.modules` is in the order of the imports' ends."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        found.update(dict.fromkeys(".".join(parts[:n]) for n in range(1, len(parts) + 1)))
    return list(found)


def _activity(pid: int) -> tuple[str, float]:
    """The state of a process, R for running, and its seconds of CPU time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rest(file: Any) -> str:
    text: bytes = file.read(4096)
    return text.decode(errors="replace") or "?"


def shadowed(name: str) -> str:
    """Why the script would not find an installed module of that name, "" if it does."""
    spec = PathFinder.find_spec(name.partition(".")[0])
    if spec is None:
        return "it is not installed"
    return "" if is_installed(spec) else f"it is {spec.origin}, which is not installed"


def foreign(modules: Mapping[str, ModuleType]) -> str:
    """What of these modules has a file that is not an installed one, or ""."""
    for name, module in modules.items():
        spec = getattr(module, "__spec__", None)
        ours = name.partition(".")[0] == "elastic_etcd"
        if spec is not None and spec.has_location and not (ours or is_installed(spec)):
            return f"it imports {name} from {spec.origin}, which is not installed"
    return ""


def touched(group: Group, changed: Mapping[str, str | None]) -> str:
    """A variable that the script changes and that these imports have read or set, or ""."""
    names = group.read | group.set.keys()
    return min((n for n in names & changed.keys() if os.environ.get(n) != changed[n]), default="")


def state(torch: Any) -> dict[str, object]:
    """What an import must leave as it is, by its name."""
    ctypes.CDLL(None).fflush(None)
    root = logging.root
    return {
        "sys.argv": list(sys.argv),
        "sys.path": list(sys.path),
        "the working directory": os.getcwd(),  # noqa: PTH109
        "__main__": (sys.modules["__main__"], dict(vars(sys.modules["__main__"]))),
        "builtins": dict(vars(builtins)),
        "a hook": (sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook,
                   sys.breakpointhook, warnings.showwarning, builtins.__import__,
                   sys.gettrace(), sys.getprofile(), [*sys.path_hooks], faulthandler.is_enabled()),
        "a standard stream": [(each, getattr(each, "encoding", ""), getattr(each, "errors", ""),
                               getattr(each, "line_buffering", ""))
                              for each in (sys.stdin, sys.stdout, sys.stderr)],
        "logging": (root.level, [*root.handlers], [*root.filters], root.disabled,
                    root.manager.disable, logging.getLoggerClass(),
                    logging.getLogRecordFactory(), logging.lastResort,
                    logging.getLevelName("INFO")),
        "a signal's handler": [signal.getsignal(n) for n in sorted(signal.valid_signals())],
        "open files": sorted(_open_files()),
        "the random state": _random_states(torch),
        "a setting of Python": (sys.getrecursionlimit(), sys.getswitchinterval(),
                                gc.get_threshold(), gc.isenabled(), len(gc.callbacks),
                                socket.getdefaulttimeout(), locale.setlocale(locale.LC_ALL),
                                sys.get_int_max_str_digits(), sys.getdlopenflags(),
                                sys.dont_write_bytecode, threading.stack_size(), time.tzname,
                                str(multiprocessing.get_start_method(allow_none=True)),
                                *_contexts()),
        "a setting of the process": (_umask(), os.sched_getaffinity(0),
                                     os.getpriority(os.PRIO_PROCESS, 0),
                                     [resource.getrlimit(limit) for limit in _LIMITS]),
        "a setting of numpy": _numpy_settings(),
        "what is done at the exit": _finalizers(),
        "its children": _children(),
        "the filters of warnings": list(warnings.filters),
        "output": os.fstat(1).st_size + os.fstat(2).st_size,
    }  # fmt: skip


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _contexts() -> tuple[object, ...]:
    """What of decimal and asyncio counts for all of this process's arithmetic and loops."""
    decimal: Any = sys.modules.get("decimal")
    asyncio: Any = sys.modules.get("asyncio.events")
    return (
        repr((decimal.getcontext(), decimal.DefaultContext)) if decimal else None,
        [asyncio._event_loop_policy] if asyncio else None,  # noqa: SLF001 - to ask makes one
    )


def _numpy_settings() -> tuple[object, ...]:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return (None, None)
    shown = {name: str(value) for name, value in numpy.get_printoptions().items()}
    return sorted(numpy.geterr().items()), sorted(shown.items())


def settings(torch: Any) -> dict[str, object]:
    """Those of torch, as `state`: only a trial asks, since torch warns or begins something then."""
    core, module = torch._C, torch.nn.modules.module  # noqa: SLF001 - nothing else tells
    precision = getattr(core, "_get_fp32_precision_getter", lambda *_: None)
    packages = (vars(torch).get(name) for name in ("_dynamo", "_functorch", "_inductor"))
    configs = [vars(package).get("config") for package in packages if package]
    device = torch._GLOBAL_DEVICE_CONTEXT  # noqa: SLF001
    collate = torch.utils.data._utils.collate  # noqa: SLF001
    return {
        "a setting of torch": [
            *(
                torch.get_default_dtype(),
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
            ),
            *(torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            *(torch.get_num_threads(), torch.get_num_interop_threads()),
            *(core._len_torch_function_stack(), core._len_torch_dispatch_stack()),  # noqa: SLF001
            *(_asked(getattr(core, name)) for name in _switches(core)),
            *(_asked(precision, *which) for which in _PRECISIONS),
            getattr(device, "device_context", None),
            torch.multiprocessing.get_sharing_strategy(),
            [*collate.default_collate_fn_map.items()],
            [*vars(torch._tensor_str.PRINT_OPTS).items()],  # noqa: SLF001
        ],
        "hooks of all modules": [
            (name, [*value] if isinstance(value, dict) else value)
            for name, value in vars(module).items()
            if name.startswith("_global_")
        ],
        **{config.__name__: _values(config) for config in configs if config},
    }


@cache
def _switches(core: Any) -> list[str]:
    return [n for n in dir(core) if n.startswith("_get_") and any(s in n for s in _SWITCHES)]


def _asked(call: Callable[..., object], *args: str) -> object:
    try:
        return call(*args)
    except (RuntimeError, TypeError) as error:  # as where its older and newer names are mixed
        return str(error)


def _values(config: Any) -> dict[str, object]:
    """But for what is another's: to ask for that would import it."""
    entries = config._config  # noqa: SLF001 - the official way warns, or copies
    own = [name for name, each in entries.items() if getattr(each, "alias", None) is None]
    return {name: getattr(config, name) for name in own}


def _owners(torch: Any) -> tuple[Any, ...]:
    data, nn = torch.utils.data, torch.nn
    return torch.Tensor, nn.Module, nn.functional, torch.optim.Optimizer, data.DataLoader


def names(torch: Any, modules: Mapping[str, ModuleType]) -> dict[Any, dict[str, object]]:
    """What may be replaced in the standard library, in torch and in its classes."""
    found: dict[Any, Any] = {
        name: module
        for name, module in modules.items()
        if name.partition(".")[0] in _REPLACED and name.count(".") < _DEEP
    }
    owners = found | {each: each for each in _owners(torch)}
    return {name: dict(vars(owner)) for name, owner in owners.items()}


def _finalizers() -> int:
    """How many there are, but for torch's own, of its operators that others have added."""
    known: Any = weakref.finalize
    calls = [each.func for each in known._registry.values()]  # noqa: SLF001 - nothing else tells
    return sum(not str(getattr(call, "__module__", "")).startswith("torch.") for call in calls)


def _open_files() -> Iterator[tuple[int, str]]:
    for fd in list(Path("/proc/self/fd").iterdir()):
        with suppress(FileNotFoundError):  # the listing's own
            yield int(fd.name), str(fd.readlink())


def _children() -> str:
    file = Path("/proc/self/task") / str(os.getpid()) / "children"
    return file.read_text() if file.exists() else ""  # not every kernel tells


def _random_states(torch: ModuleType) -> tuple[object, ...]:
    numpy = sys.modules.get("numpy.random")
    return (
        random.getstate(),
        [part.tolist() if hasattr(part, "tolist") else part for part in numpy.get_state()]
        if numpy
        else None,
        torch.get_rng_state().tolist(),
    )


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The first thing that is not as it was, or ""."""
    both = [name for name in before if name in after]
    return next((name for name in both if not _same(before[name], after[name])), "")


def replaced(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> str:
    """A function of `names` that is another one now, or ""."""
    for owner, was in before.items():
        now = after.get(owner, was)
        if not all(map(operator.is_, was.values(), now.values())):
            for name, value in was.items():
                if callable(value) and now.get(name) is not value:
                    return f"{getattr(owner, '__name__', owner)}.{name}"
    return ""


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, tuple):  # what was not there before may be there now
        return all(a is None or _same(a, b) for a, b in zip(before, after, strict=True))
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(v is after[k] for k, v in before.items())
    return bool(before == after)
