"""torch's `elastic_launch` over etcd v3: start a job from Python, and get what its workers return.

    from elastic_etcd.launcher import LaunchConfig, elastic_launch

    values = elastic_launch(LaunchConfig(nproc_per_node=2), train)(0.1)  # {rank: value}

The agent is a child process with the launcher's own command line (api/child.py), so it works
in any thread and beside a running event loop, and no other thread than the main one has a signal
handled. The function and what it returns travel as files. docs/python.md says how to use it.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from elastic_etcd.api import functions
from elastic_etcd.errors import ElasticEtcdError, EtcdError, RendezvousTimeout, UsageError
from elastic_etcd.protocol.run_record import RunRecord, RunResult
from elastic_etcd.system.kernel import new_memfd

if TYPE_CHECKING:
    from elastic_etcd.api.child_failed import ChildFailedError

__all__ = ["ChildFailedError", "LaunchConfig", "RunResult", "elastic_launch"]

_RUN_FUNCTION = Path(__file__).with_name("api") / "run_function.py"
# By the exit code of the agent, docs/failures.md.
_ERRORS: dict[int, type[ElasticEtcdError]] = {2: UsageError, 4: RendezvousTimeout, 5: EtcdError}

log = logging.getLogger("elastic_etcd")


@dataclass
class LaunchConfig:
    """torch's LaunchConfig, with its names, for a job over etcd v3.

    A field that is None, or not given, has the launcher's default (`python -m elastic_etcd.launch
    --help`). A field of torch's that has no meaning here is accepted; a line of the log says why it
    has none. docs/python.md has those that differ from torch's.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: int | str = 1  # also gpu, cpu, xpu, auto, or a backend
    logs_specs: Any = None  # torch's, in place of the four fields from log_dir on
    run_id: str = ""  # the job, the same on all nodes; "": a random one
    role: str | None = None
    rdzv_endpoint: str = ""  # etcd's endpoints, HOST:PORT,...; "": the job has an etcd of its own
    rdzv_backend: str | None = None
    rdzv_configs: Mapping[str, Any] = field(default_factory=dict)  # as --rdzv-conf
    rdzv_timeout: int = -1
    max_restarts: int | None = None  # failures of workers that the job survives, over all nodes
    monitor_interval: float | None = None
    start_method: str | None = None  # prefork or exec; torch's words mean prefork
    log_line_prefix_template: str | None = None
    metrics_cfg: Mapping[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str | None = None
    numa_options: Any = None
    signals_to_handle: str | None = None
    duplicate_stdout_filters: Sequence[str] | None = None
    duplicate_stderr_filters: Sequence[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: float | None = None
    log_dir: str | os.PathLike[str] | None = None
    redirects: Any = None  # torch's Std, a dictionary of them by local rank, or text as in a flag
    tee: Any = None  # likewise
    local_ranks_filter: Sequence[int] | set[int] | str | None = None
    flags: Sequence[str] = ()  # others of the launcher, as on its command line

    def command_line(self) -> list[str]:
        """The flags of the launcher that say the same."""
        from elastic_etcd.cli.flags import FLAGS  # noqa: PLC0415 - only once a job is started

        mode = getattr(self.numa_options, "affinity_mode", self.numa_options)
        given = vars(self) | {
            "min_nodes": f"{self.min_nodes}:{self.max_nodes}",
            "run_id": self.run_id or None,
            "rdzv_endpoint": self.rdzv_endpoint or None,
            "rdzv_configs": ",".join(f"{k}={v}" for k, v in self.rdzv_configs.items()) or None,
            "rdzv_timeout": None if self.rdzv_timeout == -1 else self.rdzv_timeout,
            "numa_options": getattr(mode, "value", mode),
            "logs_specs": None,  # instead of it, its attributes
            "log_dir": self._of_logs("log_dir", "_root_log_dir"),
            "redirects": self._of_logs("redirects", "_redirects"),
            "tee": self._of_logs("tee", "_tee"),
            "local_ranks_filter": self._of_logs("local_ranks_filter", "_local_ranks_filter"),
        }
        by_name = {f.long[0]: given.get(f.in_python or f.dest) for f in FLAGS if f.kind}
        texts = {name: _as_text(value) for name, value in by_name.items()}
        flags = [f"{name}={text}" for name, text in texts.items() if text is not None]
        switch = ["--virtual-local-rank"] if self.virtual_local_rank else []
        return [*flags, *switch, *self.flags]

    def environment(self) -> dict[str, str]:
        """The agent's environment: this process's, and what has no flag."""
        env = dict(os.environ)
        if self.log_line_prefix_template is not None:
            env["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = self.log_line_prefix_template
        return env

    def _of_logs(self, name: str, in_specs: str) -> Any:
        """A field of ours, or else torch's of its LogsSpecs."""
        own = getattr(self, name)
        return getattr(self.logs_specs, in_specs, None) if own is None else own


def _as_text(value: Any) -> str | None:
    """A value as on the command line: torch's Std by local rank, and several of anything, too."""
    if isinstance(value, Mapping):
        return ",".join(f"{rank}:{int(std)}" for rank, std in value.items()) or None
    if isinstance(value, Collection) and not isinstance(value, str | int):  # as Std is
        return ",".join(map(str, sorted(value)))
    return None if value is None else str(value)


class elastic_launch:  # noqa: N801 - it is torch's name
    """`elastic_launch(config, entrypoint)(*args)` runs a job's node here, and waits for its end.

    `entrypoint` is a function, which each worker calls with `args`, or a program, which gets them
    as its command line. A call gives {rank: value} of this node's ranks; a program has no values.

    It raises ChildFailedError (torch's) where a worker failed for good, UsageError for what can't
    work, RendezvousTimeout, EtcdError, and ElasticEtcdError where the job was stopped, or this node
    made to leave it, as by `stop`. On Ctrl-C, on SIGTERM in the main thread (SystemExit(143), if
    the program does not handle it), and on any other exception of a signal handler's, the node
    leaves the job; what was raised is raised again when its workers are gone.
    """

    def __init__(self, config: LaunchConfig, entrypoint: Callable[..., Any] | str) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._agents: list[subprocess.Popen[bytes]] = []  # one for each call that waits
        self._stopped = False

    def __call__(self, *args: Any) -> dict[int, Any]:
        result = self.run(*args)
        name = functions.name_of(self._entrypoint)
        if result.outcome == "over":
            cure = "give another run_id, or flags=['--rerun']"
            raise UsageError(f"{name}: job {self._config.run_id} had succeeded before: {cure}")
        if result.exit_code == 0:
            return result.return_values
        if result.cause is not None:
            from elastic_etcd.api.child_failed import child_failed  # noqa: PLC0415 - it loads torch

            raise child_failed(name, result)
        kind = _ERRORS.get(result.exit_code, ElasticEtcdError)
        raise kind(f"{name}: the job has not succeeded ({result.outcome}): {result.reason}")

    def run(self, *args: Any) -> RunResult:
        """As a call, but a job that failed, or was stopped, is a result, too."""
        if self._stopped:
            name = functions.name_of(self._entrypoint)
            raise ElasticEtcdError(f"{name}: stop() was called before")
        if self._config.metrics_cfg:
            log.warning("metrics_cfg has no meaning here: use flags=['--metrics-addr', 'PORT']")
        from elastic_etcd.agent.directories import find_temporary_directory  # noqa: PLC0415 - as above

        find_temporary_directory()
        with tempfile.TemporaryDirectory(prefix="elastic_etcd-") as folder:
            record = self._run(Path(folder), args)
            if not record.outcome:
                raise _ERRORS.get(record.exit_code, ElasticEtcdError)(record.error)
            succeeded = record.exit_code == 0
            values = functions.load_values(Path(folder), record.generation) if succeeded else {}
        failures = tuple(
            each if Path(each.error_file).is_file() else replace(each, error_file="")
            for each in record.failures
        )
        return RunResult(
            outcome=record.outcome,
            reason=record.reason,
            exit_code=record.exit_code,
            generations=tuple(record.generations),
            restarts=record.restarts,
            failures=failures,
            cause=failures[record.cause] if record.cause >= 0 else None,
            return_values=values,
        )

    def stop(self) -> None:
        """Make this node leave the job of the call that waits; once more: at once.

        For any thread, since Ctrl-C reaches the main one only. It does not wait: the call raises
        ElasticEtcdError, or `run` returns, when the workers are gone. It is for good: what is
        called later raises that at once, and runs nothing.
        """
        self._stopped = True
        for agent in tuple(self._agents):
            agent.terminate()

    def _run(self, folder: Path, args: Sequence[Any]) -> RunRecord:
        env = self._config.environment()
        if isinstance(self._entrypoint, str):
            command = ["--no-python", self._entrypoint, *map(str, args)]
        else:
            file = functions.save_function(folder, self._entrypoint, args)
            command = [str(_RUN_FUNCTION), str(file)]
            with file.open("rb") as held:  # others may remove the folder, as any temporary one
                env["ELASTIC_ETCD_HELD_FUNCTION"] = f"/proc/{os.getpid()}/fd/{held.fileno()}"
                return self._run_agent(folder, command, env)
        return self._run_agent(folder, command, env)

    def _run_agent(self, folder: Path, command: Sequence[str], env: Mapping[str, str]) -> RunRecord:
        # -P: nothing in the directory of the user's program is taken for a module of ours.
        program = [sys.executable, "-P", "-m", "elastic_etcd.api.child"]
        # In memory: a disk may be full, and the folder removed.
        with open(new_memfd("run_record"), "rb") as file, _outliving_sigterm():  # noqa: PTH123 - a descriptor
            ids = [str(os.getpid()), str(file.fileno()), str(folder)]
            # Without the trampoline, whose SIGKILL would keep it from leaving the job: it asks
            # for SIGTERM itself, at the end of the thread that waits here.
            agent = subprocess.Popen(
                [*program, *ids, *self._config.command_line(), *command],
                env=env,
                stdin=subprocess.DEVNULL,
                pass_fds=[file.fileno()],
                start_new_session=True,  # Ctrl-C is for this program, which makes the agent leave
            )
            code = self._wait(agent)
            file.seek(0)
            record = file.read()
        try:
            return msgspec.json.decode(record, type=RunRecord)
        except msgspec.MsgspecError:
            text = (
                f"the agent (pid {agent.pid}) ended with {code}, and did not say how the job went"
            )
            return RunRecord(exit_code=1, error=text)

    def _wait(self, agent: subprocess.Popen[bytes]) -> int:
        """Wait for its end, which `stop` may bring about; gives its exit code.

        When that is interrupted it leaves, and once more: at once.
        """
        self._agents.append(agent)
        if self._stopped:  # before `stop` could see it
            agent.terminate()
        try:
            return agent.wait()
        except BaseException:
            while agent.poll() is None:
                agent.terminate()
                with suppress(BaseException):
                    agent.wait()
            raise
        finally:
            self._agents.remove(agent)


@contextmanager
def _outliving_sigterm() -> Iterator[None]:
    """Have SIGTERM raise SystemExit in here, if it would end this program at once.

    A scheduler that gives a job time to save kills what is left when its program has ended.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def __getattr__(name: str) -> Any:
    """ChildFailedError, which loads torch, is loaded when it is asked for."""
    if name != "ChildFailedError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from elastic_etcd.api.child_failed import ChildFailedError  # noqa: PLC0415 - as above

    return ChildFailedError
