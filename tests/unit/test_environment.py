"""Who a process is, from what each launcher really sets (values as seen under torchrun, srun, mpirun and hydra)."""

from collections.abc import Mapping

import pytest
from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpdiag.errors import UsageError
from ddpdiag.model import Place
from ddpdiag.model.launch import LaunchArgs
from ddpdiag.probes.host.environment import FIRST_PSEUDO_STEP, expanded, tasks_per_node
from ddpdiag.runtime.launchers import read_launch
from ddpdiag.runtime.launchers.launch import Launch, places, worker_variables
from ddpdiag.runtime.launchers.slurm import first_of, node_name, task_hosts

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "ROLE_NAME": "default",
    "MASTER_ADDR": "h0",
    "MASTER_PORT": "29501",
    "TORCHELASTIC_RUN_ID": "7f1c",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "h[0-7]",
    "SLURM_JOB_NUM_NODES": "8",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "h[2-3]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "h3",
}
ONE_TASK_A_NODE = STEP | {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
# The body of a batch script has a SLURM_PROCID, but no step.
BATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "h[0-1]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURMD_NODENAME": "h0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-h0-8123@1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def launch(env: Mapping[str, str], *, gpus: int = 0, cores: int = 8, **asked: int | str) -> Launch:
    return read_launch(env, LaunchArgs(**asked), host="here", gpus=gpus, cores=cores, fresh="f4e5")


def refused(env: Mapping[str, str], *, gpus: int = 0, **asked: int | str) -> str:
    with pytest.raises(UsageError) as caught:
        launch(env, gpus=gpus, **asked)
    return str(caught.value)


def words(changed: Mapping[str, int | str]) -> str:
    return " ".join(f"{name}={value}" for name, value in changed.items())


def test_torchrun_says_everything():
    found = launch(TORCHRUN)
    assert found.place == Place(
        rank=3, world_size=4, host="here", launcher="torchrun", local_rank=1, local_world_size=2, node_rank=1
    )
    assert (found.coordinator, found.port, found.run_id, found.nodes) == ("h0", 29501, "7f1c", 2)
    assert found.agent_store
    assert found.ranks == ()


def test_torchruns_variables_win_over_slurms_and_mpis():
    assert launch(STEP | OPEN_MPI | TORCHRUN).place.launcher == "torchrun"


def test_a_restarted_torchrun_has_another_run_id():
    assert launch(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}).run_id == "7f1c.2"


def test_torchruns_default_run_id_is_replaced_as_it_tells_nobody_apart():
    one = launch(TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}).run_id
    other = launch(TORCHRUN | {"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29502"}).run_id
    assert len({"none", one, other}) == 3


def test_a_run_id_that_is_no_file_name_is_replaced():
    assert "/" not in launch(TORCHRUN | {"TORCHELASTIC_RUN_ID": "../x"}).run_id


def test_a_static_rendezvous_has_no_agent_store():
    assert not launch(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).agent_store


def test_any_env_launcher_needs_four_variables_only():
    found = launch({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h0", "MASTER_PORT": "29500"})
    assert found.place == Place(rank=0, world_size=2, host="here", launcher="env")


def test_torch_distributed_launch_repeats_the_local_rank():
    assert launch(TORCHRUN, local_rank=1).place.local_rank == 1


def test_a_local_rank_that_nobody_set_is_lacking() -> None:
    without = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_RANK"}
    assert launch(without).lacks == ("LOCAL_RANK",)
    assert launch(without, local_rank=1).lacks == launch(TORCHRUN).lacks == ()


def test_a_slurm_task_is_a_rank():
    found = launch(STEP)
    assert found.place == Place(
        rank=3, world_size=4, host="h3", launcher="slurm", local_rank=1, local_world_size=2, node_rank=1
    )
    assert (found.coordinator, found.run_id, found.ranks, found.nodes) == ("h2", "4711.2", (), 2)


def test_a_slurm_task_uses_an_exported_master():
    found = launch(STEP | {"MASTER_ADDR": "h2-ib", "MASTER_PORT": "12345"})
    assert (found.coordinator, found.port) == ("h2-ib", 12345)


JOB_OF_FOUR = {"SLURM_JOB_NODELIST": "h[0-3]", "SLURM_STEP_NODELIST": "h[2-3]"}


@pytest.mark.parametrize("address", ["h0", "h1.cluster.example"])
def test_a_master_outside_of_the_step_is_refused(golden, address):
    golden(refused(STEP | JOB_OF_FOUR | {"MASTER_ADDR": address}))


@pytest.mark.parametrize("address", ["h2", "h3", "h2-ib", "10.0.0.1", "login"])
def test_a_master_in_the_step_or_of_another_name_is_taken(address):
    assert launch(STEP | JOB_OF_FOUR | {"MASTER_ADDR": address}).coordinator == address


EXPORTED = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "h2", "MASTER_PORT": "29511"}


def test_a_rank_0_that_was_exported_for_every_task_is_told(golden):
    golden(launch(STEP | EXPORTED).note)


@pytest.mark.parametrize(
    "change", [{"RANK": "3"}, {"SLURM_PROCID": "0"}, {"WORLD_SIZE": "8"}, {"TORCHELASTIC_RUN_ID": "x"}], ids=words
)
def test_a_rank_that_may_be_meant_is_not_told(change):
    assert launch(STEP | EXPORTED | change).note == ""


def test_the_shell_of_a_step_is_told_how_to_test_the_whole_job(golden):
    shell = STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "4"}
    assert launch(shell).note == ""
    golden(launch(shell | {"SLURM_PTY_PORT": "46083"}).note)


@pytest.mark.parametrize("gpus", ["", "h100:4", "4; rm"])
def test_the_line_for_a_batch_script_asks_for_what_the_job_has(golden, gpus):
    job = {"SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "4", "SLURM_NTASKS": "8", "SLURM_CPUS_PER_TASK": "2"}
    golden(launch(job | ({"SLURM_GPUS_PER_NODE": gpus} if gpus else {})).note)


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
        assert read_launch(env, LaunchArgs(), host="ip-3", gpus=0, cores=8, fresh="f").place.host == "h3"


def test_variables_that_an_mpi_launcher_brought_along_name_no_host_that_is_called_otherwise():
    brought = STEP | {"SLURMD_NODENAME": "h0"}
    for env in (brought | HYDRA, brought | OPEN_MPI | {"MASTER_ADDR": "h0"}):
        named = [
            read_launch(env, LaunchArgs(), host=own, gpus=0, cores=8, fresh="f").place.host
            for own in ("h3.example", "ip-3")
        ]
        assert named == ["h3", "ip-3"]


def test_two_slurm_jobs_or_steps_do_not_share_a_port():
    ports = {
        launch(STEP | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port
        for job in range(4711, 4731)
        for step in range(20)
    }
    assert len(ports) == 400
    assert min(ports) >= 20000
    assert max(ports) < 29500


def test_one_task_per_node_starts_a_rank_per_gpu():
    found = launch(ONE_TASK_A_NODE, gpus=4)
    assert found.ranks == (4, 5, 6, 7)
    assert found.place == Place(
        rank=4, world_size=8, host="h3", launcher="slurm", local_rank=0, local_world_size=4, node_rank=1
    )


def test_one_task_per_node_starts_as_many_ranks_as_asked():
    assert launch(ONE_TASK_A_NODE, nproc_per_node=2, nnodes=2, node_rank=1).ranks == (2, 3)


def test_one_task_per_node_without_gpus_is_a_rank():
    found = launch(ONE_TASK_A_NODE)
    assert (found.place.rank, found.place.world_size, found.ranks) == (1, 2, ())


def test_many_tasks_per_node_are_ranks_even_if_each_sees_all_gpus():
    assert launch(STEP, gpus=4).ranks == ()


def test_srun_with_pmix_or_pmi2_is_still_slurm():
    pmix = {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.4711.2"}
    assert launch(STEP | pmix).place.launcher == "slurm"
    assert launch(STEP | {"PMI_RANK": "3", "PMI_SIZE": "4"}).place.launcher == "slurm"


def test_hydra_that_starts_its_proxies_with_srun_is_not_slurm():
    hydra = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", "MASTER_ADDR": "h2"}
    assert launch(ONE_TASK_A_NODE | hydra).place == Place(
        rank=5, world_size=8, host="here", launcher="pmi", local_rank=1, local_world_size=4
    )


def test_the_body_of_a_batch_script_tests_this_host_and_says_how_to_test_all(golden):
    found = launch(BATCH | {"MASTER_ADDR": "h0", "WORLD_SIZE": "8"}, gpus=4)
    assert (found.place.launcher, found.ranks, found.coordinator) == ("standalone", (0, 1, 2, 3), "127.0.0.1")
    golden(found.note)


def test_the_shell_of_an_interactive_step_is_no_step(golden):
    interactive = STEP | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    found = launch(interactive | {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.4711.4294967290"})
    assert int(interactive["SLURM_STEP_ID"]) >= FIRST_PSEUDO_STEP
    assert found.place.launcher == "standalone"
    golden(found.note)


def test_a_batch_script_on_its_only_host_needs_no_note():
    assert launch(BATCH | {"SLURM_JOB_NUM_NODES": "1"}).note == ""


def test_an_salloc_shell_on_the_login_host_gets_the_note_even_for_one_host(golden):
    golden(launch({"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "1"}).note)


def test_a_loop_of_sruns_may_number_the_hosts_itself():
    env = STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NUM_NODES": "1"}
    env |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    found = launch(env, nnodes=2, node_rank=1, nproc_per_node=2, master_addr="h0")
    assert (found.place.launcher, found.ranks) == ("hand", (2, 3))


def test_open_mpi_on_one_host_needs_no_master():
    found = launch(OPEN_MPI)
    assert found.place == Place(rank=1, world_size=2, host="here", launcher="openmpi", local_rank=1, local_world_size=2)
    assert found.coordinator == "127.0.0.1"


def test_two_open_mpi_jobs_on_one_host_do_not_meet():
    found, other = launch(OPEN_MPI), launch(OPEN_MPI | {"PMIX_NAMESPACE": "prterun-h0-8124@1"})
    assert found.port != other.port
    assert found.run_id != other.run_id


def test_open_mpi_under_slurm_is_open_mpi():
    assert launch(ONE_TASK_A_NODE | OPEN_MPI).place.launcher == "openmpi"


def test_open_mpi_on_several_hosts_is_told_the_line_to_use(golden):
    env = OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}
    golden(refused(env))
    assert launch(env | {"MASTER_ADDR": "h0"}).coordinator == "h0"
    assert launch(env, master_addr="h0").coordinator == "h0"


def test_hydra_sets_pmi():
    assert launch(HYDRA).place == Place(
        rank=1, world_size=2, host="here", launcher="pmi", local_rank=1, local_world_size=2
    )


def test_pmix_alone_does_not_tell_the_worlds_size():
    env = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-h0-8123@1"}
    assert "--world-size" in refused(env)
    found = launch(env, world_size=2, master_addr="h0")
    assert (found.place.rank, found.place.world_size, found.place.launcher) == (1, 2, "pmix")


def test_by_hand_rank_by_rank():
    found = launch({}, rank=1, world_size=2, master_addr="h0")
    assert found.place == Place(rank=1, world_size=2, host="here", launcher="hand")
    assert (found.coordinator, found.port, found.ranks) == ("h0", 29500, ())


def test_shells_started_by_hand_agree_on_the_run_id():
    ids = {launch({}, rank=rank, world_size=2, master_addr="h0").run_id for rank in range(2)}
    assert len(ids) == 1
    assert ids != {launch({}, rank=0, world_size=2, master_addr="h0", master_port=29501).run_id}


def test_shells_agree_on_the_run_id_however_they_spell_the_coordinator_and_the_world():
    spelled = [launch({}, rank=1, world_size=2, master_addr=name).run_id for name in ("h0", "10.0.0.1", "localhost")]
    assert len({*spelled, launch({}, rank=1, world_size=3, master_addr="h0").run_id}) == 1
    env = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h0", "MASTER_PORT": "29501"}
    assert launch(env).run_id == launch(env | {"MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "2"}).run_id


def test_by_hand_host_by_host():
    found = launch({}, nnodes=2, node_rank=1, nproc_per_node=2, master_addr="h0")
    assert [(place.rank, place.local_rank) for place in places(found)] == [(2, 0), (3, 1)]
    assert (found.place.world_size, found.place.node_rank, found.port) == (4, 1, 29500)


def test_nothing_at_all_tests_this_host_with_two_ranks():
    found = launch({})
    assert (found.ranks, found.coordinator, found.port, found.run_id) == ((0, 1), "127.0.0.1", None, "f4e5")
    assert found.place.launcher == "standalone"


def test_nothing_at_all_tests_every_gpu():
    assert launch({}, gpus=3).ranks == (0, 1, 2)


def test_more_ranks_than_cores_are_noted(golden):
    golden(launch({}, cores=1).note)


def test_the_users_run_id_wins():
    for env in ({}, TORCHRUN, STEP, OPEN_MPI):
        assert launch(env, run_id="mine").run_id == "mine"


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
@pytest.mark.parametrize("empty", [True, False])
def test_a_missing_or_empty_variable_is_named(name, empty):
    env = TORCHRUN | {name: ""} if empty else {key: value for key, value in TORCHRUN.items() if key != name}
    assert name in refused(env)


@pytest.mark.parametrize(
    "env",
    [
        {"WORLD_SIZE": "four"},
        {"RANK": "-1"},
        {"RANK": "4"},
        {"WORLD_SIZE": "0"},
        {"WORLD_SIZE": "9999999999"},
        {"LOCAL_RANK": "2"},
        {"LOCAL_WORLD_SIZE": "8"},
        {"MASTER_PORT": "66660"},
        {"MASTER_PORT": "0"},
        {"MASTER_ADDR": "n[01-04]"},
        {"MASTER_ADDR": "n01,n02"},
        {"MASTER_ADDR": "n01:29500"},
        {"MASTER_ADDR": "tcp://n01"},
    ],
    ids=words,
)
def test_a_wrong_variable_is_named_with_its_value(golden, env):
    golden(refused(TORCHRUN | env))


def test_an_ipv6_master_is_an_address():
    assert launch(TORCHRUN | {"MASTER_ADDR": "fd00::1"}).coordinator == "fd00::1"


@pytest.mark.parametrize(
    "asked",
    [
        {"rank": 2},
        {"world_size": 8},
        {"local_rank": 0},
        {"master_addr": "h1"},
        {"master_port": 1},
        {"nproc_per_node": 2},
        {"nnodes": 2},
        {"run_id": "a/b"},
    ],
    ids=words,
)
def test_a_command_line_that_contradicts_torchrun_is_refused(golden, asked):
    golden(refused(TORCHRUN, **asked))


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_JOB_ID"])
def test_a_step_without_its_variables_is_refused(name):
    assert name in refused({key: value for key, value in STEP.items() if key != name})


@pytest.mark.parametrize(
    ("env", "asked"),
    [
        ({"SLURM_PROCID": "4"}, {}),
        ({"SLURM_LOCALID": "2"}, {}),
        ({"WORLD_SIZE": "8"}, {}),
        ({"MASTER_ADDR": "h[2-3]"}, {}),
        ({"SLURM_STEP_NUM_TASKS": "4000000000"}, {}),
        ({}, {"rank": 0}),
        ({}, {"node_rank": 0}),
        ({}, {"nnodes": 3}),
        ({}, {"nproc_per_node": 4}),
    ],
    ids=words,
)
def test_a_contradiction_in_a_step_is_refused(golden, env, asked):
    golden(refused(STEP | env, **asked))


@pytest.mark.parametrize(
    "asked",
    [
        {"rank": 1},
        {"rank": 2, "world_size": 2, "master_addr": "h0"},
        {"rank": 1, "world_size": 2},
        {"rank": 1, "world_size": 2, "master_addr": "h0", "master_port": 70000},
        {"rank": 1, "world_size": 2, "nproc_per_node": 2},
        {"rank": 0, "world_size": 10**20, "master_addr": "h0"},
        {"world_size": 2},
        {"master_addr": "h0"},
        {"nnodes": 2, "master_addr": "h0"},
        {"node_rank": 1},
        {"nnodes": 0},
        {"nnodes": 2, "node_rank": 2},
        {"nnodes": 2, "node_rank": 1, "nproc_per_node": 2},
        {"nnodes": 2, "node_rank": 1, "nproc_per_node": 2, "world_size": 2},
        {"nnodes": 10**20, "node_rank": 0, "master_addr": "h0"},
        {"nproc_per_node": 0},
        {"nproc_per_node": 1_000_000_000},
        {"local_rank": 0},
    ],
    ids=words,
)
def test_half_a_launch_by_hand_or_a_huge_one_is_refused(golden, asked):
    golden(refused({}, **asked))


@pytest.mark.parametrize(
    ("env", "asked"),
    [
        ({"WORLD_SIZE": "1"}, {}),
        ({"LOCAL_RANK": "1"}, {}),
        ({"MASTER_ADDR": "1"}, {}),
        ({"RANK": "0"}, {}),
        ({"RANK": "0"}, {"nproc_per_node": 2}),
        ({"RANK": "0", "MASTER_ADDR": "h0"}, {"master_port": 1}),
    ],
    ids=words,
)
def test_a_world_without_a_rank_or_a_rank_without_a_world_is_told_what_is_missing(golden, env, asked):
    golden(refused(env, **asked))


def test_workers_of_any_launcher_see_torchruns_variables():
    found = launch({})
    second = places(found)[1]
    assert worker_variables(found, second, 40000) == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "40000",
        "TORCHELASTIC_RUN_ID": "f4e5",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def test_workers_under_torchrun_see_what_torchrun_said():
    found = launch(TORCHRUN)
    said = {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_USE_AGENT_STORE"}
    assert worker_variables(found, found.place, 29501) == said


def test_what_nobody_knows_is_left_out_of_the_workers_variables():
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
    assert " ".join(expanded(nodelist)) == hosts


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
    assert first_of("z[9,1-3],a1") == "z9"


@pytest.mark.parametrize("nodelist", ["n1", "n[01-04]", "a1,b2", "rack[2-3]n[01-04]-ib", "gpu-[007,009-011],z[1-2]"])
def test_the_first_host_of_a_sorted_list_is_clustershells(nodelist):
    assert first_of(nodelist) == NodeSet(nodelist, resolver=RESOLVER_NOGROUP)[0]


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
