"""`elastic-etcd drain`, `undrain`, `scale`, `stop`, `forget`, of one job or with --all of each."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from argparse import ArgumentTypeError, Namespace
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any

from elastic_etcd.cli import flag_values, parsers, query, write_requests
from elastic_etcd.cli.parsers import shown
from elastic_etcd.core import requests
from elastic_etcd.core.schema import seconds_of
from elastic_etcd.errors import ElasticEtcdError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elastic_etcd.core.view import View
    from elastic_etcd.etcd.client import Client

_CODES = """\
exit codes:
  0 done, or it was so before     1 refused: no such job or node, or as told  2 wrong usage
  4 --wait: not within its time   5 etcd unreachable, or denied               130 ended by Ctrl-C
  7 a newer elastic_etcd has written to the job
"""
_OF_ALL = """
With --all it goes on with the other jobs where it fails in one; the exit code is then the highest.
"""
_DRAIN = f"""\
The node leaves as on SIGTERM to its agent: scripts in ee.run stop at a step that all ranks agree
on, others get SIGTERM; `ee.leaving()` is true, they may save until the deadline, and the other
nodes go on without it. Its agent exits 143. An agent that is started there again waits for
`undrain`. Without --force it is refused where fewer than MIN nodes would be left; --self never is,
as that machine goes anyway.

examples:
  elastic-etcd drain resnet-7 node2 --etcd etcd1:2379 --wait && ssh node2 reboot
  elastic-etcd undrain resnet-7 node2 --etcd etcd1:2379
  elastic-etcd drain resnet-7 --self --wait     # in a container, as Kubernetes' preStop hook
  elastic-etcd drain --all node2 --wait         # from each job in which it is
{_OF_ALL}
{_CODES}"""
_UNDRAIN = f"""\
An agent that waits there joins at once. If none waits, start one. A node that is not drained is
refused.
{_OF_ALL}
{_CODES}"""
_STOP = f"""\
All nodes leave at once. Scripts in ee.run stop at a step that all ranks agree on, others get
SIGTERM and --shutdown-timeout (30 s by default). With --save `ee.leaving()` is true, and they have
--leave-deadline to save, as on SIGTERM to every agent. The job's outcome is `stopped`, its agents
exit 143. Agents that are started after that begin a new run. A deserted job is refused.

examples:
  elastic-etcd stop resnet-7 --etcd etcd1:2379 --save --wait
  elastic-etcd stop --all --prefix /team-a --yes
{_OF_ALL}
{_CODES}"""
_FORGET = f"""\
Its keys are removed: its outcome, its history, its drains. Its id may be used again, as that of any
job that is over. A job with nodes is refused, a deserted one without --force, and one that is not
there, as after the first time.

examples:
  elastic-etcd forget resnet-7 --etcd etcd1:2379
  elastic-etcd forget --all --yes      # once a day, say: those that ended a week ago or earlier
{_OF_ALL}
{_CODES}"""
_DAY = 86400
_SCALE = f"""\
A world of a number of nodes that is not allowed any more ends at once: too many become spares,
too few wait for more, and newcomers are taken in as ever. Scripts in ee.run stop at a step that
all ranks agree on, others get SIGTERM. Agents may be started with the old --nnodes or the new one.
It counts for this run of the job, until it is scaled again. Without --force it is refused where too
few nodes are there. There is no --all: how many nodes a job
needs is its own affair.

examples:
  elastic-etcd scale resnet-7 2:8 --etcd etcd1:2379
  elastic-etcd scale resnet-7 2,4,8 --etcd etcd1:2379 --wait

{_CODES}"""


def drain() -> parsers.Parser:
    """The command line of `elastic-etcd drain JOB NODE`."""
    text = "Makes a node leave a job, and keeps it out."
    every = "from each job under --prefix in which the node is"
    # With --all the first name is the node's.
    one = flag_values.printable
    parser = query.parser("drain", text, _DRAIN, "JOB | --all  NODE", one=one, every=every)
    parser.add_argument(
        "node", metavar="NODE", nargs="?", type=flag_values.printable, help="its name"
    )
    parser.add_argument(
        "--self",
        action="store_true",
        help="this machine's node (PET_NODE_NAME or SLURMD_NODENAME, else its host name), and "
        "only the agent that is there now: the next one that is started joins",
    )
    parser.add_argument(
        "--deadline",
        type=flag_values.seconds,
        metavar="SECONDS",
        help="from now to SIGKILL of its workers (default: the job's --leave-deadline)",
    )
    parser.add_argument("--wait", action="store_true", help="return when the node has left")
    _may_stop_training(parser)
    parser.checks = [_which_node]
    return parser


def undrain() -> parsers.Parser:
    """The command line of `elastic-etcd undrain JOB NODE`."""
    text = "Lets a node that was drained come back."
    every = "to each job under --prefix from which it is drained"
    parser = query.parser("undrain", text, _UNDRAIN, "JOB | --all  NODE", every=every)
    parser.add_argument("node", metavar="NODE", type=flag_values.printable, help="its name")
    return parser


def scale() -> parsers.Parser:
    """The command line of `elastic-etcd scale JOB NODES`."""
    parser = query.parser("scale", "Changes how many nodes a job trains on.", _SCALE, "JOB NODES")
    parser.add_argument(
        "nnodes", metavar="NODES", type=flag_values.nnodes, help="MIN:MAX, or all sizes: 2,4,8"
    )
    parser.add_argument(
        "--nodes-multiple-of",
        type=flag_values.count,
        default=1,
        metavar="N",
        help="only multiples of N from MIN to MAX (default: 1)",
    )
    parser.add_argument("--wait", action="store_true", help="return when so many nodes train")
    _may_stop_training(parser)
    return parser


def stop() -> parsers.Parser:
    """The command line of `elastic-etcd stop JOB`."""
    every = "each job under --prefix that goes on; asks first"
    parser = query.parser("stop", "Ends a job on all of its nodes.", _STOP, every=every)
    parser.add_argument("--yes", action="store_true", help="--all: do not ask")
    parser.add_argument("--save", action="store_true", help="wait for what the scripts save")
    parser.add_argument("--wait", action="store_true", help="return when the job has ended")
    return parser


def forget() -> parsers.Parser:
    """The command line of `elastic-etcd forget JOB`."""
    every = "each job under --prefix that was over --older-than seconds ago; asks first"
    parser = query.parser("forget", "Removes a job that is over.", _FORGET, every=every)
    parser.add_argument("--yes", action="store_true", help="--all: do not ask")
    parser.add_argument(
        "--older-than",
        type=flag_values.seconds,
        metavar="SECONDS",
        help="--all: since their end (default: a week)",
    )
    text = "also where nobody has ended it; not with --all"
    parser.add_argument("--force", action="store_true", help=text)
    parser.checks.append(_one_or_old)
    return parser


def _one_or_old(args: Namespace) -> None:
    """Raises ArgumentTypeError where something could not be heeded. Sets the age that counts."""
    if args.job and args.older_than is not None:
        older = f"--older-than goes with --all: {args.job} would be removed however old it is"
        raise ArgumentTypeError(older)
    if args.all and args.force:
        raise ArgumentTypeError("--force goes with one JOB: a deserted one has no end")
    args.older_than = 7 * _DAY if args.older_than is None else args.older_than


def _may_stop_training(parser: parsers.Parser) -> None:
    text = "also where fewer than MIN nodes are left, so that training stops"
    parser.add_argument("--force", action="store_true", help=text)


def _which_node(args: Namespace) -> None:
    """Settle which node is meant. Raises ArgumentTypeError where that is not clear."""
    if args.all:
        if args.job and args.node:
            raise ArgumentTypeError(f"{args.job} and --all: give one of both")
        args.job, args.node = None, args.job
    elif not args.job:
        raise ArgumentTypeError("no job given: give its id, or --all")
    else:
        flag_values.job_id(args.job)
    if args.self == bool(args.node):
        raise ArgumentTypeError("which node? Give its name, or --self")


def main(command: str, argv: Sequence[str]) -> int:
    """Do what `elastic-etcd COMMAND` says; gives the exit code."""
    make, do = COMMANDS[command]

    async def steer(client: Client, args: Namespace) -> int:
        if args.all:
            return await _in_all(command, client, args)
        _print_outcome(await do(write_requests.SteeredJob(client, args), args), args)
        return 0

    return query.with_etcd(make, argv, steer)


def _print_outcome(done: dict[str, Any], args: Namespace) -> None:
    with suppress(BrokenPipeError):  # as after `| head`: other jobs are still to be steered
        if args.json:
            query.print_json({"job": args.job} | done, args)
        else:
            print(shown(done["told"]), flush=True)


# --- all jobs -----------------------------------------------------------------------------


async def _in_all(command: str, client: Client, args: Namespace) -> int:
    """Run the command on each job that it is about; gives the highest of their exit codes."""
    about, what = _ABOUT[command]
    views = await query.views(client, args)
    jobs = [job for job, view in views.items() if about(view, args)]
    if not jobs:
        return _nothing_to_do(command, args)
    _announce(what(args), jobs, args)
    if command in ("stop", "forget") and not args.yes:
        _ask_first(command)
    one_by_one = (_in_one(command, client, args, job) for job in jobs)
    return max(await asyncio.gather(*one_by_one))


async def _in_one(command: str, client: Client, args: Namespace, job: str) -> int:
    _, do = COMMANDS[command]
    own = copy(args)
    own.job = job
    try:
        done = await do(write_requests.SteeredJob(client, own), own)
    except ElasticEtcdError as error:
        print(f"error: job {job}: {shown(str(error))}", file=sys.stderr)
        return error.exit_code
    _print_outcome(done, own)
    return 0


def _nothing_to_do(command: str, args: Namespace) -> int:
    """A name that no job knows may be mistyped; where no job goes on, all have stopped."""
    if command in ("stop", "forget"):
        which = "goes on"
        if command == "forget":
            ago = "a week" if args.older_than == 7 * _DAY else f"{args.older_than:g} s"
            which = f"was over {ago} ago"
        query.note(f"no job under {args.prefix} {which}")
        return 0
    node, prefix = write_requests.node_of(args), args.prefix
    if command == "undrain":
        raise ElasticEtcdError(f"no job under {prefix} has node {node} drained")
    raise ElasticEtcdError(f"node {node} is in no job under {prefix} that goes on")


def _announce(what: str, jobs: Sequence[str], args: Namespace) -> None:
    """Say what will be done, and to whom."""
    count = "1 job" if len(jobs) == 1 else f"{len(jobs)} jobs"
    text = f"{what} {count} under {args.prefix}: {query.some_of(jobs)}"
    print(shown(text), file=sys.stderr, flush=True)


def _ask_first(command: str) -> None:
    """Raises UsageError where nobody can be asked, ElasticEtcdError where the answer is no."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"{command} --all asks first, and here is no terminal: give --yes")
    print("Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio's would wait
    try:
        answer = sys.stdin.readline()
    finally:
        signal.signal(signal.SIGINT, before)
    if answer.strip().lower() not in ("y", "yes"):
        raise ElasticEtcdError("nothing is done")


def _has_node(view: View, args: Namespace) -> bool:
    """Whether a run goes on in which the node is, or from which it is drained."""
    node = write_requests.node_of(args)
    there = any(m.node == node for m in view.members)
    return _goes_on(view) and (there or bool(requests.drained(view, node)))


def _goes_on(view: View) -> bool:
    return view.spec is not None and view.outcome is None


def _is_old(view: View, args: Namespace) -> bool:
    """Whether it was over so long ago, by its coordinator's clock and this one's."""
    ended = seconds_of(view.outcome.at) if view.outcome else None
    return ended is not None and not view.members and time.time() - ended >= args.older_than


# Of each command that knows --all which jobs it is about, and what it does, in words.
_ABOUT: dict[str, tuple[Callable[[View, Namespace], bool], Callable[[Namespace], str]]] = {
    "drain": (_has_node, lambda args: f"node {write_requests.node_of(args)} is to leave"),
    "undrain": (
        lambda view, args: requests.drained(view, args.node) is not None,
        lambda args: f"node {args.node} may come back to",
    ),
    "stop": (lambda view, _: _goes_on(view) and bool(view.members), lambda _: "to stop:"),
    "forget": (_is_old, lambda _: "to forget:"),
}


COMMANDS: dict[str, tuple[Callable[[], parsers.Parser], Callable[..., Any]]] = {
    "drain": (drain, write_requests.drain),
    "undrain": (undrain, write_requests.undrain),
    "scale": (scale, write_requests.scale),
    "stop": (stop, write_requests.stop),
    "forget": (forget, write_requests.forget),
}
