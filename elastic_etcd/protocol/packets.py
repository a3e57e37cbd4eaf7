"""Sockets that keep packets whole (SOCK_SEQPACKET), and descriptors that travel with them."""

import socket
import struct
from array import array

from elastic_etcd.protocol.messages import LONGEST

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


def address_of(name: str) -> str:
    """The address of an abstract socket's name, which is written as `ss` and socat do: "@name"."""
    return name.replace("@", "\0", 1)


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end of a Unix socket, as the kernel tells.

    The process is 0 if it is in another namespace, so that it has no number in this one.
    """
    told = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(told)
    return pid, uid


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
