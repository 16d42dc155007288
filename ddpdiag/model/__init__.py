"""The data model: frozen structs that all other packages share. No module of it reads the machine."""

from ddpdiag.model.options import Depth, RunOptions
from ddpdiag.model.recording import End, Event, EventKind, Header, Recording, Skip
from ddpdiag.model.report import (
    CheckSummary,
    Finding,
    HostLists,
    Matrix,
    Report,
    Scalar,
    Severity,
    StageSummary,
    Verdict,
    WorldSummary,
)
from ddpdiag.model.trial import (
    FORK_STEP,
    IMPORT_STEP,
    Arrival,
    Collective,
    Kind,
    Outcome,
    Place,
    ProcessState,
    Status,
    Trial,
)

__all__ = [
    "FORK_STEP",
    "IMPORT_STEP",
    "Arrival",
    "CheckSummary",
    "Collective",
    "Depth",
    "End",
    "Event",
    "EventKind",
    "Finding",
    "Header",
    "HostLists",
    "Kind",
    "Matrix",
    "Outcome",
    "Place",
    "ProcessState",
    "Recording",
    "Report",
    "RunOptions",
    "Scalar",
    "Severity",
    "Skip",
    "StageSummary",
    "Status",
    "Trial",
    "Verdict",
    "WorldSummary",
]
