"""`scripts/bench activity`: what a worker's activity page costs it, for each step.

Each figure is the least of several runs of so many calls, in microseconds.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable

from rich.console import Console

from elastic_etcd.children import entry
from elastic_etcd.protocol import activity
from elastic_etcd.protocol.activity import ActivityPages
from elastic_etcd.train.heartbeat import heartbeat, quiet
from elastic_etcd.train.state.elastic_state import ElasticState

from .figures import grid


def microseconds(call: Callable[[], object], calls: int, repeat: int) -> float:
    """Of one call."""
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - start)
    return best / calls * 1e6


def evaluate() -> None:
    with quiet("evaluation"):
        pass


def hook() -> Callable[[], object]:
    """What each optimizer's step calls."""
    entry.mend_libraries()
    (found,) = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks.values()  # noqa: SLF001
    return lambda: found(None, (), {})


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench activity", description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()

    def measure(call: Callable[[], object]) -> float:
        return microseconds(call, args.calls, args.repeat)

    state = ElasticState(epoch=0)
    calls = {"state.check()": state.check, "ee.heartbeat()": heartbeat, "ee.quiet()": evaluate}
    without = {name: measure(call) for name, call in calls.items()}
    pages = ActivityPages()
    os.environ[activity.VARIABLE] = pages.begin(0)
    activity.look()
    rows = [("an optimizer's hook", "", f"{measure(hook()):.2f}")]  # first: it yields to the others
    rows += [(name, f"{without[name]:.2f}", f"{measure(call):.2f}") for name, call in calls.items()]
    Console().print(grid("µs of one call", ["", "without a page", "with one"], rows))
    reading = microseconds(lambda: pages.read(0), args.calls // 10, args.repeat)
    Console().print(f"the agent reads a page in {reading:.1f} µs")
    pages.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
