"""What the kernel knows of a TCP connection."""

import socket
import struct

from msgspec import Struct

# Offsets in struct tcp_info of <linux/tcp.h>; the last of these fields came with Linux 4.2.
_ACKNOWLEDGED = struct.Struct("=Q")
_ACKNOWLEDGED_AT = 120
_COUNT = struct.Struct("=I")
_RETRANSMITTED_AT = 100
_SEGMENTS_AT = 136
_SIZE = 140


class TcpInfo(Struct, frozen=True):
    """Bytes that the peer's kernel acknowledged, segments sent, and those of them that were sent again."""

    acknowledged_bytes: int
    segments: int
    retransmitted: int


def tcp_info(sock: socket.socket) -> TcpInfo | None:
    """The counters of our sending side, or None where the kernel does not say."""
    try:
        data = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    except OSError:
        return None
    if len(data) < _SIZE:
        return None
    return TcpInfo(
        _ACKNOWLEDGED.unpack_from(data, _ACKNOWLEDGED_AT)[0],
        _COUNT.unpack_from(data, _SEGMENTS_AT)[0],
        _COUNT.unpack_from(data, _RETRANSMITTED_AT)[0],
    )
