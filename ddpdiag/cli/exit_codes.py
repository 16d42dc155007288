"""The exit codes that `--exit-codes` selects: those of ddpdiag, or those that programs of Kubernetes expect.

Each process translates its own code at the end. Only 10 and 20 of K8S depend on the findings, so rank 0 computes them
and sends them to the other ranks. The JSON report and the Python API have the codes of ddpdiag.
"""

from collections.abc import Sequence
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, assert_never

from ddpdiag.errors import ExitCode

if TYPE_CHECKING:
    from ddpdiag.model import Report


class ExitCodes(StrEnum):
    """The values of `--exit-codes`.

    DDPDIAG: the codes in `ExitCode`. K8S: those in `Preflight`. NPD: 0 OK, 1 NonOK, 2 Unknown, as node-problem-detector
    expects them of a custom plugin (pkg/custompluginmonitor/types/types.go).
    """

    DDPDIAG = "ddpdiag"
    K8S = "k8s"
    NPD = "npd"


class Preflight(IntEnum):
    """The classes of a preflight container (kubeflow/trainer, proposals/3416-pet-env-init-containers)."""

    PASS = 0
    WARNING = 10
    RETRY = 20
    FATAL = 30


# A second try with the same command and software ends like the first one, so USAGE and BUG are fatal.
_PREFLIGHT: dict[int, int] = {
    ExitCode.FIT: Preflight.PASS,
    ExitCode.UNFIT: Preflight.FATAL,
    ExitCode.USAGE: Preflight.FATAL,
    ExitCode.UNKNOWN: Preflight.RETRY,
    ExitCode.BUG: Preflight.FATAL,
}
# The host of a lost rank may have been drained, and its pod evicted. The next try gets another host.
_GONE_IN_NEXT_TRY = {"RUN002.lost"}
_NPD_UNKNOWN = 2


def exit_code_of(report: "Report", codes: ExitCodes) -> int:
    """The exit code of a run, for `translated`. K8S has different codes for reports with the same verdict."""
    if codes is ExitCodes.K8S:
        from ddpdiag.model import Severity

        error_codes = {finding.code for finding in report.findings if finding.severity is Severity.ERROR}
        has_warning = any(finding.severity is Severity.WARNING for finding in report.findings)
        if report.exit_code == ExitCode.FIT and has_warning:
            return Preflight.WARNING
        if report.exit_code == ExitCode.UNFIT and error_codes and error_codes <= _GONE_IN_NEXT_TRY:
            return Preflight.RETRY
    return report.exit_code


def translated(code: int, codes: ExitCodes) -> int:
    """The code that the process exits with. K8S keeps codes of signals (130, 143) and those that it already has."""
    match codes:
        case ExitCodes.DDPDIAG:
            return code
        case ExitCodes.K8S:
            return _PREFLIGHT.get(code, code)
        case ExitCodes.NPD:
            return code if code in (ExitCode.FIT, ExitCode.UNFIT) else _NPD_UNKNOWN
    assert_never(codes)


def requested_codes(words: Sequence[str]) -> ExitCodes:
    """The value of `--exit-codes` among the words of a command line that may have mistakes; DDPDIAG without one."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == "--exit-codes":
            given = value if equals else next(iter(words[index + 1 :]), "")
            return next((codes for codes in ExitCodes if codes == given), ExitCodes.DDPDIAG)
    return ExitCodes.DDPDIAG
