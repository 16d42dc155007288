"""The report for scripts: `ddpdiag.report/1`, as the public contract has it."""

import msgspec

from ddpdiag.codec import encode
from ddpdiag.model import Report


def render(report: Report) -> str:
    """`report` as indented JSON with a newline at the end; a non-finite number is the string "nan", "inf" or "-inf"."""
    return msgspec.json.format(encode(report), indent=2).decode() + "\n"
