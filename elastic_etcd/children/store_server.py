"""The process that serves the TCPStore: `python store_server.py CHANNEL_FD`, started by the agent.

The agent sends (generation, listening socket) over the channel, once per generation. End of file
on it is the end of the agent, and of this process.
"""

import os
import signal
import socket
import sys
from datetime import timedelta
from functools import partial

# A scheduler signals every process of a job; the store has to outlive the workers' grace.
IGNORED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def main(argv: list[str]) -> int:
    """Serve one store after another; the last line on stderr says why it failed."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # of names for torch's log (resolv.conf(5))
    try:
        from torch.distributed import TCPStore  # noqa: PLC0415 - its failure has a message
    except ImportError as error:
        sys.stderr.write(f"torch cannot be imported by {sys.executable}: {error}\n")
        return 1
    stores: list[TCPStore] = []
    with socket.socket(fileno=int(argv[1])) as channel:
        while True:
            message, fds, _, _ = socket.recv_fds(channel, 64, 1)
            if not message:
                return 0
            listener = socket.socket(fileno=fds[0])
            host, port = _own_address(listener)
            store = partial(
                TCPStore,
                host_name=host,
                port=port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=60),
                master_listen_fd=listener.detach(),
            )
            # The older store first: nobody of this generation knows it, and its clients are gone.
            stores.clear()
            try:
                stores.append(store(use_libuv=True))
            except NotImplementedError:  # before torch 2.8 that one takes no socket
                stores.append(store(use_libuv=False))


def _own_address(listener: socket.socket) -> tuple[str, int]:
    """The address at which this process reaches the socket: the server has a client, too."""
    address, port = listener.getsockname()[:2]
    everywhere = address in ("::", "0.0.0.0")  # noqa: S104 - compared, not bound
    return "127.0.0.1" if everywhere else address, port


if __name__ == "__main__":
    sys.exit(main(sys.argv))
