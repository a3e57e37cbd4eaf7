"""The fork server: it imports torch once, and forks workers that begin where `import torch` ended.

`python -u forkserver.py CHANNEL MODULES COMMAND...` is started by agent/prefork.py, by its
path, with the interpreter and the environment of the workers; COMMAND is what they run, `python -u
train.py ...`. A worker is forked ahead of its use and waits for its order. Standard library, torch
and MODULES; its messages are those of protocol/messages.py, which this interpreter need
not have.
"""

from __future__ import annotations

import sys

if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this folder: its names are not for the worker's imports

import atexit
import ctypes
import gc
import json
import os
import signal
import socket
import time
import traceback
from contextlib import suppress
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_etcd.children import entry, variables
    from elastic_etcd.system import process_title
else:  # beside this file; torch.compile looks in sys.modules for what it meets
    _spec = spec_from_file_location("_elastic_etcd_entry", Path(__file__).with_name("entry.py"))
    entry = sys.modules[_spec.name] = module_from_spec(_spec)
    _spec.loader.exec_module(entry)
    variables = entry.load(Path(__file__).with_name("variables.py"))
    process_title = entry.load(Path(__file__).parents[1] / "system" / "process_title.py")

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
IGNORED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
PR_SET_PDEATHSIG = 1
BETWEEN = 0.0002  # seconds, between two looks at who the parent is


class CannotFork(Exception):
    """Workers can't be forked from this process; says why."""


class ForkServer:
    """The process that has imported everything; `serve` returns in a forked worker only."""

    def __init__(self, channel: socket.socket, command: list[str]) -> None:
        self._channel = channel
        self._agent = os.getppid()
        self._cwd = os.open(".", os.O_PATH | os.O_CLOEXEC)
        self._umask = os.umask(0)
        os.umask(self._umask)
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._handlers = {number: signal.signal(number, signal.SIG_IGN) for number in IGNORED}
        self._environment = entry.Environment()
        self._imports = variables.Imports()
        # The modules are imported as the script would import them.
        self._start = entry.Entry(command)
        self._folder = self._start.folder
        if self._folder is not None:
            sys.path.insert(0, self._folder)
        self._start.install_as_main()

    def warm_up(self, modules: Sequence[str]) -> bool:
        """Import everything and tell the agent how it went; False if nothing can be forked."""
        os.environ.update(IMPORTING)
        gc.disable()  # imports make objects that stay: looking for garbage takes a quarter of them
        try:
            if not self._import_all(modules):
                return False
        except CannotFork as error:
            say(self._channel, "unsafe", why=str(error))
            return False
        self._environment.imported()
        self._start.compile_ahead()
        gc.collect()
        gc.freeze()  # never looked at again by the collector: the pages stay shared
        gc.enable()
        say(self._channel, "warm")
        return True

    def _import_all(self, modules: Sequence[str]) -> bool:
        """Import torch and what --preload names; False, and the agent is told, if one can't be."""
        with self._imports.noted():
            if not self._import(OURS[:1]):
                return False
            self._imports.torch_is_there()
            if not self._import(OURS[1:]):
                return False
            ours = set(sys.modules)
            with self._imports.kept():
                if not self._import(modules):
                    return False
            standard = sys.stdlib_module_names
            new = sys.modules.keys() - ours
            preloaded = {name for name in new if name.partition(".")[0] not in standard}
            for name in (*ELASTIC, IDNA):
                with suppress(Exception):  # a head start, and no more than that
                    import_module(name)
            torch = sys.modules["torch"]
            with suppress(Exception), torch.autograd.profiler.record_function(""):
                pass  # as each step of an optimizer; the first one looks for the operators
        entry.mend_libraries()
        names = [name for name in sys.modules if name in preloaded or is_ours(name)]
        self._imports.withhold(names, entry.mapped_files())
        return True

    def _import(self, names: Sequence[str]) -> bool:
        """Import them all; False, and the agent is told, if one can't be. Raises CannotFork."""
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
                except CannotFork as error:
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
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is signal.SIG_IGN:
                # While it waits SIGINT ends it as it would end a script, but without a traceback.
                signal.signal(number, signal.SIG_DFL if callable(handler) else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        entry.be_another(self._imports.modules)
        self._imports.touch()
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
        if complains_of_leaks():
            atexit.register(gc.unfreeze)  # so that the interpreter's end finalises all
        self._environment.become(order["env"])
        command = [*order["argv"], *map(str, given)]
        script = entry.Entry(command)
        if self._folder in sys.path and script.folder not in (None, self._folder):
            sys.path[sys.path.index(self._folder)] = script.folder
        script.install_as_main()
        job = order["env"].get("TORCHELASTIC_RUN_ID")
        if job and not given:  # a store server has descriptors, and its agent's environment
            process_title.show_worker(Path(script.target).name, order["env"]["RANK"], job)
        entry.show_stacks()
        if command[1:2] == ["-u"]:  # its steps are to be seen then, too
            command.insert(2, RUN_SCRIPT)
        self._imports.watch(command, order["env"])
        return script


def is_ours(name: str) -> bool:
    """Whether it is torch's, or a module of ours that imports torch."""
    return name in WITH_TORCH or name.startswith(tuple(f"{each}." for each in WITH_TORCH))


def complains_of_leaks() -> bool:
    """Whether nanobind is loaded, which tells at exit of each type that was not finalised.

    To finalise torch takes a second of CPU, so that peers may be heard to fail before their cause.
    """
    return any(each.__module__ == "nanobind" for each in type.__subclasses__(type))


def say(channel: socket.socket, kind: str, **fields: object) -> None:
    """Send the agent one of the messages of protocol/messages.py."""
    channel.send(json.dumps({"type": kind, **fields}).encode())


def check_safe(who: str) -> None:
    """Raises CannotFork when a fork would lose threads or break CUDA."""
    tasks = list(Path("/proc/self/task").iterdir())
    if len(tasks) > 1:
        # A name may be cut inside a character.
        found = {(task / "comm").read_text(errors="replace").strip() for task in tasks}
        names = ", ".join(sorted(found))
        raise CannotFork(f"{who} started {len(tasks) - 1} threads ({names})")
    for fd in list(Path("/proc/self/fd").iterdir()):
        try:
            device = str(fd.readlink())
        except FileNotFoundError:  # the listing's own
            continue
        if device in ("/dev/nvidia-uvm", "/dev/kfd"):
            raise CannotFork(f"{who} initialised the GPU driver (it opened {device})")


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
    while os.getppid() == between:  # it is about to end
        time.sleep(BETWEEN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != agent:
        os._exit(0)


def main(argv: list[str]) -> entry.Entry | None:
    """The fork server's whole life; in a worker, what it runs."""
    channel = socket.socket(fileno=int(argv[1]))
    server = ForkServer(channel, argv[3:])
    if server.warm_up(argv[2].split(",") if argv[2] else []):
        return server.serve()
    return None


if __name__ == "__main__":
    worker = main(sys.argv)
    if worker is not None:
        worker.run()
