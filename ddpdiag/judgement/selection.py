"""The selection of a run's checks by --stage, --skip-stage, --select and --ignore."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from ddpdiag.checks.api import Check, Stage
from ddpdiag.checks.registry import ONLY_BY_WHOLE_CODE, SOAK
from ddpdiag.errors import UsageError, did_you_mean
from ddpdiag.model import RunOptions

# A sentence lists at most this many names.
_MAX_LISTED = 12


def is_selected(check: Check[Any], options: RunOptions) -> bool:
    """Whether the run includes the check. `--ignore` and `--skip-stage` exclude even checks that `--select` names."""
    if check.code.startswith(options.ignore) and options.ignore:
        return False
    if check.code in ONLY_BY_WHOLE_CODE and not options.alone and check.code not in options.select:
        return False
    if check.code == SOAK and options.soak_seconds is None:
        return False
    if check.stage.value in options.skip_stages:
        return False
    if options.select and not check.code.startswith(options.select):
        return False
    return not options.stages or check.stage.value in options.stages


def validate(options: RunOptions, checks: Iterable[Check[Any]]) -> None:
    """Raise UsageError for an unknown stage, code or threshold, for a deadline of 0, or if no check is selected.

    Also raises it if only one of the soak's check and its duration is requested.
    """
    by_code = {check.code: check for check in checks}
    codes = list(by_code)
    stages = [stage.value for stage in Stage if stage is not Stage.RUN]
    for option, names in (("--stage", options.stages), ("--skip-stage", options.skip_stages)):
        _require_known(option, names, stages, "stage")
    for option, names in (("--select", options.select), ("--ignore", options.ignore)):
        unknown = [name for name in names if not name or not any(code.startswith(name) for code in codes)]
        _require_known(option, unknown, codes, "code")
    if options.soak_seconds is None and SOAK in options.select:
        raise UsageError(f"--select {SOAK}: the check needs the time that it may take, such as --soak 30m")
    if options.soak_seconds is not None and not is_selected(by_code[SOAK], options):
        raise UsageError(f"--soak: --stage, --skip-stage, --select or --ignore leaves out {SOAK}, which runs the soak")
    if not any(check.stage is not Stage.RUN and is_selected(check, options) for check in by_code.values()):
        raise UsageError("--stage, --skip-stage, --select and --ignore leave no check to run")
    for name, value in options.settings.items():
        code, _, threshold = name.partition(".")
        _require_known("--set", [code], codes, "code")
        _require_known("--set", [name], [f"{code}.{each}" for each in by_code[code].thresholds], f"threshold of {code}")
        if threshold == "deadline_seconds" and float(value) <= 0:
            raise UsageError(f"--set {name}={value}: a deadline must be more than 0 seconds")


def _require_known(option: str, names: Iterable[str], known: Sequence[str], kind: str) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"{option} {name}: unknown {kind}; {_expected(name, known, kind)}")


def _expected(name: str, known: Sequence[str], kind: str) -> str:
    """The end of an error message: all known names if there are few, else those similar to `name`."""
    if len(known) <= _MAX_LISTED:
        suggestion = did_you_mean(name, known) if len(known) > 1 else ""
        return f"expected {', '.join(known)}{suggestion}" if known else "there is none"
    similar = get_close_matches(name, known, n=3)
    question = f"did you mean {', '.join(similar)}? " if similar else ""
    return f"{question}`ddpdiag checks` lists the {kind}s"
