"""A stand-in for NCCL's RAS service, over a real socket: the text protocol of src/ras/client_support.cc (NCCL 2.24).

`act` says how it behaves: "answer"; "silent" (accepts and never says a word); "late" (silent to the first caller only,
as a stopped process that shares the port); "cut" (ends in the middle of its report, and keeps the connection);
"close" (hangs up at once); "stranger" (speaks another protocol); "waits" (its header at once, and the rest when the
time-out of its caller is over, as NCCL does where one of its processes is stopped).
"""

import contextlib
import socket
import threading
import time

# Composed from the format strings of rasClientRunInit and rasClientRunComms (client_support.cc, NCCL 2.24 to 2.30); the
# documentation shows the same (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html).
REPORT = """NCCL version 2.27.7 compiled with CUDA 12.8
CUDA runtime version 12080, driver version 12080

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          4            1          4        4

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         4         4         4   RUNNING  MISMATCH

Errors
======

Warnings
========

#0-0 (9e3779b97f4a7c15) MISMATCH
  Communicator ranks have different collective operation counts
  3 ranks have launched up to operation 7
  Rank 2 has launched up to operation 6 -- GPU 2 managed by process 4103 on node 10.0.0.1
"""


class RasServer:
    """Listens on `port` (0: any) of `host` until it is closed; `heard` are the lines of all callers."""

    def __init__(self, *, host="127.0.0.1", port=0, act="answer", report=REPORT):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self.port = self._socket.getsockname()[1]
        self.act, self.report = act, report
        self.heard, self.callers = [], []
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self):
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept
        for sock in (self._socket, *self.callers):
            sock.close()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._socket.accept()
                self.callers.append(caller)
                threading.Thread(target=self._talk, args=(caller, len(self.callers)), daemon=True).start()

    def _talk(self, caller, number):
        with contextlib.suppress(OSError):
            if self.act == "close":
                caller.close()
            elif self.act == "stranger":
                caller.sendall(b"220 mail.example ESMTP\r\n")
            elif self.act != "silent" and not (self.act == "late" and number == 1):
                self._answer(caller)

    def _answer(self, caller):
        seconds = 5.0
        with caller.makefile("r", newline="\n") as lines:
            for line in lines:
                word = line.strip().lower()
                self.heard.append(line.strip())
                if word.startswith("client protocol "):
                    caller.sendall(b"SERVER PROTOCOL 2\n")
                elif word.startswith("timeout "):
                    seconds = float(word.split()[1])
                    caller.sendall(b"OK\n")
                elif word in ("status", "verbose status"):
                    self._report(caller, seconds if self.act == "waits" else 0.0)
                    return
                else:
                    caller.sendall(f"ERROR: Unknown command {word}\n".encode())

    def _report(self, caller, seconds):
        first, _, rest = self.report.partition("Communicators...")
        caller.sendall(first.encode())
        time.sleep(seconds)
        if self.act != "cut":
            caller.sendall(f"Communicators...{rest}".encode() if rest else b"")
            caller.shutdown(socket.SHUT_RDWR)
