"""A stand-in for the RAS threads of NCCL: a server that answers as NCCL's src/ras/client_support.cc does.

`python ras_stand_in.py PORT FILE` answers each connection with the status in FILE, as read at that moment, until its
standard input is closed. A test can also start `Server` in its own process.
"""

import json
import re
import socketserver
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

COLLECTIVES = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
HASH, SECONDARY_HASH = "0xae94423cfbb2ef4a", "0xb7e7187447156001:0xb8242ed28a71381e"


def rank(number: int, *, host: str = "10.0.0.1", pid: int | None = None, gpu: int | None = None, **more) -> dict:
    """A rank as the JSON of 2.28.7 and newer lists it: `rank(2, AllReduce=99)`, `rank(1, abort_flag=True)`.

    With `unresponsive` or `considered_dead` it is one of `missing_ranks`.
    """
    gpu = number if gpu is None else gpu
    place = {
        "rank": number,
        "host": host,
        "pid": 100 + number if pid is None else pid,
        "cuda_dev": gpu,
        "nvml_dev": gpu,
    }
    if {"unresponsive", "considered_dead"} & more.keys():
        return place | {"status": {"unresponsive": True, "considered_dead": False} | more}
    flags = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    status = flags | {name: value for name, value in more.items() if name in flags}
    return place | {"status": status, "collective_counts": {name: more.get(name, 0) for name in COLLECTIVES}}


def communicator(*ranks: dict, hash: str = HASH) -> dict:
    """A communicator with these ranks, in the form of the JSON."""
    present = [each for each in ranks if "collective_counts" in each]
    missing = [each for each in ranks if "collective_counts" not in each]
    counts = {"size": len(ranks), "ranks_count": len(present), "missing_ranks_count": len(missing)}
    return {"hash": hash, "secondary_hash": SECONDARY_HASH, **counts, "ranks": present, "missing_ranks": missing}


def status(*communicators: dict, version: str = "2.30.7") -> bytes:
    """The JSON of a status. 2.28.7 and 2.28.9 omit the comma after each nvml_dev of `missing_ranks`."""
    answer = {
        "nccl_version": version,
        "cuda_runtime_version": 13000,
        "cuda_driver_version": 13000,
        "timestamp": "2025-12-19 13:06:53",
        "communicators_count": len(communicators),
        "communicators": communicators,
        "ras": {"collection_time_sec": 0.0, "timeouts_count": 0},
    }
    text = json.dumps(answer, indent=2) + "\n"
    if version.startswith("2.28."):
        text = re.sub(r'("nvml_dev": \d+),(\s+"status": \{\s+"unresponsive")', r"\1\2", text)
    return text.encode()


def handshake(status_bytes: bytes, question: bytes) -> bytes:
    """The lines with which NCCL answers the commands before STATUS."""
    lines = []
    for command in question.decode().splitlines():
        match command.lower().split():
            case ["client", "protocol", _]:
                lines.append("SERVER PROTOCOL 2")
            case ["timeout", seconds]:
                lines.append("OK" if seconds.isdecimal() else f"ERROR: Invalid timeout value {seconds}")
            case ["set", "format", "json"] if status_bytes.startswith(b"{"):
                lines.append("OK")
            case ["status"] | ["verbose", "status"]:
                break
            case _:
                lines.append(f"ERROR: Unknown command {command}")
    return "".join(f"{line}\n" for line in lines).encode()


class Server(socketserver.ThreadingTCPServer):
    """Answers each connection by `answer(question)`, an iterable of pieces of bytes. `port` is where it listens."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, answer: Callable[[bytes], Sequence[bytes]], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.answer = answer
        self.port = self.server_address[1]
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def server_close(self) -> None:
        """Stop to listen, too: a `with` block calls only this."""
        self.shutdown()
        super().server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that leave early."""


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        question = b""
        while b"status\n" not in question.lower() and (line := self.rfile.readline()):
            question += line
        for piece in self.server.answer(question):
            self.wfile.write(piece)


def answers(status_bytes: bytes) -> Callable[[bytes], Sequence[bytes]]:
    """What NCCL answers if its status is `status_bytes`."""
    return lambda question: (handshake(status_bytes, question), status_bytes)


if __name__ == "__main__":
    port, file = int(sys.argv[1]), Path(sys.argv[2])
    with Server(lambda question: answers(file.read_bytes())(question), port):
        sys.stdin.read()
