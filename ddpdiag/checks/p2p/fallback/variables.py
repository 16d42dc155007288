"""The variables that P2P003 tries: the feature that each turns off, signs that it fails, and the usual cause."""

from collections.abc import Sequence
from typing import NamedTuple

from ddpdiag.checks.p2p.fallback.search import Override, Overrides


class Variable(NamedTuple):
    """An NCCL variable to try. `error_texts` are parts of NCCL's messages about the feature that it turns off.

    `finding_codes` are codes of checks or findings that show why the feature fails. `cause` is the cause to report
    if the report has none of these findings.
    """

    override: Override
    error_texts: tuple[str, ...] = ()
    finding_codes: tuple[str, ...] = ()
    cause: str = ""


# The error texts are names of NCCL's source files (src/transport, src/misc, src/mnnvl.cc) and parts of its messages.
_INSIDE_HOSTS = (
    Variable(
        Override("P2P", {"NCCL_P2P_DISABLE": "1"}, "direct copies between GPUs (P2P)"),
        error_texts=("p2p.cc", "P2P is disabled", "failed to peer", "peer mapping", "cudaIpc", "CUDA IPC"),
        # Without the fabric manager NVLinks carry no data (GPU007). NCCL uses /dev/shm to set P2P up (HST003).
        finding_codes=("GPU007", "GPU001.isolated", "P2P001.disabled", "P2P001.acs", "HST003"),
        cause="ACS or an IOMMU blocks direct copies between the GPUs. Look for ACSCtl in `lspci -vvv` (as root), turn "
        "ACS and the IOMMU off in the BIOS, or boot with iommu=pt; a virtual machine needs them on",
    ),
    # With this value NCCL's shared memory is a file in /dev/shm, which is as fast (transport/shm.cc, since 2.24).
    Variable(
        Override("CUMEM_HOST", {"NCCL_CUMEM_HOST_ENABLE": "0"}, "shared memory by cuMem"),
        # Seen with GPUs without peer access (RTX 4090, L4, T4, A10; NCCL issue 1838), and a segment of size 0 (2190).
        error_texts=("Cuda failure 217", "attaching to shared memory segment"),
        cause="GPUs without peer access (NCCL issue 1838; a later NCCL or driver may not need it), "
        "a container without permission to set memory policies (docker --cap-add SYS_NICE), or uneven NUMA nodes",
    ),
    Variable(
        Override("SHM", {"NCCL_SHM_DISABLE": "1"}, "shared memory (/dev/shm)"),
        error_texts=("/dev/shm", "shmutils", "transport/shm.cc", "posix_fallocate"),
        finding_codes=("HST003",),
        cause="the ranks' containers do not share /dev/shm, or it is too small. Use docker --shm-size=1g --ipc=host",
    ),
    Variable(
        Override("NVLS", {"NCCL_NVLS_ENABLE": "0"}, "NVLink SHARP (NVLS)"),
        error_texts=("nvls", "NVLS", "multicast", "Multicast"),
        finding_codes=("GPU007", "GPU006"),
        cause="the version of nvidia-fabricmanager is not the driver's, or it does not run. Compare them, look for "
        "SXid lines in `dmesg`, and reset the GPUs after a restart of the service",
    ),
    # This value also turns CUMEM_HOST and NVLS off.
    Variable(
        Override("CUMEM", {"NCCL_CUMEM_ENABLE": "0"}, "device memory by cuMem"),
        error_texts=("cuMem",),
        cause="the driver cannot share device memory between these processes. Compare the control groups and "
        "containers of the ranks (GPU001), and try another driver",
    ),
)
_BETWEEN_HOSTS = (
    # NCCL looks for MNNVL only if it runs on several hosts (init.cc, mnnvl.cc).
    Variable(
        Override("MNNVL", {"NCCL_MNNVL_ENABLE": "0"}, "NVLinks between hosts (MNNVL)"),
        error_texts=("MNNVL", "IMEX"),
    ),
    Variable(
        Override("GDR", {"NCCL_NET_GDR_LEVEL": "LOC"}, "GPUDirect RDMA"),
        error_texts=("DMA-BUF", "dmabuf", "nv_peer_mem", "GPU Direct RDMA", "ibv_reg_mr"),
        cause="GPUDirect RDMA does not work with this card: nvidia_peermem, or ACS on the path",
    ),
    Variable(
        Override("PXN", {"NCCL_PXN_DISABLE": "1"}, "sending through other GPUs' network adapters (PXN)"),
        error_texts=("PXN",),
    ),
    Variable(
        Override("PLUGIN", {"NCCL_NET_PLUGIN": "none"}, "the network plugin"),
        error_texts=("NET/Plugin", "libnccl-net", "NET/OFI"),
        cause="the network plugin that NCCL loads does not work here. Check LD_LIBRARY_PATH",
    ),
    Variable(
        Override("IB", {"NCCL_IB_DISABLE": "1"}, "InfiniBand or RoCE"),
        error_texts=("net_ib", "NET/IB", "ibv_", "IBV_WC"),
        cause="InfiniBand or RoCE is present and carries no data. Check port state and GID (`ibv_devinfo -v`), the "
        "limit of locked memory (`ulimit -l`) and partition keys",
    ),
)
# The template of the overrides of `interface_overrides`, one for each interface.
INTERFACE = Variable(
    Override("IFNAME", {"NCCL_SOCKET_IFNAME": "="}, "the interfaces that NCCL would choose"),
    finding_codes=("RDZ003", "RDZ002"),
    cause="NCCL chooses an interface that does not reach the other hosts (RDZ003)",
)
INSIDE_HOSTS = tuple(variable.override for variable in _INSIDE_HOSTS)
BETWEEN_HOSTS = tuple(variable.override for variable in _BETWEEN_HOSTS)
VARIABLES = {variable.override.name: variable for variable in (*_INSIDE_HOSTS, *_BETWEEN_HOSTS, INTERFACE)}


def interface_overrides(names: Sequence[str]) -> Overrides:
    """One override of NCCL_SOCKET_IFNAME for each interface name."""
    return tuple(
        INTERFACE.override._replace(name=f"IFNAME {name}", env={"NCCL_SOCKET_IFNAME": f"={name}"}) for name in names
    )
