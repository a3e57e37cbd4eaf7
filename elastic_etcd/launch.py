"""`python -m elastic_etcd.launch`: torchrun's command line, for an elastic job over etcd."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import signal
import stat
import sys
import tempfile
import termios
import zlib
from argparse import ArgumentTypeError
from array import array
from contextlib import suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from elastic_etcd.agent.config import AgentConfig, LogConfig
from elastic_etcd.agent.failures import write_error_file
from elastic_etcd.cli import flag_values, parsers
from elastic_etcd.cli.flags import FLAGS, WITHOUT_MEANING
from elastic_etcd.cli.parsers import shown
from elastic_etcd.core.schema import Limits
from elastic_etcd.errors import ElasticEtcdError, UsageError
from elastic_etcd.system import kernel
from elastic_etcd.system.startup import be_init, open_standard_streams, reset_signals
from elastic_etcd.times import GRACE_LEAVE, STOP_PATIENCE

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from elastic_etcd.agent.inbox import Follower
    from elastic_etcd.agent.output.logs import Logs
    from elastic_etcd.etcd.access import EtcdConfig

log = logging.getLogger("elastic_etcd")

# torchrun's documentation has it for a job of one node: a store, here an etcd, at a free port.
_FREE_PORT = re.compile(r"(localhost|127\.0\.0\.1|\[::1\]):0")
_HEALTH_CHECK = "TORCHELASTIC_HEALTH_CHECK_PORT"
_PRIORITIES = {logging.DEBUG: 7, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


def main(
    argv: Sequence[str] | None = None, prog: str = parsers.COMMAND, remarks: Sequence[str] = ()
) -> int:
    """Run this node's agent until its job is over; gives the exit code, see docs/failures.md.

    `remarks` are logged before those that the flags give rise to.
    """
    open_standard_streams()
    reset_signals()
    be_init()
    try:
        return run(sys.argv[1:] if argv is None else argv, os.environ, prog, remarks=remarks)
    except ElasticEtcdError as error:
        if log.handlers:
            log.error("%s", error)  # noqa: TRY400 - it says what to do, without a traceback
        else:
            print(f"error: {shown(str(error))}", file=sys.stderr)
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            write_error_file(path, error)
        return error.exit_code
    except KeyboardInterrupt:  # before it takes signals
        print("SIGINT: this node ends", file=sys.stderr)
        return 128 + signal.SIGINT


def run(
    argv: Sequence[str],
    env: Mapping[str, str],
    prog: str = parsers.COMMAND,
    follow: Callable[[Logs], Follower] | None = None,
    remarks: Sequence[str] = (),
) -> int:
    """Be the agent of this command line and environment; gives the exit code.

    `follow` makes one more follower of it. Signals are ignored when this returns: the process is
    to end. Raises ElasticEtcdError.
    """
    args = _arguments(argv, env, prog)
    config = _config(args, env)
    set_up_logging(config)
    kernel.raise_descriptor_limit()
    kernel.check()
    _import_asyncio()
    from elastic_etcd.system.signals import ending_the_start  # noqa: PLC0415 - it needs asyncio

    with ending_the_start(config.signals):
        return _run_agent(config, follow, (*remarks, *_remarks(args, env)))


def _run_agent(
    config: AgentConfig, follow: Callable[[Logs], Follower] | None, remarks: Sequence[str]
) -> int:
    from elastic_etcd.agent import agent, directories  # noqa: PLC0415 - a wrong flag is told at once

    directories.find_temporary_directory()
    if not kernel.has_pidfds():
        log.info("%s has no pidfds, or a container refuses them: threads wait", kernel.machine())
    if not kernel.is_open_to_its_user():
        log.warning(
            "%s has capabilities (setcap): workers may not tell their agent of their steps, so "
            "that hangs and slow nodes are not found; `setcap -r` takes them back",
            sys.executable,
        )
    for remark in remarks:
        log.warning(remark)
    return agent.run(config, follow)


def _import_asyncio() -> None:
    """Without TLS: OpenSSL would take 4 MB of each agent, whose TLS is gRPC's."""
    if not {"asyncio", "ssl"} & sys.modules.keys():
        sys.modules["ssl"] = None  # type: ignore[assignment]  # asyncio does without it then
        import asyncio  # noqa: F401, PLC0415

        del sys.modules["ssl"]


def parse(argv: Sequence[str], env: Mapping[str, str]) -> AgentConfig:
    """The agent's configuration from a command line and an environment.

    Raises UsageError for what cannot work, before anything has started.
    """
    return _config(_arguments(argv, env, parsers.COMMAND), env)


def _arguments(argv: Sequence[str], env: Mapping[str, str], prog: str) -> Namespace:
    parser = parsers.build_parser(env, prog)
    args = parser.parse_args(argv)
    meant = {key: flag.dest for flag in FLAGS for key in flag.rdzv_conf}
    conf = {meant[key]: text for key, text in args.rdzv_conf.items() if key in meant}
    if conf:  # as defaults, so that a flag given by itself is the stronger one
        parser.set_defaults(**conf)
        args = parser.parse_args(argv)
    args.node_name = args.node_name or parsers.this_node(env)
    args.log_level = args.log_level or _log_level(env)
    args.metrics_addr = args.metrics_addr or _health_check(env)
    if args.shutdown_timeout is None:
        args.shutdown_timeout = _shutdown_timeout(env)
    return args


def _config(args: Namespace, env: Mapping[str, str]) -> AgentConfig:
    limits = _limits(args)
    etcd = None if args.standalone else _etcd(args, env)
    job = _job(args, limits.max_nodes, etcd)
    argv = _worker_command(args, env)
    if args.log_dir not in (None, os.devnull):
        _check_writable("--log-dir", args.log_dir)
    if args.memory_dir != AgentConfig.memory_dir:  # that one need not be there
        _check_writable("--memory-dir", args.memory_dir)
    args.memory_dir = str(Path(args.memory_dir).absolute())
    return AgentConfig(
        etcd=etcd,
        job=job,
        argv=argv,
        command=_digest(args),
        node=args.node_name,
        limits=limits,
        has_peers=limits.max_nodes > 1 or job == args.job,
        no_python=_no_python(args),
        prefork=args.start_method != "exec" and not _no_python(args),
        preload=tuple(args.preload),
        log=LogConfig(**parsers.fields_of(args, "log")),
        log_level=args.log_level,
        timer_file=_timer_file(env),
        nproc=_nproc(args.nproc_per_node, env),  # last, as it may take seconds
        **parsers.fields_of(args),
    )


def _limits(args: Namespace) -> Limits:
    grace = GRACE_LEAVE if args.shutdown_timeout is None else args.shutdown_timeout
    # The most that a worker of a node that stays has from the word to stop to SIGKILL.
    longest: float = max(GRACE_LEAVE, args.shutdown_timeout or 0.0, args.park_timeout)
    return structs.replace(
        _nodes(args),
        leave_deadline=grace if args.leave_deadline is None else args.leave_deadline,
        cut_off=args.lease_ttl if args.when_cut_off == "stop" else None,
        patience=longest + args.kill_timeout + STOP_PATIENCE,
        **parsers.fields_of(args, "limits"),
    )


def _nodes(args: Namespace) -> Limits:
    asked = flag_values.in_multiples(args.nnodes, args.nodes_multiple_of)
    if not args.standalone:
        return asked
    if asked.min_nodes > 1:
        raise UsageError(f"--standalone is one node, --nnodes asks for at least {asked.min_nodes}")
    return Limits(1, 1)


def _etcd(args: Namespace, env: Mapping[str, str]) -> EtcdConfig | None:
    if args.etcd and _FREE_PORT.fullmatch(args.etcd):
        if args.nnodes.max_nodes == 1:
            return None
        raise UsageError(
            f"--etcd {args.etcd}: port 0 is a free port of this machine: no other node knows "
            "it.\nGive --etcd HOST:2379, the same on every node"
        )
    etcd = parsers.etcd_of(args, env)
    if etcd is None and args.nnodes.max_nodes > 1 and args.master_addr is not None:
        raise UsageError(
            f"--master-addr {args.master_addr}: nodes meet through etcd here, not at a master.\n"
            "Give --etcd HOST:2379 and --job ID instead, the same on every node."
        )
    return etcd


def _job(args: Namespace, most: int, etcd: EtcdConfig | None) -> str:
    if args.job and not args.standalone:
        return str(args.job)
    if etcd is not None and most > 1:
        raise UsageError(
            "no job id: nodes that meet in one etcd need it to tell their job from others.\n"
            "Add --job ID, the same on every node, for example --job resnet-7"
        )
    return f"run-{os.urandom(4).hex()}"  # nobody else has to know it


def _nproc(spec: str, env: Mapping[str, str]) -> int:
    if re.fullmatch(r"[1-9][0-9]*", spec):
        return int(spec)
    from elastic_etcd.agent.devices import count_devices  # noqa: PLC0415 - only for gpu, cpu, auto

    return count_devices(spec, env)


def _no_python(args: Namespace) -> bool:
    return bool(args.no_python and not args.run_path)


def _worker_command(args: Namespace, env: Mapping[str, str]) -> tuple[str, ...]:
    script, arguments = args.training_script, args.training_script_args
    if _no_python(args):
        if args.module:
            raise UsageError("--no-python and --module exclude each other; give one of them")
        if shutil.which(script, path=env.get("PATH")) is None:
            raise UsageError(f"{script}: no such program, or not executable (--no-python)")
        return (script, *arguments)
    python = sys.executable if args.run_path else env.get("PYTHON_EXEC", sys.executable)
    if shutil.which(python, path=env.get("PATH")) is None:
        raise UsageError(f"PYTHON_EXEC={python}: no such program, or not executable")
    if args.module and not args.run_path:
        return (python, "-u", "-m", script, *arguments)
    _check_script(script)
    return (python, "-u", script, *arguments)


def _digest(args: Namespace) -> str:
    """A digest of what workers run, "" for a function of `elastic_launch`: a file of each node."""
    script = Path(args.training_script)
    if script.is_relative_to(Path(__file__).parent):
        return ""
    command = "\0".join((script.name, *args.training_script_args))
    return f"{zlib.crc32(command.encode(errors='surrogateescape')):08x}"


def _check_script(script: str) -> None:
    path = Path(script)
    try:
        runs = not stat.S_ISDIR(path.stat().st_mode) or (path / "__main__.py").exists()
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"{script}: no such training script (looked from {Path.cwd()}).\n"
            "With -m it may be a module, with --no-python a program."
        ) from None
    except OSError as error:
        raise UsageError(
            f"{script}: the training script cannot be read: {error.strerror}"
        ) from error
    if not runs:
        raise UsageError(f"{script}: is a directory, not a training script")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{script}: the training script cannot be read: permission denied")


def _check_writable(flag: str, directory: str) -> None:
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise UsageError(
            f"{flag} {directory}: cannot be written to: {error.strerror}.\n"
            "Give a directory that this user may write to."
        ) from error


def _shutdown_timeout(env: Mapping[str, str]) -> float | None:
    variable = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    try:
        return flag_values.seconds(env[variable]) if env.get(variable) else None
    except ArgumentTypeError as error:
        raise UsageError(f"{variable}: {error}") from error


def _timer_file(env: Mapping[str, str]) -> str | None:
    """The path at which torch's variables want timers to be served, "" where they leave it open."""
    served = env.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1"
    return env.get("TORCHELASTIC_TIMER_FILE", "") if served else None


def _health_check(env: Mapping[str, str]) -> tuple[str, int] | None:
    """The address for health checks that torch's variable asks for: those come from outside."""
    port = env.get(_HEALTH_CHECK)
    if not (port and _can_serve()):
        return None
    try:
        return flag_values.listening(f"0.0.0.0:{port}")
    except ArgumentTypeError as error:
        raise UsageError(f"{_HEALTH_CHECK}={port}: {error}") from error


def _stdin_has_text() -> bool:
    waiting = array("i", [0])
    with suppress(OSError):  # /dev/null, and what else can't tell
        fcntl.ioctl(0, termios.FIONREAD, waiting)
    return waiting[0] > 0


def _can_serve() -> bool:
    return find_spec("prometheus_client") is not None


def _log_level(env: Mapping[str, str]) -> str:
    try:
        return flag_values.log_level(env.get("LOGLEVEL", AgentConfig.log_level))
    except ArgumentTypeError:
        return AgentConfig.log_level  # other programs read LOGLEVEL too, and other words


def _remarks(args: Namespace, env: Mapping[str, str]) -> Iterator[str]:
    """A line for each thing given that has no meaning here, with the reason."""
    for flag in WITHOUT_MEANING.flags:
        if getattr(args, flag.dest) not in (None, "null"):
            yield f"{flag.names} has no meaning here: {flag.text}"
    for key in args.rdzv_conf.keys() - {key for flag in FLAGS for key in flag.rdzv_conf}:
        yield f"--rdzv-conf {key} has no meaning here"
    if _nodes(args).max_nodes > 1 and _stdin_has_text():
        yield "stdin is not handed on to the workers of several nodes: let them read a file"
    if env.get(_HEALTH_CHECK) and not _can_serve():
        yield f"{_HEALTH_CHECK} has no meaning without pip install 'elastic_etcd[metrics]'"


class _Lines(logging.Formatter):
    """`elastic_etcd[node]: message`, with the level where it is not the usual one; or `json`.

    The time comes first, or the priority in a `journal`, which has its own time. Nothing that
    others say begins a line: what follows the first is indented.
    """

    def __init__(self, config: AgentConfig, *, timed: bool = False, journal: bool = False) -> None:
        super().__init__()
        self._job, self._node, self._json = config.job, config.node, config.log_format == "json"
        self._timed, self._journal = timed, journal

    def format(self, record: logging.LogRecord) -> str:
        level, message = record.levelname.lower(), super().format(record)
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        at = at.replace("+00:00", "Z")
        if self._json:
            fields = {"time": at, "level": level, "job": self._job, "node": self._node}
            return json.dumps(fields | {"message": message})
        level = "" if level == "info" else f"{level}: "
        text = shown(message).replace("\n", "\n    ")
        line = f"elastic_etcd[{self._node}]: {level}{text}"
        if self._journal:
            priority = f"<{_PRIORITIES.get(record.levelno, 6)}>"
            return priority + line.replace("\n", f"\n{priority}")
        return f"{at} {line}" if self._timed else line


def set_up_logging(config: AgentConfig) -> None:
    """Have this program's log written to stderr, each line with this node's name."""
    handler = logging.StreamHandler()
    seen = os.fstat(2)  # what a shell leads elsewhere is no pipe to the journal any more
    journal = os.environ.get("JOURNAL_STREAM") == f"{seen.st_dev}:{seen.st_ino}"
    handler.setFormatter(_Lines(config, timed=not os.isatty(2), journal=journal))
    log.addHandler(handler)
    log.setLevel(config.log_level)
    log.propagate = False


if __name__ == "__main__":
    sys.exit(main())
