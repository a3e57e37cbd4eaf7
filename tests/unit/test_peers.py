"""What counts as the word of a worker that lost its peer."""

import pytest

from elastic_etcd.core.peers import ends_with_lost_peer

STACK = """Traceback (most recent call last):
  File "{file}", line 12, in <module>
    train("Connection closed by peer")
{error}"""
GLOO = (
    "RuntimeError: [/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection "
    "closed by peer [127.0.0.1]:4506. This is typically caused by a remote worker crashing."
)

OF_A_LOADER = """RuntimeError: Caught RuntimeError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "data.py", line 9, in __getitem__
    raise RuntimeError("s3://data/7: Connection reset by peer, in gloo/")
RuntimeError: s3://data/7: Connection reset by peer, in gloo/"""
MISUSED = """NCCL error in: ProcessGroupNCCL.cpp:77, invalid usage, NCCL version 2.27.5
ncclInvalidUsage: This usually reflects invalid usage of NCCL library."""


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (GLOO, True),
        ("torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, remote error", True),
        ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", True),
        ("torch.distributed.DistStoreError: wait timeout after 300000ms", True),
        ("RuntimeError: Application timeout caused pair closure", True),
        ("RuntimeError: [Rank 0]: Ranks 1 failed to pass monitoredBarrier in 1800000 ms", True),
        ("RuntimeError: shape '[3]' is invalid for input of size 4", False),
        ("ValueError: bad sample\n  in gloo/train.py", False),
        (OF_A_LOADER, False),
        ("ConnectionError: s3://data/7: [Errno 104] Connection reset by peer", False),
        (f"torch.distributed.DistBackendError: {MISUSED}", False),
        ("", False),
    ],
)
def test_t13_which_words_are_of_a_lost_peer(error: str, lost: bool) -> None:
    assert ends_with_lost_peer(STACK.format(file="gloo/train.py", error=error)) == lost
