"""The message that node-problem-detector takes from a custom plugin: one line on standard output."""

from ddpdiag.model import Report, Severity
from ddpdiag.render.page import clip_text

# max_output_length in bytes where its configuration has none (pkg/custompluginmonitor/types/config.go). It cuts longer
# messages without a mark, so this line is ASCII and ends with "...".
_MAX_BYTES = 80


def render(report: Report) -> str:
    """The verdict and the first error, or without errors the verdict and its sentence."""
    text = next((each.title for each in report.findings if each.severity is Severity.ERROR), report.sentence)
    line = f"{report.verdict_text}: {text}".encode("ascii", "replace").decode()
    return f"{clip_text(line, _MAX_BYTES)}\n"
