"""The CUDA stand-in, built once for a session; runs of faults, three at a time; and the table at the end."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from cuda_faults import FAULTS
from cuda_runs import CudaResult, run, table
from cuda_standin import Standin, Unavailable, standin
from shown import SHOWN

TITLE = "CUDA stand-in"
_LINES = pytest.StashKey[list[str]]()
_ROWS = pytest.StashKey[list[tuple[str, ...]]]()
# Most of a run is waiting for a deadline.
AT_ONCE = 3


@pytest.fixture(scope="session")
def cuda() -> Standin:
    """The stand-in; without a CUDA wheel of torch, or a compiler, the test is skipped."""
    try:
        return standin()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def results(
    request: pytest.FixtureRequest, cuda: Standin, tmp_path_factory: pytest.TempPathFactory
) -> Iterator["Runs"]:
    """Runs of those faults whose tests were selected."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = [(call.params["name"], call.params["group"]) for call in calls if call and "name" in call.params]
    with ThreadPoolExecutor(AT_ONCE, "fault") as threads:
        runs = Runs(threads, cuda, chosen, tmp_path_factory.mktemp("cuda"), request.config)
        yield runs
        threads.shutdown(cancel_futures=True)


class Runs:
    """Results by fault and group; who asks for one waits for it."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        cuda: Standin,
        chosen: list[tuple[str, str]],
        folder: Path,
        config: pytest.Config,
    ) -> None:
        self._config = config
        self._futures: dict[tuple[str, str], Future[CudaResult]] = {
            (name, group): threads.submit(run, cuda, name, FAULTS[name], group, folder / f"{name}-{group}")
            for name, group in chosen
        }

    def __getitem__(self, key: tuple[str, str]) -> CudaResult:
        result = self._futures[key].result()
        self._config.stash.setdefault(_ROWS, []).append(result.row)
        return result


@pytest.fixture
def show(request: pytest.FixtureRequest) -> list[str]:
    """Lines that are shown at the end."""
    return request.config.stash.setdefault(_LINES, [])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The table of all faults that were run, and what else tests have to show."""
    config = session.config
    rows, lines = config.stash.get(_ROWS, []), list(config.stash.get(_LINES, []))
    if rows:
        right = sum(row[-1] == "right" for row in rows)
        lines += ["", *table(rows), f"faults: {right} of {len(rows)} named rightly"]
    if lines:
        shown = config.workeroutput if hasattr(config, "workeroutput") else config.stash.setdefault(SHOWN, {})
        shown[TITLE] = lines
