"""The bundle of a ticket: the form and its evidence as a tar.gz file without secrets.

The same content gives the same bytes: members have no time, user or group.
"""

import gzip
import io
import re
import tarfile
from collections.abc import Iterator

import msgspec

from ddpdiag.codec import disassemble, encode, encode_line
from ddpdiag.ticket.job import Job, hidden


def bundle(job: Job, form: str) -> bytes:
    """Pack the form, reports, recordings, logs and outputs of commands."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in _files(job, form):
            member = tarfile.TarInfo(f"ddpdiag-ticket/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return gzip.compress(buffer.getvalue(), compresslevel=6, mtime=0)


def _files(job: Job, form: str) -> Iterator[tuple[str, bytes]]:
    yield "form.md", form.encode()
    for number, report in enumerate(job.reports):
        yield f"report-{number}.json", _without_secrets(encode(report))
    for number, recording in enumerate(job.recordings):
        lines = map(encode_line, disassemble(recording))
        yield f"recording-{number}.jsonl", b"".join(_without_secrets(line) + b"\n" for line in lines)
    for name, text in job.logs.items():
        yield f"logs/{name}", text.encode()
    for command, output in job.outputs.items():
        if output is not None:
            yield f"commands/{re.sub('[^a-z]+', '-', command)}.txt", output.encode()


def _without_secrets(data: bytes) -> bytes:
    return msgspec.json.encode(hidden(msgspec.json.decode(data)))
