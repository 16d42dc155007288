"""Where workers of pytest-xdist run tests: who has the cores, and what there is to show at the end."""

import shutil
from collections.abc import Generator

import pytest
from cores import cores, place
from golden import golden, pytest_addoption  # noqa: F401 (pytest finds them here)
from shown import SHOWN

TITLES = ("gallery of faults",)
RUN = pytest.StashKey[str]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """From the setup of a test to its end, and once more where it is tried again."""
    # Runs of the gallery go on between its tests, and take the cores for themselves.
    if "results" in getattr(item, "fixturenames", ()):
        return (yield)
    with cores(alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """A worker hands over what it has to show."""
    output = getattr(node, "workeroutput", {})
    node.config.stash.setdefault(SHOWN, {}).update({title: output[title] for title in TITLES if title in output})
    node.config.stash[RUN] = node.workerinput["testrunuid"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show it."""
    for title, lines in config.stash.get(SHOWN, {}).items():
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    """The locks of a run's workers go with it."""
    if run := config.stash.get(RUN, None):
        shutil.rmtree(place(run), ignore_errors=True)
