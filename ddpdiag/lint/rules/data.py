"""Rules on the distribution of data among the ranks."""

import ast
from collections.abc import Iterator

from ddpdiag.lint import Hit, rule
from ddpdiag.lint.analysis import RANKS, Analysis, Kind, name_or_code
from ddpdiag.lint.script import Function, argument, has_backward, has_unpacking, is_constant, variables_in
from ddpdiag.model import Severity


@rule("LNT008", Severity.ERROR)
def shuffle_with_sampler(script: Analysis) -> Iterator[Hit]:
    """A DataLoader gets both shuffle=True and a sampler.

    What: a DataLoader gets a DistributedSampler and shuffle=True.

    Why: DataLoader refuses both together: "sampler option is mutually exclusive with shuffle".

        DataLoader(data, sampler=sampler, shuffle=True)                # ValueError
        DataLoader(data, sampler=sampler, shuffle=sampler is None)     # right

    Fix: remove shuffle; DistributedSampler(shuffle=True), its default, shuffles.

    Source: https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.DataLoader.
    """
    for loader in script.loaders:
        is_shuffled = is_constant(argument(loader, "shuffle", 2), True)
        if is_shuffled and script.may_be(argument(loader, "sampler", 3), Kind.SAMPLER):
            message = "DataLoader refuses shuffle=True together with a sampler"
            yield Hit(loader, message, "Remove shuffle: the DistributedSampler shuffles.")


@rule("LNT009", Severity.WARNING)
def no_sampler(script: Analysis) -> Iterator[Hit]:
    """Every rank trains on all of the data.

    What: a DataLoader with shuffle=True and without any sampler feeds the training of a DistributedDataParallel;
    nothing else in the script gives each rank a part of its own.

    Why: each rank goes through the whole dataset in its own order. An epoch does the work of one rank as many times as
    there are ranks. Nothing fails, but training is not faster.

    Fix: DataLoader(data, sampler=DistributedSampler(data)), and sampler.set_epoch(epoch) in every epoch.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html ("does not
    chunk or otherwise shard the input").
    """
    if not script.wrappings or not script.group_openings or _mentions_sampler(script):
        return
    for loader in script.loaders:
        is_shuffled = is_constant(argument(loader, "shuffle", 2), True) and not has_unpacking(loader)
        if is_shuffled and _is_unsharded(script, argument(loader, "dataset", 0)) and _feeds_training(script, loader):
            yield Hit(
                loader,
                "every rank goes through all of the data: DistributedDataParallel does not split it among the ranks",
                "Give the DataLoader sampler=DistributedSampler(dataset), without shuffle.",
            )


def _mentions_sampler(script: Analysis) -> bool:
    for node in script.nodes:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)) | ast.alias(name=name):
                if "sampler" in name.lower() or "shard" in name.lower() or name == "IterableDataset":
                    return True
    return False


def _is_unsharded(script: Analysis, dataset: ast.expr | None) -> bool:
    """Whether every rank surely has all data: a dataset of torchvision or a TensorDataset, made without the rank."""
    if dataset is None or script.may_differ_by_rank(dataset):
        return False
    return all(
        isinstance(origin, ast.Call)
        and script.callee_name(origin).startswith(("torchvision.datasets.", "torch.utils.data.TensorDataset"))
        for origin in script.origins(dataset)
    )


def _feeds_training(script: Analysis, loader: ast.Call) -> bool:
    loops = (node for node in script.nodes if isinstance(node, ast.For) and has_backward(node))
    iterated = (name for loop in loops for name in variables_in(loop.iter))
    return any(origin is loader for name in iterated for origin in script.origins(name))


@rule("LNT010", Severity.WARNING)
def no_set_epoch(script: Analysis) -> Iterator[Hit]:
    """set_epoch is not called in the loop over epochs.

    What: every epoch iterates over a DataLoader with a shuffling DistributedSampler, and nothing in the script calls
    set_epoch.

    Why: the sampler shuffles by its seed and its epoch. Without set_epoch the epoch stays 0: every epoch has the same
    order and the same batches, and each rank sees the same part of the data. Nothing fails, but the model is worse.

        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for batch in loader:

    Fix: sampler.set_epoch(epoch) (or loader.sampler.set_epoch) at the start of every epoch.

    Source: https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler (its
    warning); https://github.com/pytorch/pytorch/issues/31771.
    """
    shuffling = [each for each in script.samplers if not is_constant(argument(each, "shuffle", 3), False)]
    if not shuffling or "set_epoch" in script.read_attributes:
        return
    loops = (node for node in script.nodes if isinstance(node, ast.For) and _is_training_loop(script, node))
    epoch_loops = (loop for loop in loops if any(script.may_be(name, Kind.LOADER) for name in variables_in(loop.iter)))
    if any(_is_repeated(script, loop) for loop in epoch_loops):
        message = "set_epoch is never called: the sampler gives the same order in every epoch"
        yield Hit(shuffling[0], message, "Call sampler.set_epoch(epoch) at the start of every epoch.")


def _is_training_loop(script: Analysis, loop: ast.For) -> bool:
    if has_backward(loop) or any(isinstance(node, ast.Yield) for node in ast.walk(loop)):
        return True  # a loop that yields batches is the generator of a training
    calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call)]
    return any(has_backward(function) for call in calls for function in script.callees(call))


def _is_repeated(script: Analysis, node: ast.AST, depth: int = 4) -> bool:
    """Whether a loop encloses `node` in its function, or a call of that function, through `depth` calls at most."""
    for outer in script.ancestors(node):
        if isinstance(outer, (ast.For, ast.While)):
            return True
        if isinstance(outer, Function):
            call_sites = script.call_sites.get(outer, ())
            return depth > 0 and any(_is_repeated(script, site, depth - 1) for site in call_sites)
    return False


_SAMPLER_FIX = "Remove this argument: the sampler asks the process group."


@rule("LNT011", Severity.WARNING)
def sampler_of_wrong_rank(script: Analysis) -> Iterator[Hit]:
    """A DistributedSampler gets the wrong rank, number of ranks, or seed.

    What: `rank=` is a local rank, `num_replicas=` is the number of this host's GPUs, or `seed=` differs between ranks.

    Why: the sampler splits the data among num_replicas ranks by the rank in the whole job. With local ranks, all hosts
    train on the same parts, and no rank sees the other parts. If the seeds differ, each rank draws its part from
    another order: parts overlap. Nothing fails.

        DistributedSampler(data, num_replicas=dist.get_world_size(), rank=dist.get_rank())
        DistributedSampler(data)                # the same

    Fix: remove rank, num_replicas and seed. On a single host a local rank is correct, so this is a warning; it is an
    error if the script mentions several hosts. A number from mp.spawn is accepted.

    Source: https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler (rank within
    num_replicas; seed: "should be identical across all processes").
    """
    for sampler in script.samplers:
        if has_unpacking(sampler):
            continue
        replicas, rank = argument(sampler, "num_replicas", 1), argument(sampler, "rank", 2)
        counts_one_host = replicas is not None and script.is_surely(replicas, Kind.LOCAL_WORLD_SIZE)
        if rank is not None and script.is_surely(rank, Kind.LOCAL_RANK) and not counts_one_host:
            message = f"{name_or_code(rank)} is a local rank: all hosts train on the same parts of the data"
            yield Hit(rank, message, _SAMPLER_FIX, script.several_hosts_severity)
        if replicas is not None and counts_one_host and (rank is None or script.is_surely(rank, Kind.RANK)):
            message = f"{name_or_code(replicas)} counts the GPUs of one host, not the ranks of the job"
            yield Hit(replicas, message, _SAMPLER_FIX, script.several_hosts_severity)
        seed = argument(sampler, "seed", 4)
        if seed is not None and script.contains_surely(seed, *RANKS):
            message = "the seed differs between ranks: their parts of the data overlap"
            yield Hit(seed, message, _SAMPLER_FIX, Severity.ERROR)


# Functions that split data, with the name and position of the argument that fixes their random numbers.
_SPLITS = {
    "torch.utils.data.random_split": ("generator", 2),
    "torch.utils.data.dataset.random_split": ("generator", 2),
    "sklearn.model_selection.train_test_split": ("random_state", None),
}


@rule("LNT012", Severity.ERROR)
def split_differs(script: Analysis) -> Iterator[Hit]:
    """Each rank splits the data differently.

    What: random_split without a generator (or scikit-learn's train_test_split without random_state) on every rank,
    while nothing seeds the random numbers, or every seed contains the rank.

    Why: unseeded processes draw different random numbers. Each rank then holds out other images: one rank trains on
    images that another validates on, and the parts of a DistributedSampler overlap and leave gaps. Nothing fails, but
    the validation result is too good.

        random_split(data, [0.9, 0.1], generator=torch.Generator().manual_seed(0))

    Fix: give the split a generator with a fixed seed.

    Source: https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.random_split (generator);
    https://docs.pytorch.org/docs/stable/notes/randomness.html; https://github.com/TensorAuto/OpenTau/pull/498.
    """
    seeds = [call for call in script.calls if "seed" in script.last_name(call).lower()]
    if not all(any(script.contains_surely(arg, *RANKS) for arg in call.args) for call in seeds):
        return
    for call in script.calls_of(*_SPLITS):
        name, position = _SPLITS[script.callee_name(call)]
        is_random = argument(call, name, position) is None and not is_constant(argument(call, "shuffle"), False)
        if is_random and not has_unpacking(call) and script.runs_on_all_ranks(call):
            fix = "random_state=0." if name == "random_state" else "generator=torch.Generator().manual_seed(0)."
            message = "each rank splits by different random numbers: one rank trains on data that another validates on"
            yield Hit(call, message, f"Fix the split: {fix}")


@rule("LNT014", Severity.WARNING)
def uneven_inputs(script: Analysis) -> Iterator[Hit]:
    """Ranks may train for different numbers of steps.

    What: the training loop iterates over every n-th element, `items[rank::world_size]` or `range(rank, n, world_size)`,
    and nothing makes the shares equal: no join, no drop_last.

    Why: if the number of elements is not a multiple of the world size, some ranks have one more. Their last backward
    pass waits for an all-reduce that the others never join: NCCL hangs until its watchdog fires, gloo ends with
    "Connection closed by peer".

    Fix: DistributedSampler pads (or drops) so that all shares are equal. Otherwise cut the list to a multiple of the
    world size, or train within `with model.join():`.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html#torch.nn.parallel.DistributedDataParallel.join;
    https://github.com/pytorch/pytorch/issues/38174.
    """
    contexts = [item.context_expr for node in script.nodes if isinstance(node, ast.With) for item in node.items]
    context_names = [ast.unparse(each.func) for each in contexts if isinstance(each, ast.Call)]
    is_evened_out = any("Join" in each or each.endswith(".join") for each in context_names) or any(
        is_constant(argument(loader, "drop_last"), True) for loader in script.loaders
    )
    if not script.wrappings or is_evened_out:
        return
    for loop in script.nodes:
        if isinstance(loop, ast.For) and has_backward(loop) and script.contains_surely(loop.iter, Kind.SHARD):
            yield Hit(
                loop,
                "this loop trains on every n-th element: if their number is not a multiple of the world size, some "
                "ranks have one step more than others, and hang in it",
                "Use a DistributedSampler, which makes the shares equal, or `with model.join():`.",
            )


RULES = (shuffle_with_sampler, no_sampler, no_set_epoch, sampler_of_wrong_rank, split_differs, uneven_inputs)
