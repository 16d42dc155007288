"""From a recording to a report. Pure: the same on the cluster, on a laptop, and years later."""

from ddpdiag.judgement.judge import judge

__all__ = ["judge"]
