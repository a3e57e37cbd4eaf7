"""Common ground of the commands that read jobs or steer them: flags, views, and how they run."""

from __future__ import annotations

import asyncio
import errno
import getpass
import json
import os
import select
import sys
from argparse import ArgumentTypeError
from contextlib import suppress
from datetime import UTC, datetime
from difflib import get_close_matches
from io import TextIOWrapper, UnsupportedOperation
from typing import TYPE_CHECKING, Any, Never, TypeAlias, TypeVar

from msgspec.structs import replace

from elastic_etcd.cli import parsers
from elastic_etcd.cli.flag_values import job_id, seconds
from elastic_etcd.cli.flags import CONNECTION, Flag
from elastic_etcd.cli.parsers import shown
from elastic_etcd.core.schema import PARTS, History, Keys, decode, valid_job
from elastic_etcd.core.txn import Get, Snapshot
from elastic_etcd.core.view import Everything, View, covered, view_of
from elastic_etcd.errors import ElasticEtcdError, EtcdError, UsageError
from elastic_etcd.etcd.client import Client

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence

    from elastic_etcd.core.txn import KeyValue
    from elastic_etcd.etcd.access import EtcdConfig

T = TypeVar("T")
Away: TypeAlias = dict[str, str]  # `since` when etcd does not answer, and `why`

MOST_KEYS = 100_000  # of all jobs together
JSON_VERSION = 1  # of --json: a field that goes, or means something else, makes it another
_NAMED = 8  # jobs or nodes, in a line
_ASK = 2.0  # seconds between two questions whether etcd is there
_UNWRITTEN = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
CODES = """\
exit codes:
  0 shown, with --all also if there is no job     1 no such job     2 wrong usage
  5 etcd unreachable, or denied     130 ended by Ctrl-C
"""


def parser(
    command: str,
    description: str,
    epilog: str,
    arguments: str = "JOB | --all",
    *,
    one: Callable[[str], str] = job_id,
    every: str = "",
    as_json: str = "",
) -> parsers.Parser:
    """The parser of a command that takes a job or --all, and etcd's flags; others are added to it.

    `one` reads the job's text. `every` is the help of --all; without it there is no such flag.
    `as_json` is that of --json, "" the usual one.
    """
    made = parsers.Parser(
        prog=f"elastic-etcd {command}",
        usage=f"elastic-etcd {command} [options] {arguments}".rstrip(),
        description=description,
        epilog=epilog,
        formatter_class=parsers.Help,
    )
    made.checks = [_one_or_all]
    made.set_defaults(all=False)
    made.add_argument(
        "job", metavar="JOB", nargs="?" if every else None, type=one, help="the job's id"
    )
    if every:
        made.add_argument("--all", action="store_true", help=every)
    usual = "print one JSON object; with --all, one a line" if every else "print one JSON object"
    made.add_argument("--json", action="store_true", help=as_json or usual)
    timeout = Flag("--timeout", "how long to wait for etcd", seconds, default=5.0)
    parsers.add_flags(made, "etcd", (*CONNECTION, timeout), os.environ)
    return made


def not_both(args: Namespace) -> None:
    """Raises ArgumentTypeError where a job is given beside --all."""
    if args.job and args.all:
        raise ArgumentTypeError(f"{args.job} and --all: give one of both")


def _one_or_all(args: Namespace) -> None:
    """Raises ArgumentTypeError where that is not clear."""
    not_both(args)
    if not (args.job or args.all):
        raise ArgumentTypeError("no job given: give its id, or --all")


def by_job(kvs: Mapping[str, KeyValue], prefix: str) -> dict[str, dict[str, KeyValue]]:
    """The keys of each job; what else lies under the prefix is left out."""
    found: dict[str, dict[str, KeyValue]] = {}
    start = len(prefix) + 1
    for key, kv in kvs.items():
        job, _, rest = key[start:].partition("/")
        if rest.partition("/")[0] in PARTS:
            found.setdefault(job, {})[key] = kv
    return {job: own for job, own in sorted(found.items()) if valid_job(job)}


def keys_of(args: Namespace) -> Get:
    """The keys of the job, or with --all of each under the prefix."""
    return Get(f"{args.prefix}/" if args.all else f"{args.prefix}/{args.job}/", prefix=True)


def views_of(seen: Snapshot, args: Namespace) -> dict[str, View]:
    """The job, or with --all each under the prefix in the order of their names."""
    if not args.all:
        return {args.job: view_of(seen, Keys(f"{args.prefix}/{args.job}"), Everything())}
    views = {
        job: view_of(Snapshot(seen.revision, own), Keys(f"{args.prefix}/{job}"), Everything())
        for job, own in by_job(seen.kvs, args.prefix).items()
    }
    return {job: view for job, view in views.items() if is_known(view)}


async def views(client: Client, args: Namespace) -> dict[str, View]:
    """The job, or with --all each, as they are now; where there is none a note says so.

    Raises ElasticEtcdError where there is no such job.
    """
    if not args.all:
        return views_of(await Job(client, args).read(), args)
    listed = await client.list(keys_of(args), timeout=args.timeout, most=MOST_KEYS)
    found = views_of(listed.snapshot, args)
    if not found:
        note(f"{client.endpoint} has no job under {args.prefix}")
    return found


def worlds(view: View) -> list[History]:
    """Those that are remembered, in order; `elastic-etcd events` names those that can't be read."""
    found = []
    for _, text in view.history:
        with suppress(ValueError):
            found.append(decode(History, text))
    return found


def newest_divergences(view: View, generation: int) -> tuple[str, ...]:
    """Those of a world that are not in its history yet, since it has not ended."""
    found = view.divergence
    return found.lines if found and found.generation == generation else ()


def print_json(value: dict[str, Any], args: Namespace) -> None:
    """Print it in a line where there are several, else for people to read."""
    print(json.dumps({"version": JSON_VERSION} | value, indent=None if args.all else 2), flush=True)


def say(lines: Iterable[str]) -> None:
    """Print these, whoever has written them, each as one line."""
    for line in lines:
        print(in_one_line(line))


def some_of(names: Sequence[str]) -> str:
    """These names in a line, however many there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def when(at: str) -> str:
    """A time of somebody else's in whole seconds of UTC; text that is no time as it is."""
    try:
        told = datetime.fromisoformat(at).astimezone(UTC)
    except (ValueError, OverflowError):
        return at
    return told.isoformat(timespec="seconds").replace("+00:00", "Z")


def note(text: str) -> None:
    """Tell it beside what is printed."""
    print(f"note: {shown(text)}", file=sys.stderr)


def user() -> str:
    """The user who runs this command, and the machine."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # no such user in this container
        name = str(os.getuid())
    return f"{name}@{os.uname().nodename}"


def is_known(view: View) -> bool:
    """Whether there is a job of that name."""
    there = view.round or view.outcome or view.members or view.history
    return bool(there or view.wanted or view.unfit)


class Job:
    """A job as it is in etcd."""

    def __init__(self, client: Client, args: Namespace) -> None:
        self.client, self.name = client, str(args.job)
        self.keys = Keys(f"{args.prefix}/{args.job}")
        self.ranges = covered(self.keys, Everything())
        self.args, self.timeout = args, args.timeout

    async def read(self) -> Snapshot:
        """All of it at one revision. Raises ElasticEtcdError where there is no such job."""
        seen = await self.client.range(*self.ranges, timeout=self.timeout)
        if not is_known(self.view_of(seen)):
            raise ElasticEtcdError(
                f"{self.client.endpoint} has no job at {self.keys.root}{await self._meant()}; "
                "elastic-etcd status --all shows those under --prefix"
            )
        return seen

    async def _meant(self) -> str:
        """A hint at jobs whose names are like this one, as far as their keys may be read."""
        every = Get(f"{self.args.prefix}/", prefix=True)
        with suppress(EtcdError):
            listed = await self.client.list(
                every, timeout=self.timeout, values=False, most=MOST_KEYS
            )
            names = list(by_job(listed.snapshot.kvs, self.args.prefix))
            if near := get_close_matches(self.name, names):
                return f" (did you mean {' or '.join(near)}?)"
        return ""

    def view_of(self, seen: Snapshot) -> View:
        return view_of(seen, self.keys, Everything())


def with_etcd(
    made: Callable[[], parsers.Parser],
    argv: Sequence[str],
    command: Callable[[Client, Any], Awaitable[int | None]],
) -> int:
    """Run `command(client, args)` while connected to etcd; gives its exit code, 0 for None.

    The command line is `argv`, which `made()` parses. Errors of this package are printed, and give
    their exit code.
    """

    async def connected(config: EtcdConfig, args: Namespace) -> int | None:
        async with Client(config) as client:
            return await command(client, args)

    if isinstance(sys.stdout, TextIOWrapper):  # it may be of an ASCII terminal
        sys.stdout.reconfigure(errors="backslashreplace")
    code = 0
    try:
        args = _parsed(made(), argv)
        config = parsers.etcd_of(args, os.environ)
        if config is None:
            raise UsageError("which etcd? Give --etcd HOST:2379, or set ETCDCTL_ENDPOINTS.")
        code = asyncio.run(connected(config, args)) or 0
        sys.stdout.flush()
    except ElasticEtcdError as error:
        print(f"error: {shown(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno not in _UNWRITTEN:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for Python's own attempt, at its end
        if error.errno != errno.EPIPE:  # as after `| head`
            print(f"error: standard output: {error.strerror}", file=sys.stderr)
            return 1
    return code


def _parsed(parser: parsers.Parser, argv: Sequence[str]) -> Namespace:
    args = parser.parse_intermixed_args(argv)  # a flag may stand between JOB and NODE
    try:
        for check in parser.checks:
            check(args)
    except ArgumentTypeError as error:
        parser.error(str(error))
    return args


async def while_read(doing: Coroutine[Any, Any, object]) -> None:
    """Do this until it ends, or nobody reads any more what it prints, as after `| head`."""
    loop, task = asyncio.get_running_loop(), asyncio.create_task(doing)
    with select.epoll() as output:

        def end() -> None:
            loop.remove_reader(output.fileno())  # it would be called at each turn, in all clean-ups
            task.cancel()

        with suppress(PermissionError, UnsupportedOperation):  # a file or string is never closed
            output.register(sys.stdout.fileno(), 0)  # for nothing but the reader's end
        loop.add_reader(output.fileno(), end)
        try:
            await task
        except asyncio.CancelledError:
            if not output.poll(0):  # it was Ctrl-C
                raise
        finally:
            loop.remove_reader(output.fileno())


async def while_silence_is_told(client: Client, args: Namespace, doing: Awaitable[T]) -> T:
    """Do this, and say whenever etcd does not answer, or does so again."""

    def tell(away: Away | None) -> None:
        note(
            f"no answer from etcd since {away['since']}: {away['why']}" if away else "etcd answers"
        )

    asking = asyncio.create_task(ask_whether_there(client, keys_of(args), args.timeout, tell))
    try:
        return await doing
    finally:
        asking.cancel()


async def ask_whether_there(
    client: Client, keys: Get, timeout: float, tell: Callable[[Away | None], None]
) -> Never:
    """Ask etcd again and again, as a watch alone may be silent for long; tell what has changed."""
    away: Away | None = None
    answered = timestamp()
    while True:
        try:
            await client.range(replace(keys, limit=1), timeout=timeout)
            answered = timestamp()
            if away:
                away = None
                tell(None)
        except EtcdError as error:
            if not away:
                away = {"since": answered, "why": str(error).partition("\n")[0]}
                tell(away)
        await asyncio.sleep(_ASK)


def timestamp(at: float | None = None) -> str:
    """A time in seconds since 1970, by default this moment, as `when` tells it."""
    told = datetime.now(UTC) if at is None else datetime.fromtimestamp(at, UTC)
    return when(told.isoformat())


def in_one_line(text: str) -> str:
    """A text of somebody else's that neither steers a terminal nor begins another line."""
    return shown(text.replace("\n", "\\n").replace("\t", " "))
