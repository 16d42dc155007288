"""Which checks a run takes, from its options."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from ddpdiag.checks.api import Check, Stage
from ddpdiag.checks.world import World, without_gpu
from ddpdiag.errors import UsageError, nearest
from ddpdiag.model import Options

# So many names fit into a sentence.
_FEW = 12


def selected(check: Check[Any], options: Options) -> bool:
    """Does this run take the check? `--select` and `--ignore` take codes or their prefixes; ignoring wins."""
    if check.code.startswith(options.ignore) and options.ignore:
        return False
    if check.by_name and not options.alone and check.code not in options.select:
        return False
    if check.stage.value in options.skip_stages:
        return False
    if options.select and not check.code.startswith(options.select):
        return False
    return not options.stages or check.stage.value in options.stages


def asked_for(check: Check[Any], options: Options) -> bool:
    """Was this check, or its stage, named by the user? Then missing ground is no excuse.

    An optional check is asked for by its own code only.
    """
    if check.optional:
        return check.code in options.select
    return check.stage.value in options.stages or bool(options.select and check.code.startswith(options.select))


def lacks_named_backend(check: Check[Any], world: World) -> bool:
    """Did the check need what the user's `--backend` needs, and it is not there? That is no excuse either."""
    reason = without_gpu(world)
    return world.options.backend != "auto" and reason is not None and check.ground(world) == reason


def validate(options: Options, checks: Iterable[Check[Any]]) -> None:
    """UsageError for a stage or code that does not exist, or a `--set` that names none."""
    by_code = {check.code: check for check in checks}
    codes = list(by_code)
    stages = [stage.value for stage in Stage if stage is not Stage.RUN]
    for option, names in (("--stage", options.stages), ("--skip-stage", options.skip_stages)):
        _known(option, names, stages, "stage")
    for option, names in (("--select", options.select), ("--ignore", options.ignore)):
        unknown = [name for name in names if not name or not any(code.startswith(name) for code in codes)]
        _known(option, unknown, codes, "code")
    if not any(check.stage is not Stage.RUN and selected(check, options) for check in by_code.values()):
        raise UsageError("--stage, --skip-stage, --select and --ignore leave no check to run")
    for name, value in options.settings.items():
        code, _, threshold = name.partition(".")
        _known("--set", [code], codes, "code")
        _known("--set", [name], [f"{code}.{own}" for own in by_code[code].thresholds], f"threshold of {code}")
        if threshold == "deadline_seconds" and float(value) <= 0:
            raise UsageError(f"--set {name}={value}: a deadline must be more than 0 seconds")


def _known(option: str, names: Iterable[str], known: Sequence[str], word: str) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"{option} {name}: unknown {word}; {_those(name, known, word)}")


def _those(name: str, known: Sequence[str], word: str) -> str:
    """What there is instead: all of a few, and of many those with similar names."""
    if len(known) <= _FEW:
        near = nearest(name, known) if len(known) > 1 else ""
        return f"expected {', '.join(known)}{near}" if known else "there is none"
    similar = get_close_matches(name, known, n=3)
    meant = f"did you mean {', '.join(similar)}? " if similar else ""
    return f"{meant}`ddpdiag checks` lists the {word}s"
