"""A worker's words in pieces: the kernel takes no more than net.core.wmem_max at once, 208 KiB as a rule."""

import socket

PIECE_BYTES = 64 << 10
_MORE, _LAST = b"+", b"."


def send(link: socket.socket, word: bytes) -> None:
    """Send a word of any length over a socket that keeps messages apart; waits while the other end does not read."""
    for start in range(0, max(1, len(word)), PIECE_BYTES):
        end = start + PIECE_BYTES
        link.send((_MORE if end < len(word) else _LAST) + word[start:end])


class Parcel:
    """The other end: collects the pieces of one word after the other."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def receive(self, link: socket.socket) -> bytes | None:
        """The whole word, None as long as there is more to come, nothing when the link is closed. Does not wait."""
        try:
            piece = link.recv(1 + PIECE_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            return b""
        if not piece:
            return b""
        self._pieces.append(piece[1:])
        if piece[:1] == _MORE:
            return None
        word, self._pieces = b"".join(self._pieces), []
        return word
