"""What a worker leaves or says may be anything; its agent reads it all the same."""

from pathlib import Path

import pytest

from elastic_etcd.agent.failures import failure_message
from elastic_etcd.protocol.messages import (
    LONGEST,
    Interrupt,
    Parked,
    encode,
    from_agent,
    from_worker,
)

TRACEBACK = b"Traceback (most recent call last):\nRuntimeError: the cause\n"


@pytest.mark.parametrize(
    "record",
    [
        b"[" * 100_000,
        b'{"message": ' * 5000,
        b"\xff\xfe",
        b'{"message": 1e999}',
        b'{"message": {"extraInfo": [], "message": 3}}',
        b"9" * 10_000,
        b"",
    ],
    ids=lambda record: repr(record[:20]),
)
def test_an_error_file_of_anything(record: bytes, tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    file.write_bytes(record)
    assert failure_message(1, str(file), TRACEBACK, 0) == TRACEBACK.decode().strip()


def test_an_error_file_that_fills_the_disk(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    with file.open("wb") as sparse:
        sparse.truncate(1 << 40)
    assert failure_message(1, str(file), TRACEBACK, 0) == TRACEBACK.decode().strip()


@pytest.mark.parametrize("character", ["x", "\x1b", "\u00e4", "\U0001f600", "\ud800"])
def test_a_long_reason_still_goes_to_the_workers(character: str) -> None:
    """It comes from etcd, where it may be as long as a value may be."""
    reason = character * LONGEST
    packet = encode(Interrupt(7, reason))
    assert len(packet) <= LONGEST
    told = from_agent(packet)
    assert isinstance(told, Interrupt)
    assert told.reason == reason[:4096].encode(errors="replace").decode()


def test_a_long_error_still_goes_to_the_agent() -> None:
    assert from_worker(encode(Parked(7, "x" * LONGEST))) == Parked(7, "x" * 4096)
