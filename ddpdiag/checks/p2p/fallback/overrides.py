"""The overrides that may get NCCL around what does not work, and the user's own that stand in the way.

What each variable does: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from collections.abc import Mapping, Sequence

from ddpdiag.checks.p2p.fallback.search import Member, Members

# NCCL's configuration files by path, as their variables.
Files = Mapping[str, Mapping[str, str]]
_CONF_FILE = "NCCL_CONF_FILE"

P2P = Member("P2P", {"NCCL_P2P_DISABLE": "1"}, "direct copies between GPUs (P2P)")
SHM = Member("SHM", {"NCCL_SHM_DISABLE": "1"}, "shared memory (/dev/shm)")
NVLS = Member("NVLS", {"NCCL_NVLS_ENABLE": "0"}, "NVLink SHARP (NVLS)")
CUMEM = Member("CUMEM", {"NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0"}, "memory shared by cuMem")
INSIDE = (P2P, SHM, NVLS, CUMEM)
GDR = Member("GDR", {"NCCL_NET_GDR_LEVEL": "LOC"}, "GPUDirect RDMA")
PLUGIN = Member("PLUGIN", {"NCCL_NET_PLUGIN": "none"}, "the network plugin")
IB = Member("IB", {"NCCL_IB_DISABLE": "1"}, "InfiniBand or RoCE")
ACROSS = (GDR, PLUGIN, IB)

# They only watch, or say where something is written.
_WATCHING = ("NCCL_DEBUG", "NCCL_RAS", "NCCL_TOPO_DUMP", "NCCL_GRAPH_DUMP", "NCCL_PROFILER", "NCCL_CONF_FILE")
# Whatever their value, they narrow what NCCL would choose by itself.
_NARROWING = frozenset(
    {
        "NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_NTHREADS", "NCCL_BUFFSIZE",
        "NCCL_HOSTID", "NCCL_P2P_LEVEL", "NCCL_SHM_LEVEL", "NCCL_NET_GDR_LEVEL",
    }
)  # fmt: skip
# With these values they take a way out of use.
_CLOSING = {
    "NCCL_P2P_DISABLE": "1", "NCCL_P2P_DIRECT_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0", "NCCL_NET_GDR_READ": "0",
    "NCCL_NET": "socket", "NCCL_NET_PLUGIN": "none",
}  # fmt: skip


def own_overrides(settings: Mapping[str, str], files: Files) -> Members:
    """A member for each NCCL variable that is set, which takes it away; and one for a configuration file of the user.

    The environment wins over /etc/nccl.conf, but only what that disables has a value that undoes it.
    """
    names = [name for name in sorted(settings) if name.startswith("NCCL_") and not name.startswith(_WATCHING)]
    variables = tuple(Member(f"no {name}", {name: None}, f"{name}={settings[name]}") for name in names)
    own = [path for path in files if not path.startswith("/etc/")]
    user = (Member(f"no {path}", {_CONF_FILE: "/dev/null"}, path) for path in own[:1])
    disabled = (
        Member(f"no {name}", {name: "0"}, f"{name}=1 in {path}")
        for path, rows in files.items()
        for name, value in rows.items()
        if path.startswith("/etc/") and name not in settings and name.endswith("_DISABLE") and value.strip() == "1"
    )
    return (*variables, *user, *disabled)


def holding_back(settings: Mapping[str, str], files: Files, own: Members) -> Members:
    """Those of the user's own that cost speed where nothing needs them."""
    in_files = {name: value for rows in files.values() for name, value in rows.items()}

    def is_one(member: Member) -> bool:
        if _CONF_FILE in member.env:
            return any(holds_back(name, value) for name, value in files[member.what].items() if name not in settings)
        return any(holds_back(name, settings.get(name, in_files.get(name))) for name in member.env)

    return tuple(filter(is_one, own))


def holds_back(name: str, value: str | None) -> bool:
    """Does a variable with this value cost speed where nothing needs it?"""
    if value is None:
        return False
    return name in _NARROWING or _CLOSING.get(name) == value.strip().lower()


def interface_rungs(names: Sequence[str]) -> Members:
    """One alternative for each interface."""
    return tuple(
        Member(f"IFNAME {name}", {"NCCL_SOCKET_IFNAME": f"={name}"}, "the interfaces that NCCL would choose")
        for name in names
    )
