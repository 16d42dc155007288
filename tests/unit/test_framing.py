"""Messages of any length between worker and supervisor."""

import socket
import threading

import pytest

from ddpdiag.runtime.supervisor.ipc import FRAME_BYTES, FrameReader, send_framed


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 212_992)  # net.core.wmem_max as kernels have it
    with ours, theirs:
        yield ours, theirs


def received(channel: socket.socket, reader: FrameReader) -> bytes:
    while True:
        channel.recv(1, socket.MSG_PEEK)  # waits
        if (message := reader.receive(channel)) is not None:
            return message


@pytest.mark.parametrize("size", [0, 1, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 5_000_000])
def test_a_message_arrives_whole_and_the_next_one_apart(ends, size):
    ours, theirs = ends
    messages = [bytes(size), b"the next one"]
    sender = threading.Thread(target=lambda: [send_framed(theirs, message) for message in messages])
    sender.start()
    reader = FrameReader()
    assert [received(ours, reader) for _ in messages] == messages
    sender.join()


def test_a_closed_link_is_nothing(ends):
    ours, theirs = ends
    theirs.close()
    assert FrameReader().receive(ours) == b""
