"""Which checks a run takes, from its options. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

from ddpdiag.check import Check, Stage
from ddpdiag.errors import UsageError
from ddpdiag.model import Depth, Options

_DEPTHS = tuple(Depth)


def selected(check: Check[Any], options: Options) -> bool:
    """Does this run take the check? `--select` and `--ignore` take codes or their prefixes; ignoring wins."""
    if check.code.startswith(options.ignore) and options.ignore:
        return False
    if check.stage.value in options.skip_stages:
        return False
    if options.select and not check.code.startswith(options.select):
        return False
    if options.stages and check.stage.value not in options.stages:
        return False
    return _DEPTHS.index(check.depth) <= _DEPTHS.index(options.depth) or bool(options.select)


def asked_for(check: Check[Any], options: Options) -> bool:
    """Was this check, or its stage, named by the user? Then missing ground is no excuse."""
    return check.stage.value in options.stages or bool(options.select and check.code.startswith(options.select))


def validate(options: Options, checks: Iterable[Check[Any]]) -> None:
    """UsageError for a stage or code that does not exist, or a `--set` that names none."""
    codes = [check.code for check in checks]
    stages = [stage.value for stage in Stage if stage is not Stage.RUN]
    for option, names in (("--stage", options.stages), ("--skip-stage", options.skip_stages)):
        _known(option, names, stages, "stages")
    for option, names in (("--select", options.select), ("--ignore", options.ignore)):
        unknown = [name for name in names if not any(code.startswith(name) for code in codes)]
        _known(option, unknown, codes, "codes")
    for name in options.settings:
        _known("--set", [name.partition(".")[0]], codes, "codes")


def _known(option: str, names: Iterable[str], known: Sequence[str], word: str) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"{option} {name}: no such thing; the {word} are {', '.join(known)}")
