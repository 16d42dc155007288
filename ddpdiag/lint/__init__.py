"""Pitfalls of DistributedDataParallel that can be read off a training script, which is never run and never imported.

One file is read at a time (`Script`): names are followed through imports, assignments, attributes, and the calls of
its own functions. A rule speaks where every value that a name can have is known to be wrong, and is silent where one of
them is unknown: a script that is right must stay silent, and a pitfall that is spread over several files may be missed.
"""

from ddpdiag.lint.reading import Rule
from ddpdiag.lint.rules import all_rules, rule_of

__all__ = ["Rule", "all_rules", "rule_of"]
