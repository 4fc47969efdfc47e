"""Messages between two processes: all of them arrive, whole and in order, and nobody waits for a slow reader."""

import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from peftkit_serve.channel import Channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = map(Channel, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def take(channel: Channel, count: int) -> list[Any]:
    taken: list[Any] = []
    while len(taken) < count:
        channel.wait()
        taken += channel.receive()
    return taken


def test_messages_of_all_sizes_come_whole_and_in_order(ends: tuple[Channel, Channel], seed: int) -> None:
    rng, (one, other) = random.Random(seed), ends
    sizes = [
        0,
        1,
        2**18 - 8,
        2**18,
        2**18 + 1,
        3 * 2**20,
        *(rng.randrange(2 ** rng.randrange(1, 20)) for _ in range(200)),
    ]
    messages = [(number, rng.randbytes(size)) for number, size in enumerate(sizes)]
    received: list[Any] = []
    reader = threading.Thread(target=lambda: received.extend(take(other, len(messages))))
    reader.start()
    for message in messages:
        one.send(message)
    reader.join(30)
    assert received == messages


def test_a_sender_waits_for_no_reader(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    begin = time.monotonic()
    for number in range(200):
        one.send((number, bytes(10**5)))
    assert time.monotonic() - begin < 5, "20 MB are more than a socket holds"
    assert 10**7 < one.num_unsent < 2 * 10**7 + 10**6
    assert [number for number, _ in take(other, 200)] == list(range(200))
    one.flush(10)
    assert one.num_unsent == 0
    one.send("next")
    assert take(other, 1) == ["next"]


def test_any_thread_may_send(ends: tuple[Channel, Channel]) -> None:
    one, other = ends

    def send(name: int) -> None:
        for number in range(100):
            one.send((name, number, bytes(20_000)))

    threads = [threading.Thread(target=send, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    taken = take(other, 400)
    for name in range(4):
        assert [number for who, number, _ in taken if who == name] == list(range(100))


def test_text_that_is_no_unicode_goes_through(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    one.send(("\ud800 half", "\U0001f600", "\0"))
    assert take(other, 1) == [("\ud800 half", "\U0001f600", "\0")]


def test_what_was_sent_before_the_end_is_taken_before_it(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    assert other.receive() == []
    one.send("last")
    one.close()
    one.send("nobody hears this")
    assert take(other, 1) == ["last"]
    with pytest.raises(EOFError):
        other.receive()
    other.send("nor this")
