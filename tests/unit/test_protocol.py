"""Messages from anybody: what is right is read, what is wrong is refused with its field's name."""

import inspect
import json
import os
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_etcd.protocol import messages as protocol
from elastic_etcd.protocol.messages import (
    LONGEST,
    LONGEST_TEXT,
    AskCurrent,
    AskLeaving,
    Bye,
    CannotImport,
    Change,
    Current,
    Diverged,
    Done,
    Drop,
    Elastic,
    Ended,
    Forked,
    Formed,
    Hello,
    Interrupt,
    JobOver,
    Keep,
    Kept,
    Leaving,
    NextWorld,
    Parked,
    Reader,
    Recall,
    Recalled,
    Share,
    TrainingDone,
    Unsafe,
    Wanted,
    Warm,
    Welcome,
    encode,
    from_agent,
    from_fork_server,
    from_forked,
    from_torchrun,
    from_worker,
    to_torchrun,
)
from elastic_etcd.protocol.packets import receive

BIGGEST = (1 << 63) - 1
# (what reads it, the message, how it looks)
EXAMPLES: list[tuple[Reader[Any], Any, dict[str, Any]]] = [
    (from_worker, Hello(1, 2, 3, 4),
     {"type": "hello", "v": 1, "pid": 2, "local_rank": 3, "generation": 4}),
    (from_worker, Elastic(), {"type": "elastic"}),
    (from_worker, Parked(7, "why"), {"type": "parked", "generation": 7, "error": "why"}),
    (from_worker, Keep(1, "n"), {"type": "keep", "id": 1, "name": "n"}),
    (from_worker, Recall(1, "n"), {"type": "recall", "id": 1, "name": "n"}),
    (from_worker, Share(1, "n"), {"type": "share", "id": 1, "name": "n"}),
    (from_worker, AskCurrent(1), {"type": "current", "id": 1}),
    (from_worker, AskLeaving(1), {"type": "leaving", "id": 1}),
    (from_worker, Diverged(7, "l", named=True, alone=False),
     {"type": "diverged", "generation": 7, "line": "l", "named": True, "alone": False}),
    (from_agent, Welcome(1, "r"), {"type": "welcome", "v": 1, "reason": "r"}),
    (from_agent, Kept(1, "n"), {"type": "kept", "id": 1, "name": "n"}),
    (from_agent, Recalled(1, "n", found=False),
     {"type": "recalled", "id": 1, "name": "n", "found": False}),
    (from_agent, Current(1, None, "why"),
     {"type": "current", "id": 1, "current": None, "reason": "why"}),
    (from_agent, Leaving(1, leaving=True), {"type": "leaving", "id": 1, "leaving": True}),
    (from_agent, Change(7, "why", leaving=True),
     {"type": "change", "generation": 7, "reason": "why", "leaving": True}),
    (from_agent, Interrupt(7, "why"), {"type": "interrupt", "generation": 7, "reason": "why"}),
    (from_agent, NextWorld(7, "why", {"A": "b"}),
     {"type": "world", "generation": 7, "reason": "why", "env": {"A": "b"}}),
    (from_agent, Bye("why"), {"type": "bye", "reason": "why"}),
    (from_fork_server, Warm(), {"type": "warm"}),
    (from_fork_server, Unsafe("threads"), {"type": "unsafe", "why": "threads"}),
    (from_fork_server, CannotImport("m", "why"),
     {"type": "cannot_import", "module": "m", "why": "why"}),
    (from_forked, Forked(7), {"type": "forked", "pid": 7}),
    (from_worker, TrainingDone(), {"type": "finished"}),
    (from_worker, Drop("n"), {"type": "drop", "name": "n"}),
    (from_torchrun, Wanted(), {"type": "wanted"}),
    (from_torchrun, Done(success=True), {"type": "done", "success": True}),
    (to_torchrun, Formed(7, 0, 2, "h", 1),
     {"type": "formed", "generation": 7, "group_rank": 0, "nodes": 2, "addr": "h", "port": 1}),
    (to_torchrun, Ended(), {"type": "ended"}),
    (to_torchrun, JobOver(5, "why"), {"type": "over", "exit_code": 5, "error": "why"}),
]  # fmt: skip


def packet(shown: dict[str, Any], **others: object) -> bytes:
    return json.dumps({**shown, **others}).encode()


@pytest.mark.parametrize(("reader", "message", "shown"), EXAMPLES)
def test_a_message_is_an_object_with_its_type(
    reader: Reader[Any], message: Any, shown: dict[str, Any]
) -> None:
    assert json.loads(encode(message)) == shown
    assert reader(encode(message)) == message
    assert reader(packet(shown, later="unknown fields are ignored")) == message
    for name in shown:
        if reader is from_forked and name == "type":  # of a single kind it need not be said
            continue
        with pytest.raises(ValueError, match=name):
            reader(packet({n: value for n, value in shown.items() if n != name}))
        with pytest.raises(ValueError, match=rf"at `\$\.{name}\b"):
            reader(packet(shown, **{name: [1]}))


def test_every_message_is_shown_above() -> None:
    classes = inspect.getmembers(protocol, inspect.isclass)
    messages = {kind for _, kind in classes if issubclass(kind, protocol._Message)}
    assert {type(message) for _, message, _ in EXAMPLES} == messages - {protocol._Message}


HELLO, KEEP = EXAMPLES[0][2], EXAMPLES[3][2]


@pytest.mark.parametrize(
    ("shown", "field", "value"),
    [
        (HELLO, "local_rank", -1),
        (HELLO, "local_rank", 4096),
        (HELLO, "local_rank", True),
        (HELLO, "local_rank", "0"),
        (HELLO, "local_rank", 0.5),
        (HELLO, "pid", -1),
        (HELLO, "generation", -1),
        (HELLO, "generation", BIGGEST + 1),
        (HELLO, "generation", 10**400),
        (HELLO, "generation", None),
        (HELLO, "v", "1"),
        (HELLO, "type", "world"),  # the agent's to say
        (HELLO, "type", None),
        (KEEP, "id", -1),
        (KEEP, "id", BIGGEST + 1),
        (KEEP, "name", "x" * 257),
        (KEEP, "name", 7),
    ],
)
def test_what_is_out_of_its_bounds_is_refused_by_name(
    shown: dict[str, Any], field: str, value: object
) -> None:
    with pytest.raises(ValueError, match=rf"at `\$\.{field}`"):
        from_worker(packet(shown, **{field: value}))


def test_the_bounds_themselves_are_allowed() -> None:
    hello = Hello(1, BIGGEST, 4095, BIGGEST)
    assert from_worker(encode(hello)) == hello
    keep = Keep(0, "\U0001f600" * 256)
    assert from_worker(encode(keep)) == keep


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"\0",
        b"null",
        b"[]",
        b"{}",
        b'"elastic"',
        b'{"type":"elastic"',
        b'{"type":"elastic"} {"type":"elastic"}',
        b'{"type":"elastic","type":"exec"}',
        b'{"type":"parked","generation":7,"error":"\xff"}',
        b'{"type":"parked","generation":NaN,"error":""}',
        b'{"type":"parked","generation":1e999,"error":""}',
        b'{"type":"parked","generation":7,"error":"\\ud800"}',
        b"[" * LONGEST,
        b'{"type":"elastic","x":' + b"[" * 50_000 + b"]" * 10_000,
        b'{"x":' * 10_000,
    ],
    ids=lambda packet: repr(packet[:50]),
)
def test_what_is_no_message_is_refused(packet: bytes) -> None:
    for reader in (from_worker, from_agent, from_fork_server, from_forked):
        with pytest.raises(ValueError, match=r"."):
            reader(packet)


def test_what_is_nested_deeply_is_refused_and_not_raised() -> None:
    """How deep that is, Python 3.14 says by the stack: some 60,000 of these in 8 MB."""
    with pytest.raises(ValueError, match="nested too deeply"):
        from_worker(b'{"type":"elastic","x":' + b"[" * 1_000_000 + b"}")


@given(st.binary(max_size=100))
def test_bytes_are_read_or_refused(data: bytes) -> None:
    for reader in (from_worker, from_agent, from_fork_server, from_forked):
        try:
            read = reader(data)
        except ValueError:
            continue
        assert reader(encode(read)) == read


@pytest.mark.parametrize("character", ["x", "\x1b", "\u00e4", "\U0001f600", "\ud800", "\0", '"'])
@pytest.mark.parametrize(
    "kind", [Parked, Interrupt, lambda n, text: Change(n, text, leaving=False),
             lambda n, text: Current(n, None, text), lambda n, text: NextWorld(n, text, {}),
             lambda _, text: Bye(text)],
)  # fmt: skip
def test_a_long_text_of_anybody_s_is_cut(kind: Any, character: str) -> None:
    text = f"why: {character * LONGEST}"
    sent = encode(kind(7, text))
    assert len(sent) <= LONGEST
    fields = json.loads(sent)
    told = fields.get("reason", fields.get("error"))
    assert told == text[:LONGEST_TEXT].encode(errors="replace").decode()


def test_a_short_one_is_not() -> None:
    text = "x" * LONGEST_TEXT
    assert json.loads(encode(Bye(text)))["reason"] == text


def test_what_cannot_be_sent_is_a_value_error() -> None:
    """A variable may be any bytes, and as long as the kernel takes it."""
    for value in ("x" * LONGEST, os.fsdecode(b"\xff")):
        with pytest.raises(ValueError, match=r"65536 are allowed|surrogates not allowed"):
            encode(NextWorld(8, "", {"NAME": value}))
    with pytest.raises(ValueError, match=r"NextWorld takes \d+ bytes, 65536 are allowed"):
        encode(NextWorld(8, "", {"NAME": "x" * LONGEST}))
    longest = LONGEST - len(encode(NextWorld(8, "", {"NAME": ""})))
    assert len(encode(NextWorld(8, "", {"NAME": "x" * longest}))) == LONGEST


def test_no_child_inherits_a_descriptor_that_is_received() -> None:
    """socket.recv_fds ignores the flag that asks for that."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(ours, [b"a", b"b"], [0, 1])
        packet, fds, flags = receive(theirs, 2)
    assert (packet, len(fds), flags & socket.MSG_CTRUNC) == (b"ab", 2, 0)
    assert not any(map(os.get_inheritable, fds))
    for fd in fds:
        os.close(fd)
