"""The gallery's runs, which go on in the background while tests look at the first of them; and the scoreboard."""

import time
from collections.abc import Iterator

import pytest
import scoreboard
from required import require_hosts
from runs import Pool, Result, faults
from shown import SHOWN

_RESULTS = pytest.StashKey[dict[str, Result]]()
_BEGIN = pytest.StashKey[float]()
_END = pytest.StashKey[float]()


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator["Results"]:
    """Results of those faults whose tests were selected."""
    require_hosts()
    known = faults()
    named = [item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")]
    chosen = {name: known[name] for name in dict.fromkeys(named) if name in known}
    request.config.stash[_BEGIN] = time.monotonic()
    seen = request.config.stash.setdefault(_RESULTS, {})
    pool = Pool(chosen, tmp_path_factory.mktemp("faults"))
    try:
        yield Results(pool, seen, request.config)
    finally:
        pool.close()


class Results:
    """Results by name; who asks for one waits for it."""

    def __init__(self, pool: Pool, seen: dict[str, Result], config: pytest.Config) -> None:
        self._pool = pool
        self.seen = seen
        self._config = config

    def __getitem__(self, name: str) -> Result:
        result = self._pool.result(name)
        if result.flaws:
            result = self._pool.again(name)
        self.seen[name] = result
        self._config.stash[_END] = time.monotonic()
        return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The table of all faults that were run, written where they were run; with pytest-xdist that is a worker."""
    config = session.config
    seen = [result for result in config.stash.get(_RESULTS, {}).values() if not result.skipped]
    if not seen:
        return
    seconds = config.stash[_END] - config.stash[_BEGIN]
    scoreboard.write(seen, seconds)
    totals = ", ".join(f"{name} {count}" for name, count in scoreboard.totals(seen).items())
    lines = [*scoreboard.table(seen), f"{totals}; {seconds:.0f} s"]
    # A worker of pytest-xdist hands them to the process that shows them; see tests/conftest.py.
    told = config.workeroutput if hasattr(config, "workeroutput") else config.stash.setdefault(SHOWN, {})
    told["gallery of faults"] = lines
