"""The fallback search, run for real on CPUs, over a backend that stands in for NCCL (tests/inject/standin.py).

All of P2P003 but NCCL itself: fresh workers, variables that take effect in them, hangs, crashes, wrong values, and the
file of exports with which the same scenario passes.
"""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from jobs import CHECK, Job, Start

P2P, SHM, NVLS = {"NCCL_P2P_DISABLE": "1"}, {"NCCL_SHM_DISABLE": "1"}, {"NCCL_NVLS_ENABLE": "0"}
# Long enough for four ranks on two busy cores to begin, short enough to let a dozen of them pass.
SECONDS = 8
AT_ONCE = 3
SOURCED = ("bash", "-c", '. "$0" && exec "$@"')
# One of each kind of export: set, two set, unset, with wrong values.
SOURCED_AGAIN = ("fails_with_a_text", "hang", "wrong_values", "two_together", "own_override_breaks")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What the stand-in does, and what is to be said of it: `how` it does as it is, and what else the texts quote."""

    faults: list[dict]
    word: str | None  # of the finding P2P003.word; None: skipped
    env: dict[str, str | None] = field(default_factory=dict)
    how: str = ""
    says: str = ""
    ranks: int = 2
    variables: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    code: int = 1


SCENARIOS = {
    "all_is_well": Scenario(faults=[], word=None, code=0),
    "hang": Scenario(faults=[{"kind": "hang", "unless": [P2P]}], word="fallback", env=P2P, how="hangs"),
    "crash": Scenario(faults=[{"kind": "crash", "unless": [SHM]}], word="fallback", env=SHM, how="crashes"),
    "fails_with_a_text": Scenario(
        faults=[{"kind": "raise", "unless": [P2P]}],
        word="fallback",
        env=P2P,
        how="fails",
        says="unhandled system error",
    ),
    "wrong_values": Scenario(
        faults=[{"kind": "wrong", "unless": [P2P]}], word="fallback", env=P2P, how="gives wrong values"
    ),
    "only_nvls": Scenario(
        faults=[{"kind": "crash", "unless": [NVLS]}],
        word="fallback",
        env=NVLS,
        how="crashes",
        says="nvidia-fabricmanager",
    ),
    "two_together": Scenario(
        faults=[{"kind": "crash", "unless": [P2P | SHM]}], word="fallback", env=P2P | SHM, how="crashes"
    ),
    "own_override_breaks": Scenario(
        faults=[{"kind": "raise", "where": {"NCCL_ALGO": "Tree"}}],
        variables={"NCCL_ALGO": "Tree", "NCCL_BUFFSIZE": "4194304"},
        word="fallback",
        env={"NCCL_ALGO": None},
        how="fails",
        says="NCCL_ALGO",
    ),
    "own_override_is_set_while_it_works": Scenario(
        faults=[{"kind": "crash", "unless": [P2P]}], variables=P2P | {"NCCL_BUFFSIZE": "4194304"}, word=None, code=0
    ),
    "nothing_helps": Scenario(faults=[{"kind": "raise"}], word="nothing", how="fails", says="unhandled system error"),
    "gloo_fails_too": Scenario(faults=[], word=None, variables={"DDPDIAG_TEST_FAULT": "raise 1"}),
    "only_once": Scenario(faults=[{"kind": "crash", "at": [0]}], word="transient", how="works"),
    "now_and_then": Scenario(
        faults=[{"kind": "crash", "unless": [P2P]}, {"kind": "raise", "at": [4]}], word="nothing", how="crashes"
    ),
    "no_time": Scenario(
        faults=[{"kind": "hang"}], word="unfinished", options=("--budget", "30"), how="hangs", says="--budget 180"
    ),
}


def begin(
    start: Start, scenario: Scenario, folder: str, *, prefix: tuple[str, ...] = (), training: bool = False
) -> Job:
    arguments = (
        *("--nproc-per-node", str(scenario.ranks), "--backend", "standin", "--json", "{json}", *scenario.options),
        # Not --stage p2p: there are no GPUs, and what was asked for and cannot be done is UNKNOWN.
        *(
            "--skip-stage",
            "host,gpu,rendezvous,fabric" + ("" if training else ",training"),
            "--write-workaround",
            folder,
        ),
        *("--set", f"COL001.deadline_seconds={SECONDS}", "--set", f"P2P003.deadline_seconds={SECONDS}"),
    )
    count = f"{folder}.count" if any("at" in fault for fault in scenario.faults) else "/dev/null"
    told = {"DDPDIAG_TEST_STANDIN": json.dumps(scenario.faults), "DDPDIAG_TEST_COUNT": count}
    return start(*CHECK, *arguments, prefix=prefix, **told, **({} if prefix else scenario.variables))


@pytest.fixture(scope="module")
def searches(
    start_shared: Start, tmp_path_factory: pytest.TempPathFactory, selected: frozenset[str]
) -> Iterator[dict[str, Future]]:
    """The scenarios' runs, and those with what they export; most of their time is waiting, so some run at once."""
    folder = tmp_path_factory.mktemp("exports")

    def search(name: str, scenario: Scenario) -> tuple[Job, str, Job | None]:
        path = str(folder / f"{name}.env")
        job = begin(start_shared, scenario, path)
        job.wait(240)
        return job, path, again(name, scenario, path) if name in SOURCED_AGAIN else None

    def again(name: str, scenario: Scenario, path: str) -> Job:
        # What the user had set is set again, before the file is sourced.
        assigned = tuple(f"{variable}={value}" for variable, value in scenario.variables.items())
        prefix = ("env", *assigned, *SOURCED, path)
        job = begin(start_shared, scenario, f"{path}.2", prefix=prefix, training=name == "hang")
        job.wait(150)
        return job

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {name: pool.submit(search, name, own) for name, own in SCENARIOS.items() if name in selected}


def own_findings(job: Job) -> list[dict]:
    return [finding for finding in job.report["findings"] if finding["code"].startswith("P2P003")]


@pytest.mark.deep
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_is_told_rightly_and_passes_with_its_exports(name: str, searches: dict[str, Future]) -> None:
    scenario = SCENARIOS[name]
    job, path, again = searches[name].result()
    told = own_findings(job)
    assert [finding["code"] for finding in told] == ([f"P2P003.{scenario.word}"] if scenario.word else []), job.told()
    healed = scenario.word == "fallback"
    assert job.process.returncode == (0 if healed else scenario.code), job.told()
    for finding in told:
        tried = [line.partition(",")[0] for line in finding["evidence"].get("tried", [])]
        assert not scenario.how or tried[:1] == [f"as it is: {scenario.how}"], tried
        works = sum(line.endswith(": works") for line in tried)
        assert works >= 3 or scenario.word not in ("fallback", "transient"), "nothing that was not tried"
        assert scenario.says in " ".join((finding["title"], finding["message"], finding["fix"]))
        assert finding["env"] == scenario.env
        assert (finding["ranks"], finding["links"]) == ([], [])
    assert job.report["workarounds"] == (scenario.env if healed else {})
    with open(path) as workarounds:
        lines = [line for line in workarounds.read().splitlines() if not line.startswith("#")]
    assert lines == [
        f"unset {name}" if value is None else f"export {name}={value}"
        for name, value in job.report["workarounds"].items()
    ]
    assert not job.has_traceback
    job.check_left_nothing()
    if again is not None:
        assert again.process.returncode == 0, again.told()
        assert again.errors == []
        ended = {check["code"]: check["statuses"] for check in again.report["checks"]}
        assert ended.get("TRN001") == ({"done": 2} if name == "hang" else None)
        assert own_findings(again) == []


@pytest.mark.deep
def test_without_a_file_of_exports_it_is_unfit_and_training_is_tried_with_them(start: Start) -> None:
    faults = json.dumps(SCENARIOS["wrong_values"].faults)
    job = start(
        *CHECK, "--nproc-per-node", "2", "--backend", "standin", "--json", "{json}", DDPDIAG_TEST_STANDIN=faults
    )
    assert job.wait(120) == 1
    assert "NCCL_P2P_DISABLE=1" in job.report["sentence"]
    trained = next(check for check in job.report["checks"] if check["code"] == "TRN001")
    assert trained["statuses"] == {"done": 2}
    assert {"P2P003.fallback", "COL001.wrong"} <= {finding["code"] for finding in job.errors}
