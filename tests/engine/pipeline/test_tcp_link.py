"""What a step needs travels with its message to the slots of another process, and others cannot connect."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tidewheel.engine.devices.batch import SamplingBatch, StepBatch, TokenMasks
from tidewheel.engine.pipeline.links import MASKS, Part, read_step, step_message
from tidewheel.engine.pipeline.step_slot import Arrays, SlotShape, StepSlot
from tidewheel.engine.pipeline.tcp_link import RESULTS, STEPS, TOKEN_BYTES, TcpLink, accept, connect

SHAPE = SlotShape(num_groups=1, num_stages=2, row_floats=8)
TOKEN = bytes(range(TOKEN_BYTES))


class Ends:
    """Both ends of a link, each with slots of its own."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = connect(listener.getsockname(), TOKEN, STEPS)
            theirs = accept(listener, TOKEN, {STEPS}, 10)[STEPS]
        self.slots = [[SHAPE.slot() for _ in range(2)] for _ in range(2)]
        self.ours, self.theirs = TcpLink(ours, self.slots[0]), TcpLink(theirs, self.slots[1])

    def send(self, slot: int, part: Part, size: int, kind: int = 1) -> Arrays:
        """Send a part of our slot; the arrays of theirs then."""
        self.ours.send(step_message(slot, 7, size, kind), part)
        message, arrived = self.theirs.receive(10)
        assert arrived is not None
        assert read_step(message) == (slot, 7, size)
        return self.slots[1][slot].read(size)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.ours.close()
    ends.theirs.close()
    for slot in sum(ends.slots, list[StepSlot]()):
        slot.close()


def batch(tokens: int) -> StepBatch:
    sampling = SamplingBatch.greedy([5])
    sampling.masks = TokenMasks(np.zeros((1, 2), np.uint32), np.zeros(1, np.int32))
    return StepBatch(
        token_ids=np.arange(tokens, dtype=np.int32),
        positions=np.arange(tokens, dtype=np.int32),
        query_start=np.array([0, tokens], np.int32),
        context_len=np.array([tokens], np.int32),
        block_tables=np.array([[1, 2, 3]], np.int32),
        logits_rows=np.array([tokens - 1], np.int32),
        sampling=sampling,
    )


def same(array: object, other: object) -> bool:
    return bool(np.array_equal(np.asarray(array), np.asarray(other)))


def test_each_part_comes_to_the_other_slots_and_leaves_the_rest(ends: Ends) -> None:
    size, ours = ends.slots[0][1].write(batch(3000))
    bits, rows, times, sampled = (ours[name] for name in ("masks", "rows", "times", "out_token_ids"))
    assert bits is not None
    assert rows is not None
    assert times is not None
    assert sampled is not None
    bits[...] = 5
    ends.send(1, Part.MASKS, size, MASKS)
    rows[...], times[...], sampled[...] = 2.5, 1.0, 9
    theirs = ends.send(1, Part.BATCH, size)
    assert same(theirs["token_ids"], np.arange(3000))
    assert same(theirs["masks"], bits)  # which had come before
    assert not np.asarray(theirs["rows"]).any()
    bits[...] = 0
    theirs = ends.send(1, Part.ROWS, size)
    assert same(theirs["rows"], rows)
    assert same(theirs["masks"], bits + 5)  # only MASKS brings them
    assert not np.asarray(theirs["out_token_ids"]).any()
    theirs = ends.send(1, Part.OUTPUT, size)
    assert (same(theirs["times"], times), same(theirs["out_token_ids"], sampled)) == (True, True)


def test_both_ends_may_send_much_before_they_receive(ends: Ends) -> None:
    size, _ = ends.slots[0][0].write(batch(400_000))
    ends.slots[1][1].write(batch(400_000))
    other = threading.Thread(target=ends.theirs.send, args=(step_message(1, 1, size), Part.ROWS))
    other.start()
    ends.ours.send(step_message(0, 2, size), Part.ROWS)
    other.join(20)
    assert not other.is_alive()
    assert read_step(ends.theirs.receive(10)[0])[1] == 2
    assert read_step(ends.ours.receive(10)[0])[1] == 1


def test_an_end_that_closes_is_heard_of_again_and_again(ends: Ends) -> None:
    with pytest.raises(TimeoutError):
        ends.ours.receive(0.01)
    ends.theirs.close()
    assert [ends.ours.receive(10)[0] for _ in range(2)] == [b"", b""]

    def send_much() -> None:
        for _ in range(100):
            ends.ours.send(b"x" * 1000)

    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        send_much()


@pytest.mark.parametrize(
    "said",
    [
        b"\xff" * 64,
        b"\x13\x00\x00\x00\x01" + (5).to_bytes(8, "little") + (2**40).to_bytes(8, "little") + step_message(0, 1, 4096),
        b"\x13\x00\x00\x00\x01" + bytes(8) + (16).to_bytes(8, "little") + step_message(9, 1, 4096),
        b"\x01\x00\x00\x00\x01" + bytes(8) + (16).to_bytes(8, "little") + b"\x01",
        b"\x13\x00\x00\x00\x01" + bytes(8) + (16).to_bytes(8, "little") + step_message(0, 1, 2**64 - 1),
    ],
    ids=["too long", "not in its slot", "of no slot", "no whole step", "larger than any memory"],
)
def test_what_is_no_message_closes_the_link(said: bytes) -> None:
    ours, theirs = socket.create_server(("127.0.0.1", 0)), socket.socket()
    theirs.connect(ours.getsockname())
    slot = SHAPE.slot()
    link = TcpLink(ours.accept()[0], [slot])
    theirs.sendall(said)
    assert link.receive(10)[0] == b""
    link.close()
    theirs.close()
    ours.close()
    slot.close()


def test_nobody_comes_in_without_the_token() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        wrong = [
            connect(address, bytes(TOKEN_BYTES), STEPS),
            connect(address, TOKEN, b"?"),
            connect(address, TOKEN[:-1], b""),
        ]
        wrong[2].shutdown(socket.SHUT_WR)
        right = [connect(address, TOKEN, RESULTS), connect(address, TOKEN, STEPS), connect(address, TOKEN, STEPS)]
        found = accept(listener, TOKEN, {STEPS, RESULTS}, 10)
        peers = {purpose: connection.getpeername() for purpose, connection in found.items()}
        assert peers == {RESULTS: right[0].getsockname(), STEPS: right[1].getsockname()}
        for connection in (*wrong, *right, *found.values()):
            connection.close()
        with pytest.raises(TimeoutError):
            accept(listener, TOKEN, {RESULTS}, 0.2)


def test_those_who_are_silent_keep_nobody_waiting() -> None:
    """However many they are, and also if they have said a part of the token."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener, ThreadPoolExecutor(1) as pool:
        address = listener.getsockname()
        silent = [socket.create_connection(address) for _ in range(40)]
        silent[-1].sendall(TOKEN[:20])
        accepting = pool.submit(accept, listener, TOKEN, {STEPS, RESULTS}, 60)
        right = [connect(address, TOKEN, STEPS)]
        silent[-1].sendall(TOKEN[20:-1])
        right.append(connect(address, TOKEN, RESULTS))
        found = accepting.result(5)
        assert {purpose: connection.getpeername() for purpose, connection in found.items()} == {
            STEPS: right[0].getsockname(),
            RESULTS: right[1].getsockname(),
        }
        for connection in silent:
            connection.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""  # sent away
        for connection in (*silent, *right, *found.values()):
            connection.close()
