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


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (GLOO, True),
        ("torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, remote error", True),
        ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", True),
        ("torch.distributed.DistStoreError: wait timeout after 300000ms", True),
        ("RuntimeError: shape '[3]' is invalid for input of size 4", False),
        ("ValueError: bad sample\n  in gloo/train.py", False),
        ("", False),
    ],
)
def test_which_words_are_of_a_lost_peer(error: str, lost: bool) -> None:
    assert ends_with_lost_peer(STACK.format(file="gloo/train.py", error=error)) == lost
