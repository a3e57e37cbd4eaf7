"""`scripts/bench NAME ...`: each benchmark is a module of this package with a main()."""

import importlib
import sys

NAMES = {
    "recovery": "faults and what they cost, beside torchrun",
    "goodput": "steps that get done while workers and nodes die, beside torchrun",
    "scale": "rendezvous of many simulated agents",
    "state": "commit, restore and sync of a training's state",
    "sharded": "FSDP2 that changes its world, beside torchrun and checkpoints in tmpfs",
    "gpu": "recovery and commits on a GPU; as scripts/gpu-test --bench it needs no set-up",
}


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in NAMES:
        print("usage: scripts/bench NAME [--help]\n")
        for known, what in NAMES.items():
            print(f"  {known:10} {what}")
        return 0 if name in ("-h", "--help") else 2
    sys.argv = [f"scripts/bench {name}", *sys.argv[2:]]
    module = importlib.import_module(f"{__package__}.{name}")
    return int(module.main() or 0)


if __name__ == "__main__":
    sys.exit(main())
