"""A worker that trains nothing: it logs as ddp.py does, without torch and without its peers.

For tests of agents and etcd, where a training would only cost time.
"""

import os
import time

from tests.support.trainers.ddp import Log, arguments, born, older_workers_alive


def main() -> None:
    args = arguments()
    log = Log(args.dir)
    overlap = older_workers_alive(args.dir)
    log.write("start", born=born(os.getpid()), overlap=overlap, agent=os.getppid())
    step = 0
    while not (args.dir / "stop").exists() and step < args.steps:
        time.sleep(args.step_time)
        step += 1
        log.write("step", step=step)
    log.write("end")


if __name__ == "__main__":
    main()
