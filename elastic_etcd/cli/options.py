"""The command line: the flags, and what the text of each may be.

The launcher has torchrun's flags, each with its meaning, and flags of its own. Every flag has
torchrun's underscore form and reads `PET_<FLAG>` from the environment. A flag of torchrun's that
has no meaning here stays accepted; `WITHOUT_MEANING` says why it has none. The defaults are those
of Limits, AgentConfig and LogConfig.
"""

from __future__ import annotations

import argparse
import ipaddress
import math
import os
import re
import signal
from argparse import ArgumentTypeError
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec import structs

from elastic_etcd.agent.config import AgentConfig, LogConfig, StreamChoice, Streams
from elastic_etcd.core.rules import JOIN_SETTLE
from elastic_etcd.core.schema import (
    LARGEST,
    MOST_SECONDS,
    MOST_SIZES,
    PARTS,
    Limits,
    valid_address,
    valid_job,
    valid_prefix,
)
from elastic_etcd.errors import UsageError
from elastic_etcd.etcd.access import EtcdConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DEFAULTS = Limits(min_nodes=1, max_nodes=1)

COMMAND = "python -m elastic_etcd.launch"

EXIT_CODES = """\
exit codes:
  0 the job succeeded              1 training failed            2 wrong usage
  3 restart budget used up         4 no rendezvous in time      5 etcd unreachable or denied
  130, 143 left an unfinished job on SIGINT, SIGTERM (--leave-exit-code), or at once on a second;
           143 also where it was drained, or the job was stopped (--stop-exit-code)
"""
EPILOG = f"""\
examples:
  two to eight nodes, a worker per GPU; the same line on every node, at any time:
    {COMMAND} --etcd etcd1:2379,etcd2:2379 --job resnet-7 \\
        --nnodes 2:8 --nproc-per-node gpu train.py --lr 0.1
  one machine, without an etcd of your own:
    {COMMAND} --nproc-per-node 2 train.py

{EXIT_CODES}"""

WITHOUT_MEANING = {
    "rdzv_backend": "nodes always meet through etcd v3, at --etcd",
    "monitor_interval": "the exit of a worker is an event here, not polled",
    "event_log_handler": "use elastic-etcd events --follow --json",
    "logs_specs": "use --log-dir, --redirects and --tee",
    "duplicate_stdout_filters": "filter the files under --log-dir",
    "duplicate_stderr_filters": "filter the files under --log-dir",
    "node_rank": "ranks are given at the rendezvous; a survivor keeps its rank",
    "master_addr": "each generation has a store of its own on group rank 0's node",
    "master_port": "each generation has a store of its own on a free port",
    "numa_binding": "start the workers through numactl with --no-python instead",
}


_PARTS = ", ".join(sorted(PARTS))
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class Help(argparse.RawDescriptionHelpFormatter):
    """Help as it is written, with each flag once."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Leave out the underscore forms, which would double the length of the help."""
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = [name for name in action.option_strings if "_" not in name]
        value = self._format_args(action, action.dest.upper())
        return ", ".join(names) + (f" {value}" if value else "")


class Parser(argparse.ArgumentParser):
    """Raises UsageError with a hint where argparse prints its whole usage and exits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ambiguous: dict[str, str] = {}

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """What an abbreviation stands for; none if that is ambiguous, which is told by `error`.

        Argparse asks it of the script's arguments, too, before it knows that they are the script's.
        A flag's two spellings are one.
        """
        found: list[Any] = super()._get_option_tuples(option_string)
        names = {id(each[0]): each[1] for each in reversed(found)}
        if len(names) <= 1:
            return found[:1]
        self._ambiguous[option_string.partition("=")[0]] = ", ".join(sorted(names.values()))
        return []

    def error(self, message: str) -> NoReturn:
        if missing := re.match(r"the following arguments are required: (\w+)", message):
            message = f"no {missing[1].lower()} given"
        message = re.sub(r"/--[a-z]+(?:_[a-z]+)+", "", message).removeprefix("argument ")
        unknown = re.match(r"unrecognized arguments: (-[^ =]+)", message)
        if unknown and (matches := self._ambiguous.get(unknown[1])):
            message, unknown = f"ambiguous option: {unknown[1]} could match {matches}", None
        hint = self._nearest(unknown[1]) if unknown else ""
        raise UsageError(f"{message}{hint}\nSee {self.prog} --help.")

    def _nearest(self, flag: str) -> str:
        from difflib import get_close_matches  # noqa: PLC0415 - only for this message

        known = [name for action in self._actions for name in action.option_strings]
        flag = flag.replace("_", "-")
        stem = flag[:-1]  # --nprocs is further from --nproc-per-node than from --nnodes
        longer = [name for name in known if name.startswith(stem)] if len(stem) > len("--a") else []
        nearest = longer or get_close_matches(flag, known, n=1)
        return f" (did you mean {nearest[0]}?)" if nearest else ""


class FlagGroup:
    """A group of flags; each option also gets its underscore form and its PET_ variable."""

    def __init__(self, parser: Parser, title: str, env: Mapping[str, str]) -> None:
        self._group = parser.add_argument_group(title)
        self._env = env

    def flag(self, *names: str, default: Any = None, **rest: Any) -> None:
        """An option that takes a value."""
        variables = [_variable(name) for name in names if name.startswith("--")]
        given = next((v for v in variables if self._env.get(v)), None)
        if given is not None:
            default = _checked(given, self._env[given], rest)
        self._group.add_argument(*_with_underscores(names), default=default, **rest)

    def switch(self, *names: str, **rest: Any) -> None:
        """An option without a value, which is on when given or when its PET_ variable is not 0."""
        variable = _variable(max(names, key=len))
        default = _checked(variable, self._env.get(variable) or "0", {"type": truth})
        self._group.add_argument(
            *_with_underscores(names), action="store_true", default=default, **rest
        )


def _variable(name: str) -> str:
    return "PET_" + name.lstrip("-").replace("-", "_").upper()


def _with_underscores(names: Iterable[str]) -> list[str]:
    underscored = ["--" + name[2:].replace("-", "_") for name in names if name.startswith("--")]
    return list(dict.fromkeys([*names, *underscored]))


def _checked(variable: str, value: str, rest: Mapping[str, Any]) -> Any:
    try:
        return rest.get("type", str)(value)
    except (ValueError, ArgumentTypeError) as error:
        raise UsageError(f"{variable}={value} in the environment: {error}") from error


def build_parser(env: Mapping[str, str], prog: str = COMMAND) -> Parser:
    """The parser, with defaults from the PET_ variables of `env`."""
    parser = Parser(
        prog=prog,
        usage=f"{prog} [options] script [argument ...]",
        description="Runs a torchrun script as an elastic job: nodes may die, leave and join, and "
        "training goes on with those that are there.",
        epilog=EPILOG,
        formatter_class=Help,
    )
    _job(FlagGroup(parser, "job and nodes", env))
    _etcd(FlagGroup(parser, "etcd", env))
    _worker(FlagGroup(parser, "workers", env))
    failures = FlagGroup(parser, "failures and times", env)
    for part in (_failures, _leaving, _hangs):
        part(failures)
    _output(FlagGroup(parser, "output", env))
    _ignored(FlagGroup(parser, "accepted from torchrun, without a meaning here", env))
    parser.add_argument("training_script", metavar="script", help="the training program")
    parser.add_argument(
        "training_script_args",
        metavar="argument",
        nargs=argparse.REMAINDER,
        help="its arguments, passed on as they are; ${local_rank} is filled in",
    )
    return parser


def _job(group: FlagGroup) -> None:
    group.flag(
        "--job",
        "--rdzv-id",
        type=job_id,
        metavar="ID",
        help="what the nodes of one job have in common; up to 128 letters, digits, '.', '_', '-' "
        "(default: random, where no other node can join)",
    )
    group.switch(
        "--rerun",
        help="run a job once more that has succeeded (default: exit 0 at once, because whoever "
        "supervises agents may start them again after the end)",
    )
    group.flag(
        "--nnodes",
        type=nnodes,
        default="1:1",
        metavar="MIN[:MAX]",
        help="how few and how many nodes may train, or a list, 2,4,8; others wait as spares "
        "(default: 1)",
    )
    group.flag(
        "--nodes-multiple-of",
        type=count,
        default=DEFAULTS.multiple_of,
        metavar="N",
        help="only multiples of N nodes train; others wait as spares (default: %(default)s)",
    )
    group.flag(
        "--nproc-per-node",
        default="1",
        metavar="N",
        help="workers on this node: a number, gpu, cpu, xpu or auto; nodes may differ (default: 1)",
    )
    group.switch("--standalone", help="one node with an etcd of its own; --etcd and --job ignored")
    group.flag(
        "--node-name",
        type=name,
        metavar="NAME",
        help="this node's name in logs (default: its name in Slurm, SLURMD_NODENAME, else its host "
        "name)",
    )
    group.flag(
        "--advertise",
        "--local-addr",
        type=address,
        metavar="ADDRESS",
        help="address of this node for the others, its interface (eth0), or network (10.1.0.0/16) "
        "(default: its address on the way to etcd, but no loopback if max > 1)",
    )
    group.flag(
        "--topology-label",
        type=label,
        default=AgentConfig.topology_label,
        metavar="LABEL",
        help="new nodes get ranks in the order of (label, name), so that a rack stays together",
    )
    group.flag(
        "--role",
        default=AgentConfig.role,
        help="ROLE_NAME of the workers (default: %(default)s)",
    )
    group.flag(
        "--rdzv-conf",
        type=key_values,
        default={},
        metavar="KEY=VALUE,...",
        help="torchrun's: join_timeout, last_call_timeout (= --settle), cacert, cert, key",
    )


def connection(group: FlagGroup) -> None:
    """The flags that say which etcd, as whom, and under which prefix."""
    group.flag(
        "--etcd",
        "--rdzv-endpoint",
        metavar="HOST:PORT,...",
        help="etcd's endpoints, also http(s)://...; or ETCDCTL_ENDPOINTS (without either, "
        "`launch` starts an etcd for its run)",
    )
    group.flag(
        "--prefix",
        default=AgentConfig.prefix,
        type=prefix,
        help="all keys are under it (default: %(default)s)",
    )
    group.flag("--cacert", metavar="FILE", help="CA that signed etcd's certificate; turns TLS on")
    group.flag("--cert", metavar="FILE", help="certificate of this client")
    group.flag("--key", metavar="FILE", help="its key")
    group.flag("--user", metavar="NAME", help="etcd user; its password is in ELASTIC_ETCD_PASSWORD")
    group.flag("--password-file", metavar="FILE", help="or in this file, read at each login")
    group.flag("--password", help=argparse.SUPPRESS)  # else a short form of --password-file


def etcd_of(args: argparse.Namespace, env: Mapping[str, str]) -> EtcdConfig | None:
    """What the flags of `connection` say; None where nothing names an etcd. Raises UsageError."""
    if args.password is not None:
        raise UsageError(
            "--password: a password on the command line can be read by every user of this machine; "
            "put it in ELASTIC_ETCD_PASSWORD or in a --password-file"
        )
    return EtcdConfig.parse(
        args.etcd,
        cacert=args.cacert,
        cert=args.cert,
        key=args.key,
        user=args.user,
        password_file=args.password_file,
        env=env,
    )


def _etcd(group: FlagGroup) -> None:
    connection(group)
    group.flag(
        "--lease-ttl",
        type=count,
        default=AgentConfig.lease_ttl,
        metavar="SECONDS",
        help="a node that is silent for so many seconds is gone (default: %(default)s)",
    )
    group.flag(
        "--etcd-timeout",
        type=seconds,
        metavar="SECONDS",
        help="give up when etcd is away for longer in mid-run (default: never; training goes on)",
    )
    group.flag(
        "--when-cut-off",
        choices=("train-on", "stop"),
        default="train-on",
        help="workers of a node that etcd does not answer train on, or are stopped before its "
        "lease can end, so that no two worlds ever train (default: %(default)s)",
    )
    group.flag(
        "--proof-of-death",
        type=on_or_off,
        default=AgentConfig.proof_of_death,
        metavar="on|off",
        help="agents keep a connection to their coordinator's, so that a node whose processes all "
        "die is missed at once and not after --lease-ttl (default: on)",
    )


def _worker(group: FlagGroup) -> None:
    group.switch("-m", "--module", help="script is a module: python -m script")
    group.switch(
        "--no-python",
        help="script is a program of its own, not Python; its whole process group gets SIGTERM",
    )
    group.switch("--run-path", help="run with this Python, whatever PYTHON_EXEC says")
    group.flag(
        "--start-method",
        choices=("prefork", "exec", "spawn", "fork", "forkserver"),
        default="prefork" if AgentConfig.prefork else "exec",
        metavar="METHOD",
        help="prefork: fork Python workers from a process that has torch loaded; exec: start each "
        "as a program of its own (default: %(default)s, which torchrun's spawn, fork and "
        "forkserver mean, too)",
    )
    group.flag(
        "--preload",
        action="extend",
        type=modules,
        default=[],
        metavar="MODULE,...",
        help="modules that the fork server loads, too, so that no worker waits for them; "
        "may be repeated. After the first restart the log says which ones would save time",
    )
    group.switch("--virtual-local-rank", help="LOCAL_RANK 0 for all, each sees its own GPU only")
    group.flag(
        "--signals-to-handle",
        type=signals,
        default=",".join(number.name for number in AgentConfig.signals),
        metavar="NAMES",
        help="signals on which this node leaves the job (default: %(default)s)",
    )
    group.flag(
        "--memory-dir",
        default=AgentConfig.memory_dir,
        metavar="DIR",
        help="a tmpfs for ee.memory_checkpoint; what is written there goes with the agent "
        "(default: %(default)s)",
    )


def _failures(group: FlagGroup) -> None:
    group.flag(
        "--max-restarts",
        type=natural,
        default=DEFAULTS.max_restarts,
        metavar="N",
        help="failures of workers that the job survives, over all nodes; nodes that come and go "
        "do not count (default: %(default)s; torchrun: 0)",
    )
    group.flag(
        "--suspect-after",
        type=natural,
        default=DEFAULTS.suspect_after,
        metavar="N",
        help="a node whose workers failed so often right after their start (see --min-uptime), or "
        "that went so often, is left out, as long as MIN others are there; 0: never (default: "
        "%(default)s)",
    )
    for name, text in (
        (
            "restart_window",
            "failures before so long a time of training, over all worlds since, are forgiven",
        ),
        ("min_uptime", "a worker that fails sooner, again and again, is restarted later"),
        ("settle", "the first formation waits so long after the last node joined"),
        ("join_interval", "a world that trains is ended for them after so long at the soonest"),
        (
            "join_timeout",
            "give up when fewer than MIN nodes were there for so long, while etcd answered",
        ),
    ):
        default = getattr(DEFAULTS, name)
        group.flag(
            "--" + name.replace("_", "-"),
            type=seconds,
            default=default,
            metavar="SECONDS",
            help=f"{text} (default: {default:g})",
        )
    group.flag(
        "--join-settle",
        type=seconds,
        metavar="SECONDS",
        help="nodes that come later are taken in together, so long after the last one (default: "
        f"{JOIN_SETTLE:g}, 0 where all workers are in ee.run)",
    )


def _leaving(group: FlagGroup) -> None:
    group.flag(
        "--leave-exit-code",
        type=exit_code,
        metavar="CODE",
        help="exit code of a node that left an unfinished job on a signal (default: 128 + signal, "
        "so that Kubernetes and Slurm do not take it for done)",
    )
    group.flag(
        "--stop-exit-code",
        type=exit_code,
        metavar="CODE",
        help="exit code after `elastic-etcd stop`, for a scheduler that then is to start no node "
        "again (default: that of a node that left, 143)",
    )
    group.flag(
        "--leave-deadline",
        type=seconds,
        metavar="SECONDS",
        help="from the signal on which this node leaves to SIGKILL of its workers; until they have "
        "ended, or this is over, no next world begins. The same on every node "
        f"(default: --shutdown-timeout if that is given, else {DEFAULTS.leave_deadline:g})",
    )
    group.flag(
        "--preemption-watch",
        type=notices,
        metavar="SOURCE",
        help="leave, as on a signal, when this machine is about to be taken away: aws, gcp or "
        "azure, or file:PATH, which appears then and may hold seconds; workers have the time that "
        "is left, but no more than --leave-deadline (default: none)",
    )
    group.flag(
        "--shutdown-timeout",
        type=seconds,
        metavar="SECONDS",
        help="from SIGTERM to SIGKILL of a worker, but see --leave-deadline; also "
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT (default: by reason, see docs/failures.md)",
    )
    group.flag(
        "--park-timeout",
        type=seconds,
        default=AgentConfig.park_timeout,
        metavar="SECONDS",
        help="what a worker in ee.run has after a failure, instead of --shutdown-timeout, to come "
        "out of its step and to let go of NCCL; one that has not is killed and started anew "
        "(default: %(default)g)",
    )
    group.flag(
        "--kill-timeout",
        type=seconds,
        default=AgentConfig.kill_timeout,
        metavar="SECONDS",
        help="from SIGKILL of a worker until this node gives up on it and leaves the job; many "
        "devices or much pinned memory may take long (default: %(default)g)",
    )


def _hangs(group: FlagGroup) -> None:
    group.flag(
        "--hang-timeout",
        type=hang_timeout,
        metavar="auto|SECONDS|off",
        help="a worker that has not ended its step for so long is told, with where it stands; not "
        "in the first step of a world, in a commit, or where the script says ee.quiet (default: "
        "auto, ten times the slowest of the recent steps, but a minute at least)",
    )
    group.flag(
        "--hang-action",
        choices=("report", "restart"),
        default=DEFAULTS.hang_action,
        help="what is done about it: it is told only, or its world ends as by a failure of the "
        "worker that hangs; a script that evaluates for longer has to say so by ee.quiet "
        "(default: %(default)s)",
    )
    group.flag(
        "--straggler-factor",
        type=straggler_factor,
        default=DEFAULTS.straggler_factor,
        metavar="FACTOR|off",
        help="a node is told to be slow if a step takes it, outside of collectives, so many times "
        "as long as the median of all nodes, over 50 steps; of scripts that train with "
        "DistributedDataParallel (default: %(default)g)",
    )


def _output(group: FlagGroup) -> None:
    group.flag("--log-dir", metavar="DIR", help="a file per generation, rank and stream")
    for short, long, default, text in (
        ("-r", "--redirects", LogConfig.redirects, "streams that go to a file only"),
        ("-t", "--tee", LogConfig.tee, "streams that go to a file and the console"),
    ):
        group.flag(
            short,
            long,
            type=streams,
            default=default,
            metavar="STREAMS",
            help=f"{text}: 0 none, 1 stdout, 2 stderr, 3 both, or per local rank 0:3,1:2 "
            "(default: 0)",
        )
    group.flag(
        "--local-ranks-filter",
        type=ranks,
        metavar="RANKS",
        help="local ranks whose output the console shows, like 0,1 (default: all)",
    )
    group.flag(
        "--log-level",
        type=log_level,
        metavar="LEVEL",
        help="of the agent's own lines: debug, info, warning, error; also LOGLEVEL (default: info)",
    )
    group.flag(
        "--metrics-addr",
        type=listening,
        metavar="[HOST:]PORT",
        help="answer /metrics for Prometheus, /healthz and /readyz there; without a host on the "
        "loopback only (default: nowhere; extra [metrics])",
    )


def _ignored(group: FlagGroup) -> None:
    for dest, reason in WITHOUT_MEANING.items():
        group.flag("--" + dest.replace("_", "-"), metavar="X", help=reason)


# --- what the text of a flag may be: each gives its value, or raises ArgumentTypeError ------


def nnodes(text: str) -> Limits:
    """`N`, `MIN:MAX`, or all sizes that a world may have, `2,4,8`."""
    if not re.fullmatch(r"\d{1,9}(:\d{1,9}|(,\d{1,9})+)?", text.strip()):
        raise ArgumentTypeError(
            f"{text[:140]} is neither a number nor MIN:MAX; for example 2:8, or the list 2,4,8"
        )
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    least, most = numbers[0], numbers[-1]
    if not all(numbers):
        raise ArgumentTypeError(f"{text}: at least 1 node is needed to train")
    if "," in text:
        return Limits(least, most, sizes=_ascending(text, numbers))
    if least > most:
        raise ArgumentTypeError(f"{text}: MIN is above MAX; did you mean {most}:{least}?")
    return Limits(least, most)


def _ascending(text: str, numbers: list[int]) -> tuple[int, ...]:
    """These sizes, if each is above the one before it."""
    right = sorted(set(numbers))
    if len(right) > MOST_SIZES:
        raise ArgumentTypeError(f"{len(right)} sizes are more than {MOST_SIZES}")
    if numbers != right:
        meant = ",".join(map(str, right))
        raise ArgumentTypeError(f"{text}: each size once, from small to large: {meant}")
    return tuple(numbers)


def in_multiples(asked: Limits, step: int) -> Limits:
    """These limits with multiples of `step` only. Raises UsageError if none is asked for."""
    if step == 1:
        return asked
    least, most = asked.min_nodes, asked.max_nodes
    if asked.sizes:
        raise UsageError("--nnodes lists all sizes, --nodes-multiple-of says others; give one")
    first, last = least + -least % step, most - most % step
    if first > last:
        both = f"--nnodes {least}:{most} --nodes-multiple-of {step}"
        raise UsageError(f"{both}: no multiple of {step} is from {least} to {most}")
    return structs.replace(asked, min_nodes=first, max_nodes=last, multiple_of=step)


def this_node(env: Mapping[str, str]) -> str:
    """What this machine's node is called where nobody has said so."""
    return env.get("SLURMD_NODENAME") or os.uname().nodename


def job_id(text: str) -> str:
    """A job's id, which is one part of a key in etcd."""
    if not valid_job(text):
        raise ArgumentTypeError(
            f"{text[:140]!r}: a job id is 1 to 128 letters, digits, '.', '_' or '-'; it becomes a "
            f"part of a key in etcd, where {_PARTS} mean something else"
        )
    return text


def prefix(text: str) -> str:
    """A prefix of keys: `/a` or `/a/b`."""
    if not valid_prefix(text):
        raise ArgumentTypeError(
            f"{text[:140]!r}: a prefix is '/' and letters, digits, '.', '_' or '-', once or "
            f"several times, without a '/' at its end; for example /elastic_etcd. {_PARTS} are "
            "parts of a job's own keys"
        )
    return text


def name(text: str) -> str:
    """A name that is shown in logs."""
    if not text.strip() or not text.isprintable() or len(text) > 255:
        raise ArgumentTypeError(
            f"{text[:140]!r} is empty, longer than 255, or has characters that cannot be shown"
        )
    return text


def label(text: str) -> str:
    """A name, or an empty text."""
    return name(text) if text else text


def address(text: str) -> str:
    """What other nodes can connect to, without a port; or an interface, or a network with a /."""
    if "/" in text:
        try:
            return str(ipaddress.ip_network(text, strict=False))
        except ValueError:
            raise ArgumentTypeError(f"{text[:140]!r} is no network in CIDR form") from None
    if not valid_address(text):
        raise ArgumentTypeError(f"{text[:140]!r} is neither a host name nor an IP address")
    return text


def listening(text: str) -> tuple[str, int]:
    """`PORT` on the loopback, `HOST:PORT` or `[IPV6]:PORT`; port 0 is any that is free."""
    host, colon, port = text.rpartition(":")
    if colon and not host:
        raise ArgumentTypeError(f"{text}: say 0.0.0.0{text} for all addresses of this machine")
    host = host.removeprefix("[").removesuffix("]") if colon else "127.0.0.1"
    if not valid_address(host) or natural(port) >= 1 << 16:
        raise ArgumentTypeError(f"{text[:140]} is neither PORT nor HOST:PORT")
    return host, natural(port)


def notices(text: str) -> str:
    """Where notices of this machine's end come from."""
    if text not in ("aws", "gcp", "azure") and not re.fullmatch("file:.+", text):
        raise ArgumentTypeError(f"{text[:140]} is none of aws, gcp, azure, file:PATH")
    return text


def natural(text: str) -> int:
    """An integer of at least 0."""
    if not re.fullmatch(r"\d{1,30}", text.strip()) or int(text) > LARGEST:
        raise ArgumentTypeError(f"{text[:140]} is not a whole number of at least 0")
    return int(text)


def count(text: str) -> int:
    """An integer of at least 1."""
    if natural(text) < 1:
        raise ArgumentTypeError(f"{text} is below 1")
    return int(text)


def exit_code(text: str) -> int:
    """An exit status: 0 to 255."""
    if natural(text) > 255:
        raise ArgumentTypeError(f"{text} is above 255")
    return int(text)


def hang_timeout(text: str) -> float | None:
    """Seconds above 0; None for auto, infinity for off."""
    if text in ("auto", "off"):
        return None if text == "auto" else math.inf
    value = seconds(text)
    if not value:
        raise ArgumentTypeError("0 would tell of every step; give more, or off")
    return value


def straggler_factor(text: str) -> float:
    """A number above 1; 0 for off."""
    try:
        value = 0.0 if text == "off" else float(text)
    except ValueError:
        value = math.nan
    if value and not 1 < value < MOST_SECONDS:
        raise ArgumentTypeError(f"{text} is not a number above 1, or off")
    return value


def seconds(text: str) -> float:
    """A number of seconds of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < MOST_SECONDS:
        raise ArgumentTypeError(f"{text} is not a number of seconds of at least 0")
    return value


def key_values(text: str) -> dict[str, str]:
    """`key=value,key=value`, as in torchrun's --rdzv-conf."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if any(not key.strip() or not value.strip() for key, _, value in pairs):
        raise ArgumentTypeError(f"{text} is not KEY=VALUE,KEY=VALUE")
    return {key.strip(): value.strip() for key, _, value in pairs}


def streams(text: str) -> StreamChoice:
    """`3`, or by local rank `0:3,1:2`, as in torchrun's --redirects."""
    if re.fullmatch(r"[0-3]", text):
        return StreamChoice(Streams(int(text)))
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise ArgumentTypeError(
            f"{text}: give 0 none, 1 stdout, 2 stderr or 3 both, or by local rank like 0:3,1:2"
        )
    pairs = (pair.split(":") for pair in text.split(","))
    return StreamChoice(by_local_rank=tuple((int(rank), Streams(int(s))) for rank, s in pairs))


def ranks(text: str) -> frozenset[int] | None:
    """Local ranks, `0,1`; empty means all."""
    if not text:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ArgumentTypeError(f"{text} is not a list of local ranks like 0,1,2")
    return frozenset(int(rank) for rank in text.split(","))


def signals(text: str) -> tuple[signal.Signals, ...]:
    """Names of signals, `SIGTERM,SIGINT`."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [part for part in names if part not in signal.Signals.__members__]
    if unknown or {"SIGKILL", "SIGSTOP", "SIGCHLD"} & set(names):
        raise ArgumentTypeError(f"{text}: not all are names of signals that can be handled")
    return tuple(dict.fromkeys(signal.Signals[part] for part in names))


def modules(text: str) -> list[str]:
    """Names of modules, with commas between them."""
    names = [name.strip() for name in text.split(",")]
    wrong = [name for name in names if not all(part.isidentifier() for part in name.split("."))]
    if wrong:
        raise ArgumentTypeError(f"{wrong[0]!r} is no module's name")
    return names


def log_level(text: str) -> str:
    """A level of Python's logging, in any case."""
    if text.upper() not in _LOG_LEVELS:
        raise ArgumentTypeError(f"{text}: give one of {', '.join(_LOG_LEVELS).lower()}")
    return text.upper()


def on_or_off(text: str) -> bool:
    """`on` or `off`."""
    if text not in ("on", "off"):
        raise ArgumentTypeError(f"{text} is neither on nor off")
    return text == "on"


def truth(text: str) -> bool:
    """`1` or `0`, as torchrun's switches are written in the environment."""
    if not re.fullmatch(r"\d+", text):
        raise ArgumentTypeError("give 1 or 0")
    return int(text) != 0


def shown(text: str) -> str:
    """A text of somebody else's, without what could steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
