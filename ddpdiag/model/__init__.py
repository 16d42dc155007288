"""The data model: frozen structs that all other packages share. No module of it reads the machine."""

from ddpdiag.model.options import Depth, Options
from ddpdiag.model.recording import End, Event, EventKind, Header, Recording, Skip
from ddpdiag.model.report import (
    CheckLine,
    Finding,
    HostsLine,
    Matrix,
    Report,
    Scalar,
    Severity,
    StageLine,
    Verdict,
    WorldLine,
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
    "CheckLine",
    "Collective",
    "Depth",
    "End",
    "Event",
    "EventKind",
    "Finding",
    "Header",
    "HostsLine",
    "Kind",
    "Matrix",
    "Options",
    "Outcome",
    "Place",
    "ProcessState",
    "Recording",
    "Report",
    "Scalar",
    "Severity",
    "Skip",
    "StageLine",
    "Status",
    "Trial",
    "Verdict",
    "WorldLine",
]
