"""`elastic-etcd check`: says whether this node is fit for a job, and what a job finds of etcd here.

`--health-check "elastic-etcd check"` keeps a node that is not fit out of a job.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from elastic_etcd.agent.devices import count_devices
from elastic_etcd.agent.node_checks import NodeFlags, check
from elastic_etcd.cli import parsers
from elastic_etcd.cli.flag_values import seconds
from elastic_etcd.cli.flags import CONNECTION, FLAGS, Flag
from elastic_etcd.cli.parsers import shown
from elastic_etcd.cli.query import JSON_VERSION, in_one_line
from elastic_etcd.errors import ElasticEtcdError

if TYPE_CHECKING:
    from collections.abc import Sequence


UNFIT = 10  # the exit code

_OWN_FLAGS = ("--nproc-per-node", "--log-dir", "--memory-dir", "--advertise")
_EPILOG = """\
A line for each check: what was found and, where that is wrong, what to do. What is wrong comes
last. In etcd it makes a lease, a Txn and a watch of keys under --prefix that it removes again.

examples:
  elastic-etcd check --etcd etcd1:2379 --nproc-per-node gpu
  python -m elastic_etcd.launch --health-check "elastic-etcd check" ...

exit codes:
  0 all is well     2 wrong usage     10 something is wrong     130 ended by Ctrl-C
"""


def parser() -> parsers.Parser:
    """The command line of `elastic-etcd check`."""
    made = parsers.Parser(
        prog="elastic-etcd check",
        usage="elastic-etcd check [options]",
        description="Says whether this node is fit for a job, and reaches etcd.",
        epilog=_EPILOG,
        formatter_class=parsers.Help,
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")
    own = (flag for flag in FLAGS if flag.long[0] in _OWN_FLAGS)
    parsers.add_flags(made, "node", own, os.environ)
    timeout = Flag("--timeout", "how long to wait for each answer of etcd", seconds, default=5.0)
    parsers.add_flags(made, "etcd", (*CONNECTION, timeout), os.environ)
    return made


def main(argv: Sequence[str]) -> int:
    """Check this node, and print what was found; gives the exit code."""
    try:
        args = parser().parse_args(argv)
        config = parsers.etcd_of(args, os.environ)
        given = NodeFlags(
            nproc=count_devices(args.nproc_per_node),
            log_dir=args.log_dir,
            memory_dir=args.memory_dir,
            advertise=args.advertise,
            prefix=args.prefix,
            timeout=args.timeout,
        )
        found = asyncio.run(check(config, given))
    except ElasticEtcdError as error:
        print(f"error: {shown(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    fit = not any(each.cure for each in found)
    if args.json:
        checks = [asdict(each) for each in found]
        print(json.dumps({"version": JSON_VERSION, "fit": fit, "checks": checks}, indent=2))
    else:
        for each in sorted(found, key=lambda each: bool(each.cure)):
            what = f"wrong: {each.found}: {each.cure}" if each.cure else f"ok: {each.found}"
            print(in_one_line(f"{each.name}: {what}"))
    return 0 if fit else UNFIT
