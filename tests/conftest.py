"""What all tests share: golden texts, who has the cores, signals, and what is shown at the end."""

import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from cores import cores, place
from golden import golden, pytest_addoption  # noqa: F401 (pytest finds them here)
from hypothesis import HealthCheck, settings
from shown import SHOWN

# Before any conftest of a folder imports it.
pytest.register_assert_rewrite("jobs")
# On a busy machine an example may take long.
settings.register_profile("local", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("local")
# .ci/long takes it: 125 times as many examples as usual.
settings.register_profile("long", max_examples=5000, deadline=None)
TITLES = ("gallery of faults", "CUDA stand-in")
RUN = pytest.StashKey[str]()


def pytest_configure() -> None:
    """What the machine's settings must not change: how fast children start, and which signals reach them.

    Some images set PYTHONDONTWRITEBYTECODE: each of some 300 processes would compile the package again. A shell
    (`cmd &`) or nohup ignores signals for us: an ignored one stays so across exec, one with a handler does not
    (execve(2)).
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    for signum in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, lambda _signum, _frame: None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """From the setup of a test to its end, and once more where it is tried again."""
    # Runs of the gallery go on between its tests, and take the cores for themselves.
    if "results" in getattr(item, "fixturenames", ()):
        return (yield)
    with cores(alone=_runs_alone(item)):
        return (yield)


def _runs_alone(item: pytest.Item) -> bool:
    """Whether all other tests wait for it. One that needs a GPU is skipped at once where torch can use none."""
    if item.get_closest_marker("alone") is None:
        return False
    if item.get_closest_marker("gpu") is None:
        return True
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """A worker hands over what it has to show."""
    output = getattr(node, "workeroutput", {})
    node.config.stash.setdefault(SHOWN, {}).update({title: output[title] for title in TITLES if title in output})
    node.config.stash[RUN] = node.workerinput["testrunuid"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What tests have to show, and how many of each class ran."""
    for title, lines in config.stash.get(SHOWN, {}).items():
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)
    terminalreporter.section("classes of tests")
    for line in _classes(terminalreporter.stats):
        terminalreporter.write_line(line)


def _classes(stats: dict[str, list]) -> Iterator[str]:
    """A row for each folder: how many of its tests passed, failed, and were skipped for which reason; their seconds."""
    counts, seconds, reasons = Counter(), Counter(), {}
    for outcome, reports in stats.items():
        for report in reports:
            parts = Path(getattr(report, "nodeid", "")).parts
            if len(parts) < 2 or not hasattr(report, "outcome"):
                continue
            counts[parts[1], outcome] += 1
            seconds[parts[1]] += getattr(report, "duration", 0.0)
            if outcome == "skipped":
                reasons.setdefault(parts[1], Counter())[report.longrepr[2].removeprefix("Skipped: ")] += 1
    yield f"{'class':<12}{'passed':>8}{'failed':>8}{'skipped':>8}{'seconds':>9}"
    for name in sorted(seconds):
        failed = counts[name, "failed"] + counts[name, "error"]
        row = (counts[name, "passed"], failed, counts[name, "skipped"])
        yield f"{name:<12}{row[0]:>8}{row[1]:>8}{row[2]:>8}{seconds[name]:>9.1f}"
        for reason, count in reasons.get(name, Counter()).items():
            yield f"{'':<12}{count} skipped: {reason}"


def pytest_unconfigure(config: pytest.Config) -> None:
    """The locks of a run's workers go with it."""
    if run := config.stash.get(RUN, None):
        shutil.rmtree(place(run), ignore_errors=True)
