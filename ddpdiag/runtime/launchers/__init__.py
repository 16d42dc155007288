"""Find the place of this process in the world: environment variables and command line give a `Launch`.

The caller passes the name, GPUs and cores of this host. Sources in order of trust: RANK (set by torchrun and any other
launcher for env://), MPI, a step of Slurm, the command line alone, and at last this host alone. A missing rank is an
error, never 0. An empty variable counts as missing, as in torch.
"""

import os
import secrets

from msgspec import structs

from ddpdiag.errors import UsageError
from ddpdiag.model import Arrival, Place
from ddpdiag.model.launch import LaunchArgs
from ddpdiag.probes.gpu.visibility import pci_gpus, visible_gpus
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
    Given,
    Here,
    Launch,
    Names,
    agreed,
    check_below,
    check_positive,
    check_world,
    derived_port,
    digest,
    master_addr,
    master_port,
    needed,
    number,
    option,
    place,
    plain_name,
    ranks_here,
    refuse_block,
    refuse_single,
    run_id,
)


def read_launch(env: Environ, args: LaunchArgs, *, host: str, gpus: int, cores: int, fresh: str) -> Launch:
    """The launch of this process; UsageError names the variable or option to change.

    `host` is this host's name for itself, `gpus` and `cores` are the numbers that this process may use, and `fresh` is
    an id that no other run has.
    """
    env = {name: value for name, value in env.items() if value.strip()}
    foreign = any(names is not TORCHRUN and names.rank in env and not _set_by_slurm(env, names) for names in LAUNCHERS)
    here = Here(host=slurm.node_name(env, host, foreign=foreign), gpus=gpus, cores=cores, fresh=fresh)
    if args.run_id is not None and plain_name(args.run_id) != args.run_id:
        raise UsageError(f"--run-id {args.run_id!r}: expected up to 64 letters, digits, '.', '_' or '-'")
    for names in LAUNCHERS:
        rank = number(env, names.rank)
        if rank is not None and not _set_by_slurm(env, names):
            return _from_env(env, args, here, rank) if names is TORCHRUN else _from_mpi(env, args, here, names, rank)
    given_rank = option("--rank", args.rank)
    if slurm.in_step(env):
        step = slurm.read_step(env)
        # A script may call `srun -n1 ddpdiag check --node-rank=I ...` once per host, as it does for torchrun.
        if step.tasks.value > 1 or (given_rank is None and args.node_rank is None):
            return _from_step(env, args, here, step)
    if given_rank is not None:
        return _by_rank(env, args, here, given_rank)
    if args.node_rank is not None or args.nnodes not in (None, 1):
        return _by_node(env, args, here)
    return _alone(env, args, here)


def own_arrival(place: Place) -> Arrival:
    """The arrival of this process, with all that it knows of itself; rank 0 adds its source address and the time."""
    return Arrival(
        place=place,
        host_id=boot_id(),
        pid=os.getpid(),
        address="",
        gpus=visible_gpus(os.environ, proc_root(os.environ)),
        pci_gpus=pci_gpus(sys_root(os.environ)),
        nonce=secrets.token_hex(4),
        cpus=f"{sum(1 << core for core in os.sched_getaffinity(0)):x}",
    )


def _set_by_slurm(env: Environ, names: Names) -> bool:
    """Whether `srun --mpi=pmix|pmi2` set these variables: Slurm's variables then tell more (the step's nodes)."""
    if names is PMIX:
        return env.get("PMIX_NAMESPACE", "").startswith("slurm.")
    # If hydra starts its proxies with srun, there is one task per host, whatever PMI_SIZE is.
    return names is PMI and "PMI_SIZE" in env and env["PMI_SIZE"] == env.get("SLURM_STEP_NUM_TASKS")


def _from_env(env: Environ, args: LaunchArgs, here: Here, rank: Given) -> Launch:
    """The launch by torchrun, torch.distributed.launch, or any other launcher that sets the variables of env://."""
    # A RANK alone is mostly left over in the shell. The error names all missing variables, and how to do without.
    given = {"WORLD_SIZE": args.world_size, "MASTER_ADDR": args.master_addr, "MASTER_PORT": args.master_port}
    missing = [name for name, value in given.items() if name not in env and value is None]
    if "WORLD_SIZE" in missing:
        stray = " ".join(f"-u {name}" for name in ("RANK", "LOCAL_RANK", *given) if name in env)
        raise UsageError(
            f"{rank}, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set: expected RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT in every process, as torchrun sets them; to test this host alone: "
            f"env {stray} ddpdiag check"
        )
    world, rank_place = _one_rank(env, args, here, TORCHRUN, rank)
    coordinator, port = _env_endpoint(env, args, f"{rank} and {world}", needed=world.value > 1)
    launcher_id, restarts = env.get("TORCHELASTIC_RUN_ID"), number(env, "TORCHELASTIC_RESTART_COUNT")
    shared = run_id(args, launcher_id, port)
    restarted = restarts is not None and restarts.value > 0 and args.run_id is None
    groups = number(env, "GROUP_WORLD_SIZE")
    return Launch(
        place=rank_place if launcher_id else structs.replace(rank_place, launcher="env"),
        coordinator=coordinator,
        port=port,
        run_id=f"{shared}.{restarts.value}" if restarts and restarted else shared,
        note=slurm.exported_note(env, rank, world),
        # torch itself compares with str(True)
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
        lacks=() if rank_place.local_rank is not None else ("LOCAL_RANK",),
        nodes=groups.value if groups else None,
        given={name: env[name] for name in TORCHRUN_EXTRAS if name in env},
    )


def _env_endpoint(env: Environ, args: LaunchArgs, who: str, *, needed: bool) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT. UsageError if one is missing and `needed`: torch's env:// fails then, too."""
    address, port = master_addr(env, args.master_addr), master_port(env, args.master_port)
    if needed and address is None:
        raise UsageError(f"{who}, but MASTER_ADDR is not set: export MASTER_ADDR=<host of rank 0> in every process")
    if needed and port is None:
        raise UsageError(f"{who}, but MASTER_PORT is not set: export MASTER_PORT={TORCH_PORT} in every process")
    return address or "127.0.0.1", port or TORCH_PORT


def _from_mpi(env: Environ, args: LaunchArgs, here: Here, names: Names, rank: Given) -> Launch:
    """The launch by an MPI launcher: one process per rank. The user must name rank 0's host if there are several."""
    world, rank_place = _one_rank(env, args, here, names, rank)
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
    coordinator, launcher_id = address or "127.0.0.1", env.get("PMIX_NAMESPACE")
    usual = derived_port(int(digest(launcher_id), 16)) if launcher_id else TORCH_PORT
    port = master_port(env, args.master_port) or usual
    return Launch(place=rank_place, coordinator=coordinator, port=port, run_id=run_id(args, launcher_id, port))


def _one_rank(env: Environ, args: LaunchArgs, here: Here, names: Names, rank: Given) -> tuple[Given, Place]:
    """The world's size and this process's place, if the launcher set the variables of one rank."""
    refuse_block(args, agreed(rank, option("--rank", args.rank)) or rank)
    world = agreed(number(env, *names.world_size), option("--world-size", args.world_size))
    world = needed(world, names.world_size[0] if names.world_size else "--world-size", rank, "the number of ranks")
    check_world(world)
    local_rank = agreed(number(env, *names.local_rank), option("--local-rank", args.local_rank))
    local_size = number(env, *names.local_world_size)
    check_below(rank, world)
    check_below(local_rank, local_size)
    if local_size and local_size.value > world.value:
        raise UsageError(f"{local_size}: expected at most {world.value}, because of {world}")
    node = number(env, *names.node_rank)
    return world, place(
        here, names.launcher, rank.value, world, local_rank=local_rank, local_size=local_size, node=node
    )


def _from_step(env: Environ, args: LaunchArgs, here: Here, step: slurm.Step) -> Launch:
    """The launch by srun: this process is one rank, or alone on its host and starts one rank per GPU."""
    # The options for hosts must agree with the step.
    agreed(step.node_rank, option("--node-rank", args.node_rank))
    agreed(step.nodes, option("--nnodes", args.nnodes))
    count = _ranks_per_task(args, here, step)
    rank_place = _task_place(env, args, here, step) if count is None else None
    ranks = () if count is None else tuple(range(step.rank.value * count, (step.rank.value + 1) * count))
    each = "1 rank" if (count or 1) == 1 else f"{count} ranks"
    world = Given(f"{each} for each task of {step.tasks}, world size", step.tasks.value * (count or 1))
    agreed(step.tasks if rank_place else world, option("--world-size", args.world_size))
    check_world(world)
    address = master_addr(env, args.master_addr)
    if address is not None:
        slurm.check_master(env, address, step)
    return Launch(
        place=rank_place
        or place(here, "slurm", ranks[0], world, local_rank=0, local_size=len(ranks), node=step.node_rank),
        coordinator=address or step.first_node,
        # jobs and steps that share a host have different ids
        port=master_port(env, args.master_port) or derived_port(step.job_id * 101 + step.step_id),
        run_id=run_id(args, f"{step.job_id}.{step.step_id}"),
        ranks=ranks,
        note=slurm.terminal_note(env, step),
        nodes=step.nodes.value if step.nodes else None,
        layout=tuple(host for host in step.hosts for _ in range(count or 1)),
    )


def _ranks_per_task(args: LaunchArgs, here: Here, step: slurm.Step) -> int | None:
    """Number of ranks that this task must start; None if it is a rank itself."""
    wanted = ranks_here(args, here)
    if step.one_task_per_node and (wanted is not None or here.gpus > 1):
        refuse_single(args, "srun started one task on each host, which starts its ranks")
        return wanted or here.gpus
    if wanted is not None and step.local_tasks is not None:
        agreed(step.local_tasks, option("--nproc-per-node", wanted))
    return None


def _task_place(env: Environ, args: LaunchArgs, here: Here, step: slurm.Step) -> Place:
    rank = agreed(step.rank, option("--rank", args.rank)) or step.rank
    local_rank = agreed(step.local_rank, option("--local-rank", args.local_rank))
    check_below(local_rank, step.local_tasks)
    # Checked only for a task that is a rank: torchrun, as one task on each host, would replace WORLD_SIZE.
    _check_same_world(env, step.tasks)
    return place(
        here, "slurm", rank.value, step.tasks, local_rank=local_rank, local_size=step.local_tasks, node=step.node_rank
    )


def _check_same_world(env: Environ, world: Given) -> None:
    """UsageError if an exported WORLD_SIZE, which the user's script will read, is wrong."""
    exported = number(env, "WORLD_SIZE")
    if exported is not None and exported.value != world.value:
        raise UsageError(f"{exported} contradicts {world}: expected the same, or no WORLD_SIZE")


def _by_rank(env: Environ, args: LaunchArgs, here: Here, rank: Given) -> Launch:
    """The launch of one rank that the user starts with --rank and --world-size."""
    refuse_block(args, rank)
    world = agreed(number(env, "WORLD_SIZE"), option("--world-size", args.world_size))
    world = needed(world, "--world-size", rank, "the number of ranks")
    check_world(world)
    check_below(rank, world)
    local_rank = agreed(number(env, "LOCAL_RANK"), option("--local-rank", args.local_rank))
    local_size = number(env, "LOCAL_WORLD_SIZE")
    check_below(local_rank, local_size)
    coordinator, port = _endpoint(env, args, rank, others=world.value > 1)
    return Launch(
        place=place(here, "hand", rank.value, world, local_rank=local_rank, local_size=local_size),
        coordinator=coordinator,
        port=port,
        run_id=run_id(args, None, port),
    )


def _by_node(env: Environ, args: LaunchArgs, here: Here) -> Launch:
    """The launch of one process per host, which the user starts as torchrun with --nnodes and --node-rank."""
    nodes, node = option("--nnodes", args.nnodes), option("--node-rank", args.node_rank)
    check_positive(nodes)
    nodes = needed(nodes, "--nnodes", node, "the number of hosts")
    node = needed(node, "--node-rank", nodes, f"0 to {nodes.value - 1}, another on each host")
    check_below(node, nodes)
    refuse_single(args, f"{nodes}, so this process starts all ranks of its host")
    count = ranks_here(args, here) or _default_count(here, alone=nodes.value == 1)
    world = Given(
        f"{'1 rank' if count == 1 else f'{count} ranks'} on each host under {nodes}, world size", nodes.value * count
    )
    agreed(world, option("--world-size", args.world_size))
    check_world(world)
    coordinator, port = _endpoint(env, args, node, others=nodes.value > 1)
    ranks = tuple(range(node.value * count, (node.value + 1) * count))
    return Launch(
        place=place(here, "hand", ranks[0], world, local_rank=0, local_size=count, node=node),
        coordinator=coordinator,
        port=port,
        run_id=run_id(args, None, port),
        ranks=ranks,
        nodes=nodes.value,
    )


def _alone(env: Environ, args: LaunchArgs, here: Here) -> Launch:
    """The launch without any launcher: this process tests this host with ranks that it starts."""
    refuse_single(args, "--rank is not given")
    # A world size without a rank is a mistake; but a batch script may export MASTER_ADDR and such for its steps.
    if args.master_addr is not None:
        raise UsageError(f"--master-addr {args.master_addr}, but neither --rank nor --node-rank is given")
    wanted = ranks_here(args, here)
    if args.world_size is not None and args.world_size != wanted:
        world = option("--world-size", args.world_size)
        raise UsageError(f"{world}, but --rank is not given; to start ranks on this host alone, give --nproc-per-node")
    stray = [name for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") if name in env]
    if stray and number(env, "SLURM_JOB_ID", "SLURM_JOBID") is None:
        unset = " ".join(f"-u {name}" for name in stray)
        raise UsageError(
            f"{stray[0]}={env[stray[0]]}, but RANK is not set: expected the rank of this process in RANK; "
            f"to test this host alone: env {unset} ddpdiag check"
        )
    count = wanted or _default_count(here, alone=True)
    cores = "one core" if here.cores == 1 else f"{here.cores} cores"
    crowded = f"{count} ranks share {cores} on {here.host}, so speeds mean little."
    ranks = tuple(range(count))
    return Launch(
        place=place(here, "standalone", 0, Given("--nproc-per-node", count), local_rank=0, local_size=count, node=0),
        coordinator="127.0.0.1",
        port=master_port({}, args.master_port),
        run_id=run_id(args, here.fresh),
        ranks=ranks,
        note=" ".join(filter(None, (slurm.batch_note(env, here.host), crowded if count > here.cores else ""))),
        nodes=1,
    )


def _default_count(here: Here, *, alone: bool) -> int:
    """Number of ranks on a host: one per GPU; without GPUs two if the host is `alone`, so that they can communicate."""
    return here.gpus or (2 if alone else 1)


def _endpoint(env: Environ, args: LaunchArgs, who: Given, *, others: bool) -> tuple[str, int]:
    """Rank 0's host, which --master-addr must give if there are `others`, and its port, by default torch's."""
    address = master_addr(env, args.master_addr)
    if address is None and others:
        raise UsageError(f"{who}, but --master-addr is not given: expected the host of rank 0, the same everywhere")
    return address or "127.0.0.1", master_port(env, args.master_port) or TORCH_PORT
