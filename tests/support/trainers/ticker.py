"""A worker that trains nothing: it logs and fails as ddp.py, without torch and its peers.

For tests of agents and etcd, where a training would only cost time.
"""

import os
import time

from tests.support.trainers.ddp import Log, arguments, born, happen, older_workers_alive


def main() -> None:
    args = arguments()
    log = Log(args.dir)
    overlap = older_workers_alive(args.dir)
    log.write("start", born=born(os.getpid()), overlap=overlap, agent=os.getppid())
    happen(args.fault, step=0)
    step = 0
    while not (args.dir / "stop").exists() and step < args.steps:
        time.sleep(args.step_time)
        step += 1
        log.write("step", step=step)
        happen(args.fault, step)
    log.write("end")


if __name__ == "__main__":
    main()
