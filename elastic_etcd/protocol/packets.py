"""Sockets that keep packets whole (SOCK_SEQPACKET), and descriptors that travel with them."""

import socket
from array import array

from elastic_etcd.protocol.messages import LONGEST


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """(our end, a child's end) of such a socket; ours never blocks."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def receive(channel: socket.socket, most: int) -> tuple[bytes, list[int], int]:
    """A packet, up to `most` descriptors that no child inherits, and the flags of recvmsg.

    socket.recv_fds takes flags, too, and ignores them (Python 3.11 and 3.13).
    """
    fds = array("i")
    packet, others, flags, _ = channel.recvmsg(
        LONGEST, socket.CMSG_LEN(most * fds.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in others:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return packet, fds.tolist(), flags
