"""Words of any length between worker and supervisor."""

import socket
import threading

import pytest

from ddpdiag.runtime.supervisor.ipc import PIECE_BYTES, Parcel, send


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 212_992)  # net.core.wmem_max as kernels have it
    with ours, theirs:
        yield ours, theirs


def received(link: socket.socket, parcel: Parcel) -> bytes:
    while True:
        link.recv(1, socket.MSG_PEEK)  # waits
        if (word := parcel.receive(link)) is not None:
            return word


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 5_000_000])
def test_a_word_arrives_whole_and_the_next_one_apart(ends, size):
    ours, theirs = ends
    words = [bytes(size), b"the next one"]
    sender = threading.Thread(target=lambda: [send(theirs, word) for word in words])
    sender.start()
    parcel = Parcel()
    assert [received(ours, parcel) for _ in words] == words
    sender.join()


def test_a_closed_link_is_nothing(ends):
    ours, theirs = ends
    theirs.close()
    assert Parcel().receive(ours) == b""
