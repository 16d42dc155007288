"""The variables that P2P003 tries: what each avoids, what points to it, and why it is needed."""

from collections.abc import Sequence
from typing import NamedTuple

from ddpdiag.checks.p2p.fallback.search import Member, Members


class Variable(NamedTuple):
    """An NCCL variable to try. `texts` are parts of NCCL's messages about the feature that the variable turns off.

    `seen_by` are codes of checks or of findings that show the same cause. `usual` is the cause if none of these is in
    the report.
    """

    member: Member
    texts: tuple[str, ...] = ()
    seen_by: tuple[str, ...] = ()
    usual: str = ""


# `texts` are names of NCCL's source files (src/transport, src/misc, src/mnnvl.cc) and its messages.
_INSIDE = (
    Variable(
        Member("P2P", {"NCCL_P2P_DISABLE": "1"}, "direct copies between GPUs (P2P)"),
        texts=("p2p.cc", "P2P is disabled", "failed to peer", "peer mapping", "cudaIpc", "CUDA IPC"),
        # Without the fabric manager NVLinks carry nothing. NCCL uses /dev/shm to set P2P up, and instead of P2P.
        seen_by=("GPU007", "GPU001.isolated", "P2P001.disabled", "P2P001.acs", "HST003"),
        usual="ACS or an IOMMU blocks direct copies between the GPUs. Look for ACSCtl in `lspci -vvv` (as root), turn "
        "ACS and the IOMMU off in the BIOS, or boot with iommu=pt; a virtual machine needs them on",
    ),
    # With this value NCCL's shared memory is a file in /dev/shm, which is as fast (transport/shm.cc, since 2.24).
    Variable(
        Member("CUMEM_HOST", {"NCCL_CUMEM_HOST_ENABLE": "0"}, "shared memory by cuMem"),
        # For GPUs without peer access (RTX 4090, L4, T4, A10; NCCL issue 1838), and a segment of size 0 (issue 2190).
        texts=("Cuda failure 217", "attaching to shared memory segment"),
        usual="GPUs without peer access (NCCL issue 1838; a later NCCL or driver may not need it), "
        "a container without permission to set memory policies (docker --cap-add SYS_NICE), or uneven NUMA nodes",
    ),
    Variable(
        Member("SHM", {"NCCL_SHM_DISABLE": "1"}, "shared memory (/dev/shm)"),
        texts=("/dev/shm", "shmutils", "transport/shm.cc", "posix_fallocate"),
        seen_by=("HST003",),
        usual="the ranks' containers do not share /dev/shm, or it is too small. Use docker --shm-size=1g --ipc=host",
    ),
    Variable(
        Member("NVLS", {"NCCL_NVLS_ENABLE": "0"}, "NVLink SHARP (NVLS)"),
        texts=("nvls", "NVLS", "multicast", "Multicast"),
        seen_by=("GPU007", "GPU006"),
        usual="the version of nvidia-fabricmanager is not the driver's, or it does not run. Compare them, look for "
        "SXid lines in `dmesg`, and reset the GPUs after a restart of the service",
    ),
    # With this value there is no CUMEM_HOST and no NVLS either.
    Variable(
        Member("CUMEM", {"NCCL_CUMEM_ENABLE": "0"}, "device memory by cuMem"),
        texts=("cuMem",),
        usual="the driver cannot share device memory between these processes. Compare the control groups and "
        "containers of the ranks (GPU001), and try another driver",
    ),
)
_ACROSS = (
    # NCCL looks for MNNVL only if it runs on several hosts (init.cc, mnnvl.cc).
    Variable(
        Member("MNNVL", {"NCCL_MNNVL_ENABLE": "0"}, "NVLinks between hosts (MNNVL)"),
        texts=("MNNVL", "IMEX"),
    ),
    Variable(
        Member("GDR", {"NCCL_NET_GDR_LEVEL": "LOC"}, "GPUDirect RDMA"),
        texts=("DMA-BUF", "dmabuf", "nv_peer_mem", "GPU Direct RDMA", "ibv_reg_mr"),
        usual="GPUDirect RDMA does not work with this card: nvidia_peermem, or ACS on the path",
    ),
    Variable(
        Member("PXN", {"NCCL_PXN_DISABLE": "1"}, "sending through other GPUs' network adapters (PXN)"),
        texts=("PXN",),
    ),
    Variable(
        Member("PLUGIN", {"NCCL_NET_PLUGIN": "none"}, "the network plugin"),
        texts=("NET/Plugin", "libnccl-net", "NET/OFI"),
        usual="the network plugin that NCCL loads does not work here. Check LD_LIBRARY_PATH",
    ),
    Variable(
        Member("IB", {"NCCL_IB_DISABLE": "1"}, "InfiniBand or RoCE"),
        texts=("net_ib", "NET/IB", "ibv_", "IBV_WC"),
        usual="InfiniBand or RoCE is present and carries no data. Check port state and GID (`ibv_devinfo -v`), the "
        "limit of locked memory (`ulimit -l`) and partition keys",
    ),
)
# The template of one member for each interface.
IFNAME = Variable(
    Member("IFNAME", {"NCCL_SOCKET_IFNAME": "="}, "the interfaces that NCCL would choose"),
    seen_by=("RDZ003", "RDZ002"),
    usual="NCCL chooses an interface that does not reach the other hosts (RDZ003)",
)
INSIDE = tuple(variable.member for variable in _INSIDE)
ACROSS = tuple(variable.member for variable in _ACROSS)
VARIABLES = {variable.member.name: variable for variable in (*_INSIDE, *_ACROSS, IFNAME)}


def interface_overrides(names: Sequence[str]) -> Members:
    """One override of NCCL_SOCKET_IFNAME for each interface name."""
    return tuple(
        IFNAME.member._replace(name=f"IFNAME {name}", env={"NCCL_SOCKET_IFNAME": f"={name}"}) for name in names
    )
