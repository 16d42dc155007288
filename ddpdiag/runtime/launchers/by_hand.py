"""Launches that the command line alone describes: one process per rank, one per host, or this host alone."""

from ddpdiag.errors import UsageError
from ddpdiag.runtime.launchers import slurm
from ddpdiag.runtime.launchers.launch import (
    TORCH_PORT,
    Asked,
    Environ,
    Given,
    Here,
    Launch,
    agreed,
    block_place,
    check_below,
    check_positive,
    check_world,
    master_addr,
    master_port,
    needed,
    number,
    option,
    place,
    ranks_here,
    refuse_block,
    refuse_single,
    run_id,
)


def by_rank(env: Environ, asked: Asked, here: Here, rank: Given) -> Launch:
    """The user starts each rank with --rank and --world-size."""
    refuse_block(asked, rank)
    world = agreed(number(env, "WORLD_SIZE"), option("--world-size", asked.world_size))
    world = needed(world, "--world-size", rank, "the number of ranks")
    check_world(world)
    check_below(rank, world)
    local_rank = agreed(number(env, "LOCAL_RANK"), option("--local-rank", asked.local_rank))
    local_size = number(env, "LOCAL_WORLD_SIZE")
    check_below(local_rank, local_size)
    coordinator, port = _endpoint(env, asked, rank, others=world.value > 1)
    return Launch(
        place=place(here, "hand", rank.value, world, local_rank=local_rank, local_size=local_size),
        coordinator=coordinator,
        port=port,
        run_id=run_id(asked, None, port),
    )


def by_node(env: Environ, asked: Asked, here: Here) -> Launch:
    """The user starts one process per host, as with torchrun --nnodes --node-rank."""
    nodes, node = option("--nnodes", asked.nnodes), option("--node-rank", asked.node_rank)
    check_positive(nodes)
    nodes = needed(nodes, "--nnodes", node, "the number of hosts")
    node = needed(node, "--node-rank", nodes, f"0 to {nodes.value - 1}, another on each host")
    check_below(node, nodes)
    refuse_single(asked, f"{nodes}, so this process starts all ranks of its host")
    count = ranks_here(asked) or default_count(here, alone=nodes.value == 1)
    world = Given(f"{count} rank(s) on each host under {nodes}, world size", nodes.value * count)
    agreed(world, option("--world-size", asked.world_size))
    check_world(world)
    coordinator, port = _endpoint(env, asked, node, others=nodes.value > 1)
    ranks = tuple(range(node.value * count, (node.value + 1) * count))
    return Launch(
        place=block_place(here, "hand", ranks, world, node.value),
        coordinator=coordinator,
        port=port,
        run_id=run_id(asked, None, port),
        ranks=ranks,
        nodes=nodes.value,
    )


def alone(env: Environ, asked: Asked, here: Here) -> Launch:
    """Nobody launched us: test this host with ranks that we start."""
    refuse_single(asked, "--rank is not given")
    _refuse_half_a_launch(env, asked)
    count = ranks_here(asked) or default_count(here, alone=True)
    ranks = tuple(range(count))
    return Launch(
        place=block_place(here, "standalone", ranks, Given("--nproc-per-node", count), 0),
        coordinator="127.0.0.1",
        port=master_port({}, asked.master_port),
        run_id=run_id(asked, here.fresh),
        ranks=ranks,
        note=" ".join(filter(None, (slurm.batch_note(env, here.host), _core_note(here, count)))),
        nodes=1,
    )


def default_count(here: Here, *, alone: bool) -> int:
    """One rank per GPU. Without GPUs, a host that is alone gets two: one rank cannot test communication."""
    return here.gpus or (2 if alone else 1)


def _endpoint(env: Environ, asked: Asked, who: Given, *, others: bool) -> tuple[str, int]:
    """--master-addr is needed as soon as there are others; --master-port has torch's default."""
    address = master_addr(env, asked.master_addr)
    if address is None and others:
        raise UsageError(f"{who}, but --master-addr is not given: expected the host of rank 0, the same everywhere.")
    return address or "127.0.0.1", master_port(env, asked.master_port) or TORCH_PORT


def _refuse_half_a_launch(env: Environ, asked: Asked) -> None:
    """A world without a rank is a mistake, but a batch script may export MASTER_ADDR and such for its steps."""
    if asked.master_addr is not None:
        raise UsageError(f"--master-addr {asked.master_addr}, but neither --rank nor --node-rank is given.")
    if asked.world_size is not None and asked.world_size != asked.nproc_per_node:
        world = option("--world-size", asked.world_size)
        raise UsageError(f"{world}, but --rank is not given; ranks on this host alone: --nproc-per-node.")
    stray = [name for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") if name in env]
    if stray and number(env, "SLURM_JOB_ID", "SLURM_JOBID") is None:
        unset = " ".join(f"-u {name}" for name in stray)
        raise UsageError(
            f"{stray[0]}={env[stray[0]]}, but RANK is not set: expected the rank of this process in RANK; "
            f"to test this host alone: env {unset} ddpdiag check"
        )


def _core_note(here: Here, count: int) -> str:
    """What shared cores do to measurements."""
    if count <= here.cores:
        return ""
    cores = "one core" if here.cores == 1 else f"{here.cores} cores"
    return f"{count} ranks share {cores} on {here.host}, so speeds say little."
