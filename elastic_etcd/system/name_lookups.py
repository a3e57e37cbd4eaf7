"""Lookups of names that only a log shows, and that a training should not wait for.

torch asks for the name of each peer of a TCPStore (pytorch#159007). A name server that does not
answer is asked twice, 5 s each, so that each start of a worker took 10 s (resolv.conf(5)).
"""

import ctypes
import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def short_lookups(address: str) -> Iterator[None]:
    """A name server has one second to answer this thread, while it connects to `address`.

    A name has to be looked up for more than a log: then, for other threads, and with another libc
    than glibc all lookups are as patient as the machine says.
    """
    libc = ctypes.CDLL(None)
    try:
        ipaddress.ip_address(address.partition("%")[0])
        libc["__res_init"]()
        resolver = libc["__res_state"]  # that of the calling thread: its first fields are ints
    except (ValueError, AttributeError):
        yield
        return
    resolver.restype = ctypes.POINTER(ctypes.c_int)
    fields = resolver()
    before = fields[0], fields[1]
    fields[0], fields[1] = 1, 1  # retrans in seconds, retry
    try:
        yield
    finally:
        fields[0], fields[1] = before
