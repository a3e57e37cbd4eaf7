"""torch's FileTimerServer in a process of its own: `python timer_server.py PATH CHANNEL_FD`.

Started by agent/file_timers.py. It tells the agent of each timer that expires, and ends nobody. End
of file on the channel is the end of the agent, and of this process.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress

# A scheduler signals every process of a job; timers count in the workers' grace, too.
IGNORED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
INTERVAL = 0.1  # seconds between two looks at the timers, as torchrun has it


def main(argv: list[str]) -> int:
    """Serve the timers; the last line on stderr says why it failed."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o077)
    try:
        from torch.distributed.elastic.timer import (  # noqa: PLC0415 - its failure has a message
            FileTimerRequest,
            FileTimerServer,
        )
    except ImportError as error:
        sys.stderr.write(f"torch cannot be imported by {sys.executable}: {error}\n")
        return 1

    class Server(FileTimerServer):  # type: ignore[misc]
        def _reap_worker(self, worker_pid: int, signal: int) -> bool:
            """Leave it to the agent; torch would end this process, too."""
            del worker_pid, signal
            return True

    def tell(event: str, timer: FileTimerRequest | None) -> None:
        if event == "timer expired" and timer:
            found = {"pid": timer.worker_pid, "scope": timer.scope_id, "signal": timer.signal}
            with suppress(OSError):  # the agent is gone
                channel.send(json.dumps(found).encode())

    with socket.socket(fileno=int(argv[2])) as channel:
        try:
            server = Server(argv[1], "", max_interval=INTERVAL, log_event=tell)
        except OSError as error:
            sys.stderr.write(f"{error.strerror}\n")
            return 1
        server.start()
        channel.send(b"{}")
        channel.recv(1)
        server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
