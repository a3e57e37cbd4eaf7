"""`ee.store`: torch's store of a generation, for what ranks tell each other beside collectives."""

import os
from functools import cache

import torch.distributed as dist


def store() -> dist.Store:
    """Connect to the store that all ranks of this generation share, also before a process group.

    Keys are under a prefix of their own, and go with the generation: what outlives it belongs into
    the state. Each call makes a connection; a wait on it keeps other threads from using it. Without
    a launcher it is a store in this process. Raises torch's DistError when it does not answer.
    """
    address = os.environ.get("MASTER_ADDR")
    if address is None:
        return _alone()
    client = dist.TCPStore(address, int(os.environ["MASTER_PORT"]), is_master=False)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps its store
    generation = os.environ.get("ELASTIC_ETCD_GENERATION", restarts)
    return dist.PrefixStore(f"ee.store/{generation}", client)


@cache
def _alone() -> dist.Store:
    return dist.HashStore()
