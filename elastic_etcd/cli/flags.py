"""The launcher's flags: torchrun's, each with its meaning, and our own, grouped by purpose.

Every flag has torchrun's underscore form and reads `PET_<FLAG>` from the environment. A flag of
torchrun's that has no meaning here stays accepted; `WITHOUT_MEANING` says why it has none.
"""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any, NoReturn

from elastic_etcd.cli import values
from elastic_etcd.core.keys import PREFIX
from elastic_etcd.errors import UsageError
from elastic_etcd.etcd.config import EtcdConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

COMMAND = "python -m elastic_etcd.launch"

EPILOG = f"""\
examples:
  two to eight nodes, a worker per GPU; the same line on every node, at any time:
    {COMMAND} --etcd etcd1:2379,etcd2:2379 --job resnet-7 \\
        --nnodes 2:8 --nproc-per-node gpu train.py --lr 0.1
  one machine, without an etcd of your own:
    {COMMAND} --nproc-per-node 2 train.py

exit codes:
  0 success, or left on SIGTERM    1 training failed            2 wrong usage
  3 restart budget used up         4 no rendezvous in time      5 etcd unreachable or denied
  130, 143 stopped at once by a second SIGINT, SIGTERM
"""

WITHOUT_MEANING = {
    "rdzv_backend": "nodes always meet through etcd v3, at --etcd",
    "monitor_interval": "the exit of a worker is an event here, not polled",
    "event_log_handler": "events are kept in etcd; see elastic-etcd status",
    "logs_specs": "use --log-dir, --redirects and --tee",
    "duplicate_stdout_filters": "filter the files under --log-dir",
    "duplicate_stderr_filters": "filter the files under --log-dir",
    "node_rank": "ranks are given at the rendezvous; a survivor keeps its place",
    "master_addr": "each generation has a store of its own on group rank 0's node",
    "master_port": "each generation has a store of its own on a free port",
    "numa_binding": "start the workers through numactl with --no-python instead",
}


class _Help(argparse.RawDescriptionHelpFormatter):
    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Without the underscore forms, which would double the length of the help."""
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = [name for name in action.option_strings if "_" not in name]
        value = self._format_args(action, action.dest.upper())
        return ", ".join(names) + (f" {value}" if value else "")


class Parser(argparse.ArgumentParser):
    """Raises UsageError with a hint where argparse prints its whole usage and exits."""

    def error(self, message: str) -> NoReturn:
        if missing := re.match(r"the following arguments are required: (\w+)", message):
            message = f"no {missing[1].lower()} given"
        message = re.sub(r"/--[a-z]+(?:_[a-z]+)+", "", message).removeprefix("argument ")
        unknown = re.match(r"unrecognized arguments: (-[^ =]+)", message)
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


class Group:
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
        """An option without a value: on when given, or when its PET_ variable is not 0."""
        variable = _variable(max(names, key=len))
        default = _checked(variable, self._env.get(variable) or "0", {"type": values.truth})
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
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise UsageError(f"{variable}={value} in the environment: {error}") from error


def build_parser(env: Mapping[str, str], prog: str = COMMAND) -> Parser:
    """The parser, with defaults from the PET_ variables of `env`."""
    parser = Parser(
        prog=prog,
        usage=f"{prog} [options] script [argument ...]",
        description="Runs a torchrun script as an elastic job: nodes may die, leave and join, and "
        "training goes on with those that are there.",
        epilog=EPILOG,
        formatter_class=_Help,
    )
    _job(Group(parser, "job and nodes", env))
    _etcd(Group(parser, "etcd", env))
    _worker(Group(parser, "workers", env))
    _failures(Group(parser, "failures and times", env))
    _output(Group(parser, "output", env))
    _ignored(Group(parser, "accepted from torchrun, without a meaning here", env))
    parser.add_argument("training_script", metavar="script", help="the training program")
    parser.add_argument(
        "training_script_args",
        metavar="argument",
        nargs=argparse.REMAINDER,
        help="its arguments, passed on as they are; ${local_rank} is filled in",
    )
    return parser


def _job(group: Group) -> None:
    group.flag(
        "--job",
        "--rdzv-id",
        type=values.job_id,
        metavar="ID",
        help="what the nodes of one job have in common; up to 128 letters, digits, '.', '_', '-' "
        "(default: random, where no other node can join)",
    )
    group.flag(
        "--nnodes",
        type=values.nnodes,
        default="1:1",
        metavar="MIN[:MAX]",
        help="how few and how many nodes may train; others wait as spares (default: 1)",
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
        type=values.name,
        metavar="NAME",
        help="this node's name in logs (default: host name)",
    )
    group.flag(
        "--advertise",
        "--local-addr",
        type=values.address,
        metavar="ADDRESS",
        help="address of this node for the others (default: its address on the way to etcd)",
    )
    group.flag(
        "--topology-label",
        type=values.label,
        default="",
        metavar="LABEL",
        help="new nodes get ranks in the order of (label, name), so that a rack stays together",
    )
    group.flag("--role", default="default", help="ROLE_NAME of the workers (default: %(default)s)")
    group.flag(
        "--rdzv-conf",
        type=values.key_values,
        default={},
        metavar="KEY=VALUE,...",
        help="torchrun's: join_timeout, last_call_timeout (= --settle), cacert, cert, key",
    )


def connection(group: Group) -> None:
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
        default=PREFIX,
        type=values.prefix,
        help="all keys are under it (default: %(default)s)",
    )
    group.flag("--cacert", metavar="FILE", help="CA that signed etcd's certificate; turns TLS on")
    group.flag("--cert", metavar="FILE", help="certificate of this client")
    group.flag("--key", metavar="FILE", help="its key")
    group.flag("--user", metavar="NAME", help="etcd user; its password is in ELASTIC_ETCD_PASSWORD")
    group.flag("--password-file", metavar="FILE", help="or in this file")
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


def _etcd(group: Group) -> None:
    connection(group)
    group.flag(
        "--lease-ttl",
        type=values.count,
        default=5,
        metavar="SECONDS",
        help="a node that is silent for so many seconds is gone (default: %(default)s)",
    )
    group.flag(
        "--etcd-timeout",
        type=values.seconds,
        metavar="SECONDS",
        help="give up when etcd is away for longer in mid-run (default: never; training goes on)",
    )


def _worker(group: Group) -> None:
    group.switch("-m", "--module", help="script is a module: python -m script")
    group.switch("--no-python", help="script is a program of its own, not Python")
    group.switch("--run-path", help="run with this Python, whatever PYTHON_EXEC says")
    group.flag(
        "--start-method",
        choices=("warm", "exec", "spawn", "fork", "forkserver"),
        default="warm",
        metavar="METHOD",
        help="warm: fork Python workers from a process that has torch loaded; exec: start each as "
        "a program of its own (default: warm; torchrun's spawn, fork and forkserver mean warm)",
    )
    group.flag(
        "--preload",
        action="extend",
        type=values.modules,
        default=[],
        metavar="MODULE,...",
        help="modules that the warm process loads, too, so that no worker waits for them; may be "
        "repeated",
    )
    group.switch("--virtual-local-rank", help="LOCAL_RANK 0 for all, each sees its own GPU only")
    group.flag(
        "--signals-to-handle",
        type=values.signals,
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        metavar="NAMES",
        help="signals on which this node leaves the job (default: %(default)s)",
    )


def _failures(group: Group) -> None:
    group.flag(
        "--max-restarts",
        type=values.natural,
        default=3,
        metavar="N",
        help="failures of workers that the job survives, over all nodes; nodes that come and go "
        "do not count (default: %(default)s; torchrun: 0)",
    )
    for name, default, text in (
        ("--restart-window", 3600, "failures before so long a time of good progress are forgiven"),
        ("--min-uptime", 10, "a worker that fails sooner, again and again, is restarted later"),
        ("--settle", 3, "the first formation waits so long after the last node joined"),
        ("--join-timeout", 600, "give up when fewer than MIN nodes were there for so long"),
    ):
        told = f"{text} (default: {default})"
        group.flag(name, type=values.seconds, default=default, metavar="SECONDS", help=told)
    group.flag(
        "--shutdown-timeout",
        type=values.seconds,
        metavar="SECONDS",
        help="from SIGTERM to SIGKILL of a worker; also TORCH_ELASTIC_SHUTDOWN_TIMEOUT "
        "(default: by reason, see docs/failures.md)",
    )


def _output(group: Group) -> None:
    group.flag("--log-dir", metavar="DIR", help="a file per generation, rank and stream")
    for short, name, text in (
        ("-r", "--redirects", "streams that go to a file only"),
        ("-t", "--tee", "streams that go to a file and the console"),
    ):
        group.flag(
            short,
            name,
            type=values.streams,
            default="0",
            metavar="STREAMS",
            help=f"{text}: 0 none, 1 stdout, 2 stderr, 3 both, or per local rank 0:3,1:2 "
            "(default: 0)",
        )
    group.flag(
        "--local-ranks-filter",
        type=values.ranks,
        metavar="RANKS",
        help="local ranks whose output the console shows, like 0,1 (default: all)",
    )
    group.flag(
        "--log-level",
        type=values.log_level,
        metavar="LEVEL",
        help="of the agent's own lines: debug, info, warning, error; also LOGLEVEL (default: info)",
    )


def _ignored(group: Group) -> None:
    for dest, reason in WITHOUT_MEANING.items():
        group.flag("--" + dest.replace("_", "-"), metavar="X", help=reason)
