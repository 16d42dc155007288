"""A second door to the control server, on the port that the job itself will use: firewalls may let no other through.

ZeroMQ cannot serve here: unbinding an endpoint closes the connections that came in through it (libzmq 4.3.5). So plain
connections are accepted and passed on to the control server's own port. The door is open only while ranks gather;
afterwards the port is free for the job's own tests, and connections that came in through it stay.
"""

import contextlib
import selectors
import socket
import threading
import time

_BYTES = 1 << 16
# Whoever reads nothing for so long is cut off, so that it cannot hold up the others.
_SEND_SECONDS = 1.0


class Relay:
    """Passes on, in a thread of its own, what comes to `port` of this host to its port `target`, and back.

    OSError if the port is taken.
    """

    def __init__(self, port: int, target: int) -> None:
        self._target = target
        self._door = _listen(port)
        self._closed = threading.Event()
        self._peers: dict[socket.socket, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._bell, ringing = socket.socketpair()
        self._selector.register(self._door, selectors.EVENT_READ)
        self._selector.register(ringing, selectors.EVENT_READ)
        self._ringing = ringing
        threading.Thread(target=self._serve, name="relay", daemon=True).start()

    def close_door(self) -> None:
        """Free the port; connections stay."""
        with contextlib.suppress(OSError):
            self._bell.send(b"x")
        self._closed.wait(_SEND_SECONDS + 1.0)
        self._bell.close()

    def _serve(self) -> None:
        while not self._closed.is_set() or self._peers:
            for key, _events in self._selector.select():
                match key.fileobj:
                    case self._ringing:
                        self._shut()
                    case self._door:
                        self._accept()
                    case socket.socket() as source if source in self._peers:
                        self._pass_on(source)
        self._selector.close()

    def _shut(self) -> None:
        for end in (self._ringing, self._door):
            self._selector.unregister(end)
            end.close()
        self._closed.set()

    def _accept(self) -> None:
        try:
            outside, _address = self._door.accept()
        except OSError:  # gone again, or too many open files
            time.sleep(0.01)
            return
        try:
            inside = socket.create_connection(("127.0.0.1", self._target), _SEND_SECONDS)
            inside.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            outside.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            outside.close()
            return
        for source, peer in ((outside, inside), (inside, outside)):
            source.settimeout(_SEND_SECONDS)
            self._peers[source] = peer
            self._selector.register(source, selectors.EVENT_READ)

    def _pass_on(self, source: socket.socket) -> None:
        try:
            data = source.recv(_BYTES)
            if data:
                self._peers[source].sendall(data)
                return
        except OSError:
            pass  # as if it had hung up
        for end in (source, self._peers[source]):
            self._selector.unregister(end)
            del self._peers[end]
            end.close()


def _listen(port: int) -> socket.socket:
    """A listener for IPv4 and, where there is one, IPv6. With SO_REUSEADDR, which its connections inherit.

    Without that nobody could listen on the port again as long as one of them is open.
    """
    both = socket.has_dualstack_ipv6()
    family, host = (socket.AF_INET6, "::") if both else (socket.AF_INET, "")
    return socket.create_server((host, port), family=family, backlog=1024, dualstack_ipv6=both)
