"""All symptoms. The first one of this order that fits a line is taken, so that special texts stand before general."""

from functools import cache

from ddpdiag.explain import cuda, gloo, host, launchers, nccl, rendezvous, scheduler, training, watchdog
from ddpdiag.explain.cards import Symptom


@cache
def all_symptoms() -> tuple[Symptom, ...]:
    """Every symptom, special ones first."""
    return (
        *scheduler.SYMPTOMS,
        *cuda.SYMPTOMS,
        *nccl.SYMPTOMS,
        *watchdog.SYMPTOMS,
        *gloo.SYMPTOMS,
        *rendezvous.SYMPTOMS,
        *training.SYMPTOMS,
        *host.SYMPTOMS,
        *launchers.SYMPTOMS,
    )
