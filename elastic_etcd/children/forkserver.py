"""The fork server: it imports torch once, and forks workers that begin where `import torch` ended.

`python -u forkserver.py CHANNEL MODULES LEARNED COMMAND...` is started by agent/prefork.py, by its
path, with the interpreter and the environment of the workers; COMMAND is what they run, `python -u
train.py ...`. A worker is forked ahead of its use and waits for its order. Standard library, torch,
MODULES, and of LEARNED (`FD:SECONDS`, see imported.py; or "") what is harmless; its messages are
those of protocol.py, which this interpreter need not have.
"""

from __future__ import annotations

import sys

if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this folder: its names are not for the worker's imports

import ctypes
import gc
import json
import os
import select
import signal
import socket
import traceback
from contextlib import suppress
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import uuid
    from collections.abc import Sequence

    from elastic_etcd.children import alone, entry, imported, variables
else:  # beside this file; torch.compile looks in sys.modules for what it meets
    _spec = spec_from_file_location("_elastic_etcd_entry", Path(__file__).with_name("entry.py"))
    entry = sys.modules[_spec.name] = module_from_spec(_spec)
    _spec.loader.exec_module(entry)
    alone = entry.load(Path(__file__).with_name("alone.py"))
    imported = entry.load(Path(__file__).with_name("imported.py"))
    variables = entry.load(Path(__file__).with_name("variables.py"))

# What a first DDP step imports.
OURS = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo")
# What a script that recovers in process imports, and its peers wait for; it may not be installed.
ELASTIC = (
    "elastic_etcd.train.run",
    "elastic_etcd.train.data.sampler",
    "elastic_etcd.train.state.elastic_state",
)
IDNA = "encodings.idna"  # which the first look for an address imports
RUN_SCRIPT = str(Path(__file__).with_name("run_script.py"))
WITH_TORCH = ("torch", "elastic_etcd.train")
# A fork keeps one thread: OpenBLAS starts its others when it is loaded. CUDA initialised before a
# fork fails after it, and without NVML the question whether there is a GPU initialises it.
IMPORTING = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# A scheduler signals every process of a job: the fork server outlives that, a worker decides for
# itself.
OUTLIVED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1
# Which process the kernel kills where memory is short: one that learns is no loss. To lower it
# again, to where it was, needs no right.
OOM_SCORE = Path("/proc/self/oom_score_adj")
KILLED_FIRST = "1000"


class Unsafe(Exception):
    """Workers can't be forked from this process; says why."""


class ForkServer:
    """The process that has imported everything; `serve` returns in a forked worker only."""

    def __init__(self, channel: socket.socket, command: list[str]) -> None:
        self._channel = channel
        self._agent = os.getppid()
        self._cwd = os.open(".", os.O_PATH | os.O_CLOEXEC)
        self._umask = os.umask(0)
        os.umask(self._umask)
        self._oom_score = ""  # of before, once it has changed
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._handlers = {number: signal.signal(number, signal.SIG_IGN) for number in OUTLIVED}
        self._environment = entry.Environment()
        self._env = dict(os.environ)
        self._changed: dict[str, str | None] = {}
        self._numbers: list[uuid.UUID] = []  # unique ones, which imports have made
        self._imports = variables.Imports()
        # The modules are imported as the script would import them.
        self._start = entry.Entry(command)
        self._folder = self._start.folder
        if self._folder is not None:
            sys.path.insert(0, self._folder)
        self._start.install_as_main()

    def warm_up(self, modules: list[str], learned: str = "") -> bool:
        """Import everything and tell the agent how it went; False if nothing can be forked."""
        names, patience = self._wanted(learned)
        if learned:
            self._oom_score = OOM_SCORE.read_text()
            set_oom_score(KILLED_FIRST)
        loads = imported.Learned(self._has, self._load, self._left_out, patience)
        os.environ.update(IMPORTING)
        gc.disable()  # imports make objects that stay: looking for garbage takes a quarter of them
        try:
            if not self._import_torch(modules):
                return False
            loads.load(names)
        except (Unsafe, imported.Spoilt) as error:
            say(self._channel, "unsafe", why=str(error))
            return False
        self._environment.imported()
        self._renewed = alone.Renewed(self._numbers, self._imports.modules)
        self._start.compile_ahead()
        gc.collect()
        gc.freeze()  # never looked at again by the collector: the pages stay shared
        gc.enable()
        say(self._channel, "warm", modules=loads.names)
        return True

    def _wanted(self, learned: str) -> tuple[list[str], float]:
        """The modules to learn, and how long each may take."""
        if not learned:
            return [], 0.0
        fd, _, patience = learned.partition(":")
        names, self._changed = imported.read(int(fd))
        os.close(int(fd))
        return names, float(patience)

    def _import_torch(self, modules: Sequence[str]) -> bool:
        """Import torch and what --preload names; False, and the agent is told, if one can't be."""
        group = variables.Group()
        with group.noted():
            if not self._import(OURS):
                return False
            ours = set(sys.modules)
            with group.kept():
                if not self._import(modules):
                    return False
            standard = sys.stdlib_module_names
            new = sys.modules.keys() - ours
            preloaded = {name for name in new if name.partition(".")[0] not in standard}
            for name in (*ELASTIC, IDNA):
                with suppress(Exception):  # a head start, and no more than that
                    import_module(name)
            self._torch = sys.modules["torch"]
            with suppress(Exception), self._torch.autograd.profiler.record_function(""):
                pass  # as each step of an optimizer; the first one looks for the operators
        names = [name for name in sys.modules if name in preloaded or is_ours(name)]
        group.modules = {name: sys.modules[name] for name in names}
        group.loaded(variables.numeric())
        entry.show_steps()
        entry.end_modules_before_groups()
        self._imports.withhold(group)
        return True

    def _has(self, name: str) -> bool:
        return name in sys.modules or name in self._imports.modules

    def _load(self, name: str, trial: bool) -> str:
        """Import a module that scripts import; gives what speaks against it, or ""."""
        if why := imported.shadowed(name):
            return str(why)
        before, names = self._state(trial), self._names() if trial else {}
        try:
            asked = alone.Asked()
            with self._imports.collected() as group, asked.noted():
                import_module(name)
            check_safe("it")
        except BaseException as error:  # noqa: BLE001 - as in `_import`
            return traceback.format_exception_only(type(error), error)[-1].strip()
        self._imports.withhold(group)
        self._numbers += asked.numbers
        if kept := asked.kept(group.modules):
            return f"it has {kept}"
        if changed := imported.touched(group, self._changed):
            return f"it has to do with {changed}, which the script has otherwise"
        if group.finds_first:
            return "it has a finder that comes before Python's own"
        if other := imported.difference(before, self._state(trial)):
            return f"it changes {other}"
        if trial and (other := imported.replaced(names, self._names())):
            return f"it replaces {other}"
        return str(imported.foreign(group.modules))

    def _state(self, trial: bool) -> dict[str, object]:
        settings = imported.settings(self._torch) if trial else {}  # first: torch may warn
        return {**settings, **imported.state(self._torch)}

    def _names(self) -> dict[object, dict[str, object]]:
        return imported.names(self._torch, {**sys.modules, **self._imports.modules})

    def _left_out(self, module: str, why: str) -> None:
        say(self._channel, "left_out", module=module, why=why[:1000])

    def _import(self, names: Sequence[str]) -> bool:
        """Import them all; False, and the agent is told, if one can't be. Raises Unsafe."""
        for name in names:
            try:
                import_module(name)
            except BaseException as error:  # noqa: BLE001 - also what calls sys.exit
                if getattr(error, "name", None) != name:  # else there is no such module
                    traceback.print_exc()
                words = traceback.format_exception_only(type(error), error)[-1].strip()
                module = "" if name in OURS else name
                say(self._channel, "cannot_import", module=module, why=words)
                return False
            check_safe(f"import {name}")
        return True

    def serve(self) -> entry.Entry | None:
        """Fork a worker for each channel that the agent sends; gives None when the agent has gone.

        In a worker it returns what that has to run.
        """
        while True:
            message, fds, _, _ = socket.recv_fds(self._channel, 64, 1)
            if not message:
                return None
            with socket.socket(fileno=fds[0]) as orders:
                try:
                    check_safe("something after the imports")
                    if between := fork_away():
                        return self._become_worker(orders, between)
                except Unsafe as error:
                    say(self._channel, "unsafe", why=str(error))
                except OSError as error:
                    sys.stderr.write(f"fork: {error.strerror}\n")

    def _become_worker(self, orders: socket.socket, between: int) -> entry.Entry:
        """Begin as an exec'd process would, wait for the order, and become what it says."""
        self._channel.close()
        os.setsid()
        die_with(self._agent, between)
        os.fchdir(self._cwd)
        os.close(self._cwd)
        os.umask(self._umask)
        if self._oom_score:
            set_oom_score(self._oom_score)
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is signal.SIG_IGN:
                # While it waits SIGINT ends it as it would end a script, but without a traceback.
                signal.signal(number, signal.SIG_DFL if callable(handler) else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        entry.be_another(self._imports.modules)
        self._renewed.renew()
        self._imports.touch()
        known = sys.modules.keys() | self._imports.modules.keys()
        say(orders, "forked", pid=os.getpid())
        message, fds, _, _ = socket.recv_fds(orders, 64, 64)
        if not message:  # the agent doesn't need this one
            os._exit(0)
        with open(fds[0], "rb") as file:  # noqa: PTH123 - a descriptor
            order = json.load(file)
        given = fds[1 + len(order["streams"]) :]
        for stream, fd in zip(order["streams"], fds[1:], strict=False):
            os.dup2(fd, stream)
            os.close(fd)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, self._handlers[signal.SIGINT])
        self._environment.become(order["env"])
        command = [*order["argv"], *map(str, given)]
        script = entry.Entry(command)
        if self._folder in sys.path and script.folder not in (None, self._folder):
            sys.path[sys.path.index(self._folder)] = script.folder
        script.install_as_main()
        entry.show_stacks()
        if command[1:2] == ["-u"]:  # its steps are to be seen then, too
            command.insert(2, RUN_SCRIPT)
        self._check_learned(command, order["env"])
        self._imports.watch(command, order["env"], lambda: self._tell_anew(order["env"]))
        if order["learn"]:
            self._learn(known, order["env"])
        return script

    def _learn(self, known: set[str], env: dict[str, str]) -> None:
        """At its first step this worker tells what was imported before its process group."""
        late = imported.Late()

        def tell() -> None:
            sys.meta_path.remove(late)
            imported.tell(known | late.names, self._env, env)

        sys.meta_path.insert(0, late)
        entry.at_first_step(tell)

    def _check_learned(self, command: list[str], env: dict[str, str]) -> None:
        """Begin anew where a learned module has read what is another value in this worker."""
        if name := self._imports.differing(env, self._env):
            self._tell_anew(env)
            variables.begin_anew(command, env, f"has another {name} than the fork server")

    def _tell_anew(self, env: dict[str, str]) -> None:
        imported.call(env, "anew")


def is_ours(name: str) -> bool:
    """Whether it is torch's, or a module of ours that imports torch."""
    return name in WITH_TORCH or name.startswith(tuple(f"{each}." for each in WITH_TORCH))


def say(channel: socket.socket, kind: str, **fields: object) -> None:
    """Send the agent one of the messages of protocol.py."""
    channel.send(json.dumps({"type": kind, **fields}).encode())


def set_oom_score(score: str) -> None:
    """Have this process killed earlier or later, where the kernel lets it say so."""
    with suppress(OSError):
        OOM_SCORE.write_text(score)


def check_safe(who: str) -> None:
    """Raises Unsafe when a fork would lose threads or break CUDA."""
    tasks = list(Path("/proc/self/task").iterdir())
    if len(tasks) > 1:
        names = ", ".join(sorted({(task / "comm").read_text().strip() for task in tasks}))
        raise Unsafe(f"{who} started {len(tasks) - 1} threads ({names})")
    for fd in list(Path("/proc/self/fd").iterdir()):
        try:
            device = str(fd.readlink())
        except FileNotFoundError:  # the listing's own
            continue
        if device in ("/dev/nvidia-uvm", "/dev/kfd"):
            raise Unsafe(f"{who} initialised the GPU driver (it opened {device})")


def fork_away() -> int:
    """Fork a process that the agent will be the parent of.

    In it, this is the pid of the process between, which ends now: the agent is a child subreaper
    meanwhile and inherits. In the fork server it is 0.
    """
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return 0
    between = os.getpid()
    try:
        child = os.fork()
    except OSError:
        os._exit(1)
    if child:
        os._exit(0)
    return between


def die_with(agent: int, between: int) -> None:
    """Wait until the agent is the parent, then ask the kernel for SIGKILL at its death.

    Not earlier, or the end of the process between would be taken for it.
    """
    with suppress(ProcessLookupError):  # it is gone, and reaped
        if os.getppid() == between:
            pidfd = os.pidfd_open(between)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll()
            os.close(pidfd)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != agent:
        os._exit(0)


def main(argv: list[str]) -> entry.Entry | None:
    """The fork server's whole life; in a worker, what it runs."""
    channel = socket.socket(fileno=int(argv[1]))
    server = ForkServer(channel, argv[4:])
    if server.warm_up(argv[2].split(",") if argv[2] else [], argv[3]):
        return server.serve()
    return None


if __name__ == "__main__":
    worker = main(sys.argv)
    if worker is not None:
        worker.run()
