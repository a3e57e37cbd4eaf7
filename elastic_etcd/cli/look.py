"""What the commands that look at a job or steer it have in common."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Any

from elastic_etcd.cli import options
from elastic_etcd.cli.options import shown
from elastic_etcd.core.schema import Keys
from elastic_etcd.core.view import Everything, View, covered, view_of
from elastic_etcd.errors import ElasticEtcdError, UsageError
from elastic_etcd.etcd.client import Client

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Awaitable, Callable, Sequence

    from elastic_etcd.core.txn import Snapshot
    from elastic_etcd.etcd.config import EtcdConfig

CODES = """\
exit codes:
  0 shown     1 no such job     2 wrong usage     5 etcd unreachable, or denied
"""


def parser(command: str, description: str, epilog: str, arguments: str = "JOB") -> options.Parser:
    """For a command that takes a job, or none, and etcd's flags; the rest is added later."""
    made = options.Parser(
        prog=f"elastic-etcd {command}",
        usage=f"elastic-etcd {command} [options] {arguments}".rstrip(),
        description=description,
        epilog=epilog,
        formatter_class=options.Help,
    )
    if arguments:
        made.add_argument("job", metavar="JOB", type=options.job_id, help="the job's id")
    group = options.Group(made, "etcd", os.environ)
    options.connection(group)
    group.flag("--timeout", type=options.seconds, default=5, metavar="SECONDS", help="(default: 5)")
    return made


def is_known(view: View) -> bool:
    """Whether there is a job of that name."""
    return bool(view.round or view.outcome or view.members or view.history or view.wanted)


class Job:
    """A job as it is in etcd."""

    def __init__(self, client: Client, args: Namespace) -> None:
        self.client, self.name = client, str(args.job)
        self.keys = Keys(f"{args.prefix}/{args.job}")
        self.ranges = covered(self.keys, Everything())
        self.timeout = args.timeout

    async def read(self) -> Snapshot:
        """All of it at one revision. Raises ElasticEtcdError where there is no such job."""
        seen = await self.client.range(*self.ranges, timeout=self.timeout)
        if not is_known(self.view_of(seen)):
            raise ElasticEtcdError(f"{self.client.endpoint} has no job at {self.keys.root}")
        return seen

    async def view(self) -> View:
        """The same as a view."""
        return self.view_of(await self.read())

    def view_of(self, seen: Snapshot) -> View:
        return view_of(seen, self.keys, Everything())


def run(
    made: Callable[[], options.Parser],
    argv: Sequence[str],
    command: Callable[[Job, Any], Awaitable[None]],
) -> int:
    """Do `command`, which prints; gives the exit code."""

    async def of_job(client: Client, args: Namespace) -> int:
        await command(Job(client, args), args)
        return 0

    return with_etcd(made, argv, of_job)


def with_etcd(
    made: Callable[[], options.Parser],
    argv: Sequence[str],
    command: Callable[[Client, Any], Awaitable[int]],
) -> int:
    """The same for a command that is about no job in particular, and gives an exit code."""
    try:
        args = made().parse_args(argv)
        config = options.etcd_of(args, os.environ)
        if config is None:
            raise UsageError("which etcd? Give --etcd HOST:2379, or set ETCDCTL_ENDPOINTS.")
        code = asyncio.run(_look(config, args, command))
        sys.stdout.flush()
    except ElasticEtcdError as error:
        print(f"error: {shown(str(error))}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except KeyboardInterrupt:
        return 130
    else:
        return code
    return 0


async def _look(
    config: EtcdConfig, args: Namespace, command: Callable[[Client, Any], Awaitable[int]]
) -> int:
    async with Client(config) as client:
        return await command(client, args)


def in_one_line(text: str) -> str:
    """A text of somebody else's that neither steers a terminal nor begins another line."""
    return shown(text.replace("\n", "\\n").replace("\t", " "))
