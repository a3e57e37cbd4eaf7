"""python -m tests.model [large]: searches all, and prints their table."""

import resource
import sys

from tests.model.cases import LARGE, MEDIUM, SMALL


def main() -> int:
    failed = 0
    states = transitions = 0
    print("| agents | `--nnodes` | restarts | faults | states | transitions | CPU seconds |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for case in LARGE if sys.argv[1:] == ["large"] else (*SMALL, *MEDIUM):
        result = case.run()
        counts = f"{result.states:,} | {result.transitions:,}"
        told = f"{case.faults} | {counts} | {result.seconds:.1f}"
        print(f"| {case.agents} | {case.flags} | {case.limits.max_restarts} | {told} |", flush=True)
        states, transitions = states + result.states, transitions + result.transitions
        missed = set(case.reaches) - result.reached
        if result.violation or missed:
            failed += 1
            print(result, f"never reached: {sorted(missed)}", sep="\n", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"\n{states:,} states, {transitions:,} transitions")
    print(f"{failed} searches failed; at most {peak} MiB", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
