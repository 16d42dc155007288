"""A Python that has imported what many tests need, and forks for each: 20 ms in place of 200 for a start."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping

SERVER = """
import json, os, sys, tempfile

exec(sys.argv[1])
for line in sys.stdin:
    asked = json.loads(line)
    written = [tempfile.TemporaryFile() for _ in range(2)]
    if not (pid := os.fork()):
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, file in enumerate(written, 1):
            os.dup2(file.fileno(), descriptor)
        os.environ.update(asked["variables"])
        sys.argv = ["-c", *asked["arguments"]]
        exec(asked["code"], {"__name__": "__main__"})
        sys.exit()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    out, err = (os.pread(file.fileno(), 1 << 24, 0).decode() for file in written)
    print(json.dumps([code, out, err]), flush=True)
"""


class Forked:
    """A context: `run(code, arguments)` is `python -c code arguments` in a fork of a Python that ran `prepare`."""

    def __init__(self, prepare: str, environ: Mapping[str, str] = os.environ) -> None:
        command = [sys.executable, "-c", SERVER, prepare]
        self._server = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def run(self, code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """How it ended, and what it wrote."""
        print(json.dumps({"code": code, "arguments": arguments, "variables": variables}), file=self._server.stdin)
        answer = self._server.stdout.readline()
        assert answer, f"the Python that forks has left with {self._server.wait()}"
        return subprocess.CompletedProcess(arguments, *json.loads(answer))

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()
