"""Places of processes, from what each launcher really sets (values as seen under torchrun, srun, mpirun and hydra)."""

from collections.abc import Mapping

import pytest
from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpdiag.errors import UsageError
from ddpdiag.model.launch import LaunchArgs
from ddpdiag.probes.host.environment import FIRST_PSEUDO_STEP, expand_hosts, tasks_per_node
from ddpdiag.runtime.launchers import read_launch
from ddpdiag.runtime.launchers.launch import Launch, places, worker_variables
from ddpdiag.runtime.launchers.slurm import first_host, node_name, task_hosts


def variables(text: str) -> dict[str, str]:
    """The variables of "RANK=3 WORLD_SIZE=4"."""
    return dict(word.split("=", 1) for word in text.split())


TORCHRUN = variables(
    "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 GROUP_WORLD_SIZE=2 ROLE_RANK=3 "
    "ROLE_WORLD_SIZE=4 ROLE_NAME=default MASTER_ADDR=h0 MASTER_PORT=29501 TORCHELASTIC_RUN_ID=7f1c "
    "TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=3 TORCHELASTIC_USE_AGENT_STORE=True"
)
STEP = variables(
    "SLURM_JOB_ID=4711 SLURM_JOB_NODELIST=h[0-7] SLURM_JOB_NUM_NODES=8 SLURM_NTASKS=4 SLURM_STEP_ID=2 "
    "SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=h[2-3] SLURM_STEP_TASKS_PER_NODE=2(x2) "
    "SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1 SLURMD_NODENAME=h3"
)
ONE_TASK_A_NODE = STEP | variables(
    "SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_PROCID=1 SLURM_LOCALID=0"
)
# The body of a batch script has a SLURM_PROCID, but no step.
BATCH = variables(
    "SLURM_JOB_ID=4711 SLURM_JOB_NUM_NODES=2 SLURM_JOB_NODELIST=h[0-1] SLURM_NTASKS=8 SLURM_PROCID=0 "
    "SLURM_LOCALID=0 SLURM_NODEID=0 SLURMD_NODENAME=h0"
)
OPEN_MPI = variables(
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
    "OMPI_COMM_WORLD_NODE_RANK=1 PMIX_RANK=1 PMIX_NAMESPACE=prterun-h0-8123@1"
)
HYDRA = variables("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
HYDRA_BY_SRUN = variables("PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4 MASTER_ADDR=h2")
# A step of two hosts of a job of four.
IN_FOUR = STEP | {"SLURM_JOB_NODELIST": "h[0-3]"}
FIRST_OF_LOOP = ONE_TASK_A_NODE | variables(
    "SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NUM_NODES=1 SLURM_STEP_TASKS_PER_NODE=1 SLURM_PROCID=0 SLURM_NODEID=0"
)
BASES = {
    "torchrun": TORCHRUN,
    "step": STEP,
    "in_four": IN_FOUR,
    "task_a_node": ONE_TASK_A_NODE,
    "loop": FIRST_OF_LOOP,
    "batch": BATCH,
    "openmpi": OPEN_MPI,
    "hydra": HYDRA,
    "hydra_by_srun": ONE_TASK_A_NODE | HYDRA_BY_SRUN,
    "exported": STEP | variables("RANK=0 WORLD_SIZE=4 MASTER_ADDR=h2 MASTER_PORT=29511"),
    "none": {},
}
_TEXTS = ("master_addr", "run_id")


def launch(env: Mapping[str, str], *, gpus: int = 0, cores: int = 8, host: str = "here", **asked: int | str) -> Launch:
    return read_launch(env, LaunchArgs(**asked), host=host, gpus=gpus, cores=cores, unique_id="f4e5")


def launched(case: str) -> Launch:
    """The launch of "torchrun RANK=2 world_size=8": one or several bases, variables, and options; "RANK=" is unset."""
    words = case.split()
    env = {name: value for word in words if "=" not in word for name, value in BASES[word].items()}
    pairs = [word.split("=", 1) for word in words if "=" in word]
    env |= {name: value for name, value in pairs if name.isupper()}
    options = {name: value if name in _TEXTS else int(value) for name, value in pairs if not name.isupper()}
    return launch({name: value for name, value in env.items() if value}, **options)


def refused(case: str) -> str:
    with pytest.raises(UsageError) as caught:
        launched(case)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("torchrun", "rank=3 world_size=4 host=here launcher=torchrun local_rank=1 local_world_size=2 node_rank=1"),
        ("torchrun", "master_addr=h0 port=29501 run_id=7f1c host_count=2 agent_store=True ranks=() unset_variables=()"),
        ("step openmpi torchrun", "launcher=torchrun"),
        ("torchrun TORCHELASTIC_RESTART_COUNT=2", "run_id=7f1c.2"),
        ("torchrun TORCHELASTIC_USE_AGENT_STORE=False", "agent_store=False"),
        ("torchrun local_rank=1", "local_rank=1 unset_variables=()"),
        ("torchrun LOCAL_RANK=", "unset_variables=('LOCAL_RANK',)"),
        ("torchrun LOCAL_RANK= local_rank=1", "unset_variables=()"),
        ("torchrun MASTER_ADDR=fd00::1", "master_addr=fd00::1"),
        (
            "none RANK=0 WORLD_SIZE=2 MASTER_ADDR=h0 MASTER_PORT=29500",
            "rank=0 world_size=2 host=here launcher=env local_rank=None",
        ),
        ("step", "rank=3 world_size=4 host=h3 launcher=slurm local_rank=1 local_world_size=2 node_rank=1"),
        ("step", "master_addr=h2 run_id=4711.2 ranks=() host_count=2"),
        ("step gpus=4", "ranks=()"),
        ("step MASTER_ADDR=h2-ib MASTER_PORT=12345", "master_addr=h2-ib port=12345"),
        ("step PMIX_RANK=3 PMIX_NAMESPACE=slurm.pmix.4711.2", "launcher=slurm"),
        ("step PMI_RANK=3 PMI_SIZE=4", "launcher=slurm"),
        ("in_four MASTER_ADDR=h2", "master_addr=h2"),
        ("in_four MASTER_ADDR=h3", "master_addr=h3"),
        ("in_four MASTER_ADDR=10.0.0.1", "master_addr=10.0.0.1"),
        ("in_four MASTER_ADDR=login", "master_addr=login"),
        ("task_a_node", "rank=1 world_size=2 ranks=()"),
        (
            "task_a_node gpus=4",
            "ranks=(4,5,6,7) rank=4 world_size=8 host=h3 local_rank=0 local_world_size=4 node_rank=1",
        ),
        ("task_a_node nproc_per_node=2 nnodes=2 node_rank=1", "ranks=(2,3)"),
        ("loop nnodes=2 node_rank=1 nproc_per_node=2 master_addr=h0", "launcher=hand ranks=(2,3)"),
        ("hydra_by_srun", "rank=5 world_size=8 host=here launcher=pmi local_rank=1 local_world_size=4"),
        ("batch MASTER_ADDR=h0 WORLD_SIZE=8 gpus=4", "launcher=standalone ranks=(0,1,2,3) master_addr=127.0.0.1"),
        ("openmpi", "rank=1 world_size=2 host=here launcher=openmpi local_rank=1 master_addr=127.0.0.1"),
        ("task_a_node openmpi", "launcher=openmpi"),
        ("openmpi OMPI_COMM_WORLD_SIZE=4 MASTER_ADDR=h0", "master_addr=h0"),
        ("openmpi OMPI_COMM_WORLD_SIZE=4 master_addr=h0", "master_addr=h0"),
        ("hydra", "rank=1 world_size=2 host=here launcher=pmi local_rank=1 local_world_size=2"),
        (
            "none PMIX_RANK=1 PMIX_NAMESPACE=prterun-h0-8123@1 world_size=2 master_addr=h0",
            "rank=1 world_size=2 launcher=pmix",
        ),
        ("none rank=1 world_size=2 master_addr=h0", "rank=1 launcher=hand master_addr=h0 port=29500 ranks=()"),
        ("none nnodes=2 node_rank=1 nproc_per_node=2 master_addr=h0", "world_size=4 node_rank=1 ranks=(2,3)"),
        ("none", "ranks=(0,1) master_addr=127.0.0.1 port=None run_id=f4e5 launcher=standalone"),
        ("none gpus=3", "ranks=(0,1,2)"),
        ("none run_id=mine", "run_id=mine"),
        ("torchrun run_id=mine", "run_id=mine"),
        ("step run_id=mine", "run_id=mine"),
        ("openmpi run_id=mine", "run_id=mine"),
        # What may be meant has no note.
        ("batch SLURM_JOB_NUM_NODES=1", "notice="),
        ("step SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 SLURM_JOB_NUM_NODES=4", "notice="),
        ("exported RANK=3", "notice="),
        ("exported SLURM_PROCID=0", "notice="),
        ("exported WORLD_SIZE=8", "notice="),
        ("exported TORCHELASTIC_RUN_ID=x", "notice="),
    ],
)
def test_a_launch_is_read(case: str, expected: str) -> None:
    found = launched(case)
    facts = {name: getattr(owner, name) for owner in (found, found.place) for name in owner.__struct_fields__}
    wanted = dict(word.split("=", 1) for word in expected.split())
    assert {name: str(facts[name]).replace(" ", "") for name in wanted} == wanted


@pytest.mark.parametrize(
    "case",
    [
        "in_four MASTER_ADDR=h0",
        "in_four MASTER_ADDR=h1.cluster.example",
        "openmpi OMPI_COMM_WORLD_SIZE=4",
        "torchrun WORLD_SIZE=four",
        "torchrun RANK=-1",
        "torchrun RANK=4",
        "torchrun WORLD_SIZE=9999999999",
        "torchrun LOCAL_RANK=2",
        "torchrun LOCAL_WORLD_SIZE=8",
        "torchrun MASTER_PORT=66660",
        "torchrun MASTER_ADDR=n[01-04]",
        "torchrun MASTER_ADDR=n01:29500",
        "torchrun MASTER_ADDR=tcp://n01",
        "torchrun rank=2",
        "torchrun local_rank=0",
        "torchrun master_addr=h1",
        "torchrun nproc_per_node=2",
        "torchrun run_id=a/b",
        "step SLURM_PROCID=4",
        "step SLURM_LOCALID=2",
        "step WORLD_SIZE=8",
        "step MASTER_ADDR=h[2-3]",
        "step SLURM_STEP_NUM_TASKS=4000000000",
        "step rank=0",
        "step nnodes=3",
        "none rank=1",
        "none rank=2 world_size=2 master_addr=h0",
        "none rank=1 world_size=2",
        "none rank=1 world_size=2 master_addr=h0 master_port=70000",
        "none rank=1 world_size=2 nproc_per_node=2",
        "none world_size=2",
        "none nnodes=2 master_addr=h0",
        "none node_rank=1",
        "none nnodes=0",
        "none nnodes=2 node_rank=2",
        "none nnodes=2 node_rank=1 nproc_per_node=2",
        "none nnodes=100000000000000000000 node_rank=0 master_addr=h0",
        "none nproc_per_node=1000000000",
        "none local_rank=0",
        "none WORLD_SIZE=1",
        "none LOCAL_RANK=1",
        "none RANK=0",
        "none RANK=0 nproc_per_node=2",
        "none RANK=0 MASTER_ADDR=h0 master_port=1",
    ],
)
def test_a_wrong_or_contradicting_launch_is_refused(golden, case: str) -> None:
    golden(refused(case))


@pytest.mark.parametrize(
    ("base", "name"),
    [
        *(("torchrun", name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
        *(("step", name) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")),
    ],
)
def test_a_missing_variable_is_named(base: str, name: str) -> None:
    assert name in refused(f"{base} {name}=")


def test_pmix_alone_does_not_give_the_worlds_size() -> None:
    assert "--world-size" in refused("none PMIX_RANK=1 PMIX_NAMESPACE=prterun-h0-8123@1")


INTERACTIVE = (
    f"step SLURM_STEP_ID={FIRST_PSEUDO_STEP + 10} SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 PMIX_RANK=0 "
    f"PMIX_NAMESPACE=slurm.pmix.4711.{FIRST_PSEUDO_STEP + 10}"
)
JOB = "none SLURM_JOB_ID=12 SLURM_JOB_NUM_NODES=4 SLURM_NTASKS=8 SLURM_CPUS_PER_TASK=2"


@pytest.mark.parametrize(
    "case",
    [
        "batch gpus=4",
        INTERACTIVE,
        "none SLURM_JOB_ID=4711 SLURM_JOB_NUM_NODES=1",
        "step SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 SLURM_JOB_NUM_NODES=4 SLURM_PTY_PORT=46083",
        JOB,
        f"{JOB} SLURM_GPUS_PER_NODE=h100:4",
        f"{JOB} SLURM_GPUS_PER_NODE=4;rm",
        "exported",
        "none cores=1",
    ],
)
def test_a_launch_that_may_not_be_meant_has_a_note(golden, case: str) -> None:
    golden(launched(case).notice)


def test_run_ids_that_are_no_file_names_or_the_default_are_replaced() -> None:
    one = launched("torchrun TORCHELASTIC_RUN_ID=none").run_id
    other = launched("torchrun TORCHELASTIC_RUN_ID=none MASTER_PORT=29502").run_id
    assert len({"none", one, other}) == 3
    assert "/" not in launched("torchrun TORCHELASTIC_RUN_ID=../x").run_id


def test_shells_agree_on_the_run_id_however_they_spell_the_coordinator_and_the_world() -> None:
    by_hand = ("none rank=1 world_size=2", "none rank=0 world_size=2", "none rank=1 world_size=3")
    ids = {launched(f"{case} master_addr={name}").run_id for case in by_hand for name in ("h0", "10.0.0.1")}
    assert len(ids) == 1
    assert ids != {launched("none rank=0 world_size=2 master_addr=h0 master_port=29501").run_id}


def test_two_open_mpi_jobs_on_one_host_do_not_meet() -> None:
    found, other = launched("openmpi"), launched("openmpi PMIX_NAMESPACE=prterun-h0-8124@1")
    assert found.port != other.port
    assert found.run_id != other.run_id


def test_two_slurm_jobs_or_steps_do_not_share_a_port():
    ports = {
        launch(STEP | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port
        for job in range(4711, 4731)
        for step in range(20)
    }
    assert len(ports) == 400
    assert min(ports) >= 20000
    assert max(ports) < 29500


@pytest.mark.parametrize(
    ("own", "hosts", "said", "named"),
    [
        ("h3", "h[0-7]", "h3", "h3"),
        ("h3.cluster.example", "h[0-7]", "h3", "h3"),
        ("h3.cluster.example", "h[0-7]", "", "h3"),
        ("h3", "h[0-7].cluster.example", "", "h3.cluster.example"),
        ("h3.a", "h3.a,h3.b", "h3.b", "h3.a"),
        ("h3", "h3.a,h3.b", "h3.b", "h3.b"),
        ("h3", "h3.a,h3.b", "", "h3"),
        ("h3.c", "h3.a,h3.b", "h4", "h3.c"),
        ("ip-10-0-0-3", "node-[1-8]", "node-3", "node-3"),
        ("ip-10-0-0-3", "node-[1-8]", "other", "ip-10-0-0-3"),
        ("ip-10-0-0-3", "node-[1-8]", "", "ip-10-0-0-3"),
        ("h3.cluster.example", "", "h3", "h3"),
        ("ip-10-0-0-3", "", "node-3", "node-3"),
        ("ip-10-0-0-3", "", "node-3\nnode-4", "ip-10-0-0-3"),
        ("login", "", "", "login"),
    ],
)
def test_a_host_has_the_name_that_slurm_takes(own, hosts, said, named):
    assert node_name({"SLURM_JOB_NODELIST": hosts, "SLURMD_NODENAME": said}, own) == named


def test_a_rank_is_on_the_node_that_slurm_names_under_torchrun_as_well():
    for env in (STEP, STEP | TORCHRUN, ONE_TASK_A_NODE, BATCH | {"SLURMD_NODENAME": "h3", "SLURM_JOB_NODELIST": "h3"}):
        assert launch(env, host="ip-3").place.host == "h3"


def test_slurms_variables_under_mpi_name_no_host_that_is_called_otherwise():
    brought = STEP | {"SLURMD_NODENAME": "h0"}
    for env in (brought | HYDRA, brought | OPEN_MPI | {"MASTER_ADDR": "h0"}):
        assert [launch(env, host=own).place.host for own in ("h3.example", "ip-3")] == ["h3", "ip-3"]


def test_workers_of_any_launcher_see_torchruns_variables():
    found = launch({})
    second = places(found)[1]
    assert worker_variables(found, second, 40000) == variables(
        "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 GROUP_WORLD_SIZE=1 ROLE_RANK=1 "
        "ROLE_WORLD_SIZE=2 ROLE_NAME=default MASTER_ADDR=127.0.0.1 MASTER_PORT=40000 TORCHELASTIC_RUN_ID=f4e5 "
        "TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=0"
    )


def test_workers_under_torchrun_see_what_torchrun_said():
    found = launch(TORCHRUN)
    said = {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_USE_AGENT_STORE"}
    assert worker_variables(found, found.place, 29501) == said


def test_a_local_rank_that_is_not_known_is_no_variable_of_a_worker():
    found = launch({}, rank=1, world_size=2, master_addr="h0")
    assert "LOCAL_RANK" not in worker_variables(found, found.place, 29500)


def test_tasks_per_node_are_expanded():
    assert tasks_per_node("2(x3),1") == ((2, 3), (1, 1))
    assert tasks_per_node("2(y3)") == ()


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("z[9,1-3],a1", "z9 z1 z2 z3 a1"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("r[1-2]n[3,5]-ib", "r1n3-ib r1n5-ib r2n3-ib r2n5-ib"),
        ("h0", "h0"),
        ("h[0-x]", ""),
        ("h[0-999999999]", ""),
        ("", ""),
    ],
)
def test_a_list_of_hosts_is_expanded_in_slurms_order(nodelist, hosts):
    assert " ".join(expand_hosts(nodelist)) == hosts


@pytest.mark.parametrize(
    ("distribution", "hosts"),
    [
        ("block", "h0 h0 h0 h1"),
        ("block:cyclic", "h0 h0 h0 h1"),
        ("cyclic", "h0 h1 h0 h0"),
        ("plane=2", ""),
        ("arbitrary", ""),
    ],
)
def test_tasks_are_placed_as_srun_distributes_them(distribution, hosts):
    assert " ".join(task_hosts("h[0-1]", ((3, 1), (1, 1)), distribution)) == hosts


def test_rank_0_of_a_step_knows_the_host_of_every_rank():
    first = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert launch(STEP | first).layout == ("h2", "h2", "h3", "h3")
    assert launch(STEP).layout == ()
    assert launch(STEP | first | {"SLURM_STEP_NODELIST": "h[2-4]"}).layout == ()


def test_the_first_host_keeps_slurms_order():
    assert first_host("z[9,1-3],a1") == "z9"


@pytest.mark.parametrize("nodelist", ["n1", "n[01-04]", "a1,b2", "rack[2-3]n[01-04]-ib", "gpu-[007,009-011],z[1-2]"])
def test_the_first_host_of_a_sorted_list_is_clustershells(nodelist):
    assert first_host(nodelist) == NodeSet(nodelist, resolver=RESOLVER_NOGROUP)[0]


NAMES = sorted({*TORCHRUN, *STEP, *OPEN_MPI, *HYDRA, "SLURM_STEPID", "SLURM_JOBID", "SLURM_NNODES", "PMI_LOCAL_RANK"})
VALUES = st.one_of(
    st.integers(0, 8).map(str),
    st.sampled_from(
        ["", " ", "-1", "1e3", "0x1", "4294967290", "9" * 5000, "n[1-2]", "n1", "1(x2)", "2(x9),1", "[", "[]"]
    ),
    st.text(max_size=8),
)


@settings(max_examples=600, deadline=None)
@given(
    env=st.dictionaries(st.sampled_from(NAMES), VALUES),
    base=st.sampled_from([{}, TORCHRUN, STEP, ONE_TASK_A_NODE, BATCH, OPEN_MPI, HYDRA]),
    asked=st.fixed_dictionaries(
        {},
        optional={
            name: st.one_of(st.none(), st.integers(-2, 9))
            for name in ("rank", "world_size", "local_rank", "nproc_per_node", "nnodes", "node_rank", "master_port")
        }
        | {"master_addr": st.text(max_size=4), "run_id": st.text(max_size=4)},
    ),
    gpus=st.integers(0, 8),
)
def test_whatever_is_set_a_process_has_a_rank_in_its_world_or_is_refused(env, base, asked, gpus):
    try:
        found = launch(base | env, gpus=gpus, **asked)
    except UsageError:
        return
    for place in places(found):
        assert 0 <= place.rank < place.world_size
        assert place.local_rank is None or place.local_world_size is None or place.local_rank < place.local_world_size
    assert found.run_id
    assert found.port is not None or len(found.ranks) == found.place.world_size
    assert worker_variables(found, found.place, 1)["RANK"] == str(found.place.rank)
