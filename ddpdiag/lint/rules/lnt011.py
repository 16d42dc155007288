"""A DistributedSampler is told the wrong rank, number of ranks, or seed.

What: `rank=` is a local rank, `num_replicas=` is the number of this host's GPUs, or `seed=` differs between ranks.

Why: the sampler shares the data out among num_replicas ranks by the rank in the whole job. With a local rank, hosts
train on the same parts and others are never seen. With a seed of its own, each rank draws its part from another order:
parts overlap. Nothing fails.

    DistributedSampler(data, num_replicas=dist.get_world_size(), rank=dist.get_rank())
    DistributedSampler(data)                # the same

Fix: leave rank, num_replicas and seed out. Of one host only, a local rank is right: a warning, and an error where the
script speaks of several hosts. A number from mp.spawn is left alone.

Source: https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler (rank within
num_replicas; seed: "should be identical across all processes").
"""

import ast
from collections.abc import Iterator

from ddpdiag.lint.reading import Reading
from ddpdiag.lint.rule import Hit, Rule
from ddpdiag.lint.syntax import has_unpacking, keyword
from ddpdiag.lint.values import RANKS, Kind, path_or_text
from ddpdiag.model import Severity

_REMEDY = "Leave it out: the sampler asks the process group."


def look(read: Reading) -> Iterator[Hit]:
    """What is passed to samplers."""
    for sampler in read.script.samplers:
        if has_unpacking(sampler):
            continue
        replicas, rank = keyword(sampler, "num_replicas", 1), keyword(sampler, "rank", 2)
        per_host = replicas is not None and read.values.surely(replicas, Kind.LOCAL_WORLD_SIZE)
        if rank is not None and read.values.surely(rank, Kind.LOCAL_RANK) and not per_host:
            message = f"{path_or_text(rank)} is a local rank: hosts train on the same parts of the data"
            yield Hit(rank, message, _REMEDY, read.wrong_on_several_hosts)
        if replicas is not None and per_host and (rank is None or read.values.surely(rank, Kind.RANK)):
            message = f"{path_or_text(replicas)} counts the GPUs of one host, not the ranks of the job"
            yield Hit(replicas, message, _REMEDY, read.wrong_on_several_hosts)
        seed = keyword(sampler, "seed", 4)
        if seed is not None and _differs(read, seed):
            yield Hit(seed, "the seed differs between ranks: their parts of the data overlap", _REMEDY, Severity.ERROR)


def _differs(read: Reading, seed: ast.expr) -> bool:
    """Does a seed surely contain a rank?"""
    return any(isinstance(each, ast.expr) and read.values.surely(each, *RANKS) for each in ast.walk(seed))


RULE = Rule("LNT011", "sampler-of-wrong-rank", Severity.WARNING, __doc__ or "", look)
