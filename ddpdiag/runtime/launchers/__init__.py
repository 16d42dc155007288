"""Find the rank of this process in the job: `read_launch` makes a `Launch` from environment and command line.

Sources in order of trust: RANK (set by torchrun and any other launcher for env://), the variables of an MPI launcher,
those of a step of Slurm, and the options of the command line. Without any of them this process tests its host alone. A
missing rank is an error, never 0. An empty variable counts as missing, as in torch.
"""

import os
import secrets
import socket

from msgspec import structs

from ddpdiag.codec import readable
from ddpdiag.errors import UsageError
from ddpdiag.model import Arrival, Place
from ddpdiag.model.launch import LaunchArgs
from ddpdiag.probes.gpu.visibility import pci_gpu_count, visible_gpu_count
from ddpdiag.probes.host.kernel import boot_id, proc_root, sys_root
from ddpdiag.runtime.launchers import slurm
from ddpdiag.runtime.launchers.launch import (
    LAUNCHERS,
    OPEN_MPI,
    PMI,
    PMIX,
    TORCH_PORT,
    TORCHRUN,
    TORCHRUN_EXTRAS,
    Environ,
    Launch,
    LauncherVariables,
    Setting,
    ThisHost,
    agreed_setting,
    check_below,
    check_positive,
    check_world,
    derived_port,
    digest,
    make_place,
    master_addr,
    master_port,
    option_number,
    refuse_multi_rank_options,
    refuse_one_rank_options,
    requested_rank_count,
    require,
    run_id,
    safe_name,
    variable_number,
)


def read_launch(env: Environ, args: LaunchArgs, *, host: str, gpus: int, cores: int, unique_id: str) -> Launch:
    """The launch of this process. UsageError names the variable or option to change.

    `host` is the name of this host. This process may use `gpus` GPUs and `cores` cores. No other run has `unique_id`.
    """
    env = {name: value for name, value in env.items() if value.strip()}
    launchers = [names for names in LAUNCHERS if names.rank in env and not _is_set_by_slurm(env, names)]
    name = slurm.node_name(env, host, may_be_copied=any(names is not TORCHRUN for names in launchers))
    this_host = ThisHost(name=name, gpus=gpus, cores=cores, unique_id=unique_id)
    if args.run_id is not None and safe_name(args.run_id) != args.run_id:
        raise UsageError(f"--run-id {args.run_id!r}: expected up to 64 letters, digits, '.', '_' or '-'")
    if launchers and (rank := variable_number(env, launchers[0].rank)) is not None:
        if launchers[0] is TORCHRUN:
            return _env_launch(env, args, this_host, rank)
        return _mpi_launch(env, args, this_host, launchers[0], rank)
    rank_option = option_number("--rank", args.rank)
    if slurm.in_step(env):
        step = slurm.read_step(env)
        # A script may call `srun -n1 ddpdiag check --node-rank=I ...` once per host, as it does for torchrun.
        if step.task_count.value > 1 or (rank_option is None and args.node_rank is None):
            return _step_launch(env, args, this_host, step)
    if rank_option is not None:
        return _rank_launch(env, args, this_host, rank_option)
    if args.node_rank is not None or args.nnodes not in (None, 1):
        return _host_launch(env, args, this_host)
    return _standalone_launch(env, args, this_host)


def read_own_launch(args: LaunchArgs) -> Launch:
    """Return how this process was launched, from the command line or, without it, from the launcher's variables."""
    return read_launch(
        os.environ,
        args,
        host=readable(socket.gethostname()),
        gpus=visible_gpu_count(os.environ, proc_root(os.environ)),
        cores=os.cpu_count() or 1,
        unique_id=secrets.token_hex(6),
    )


def own_arrival(place: Place) -> Arrival:
    """The arrival of this process, without the source address and the time, which are set when it joins the run."""
    return Arrival(
        place=place,
        host_id=boot_id(),
        pid=os.getpid(),
        address="",
        gpus=visible_gpu_count(os.environ, proc_root(os.environ)),
        pci_gpus=pci_gpu_count(sys_root(os.environ)),
        nonce=secrets.token_hex(4),
        cpu_mask=f"{sum(1 << core for core in os.sched_getaffinity(0)):x}",
    )


def _is_set_by_slurm(env: Environ, names: LauncherVariables) -> bool:
    """Whether `srun --mpi=pmix|pmi2` set these variables. Slurm's own variables then say more (the step's nodes)."""
    if names is PMIX:
        return env.get("PMIX_NAMESPACE", "").startswith("slurm.")
    # If hydra starts its proxies with srun, there is one task per host, whatever PMI_SIZE is.
    return names is PMI and "PMI_SIZE" in env and env["PMI_SIZE"] == env.get("SLURM_STEP_NUM_TASKS")


def _env_launch(env: Environ, args: LaunchArgs, host: ThisHost, rank: Setting) -> Launch:
    """The launch by torchrun, torch.distributed.launch, or any other launcher that sets the variables of env://."""
    # A RANK alone is usually left over in the shell. The error names all missing variables, and how to unset the rest.
    options = {"WORLD_SIZE": args.world_size, "MASTER_ADDR": args.master_addr, "MASTER_PORT": args.master_port}
    missing = [name for name, value in options.items() if name not in env and value is None]
    if "WORLD_SIZE" in missing:
        unset_options = " ".join(f"-u {name}" for name in ("RANK", "LOCAL_RANK", *options) if name in env)
        raise UsageError(
            f"{rank}, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set: expected RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT in every process, as torchrun sets them; to test this host alone: "
            f"env {unset_options} ddpdiag check"
        )
    world, rank_place = _world_and_place(env, args, host, TORCHRUN, rank)
    address, port = _env_endpoint(env, args, f"{rank} and {world}", is_required=world.value > 1)
    launcher_id, restarts = env.get("TORCHELASTIC_RUN_ID"), variable_number(env, "TORCHELASTIC_RESTART_COUNT")
    run_name = run_id(args, launcher_id, port)
    restarted = restarts is not None and restarts.value > 0 and args.run_id is None
    host_count = variable_number(env, "GROUP_WORLD_SIZE")
    return Launch(
        place=rank_place if launcher_id else structs.replace(rank_place, launcher="env"),
        master_addr=address,
        port=port,
        run_id=f"{run_name}.{restarts.value}" if restarts and restarted else run_name,
        notice=slurm.exported_rank_notice(env, rank, world),
        # torch itself compares with str(True)
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
        unset_variables=() if rank_place.local_rank is not None else ("LOCAL_RANK",),
        host_count=host_count.value if host_count else None,
        torchrun_extras={name: env[name] for name in TORCHRUN_EXTRAS if name in env},
    )


def _env_endpoint(env: Environ, args: LaunchArgs, who: str, *, is_required: bool) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT. UsageError if one is missing and `is_required`, as torch's env:// would fail."""
    address, port = master_addr(env, args.master_addr), master_port(env, args.master_port)
    if is_required and address is None:
        raise UsageError(f"{who}, but MASTER_ADDR is not set: export MASTER_ADDR=<host of rank 0> in every process")
    if is_required and port is None:
        raise UsageError(f"{who}, but MASTER_PORT is not set: export MASTER_PORT={TORCH_PORT} in every process")
    return address or "127.0.0.1", port or TORCH_PORT


def _mpi_launch(env: Environ, args: LaunchArgs, host: ThisHost, names: LauncherVariables, rank: Setting) -> Launch:
    """The launch by an MPI launcher, one process per rank. UsageError on several hosts without MASTER_ADDR."""
    world, rank_place = _world_and_place(env, args, host, names, rank)
    _check_same_world(env, world)
    address = master_addr(env, args.master_addr)
    if address is None and rank_place.local_world_size != world.value > 1:
        line = f"mpirun -np {world.value} -x MASTER_ADDR=$(hostname) ddpdiag check"
        if names is not OPEN_MPI:
            line = f"mpiexec -n {world.value} ddpdiag check --master-addr $(hostname)"
        local = "an unknown number" if rank_place.local_world_size is None else rank_place.local_world_size
        raise UsageError(
            f"{world}, {local} of them on this host, but MASTER_ADDR is not set; run on the host of rank 0: {line}"
        )
    address, launcher_id = address or "127.0.0.1", env.get("PMIX_NAMESPACE")
    default_port = derived_port(int(digest(launcher_id), 16)) if launcher_id else TORCH_PORT
    port = master_port(env, args.master_port) or default_port
    return Launch(place=rank_place, master_addr=address, port=port, run_id=run_id(args, launcher_id, port))


def _world_and_place(
    env: Environ, args: LaunchArgs, host: ThisHost, names: LauncherVariables, rank: Setting
) -> tuple[Setting, Place]:
    """The world's size and this process's place, for a launcher that sets the rank of each process."""
    refuse_multi_rank_options(args, agreed_setting(rank, option_number("--rank", args.rank)) or rank)
    world = agreed_setting(variable_number(env, *names.world_size), option_number("--world-size", args.world_size))
    world = require(world, names.world_size[0] if names.world_size else "--world-size", rank, "the number of ranks")
    check_world(world)
    local_rank = agreed_setting(variable_number(env, *names.local_rank), option_number("--local-rank", args.local_rank))
    local_size = variable_number(env, *names.local_world_size)
    check_below(rank, world)
    check_below(local_rank, local_size)
    if local_size and local_size.value > world.value:
        raise UsageError(f"{local_size}: expected at most {world.value}, because of {world}")
    node = variable_number(env, *names.node_rank)
    place = make_place(host, names.launcher, rank.value, world, local_rank=local_rank, local_size=local_size)
    return world, structs.replace(place, node_rank=node.value if node else None)


def _step_launch(env: Environ, args: LaunchArgs, host: ThisHost, step: slurm.Step) -> Launch:
    """The launch by srun: this process is one rank, or the only task on its host, which starts a rank per GPU."""
    # The options for hosts must agree with the step.
    agreed_setting(step.node_rank, option_number("--node-rank", args.node_rank))
    agreed_setting(step.node_count, option_number("--nnodes", args.nnodes))
    count = _ranks_per_task(args, host, step)
    first = step.rank.value * (count or 0)
    ranks = tuple(range(first, first + (count or 0)))
    per_task = "1 rank" if (count or 1) == 1 else f"{count} ranks"
    world = Setting(f"{per_task} for each task of {step.task_count}, world size", step.task_count.value * (count or 1))
    if count is None:
        place = _task_place(env, args, host, step)
    else:
        place = make_place(host, "slurm", first, world, local_rank=0, local_size=count, node_rank=step.node_rank)
    agreed_setting(step.task_count if count is None else world, option_number("--world-size", args.world_size))
    check_world(world)
    address = master_addr(env, args.master_addr)
    if address is not None:
        slurm.check_master_addr(env, address, step)
    return Launch(
        place=place,
        master_addr=address or step.first_node,
        # jobs and steps that share a host have different ids
        port=master_port(env, args.master_port) or derived_port(step.job_id * 101 + step.step_id),
        run_id=run_id(args, f"{step.job_id}.{step.step_id}"),
        ranks=ranks,
        notice=slurm.terminal_notice(env, step),
        host_count=step.node_count.value if step.node_count else None,
        layout=tuple(name for name in step.host_of_task for _ in range(count or 1)),
    )


def _ranks_per_task(args: LaunchArgs, host: ThisHost, step: slurm.Step) -> int | None:
    """Number of ranks that this task must start, or None if the task is a rank itself."""
    requested = requested_rank_count(args, host)
    if step.one_task_per_node and (requested is not None or host.gpus > 1):
        refuse_one_rank_options(args, "srun started one task on each host, which starts its ranks")
        return requested or host.gpus
    if requested is not None and step.local_task_count is not None:
        agreed_setting(step.local_task_count, option_number("--nproc-per-node", requested))
    return None


def _task_place(env: Environ, args: LaunchArgs, host: ThisHost, step: slurm.Step) -> Place:
    rank = agreed_setting(step.rank, option_number("--rank", args.rank)) or step.rank
    local_rank = agreed_setting(step.local_rank, option_number("--local-rank", args.local_rank))
    check_below(local_rank, step.local_task_count)
    # Checked only for a task that is a rank: torchrun, as one task on each host, would replace WORLD_SIZE.
    _check_same_world(env, step.task_count)
    size, node = step.local_task_count, step.node_rank
    return make_place(
        host, "slurm", rank.value, step.task_count, local_rank=local_rank, local_size=size, node_rank=node
    )


def _check_same_world(env: Environ, world: Setting) -> None:
    """UsageError if an exported WORLD_SIZE, which the user's script will read, differs from `world`."""
    exported = variable_number(env, "WORLD_SIZE")
    if exported is not None and exported.value != world.value:
        raise UsageError(f"{exported} contradicts {world}: expected the same, or no WORLD_SIZE")


def _rank_launch(env: Environ, args: LaunchArgs, host: ThisHost, rank: Setting) -> Launch:
    """The launch of one rank that the user starts with --rank and --world-size."""
    refuse_multi_rank_options(args, rank)
    world = agreed_setting(variable_number(env, "WORLD_SIZE"), option_number("--world-size", args.world_size))
    world = require(world, "--world-size", rank, "the number of ranks")
    check_world(world)
    check_below(rank, world)
    local_rank = agreed_setting(variable_number(env, "LOCAL_RANK"), option_number("--local-rank", args.local_rank))
    local_size = variable_number(env, "LOCAL_WORLD_SIZE")
    check_below(local_rank, local_size)
    address, port = _endpoint(env, args, rank, has_other_hosts=world.value > 1)
    rank_place = make_place(host, "hand", rank.value, world, local_rank=local_rank, local_size=local_size)
    return Launch(place=rank_place, master_addr=address, port=port, run_id=run_id(args, None, port))


def _host_launch(env: Environ, args: LaunchArgs, host: ThisHost) -> Launch:
    """The launch of one process per host, which the user starts like torchrun, with --nnodes and --node-rank."""
    host_count, node_rank = option_number("--nnodes", args.nnodes), option_number("--node-rank", args.node_rank)
    check_positive(host_count)
    host_count = require(host_count, "--nnodes", node_rank, "the number of hosts")
    node_rank = require(node_rank, "--node-rank", host_count, f"0 to {host_count.value - 1}, another on each host")
    check_below(node_rank, host_count)
    refuse_one_rank_options(args, f"{host_count}, so this process starts all ranks of its host")
    # One rank per GPU, else one; on the only host two, so that ranks can communicate.
    count = requested_rank_count(args, host) or host.gpus or (2 if host_count.value == 1 else 1)
    per_host = "1 rank" if count == 1 else f"{count} ranks"
    world = Setting(f"{per_host} on each host under {host_count}, world size", host_count.value * count)
    agreed_setting(world, option_number("--world-size", args.world_size))
    check_world(world)
    address, port = _endpoint(env, args, node_rank, has_other_hosts=host_count.value > 1)
    ranks = tuple(range(node_rank.value * count, (node_rank.value + 1) * count))
    return Launch(
        place=make_place(host, "hand", ranks[0], world, local_rank=0, local_size=count, node_rank=node_rank),
        master_addr=address,
        port=port,
        run_id=run_id(args, None, port),
        ranks=ranks,
        host_count=host_count.value,
    )


def _standalone_launch(env: Environ, args: LaunchArgs, host: ThisHost) -> Launch:
    """The launch without any launcher: this process starts all ranks, on this host."""
    refuse_one_rank_options(args, "--rank is not given")
    # A world size without a rank is a mistake; but a batch script may export MASTER_ADDR and such for its steps.
    if args.master_addr is not None:
        raise UsageError(f"--master-addr {args.master_addr}, but neither --rank nor --node-rank is given")
    requested = requested_rank_count(args, host)
    if args.world_size is not None and args.world_size != requested:
        world = option_number("--world-size", args.world_size)
        raise UsageError(f"{world}, but --rank is not given; to start ranks on this host alone, give --nproc-per-node")
    leftovers = [name for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") if name in env]
    if leftovers and variable_number(env, "SLURM_JOB_ID", "SLURM_JOBID") is None:
        unset = " ".join(f"-u {name}" for name in leftovers)
        raise UsageError(
            f"{leftovers[0]}={env[leftovers[0]]}, but RANK is not set: expected the rank of this process in RANK; "
            f"to test this host alone: env {unset} ddpdiag check"
        )
    count = requested or host.gpus or 2  # two, so that ranks can communicate
    cores = "one core" if host.cores == 1 else f"{host.cores} cores"
    crowded = f"{count} ranks share {cores} on {host.name}, so speeds mean little." if count > host.cores else ""
    world = Setting("--nproc-per-node", count)
    return Launch(
        place=make_place(host, "standalone", 0, world, local_rank=0, local_size=count, node_rank=0),
        master_addr="127.0.0.1",
        port=master_port({}, args.master_port),
        run_id=run_id(args, host.unique_id),
        ranks=tuple(range(count)),
        notice=" ".join(filter(None, (slurm.batch_notice(env, host.name), crowded))),
        host_count=1,
    )


def _endpoint(env: Environ, args: LaunchArgs, who: Setting, *, has_other_hosts: bool) -> tuple[str, int]:
    """Rank 0's host and port (default: 29500). UsageError if the run has other hosts, and no setting names rank 0's."""
    address = master_addr(env, args.master_addr)
    if address is None and has_other_hosts:
        raise UsageError(f"{who}, but --master-addr is not given: expected the host of rank 0, the same everywhere")
    return address or "127.0.0.1", master_port(env, args.master_port) or TORCH_PORT
