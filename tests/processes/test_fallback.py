"""The ladder, climbed for real on CPUs, over a backend that stands in for NCCL (tests/inject/standin.py).

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
# Four ranks and a search among pairs, while other runs share the cores.
MUCH_TIME = ("--budget", "170")
SOURCED = ("bash", "-c", '. "$0" && exec "$@"')


# One of each kind of export: set, two set, unset, for speed, with wrong values; each costs five seconds.
SOURCED_AGAIN = ("hang", "slow", "wrong_values", "two_together", "own_override_costs", "own_override_breaks")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What the stand-in does, and what is to be said of it."""

    faults: list[dict]
    word: str | None  # of the finding P2P003.word; None: skipped
    env: dict[str, str | None] = field(default_factory=dict)
    says: tuple[str, ...] = ()
    ranks: int = 2
    variables: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    code: int = 1
    blames: tuple[int, ...] = ()
    links: tuple[str, ...] = ()


SCENARIOS = {
    "all_is_well": Scenario(faults=[], word=None, code=0),
    "hang": Scenario(
        faults=[{"kind": "hang", "unless": [P2P]}],
        word="fallback",
        env=P2P,
        says=("gloo works, and standin hangs on", "worked in 3 of 3 runs", "ACS or an IOMMU"),
    ),
    "crash": Scenario(
        faults=[{"kind": "crash", "unless": [SHM]}],
        word="fallback",
        env=SHM,
        says=("standin crashes; with NCCL_SHM_DISABLE=1 it works", "shared memory"),
    ),
    "fails_with_a_text": Scenario(
        faults=[{"kind": "raise", "unless": [P2P]}],
        word="fallback",
        env=P2P,
        says=("standin fails", "unhandled system error"),
    ),
    "wrong_values": Scenario(
        faults=[{"kind": "wrong", "unless": [P2P]}],
        word="fallback",
        env=P2P,
        says=("standin gives wrong values; with NCCL_P2P_DISABLE=1 it works",),
    ),
    "slow": Scenario(
        faults=[{"kind": "slow", "unless": [P2P]}], word="slow", env=P2P, code=0, says=("standin is slow", "faster")
    ),
    "only_one_pair": Scenario(
        faults=[{"kind": "hang", "unless": [P2P], "pair": [1, 2]}],
        word="fallback",
        env=P2P,
        ranks=4,
        says=("between ranks 1 and 2 on",),
        links=("rank 1 -> rank 2",),
        options=MUCH_TIME,
    ),
    "one_rank_with_everybody": Scenario(
        faults=[{"kind": "raise", "unless": [P2P], "pair": [2, other]} for other in (0, 1, 3)],
        word="fallback",
        env=P2P,
        ranks=4,
        says=("between rank 2 on", "and all others there"),
        blames=(2,),
        options=MUCH_TIME,
    ),
    "only_nvls": Scenario(
        faults=[{"kind": "crash", "unless": [NVLS]}],
        word="fallback",
        env=NVLS,
        says=("NVLink SHARP", "nvidia-fabricmanager"),
    ),
    "two_together": Scenario(faults=[{"kind": "crash", "unless": [P2P | SHM]}], word="fallback", env=P2P | SHM),
    "own_override_costs": Scenario(
        faults=[{"kind": "slow", "where": P2P}],
        variables=P2P,
        word="held-back",
        env={"NCCL_P2P_DISABLE": None},
        code=0,
        says=("NCCL_P2P_DISABLE=1 costs bandwidth", "faster"),
    ),
    "own_override_breaks": Scenario(
        faults=[{"kind": "raise", "where": {"NCCL_ALGO": "Tree"}}],
        variables={"NCCL_ALGO": "Tree", "NCCL_BUFFSIZE": "4194304"},
        word="fallback",
        env={"NCCL_ALGO": None},
        says=("standin fails; without NCCL_ALGO it works",),
    ),
    "own_override_is_needed": Scenario(
        faults=[{"kind": "crash", "unless": [P2P]}],
        variables=P2P,
        word="needed",
        code=0,
        says=("NCCL_P2P_DISABLE=1 is needed here", "crashes without it"),
    ),
    "nothing_helps": Scenario(
        faults=[{"kind": "raise"}], word="nothing", says=("no variable gets around it", "unhandled system error")
    ),
    "gloo_fails_too": Scenario(
        faults=[], word="both", variables={"DDPDIAG_TEST_FAULT": "raise 1"}, says=("gloo fails as well as standin",)
    ),
    "only_once": Scenario(
        faults=[{"kind": "crash", "at": [0]}], word="transient", says=("failed once, and then worked 3 times",)
    ),
    "now_and_then": Scenario(
        faults=[{"kind": "crash", "unless": [P2P]}, {"kind": "raise", "at": [4]}],
        word="unreliable",
        says=("it worked 2 times and then fails",),
    ),
    "no_time": Scenario(
        faults=[{"kind": "hang"}],
        word="unfinished",
        options=("--budget", "25"),
        says=("the budget ended before a way around was found", "--budget 180"),
    ),
}


def begin(
    start: Start, scenario: Scenario, folder: str, *, prefix: tuple[str, ...] = (), training: bool = False
) -> Job:
    arguments = (
        *("--nproc-per-node", str(scenario.ranks), "--backend", "standin", "--json", "{json}", *scenario.options),
        # Not --stage p2p: there are no GPUs, and what was asked for and cannot be done is UNKNOWN.
        *("--skip-stage", "host,gpu,rendezvous,fabric" + ("" if training else ",training"), "--env-file", folder),
        *("--set", f"COL001.deadline_seconds={SECONDS}", "--set", f"P2P003.deadline_seconds={SECONDS}"),
    )
    # Other runs share the cores of this machine: their noise must not look like a backend that is slow.
    ratio = 4 if scenario.word in ("slow", "held-back") else 1000
    for setting in ("slower_than_gloo", "gain", "rescue"):
        arguments += ("--set", f"P2P003.{setting}={ratio}")
    count = f"{folder}.count" if any("at" in fault for fault in scenario.faults) else "/dev/null"
    told = {"DDPDIAG_TEST_STANDIN": json.dumps(scenario.faults), "DDPDIAG_TEST_COUNT": count}
    return start(*CHECK, *arguments, prefix=prefix, **told, **({} if prefix else scenario.variables))


@pytest.fixture(scope="module")
def climbs(start_shared: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future]]:
    """Every scenario's run, and the one with what it exports; most of their time is waiting, so some run at once."""
    folder = tmp_path_factory.mktemp("exports")

    def climb(name: str, scenario: Scenario) -> tuple[Job, str, Job | None]:
        path = str(folder / f"{name}.env")
        job = begin(start_shared, scenario, path)
        job.wait(200)
        return job, path, again(name, scenario, path) if name in SOURCED_AGAIN else None

    def again(name: str, scenario: Scenario, path: str) -> Job:
        # What the user had set is set again, before the file is sourced.
        assigned = tuple(f"{variable}={value}" for variable, value in scenario.variables.items())
        prefix = ("env", *assigned, *SOURCED, path)
        job = begin(start_shared, scenario, f"{path}.2", prefix=prefix, training=name == "hang")
        job.wait(100)
        return job

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {name: pool.submit(climb, name, scenario) for name, scenario in SCENARIOS.items()}


def own_findings(job: Job) -> list[dict]:
    return [finding for finding in job.report["findings"] if finding["code"].startswith("P2P003")]


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_is_told_rightly(name: str, climbs: dict[str, Future]) -> None:
    scenario = SCENARIOS[name]
    job, path, _ = climbs[name].result()
    told = own_findings(job)
    assert [finding["code"] for finding in told] == ([f"P2P003.{scenario.word}"] if scenario.word else []), job.told()
    healed = scenario.word in ("fallback", "slow", "held-back")
    assert job.process.returncode == (0 if healed else scenario.code), job.told()
    for finding in told:
        text = finding["title"] + " " + finding["message"] + " " + finding["remedy"]
        assert all(words in text for words in scenario.says), text
        assert finding["env"] == scenario.env
        assert tuple(finding["ranks"]) == scenario.blames
        assert tuple(finding["links"]) == scenario.links
    assert job.report["exports"] == (scenario.env if healed else {})
    with open(path) as exports:
        lines = [line for line in exports.read().splitlines() if not line.startswith("#")]
    assert lines == [
        f"unset {name}" if value is None else f"export {name}={value}" for name, value in job.report["exports"].items()
    ]
    assert not job.has_traceback
    job.check_left_nothing()


@pytest.mark.parametrize("name", SOURCED_AGAIN)
def test_with_its_exports_the_same_scenario_passes(name: str, climbs: dict[str, Future]) -> None:
    *_, again = climbs[name].result()
    assert again.process.returncode == 0, again.told()
    assert [finding["code"] for finding in again.errors] == []
    # What is exported holds nothing back that works; it is known to be needed, where it is looked at.
    assert {finding["code"] for finding in own_findings(again)} <= {"P2P003.needed"}


def test_without_a_file_of_exports_it_is_unfit_and_training_is_tried_with_them(start: Start) -> None:
    scenario = SCENARIOS["wrong_values"]
    job = start(
        *CHECK, "--nproc-per-node", "2", "--backend", "standin", "--json", "{json}",
        DDPDIAG_TEST_STANDIN=json.dumps(scenario.faults),
    )  # fmt: skip
    assert job.wait(90) == 1
    assert "standin gives wrong values; with NCCL_P2P_DISABLE=1 it works" in job.report["sentence"]
    trained = next(check for check in job.report["checks"] if check["code"] == "TRN001")
    assert trained["statuses"] == {"done": 2}
    assert {"P2P003.fallback", "COL001.wrong"} <= {finding["code"] for finding in job.errors}
