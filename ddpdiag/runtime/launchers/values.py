"""Values of variables and options, each with its source, so that a message can name what to change."""

import hashlib
import re
from collections.abc import Mapping

from msgspec import Struct

from ddpdiag.errors import UsageError

TORCH_PORT = 29500  # the default of torchrun and of torch.distributed.launch

# Below the ephemeral ports (32768 on Linux), above what services use, and without TORCH_PORT.
DERIVED_PORTS = range(20000, 29000)

Environ = Mapping[str, str]


class Given(Struct, frozen=True):
    """A number and its source; prints as the user would write it."""

    source: str
    value: int

    def __str__(self) -> str:
        return f"{self.source} {self.value}" if self.source.startswith("-") else f"{self.source}={self.value}"


def number(env: Environ, *names: str) -> Given | None:
    """The whole number in the first of these variables that is set."""
    name = next((name for name in names if name in env), None)
    if name is None:
        return None
    text = env[name].strip()
    # At most what an unsigned 32-bit number needs: Slurm's step ids are such.
    if not re.fullmatch(r"[0-9]{1,10}", text):
        raise UsageError(f"{name}={env[name]!r}: expected a whole number, 0 or more.")
    return Given(name, int(text))


def option(name: str, value: int | None) -> Given | None:
    """What the command line says for one option."""
    if value is not None and value < 0:
        raise UsageError(f"{name} {value}: expected a whole number, 0 or more.")
    return None if value is None else Given(name, value)


def agreed(variable: Given | None, given: Given | None) -> Given | None:
    """A value that environment and command line may both give, if they agree."""
    if variable and given and variable.value != given.value:
        raise UsageError(f"{given} contradicts {variable}: expected the same, or only one of them.")
    return variable or given


def confirmed(variable: Given, given: Given | None) -> Given:
    """A value that is there, and that the command line does not contradict."""
    agreed(variable, given)
    return variable


def needed(found: Given | None, name: str, because: object, expected: str) -> Given:
    """The value, which must have been given."""
    if found is None:
        raise UsageError(f"{because}, but {name} is not given: expected {expected}.")
    return found


def check_positive(said: Given | None) -> None:
    """Refuse a size of zero."""
    if said is not None and said.value < 1:
        raise UsageError(f"{said}: expected 1 or more.")


def check_below(rank: Given | None, size: Given | None) -> None:
    """Refuse a rank outside its world, or host."""
    check_positive(size)
    if rank is not None and size is not None and rank.value >= size.value:
        raise UsageError(f"{rank}: expected 0 to {size.value - 1}, because of {size}.")


def port(env: Environ, given: int | None) -> int | None:
    """MASTER_PORT or --master-port."""
    said = agreed(number(env, "MASTER_PORT"), option("--master-port", given))
    if said is not None and not 1 <= said.value <= 65535:
        raise UsageError(f"{said}: expected a port, 1 to 65535.")
    return None if said is None else said.value


def address(env: Environ, given: str | None) -> str | None:
    """MASTER_ADDR or --master-addr: one host name or address."""
    variable = env.get("MASTER_ADDR", "").strip()
    if variable and given and variable != given:
        raise UsageError(f"--master-addr {given} contradicts MASTER_ADDR={variable}: expected the same.")
    if variable:
        return one_host(variable, f"MASTER_ADDR={variable}")
    return one_host(given, f"--master-addr {given}") if given else None


def one_host(name: str, said: str) -> str:
    """The name, if it can be a single host: Slurm's compressed lists are the usual mistake."""
    if set(name) & set("[],"):
        fix = 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        raise UsageError(f"{said}: expected one host, not a list of hosts; in a Slurm job: {fix}")
    if not name.isprintable() or set(name) & set(" /") or name.count(":") == 1:
        raise UsageError(f"{said!r}: expected one host name or address, without a port.")
    return name


def digest(*parts: object) -> str:
    """A short name for these values, the same in every process that knows them."""
    return hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def derived_port(seed: int) -> int:
    """A port for those who share the seed; neighbouring seeds do not meet."""
    return DERIVED_PORTS[seed % len(DERIVED_PORTS)]


def plain_name(text: str) -> str:
    """The text if it can be part of a file name, else its digest: run ids become names of directories."""
    return text if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text) else digest(text)
