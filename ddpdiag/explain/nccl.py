"""What NCCL itself prints."""

from ddpdiag.explain.cards import Role, Symptom

SYMPTOMS = (
    Symptom(
        name="duplicate-gpu",
        role=Role.CAUSE,
        anchor="Duplicate GPU",
        pattern=r"(?:rank (?P<rank>\d{1,6}) and rank \d+|Duplicate GPU)",
        code="GPU002.shared",
        says="Two ranks take the same GPU: the script does not call torch.cuda.set_device(LOCAL_RANK), all ranks are "
        "shown the same single GPU, or there are more ranks than GPUs.",
        confirm="In every rank print LOCAL_RANK, CUDA_VISIBLE_DEVICES and "
        "torch.cuda.get_device_properties(torch.cuda.current_device()).uuid",
        todo="Call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) first; start one process per GPU.",
        example="ncclInvalidUsage: This usually reflects invalid usage of NCCL library. Last error: Duplicate GPU "
        "detected : rank 1 and rank 0 both on CUDA device 1000",
        source="NCCL up to 2.29 (init.cc); fairchem#597, Megatron-LM#661",
    ),
    Symptom(
        name="duplicate-gpu-new",
        role=Role.CAUSE,
        anchor="Multiple Ranks are using the same GPU",
        code="GPU002.shared",
        says="Two ranks take the same GPU or the same slice of one (MIG).",
        confirm="In every rank print LOCAL_RANK, CUDA_VISIBLE_DEVICES and "
        "torch.cuda.get_device_properties(torch.cuda.current_device()).uuid",
        todo="Call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) first; start one process per GPU.",
        example="n0:71:90 [0] init.cc:1057 NCCL WARN Multiple Ranks are using the same GPU/Partition. Set "
        "NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this configuration.",
        source="NCCL 2.30 (init.cc)",
    ),
    Symptom(
        name="nccl-versions",
        role=Role.CAUSE,
        anchor="Mismatched NCCL version detected",
        code="P2P004.mixed-versions",
        says="Ranks load different versions of NCCL.",
        confirm="On every host: python -c 'import torch; print(torch.cuda.nccl.version())'; "
        "grep libnccl /proc/PID/maps shows which file",
        todo="Use one environment on all hosts; unset LD_LIBRARY_PATH and LD_PRELOAD that bring another NCCL.",
        example="n0:71:90 [0] init.cc:1043 NCCL WARN Mismatched NCCL version detected : rank 0 version 22907 rank 1 "
        "version 22605",
        source="NCCL (init.cc)",
    ),
    Symptom(
        name="nccl-shm",
        role=Role.CAUSE,
        anchor="NCCL WARN Error: failed to extend /dev/shm",
        code="HST003.small",
        says="/dev/shm is full or small: a container's default is 64 MiB.",
        confirm="df -h /dev/shm; ls -l /dev/shm",
        todo="docker run --shm-size=1g or --ipc=host; remove nccl-* and torch_* files that nobody holds.",
        example="n0:71:90 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-03v824 to 4194660 "
        "bytes",
        source="NCCL documentation, troubleshooting",
    ),
    Symptom(
        name="nccl-shm-fallocate",
        role=Role.CAUSE,
        anchor="Call to posix_fallocate failed",
        code="HST003.small",
        says="/dev/shm is full or small: a container's default is 64 MiB.",
        confirm="df -h /dev/shm; ls -l /dev/shm",
        todo="docker run --shm-size=1g or --ipc=host; remove nccl-* and torch_* files that nobody holds.",
        example="include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device",
        source="NCCL up to 2.18; nccl#342",
    ),
    Symptom(
        name="nccl-shm-unlinked",
        role=Role.CAUSE,
        anchor="NCCL WARN unlink shared memory",
        code="HST003.missing",
        says="Files in /dev/shm vanished while the job ran: systemd removes those of users without a session.",
        confirm="grep RemoveIPC /etc/systemd/logind.conf",
        todo="Set RemoveIPC=no in logind.conf, and restart systemd-logind.",
        example="NCCL WARN unlink shared memory /dev/shm/nccl-d5rTd0 failed, error: No such file or directory",
        source="NCCL documentation, runtime and MPI issues",
    ),
    Symptom(
        name="nccl-no-interface",
        role=Role.CAUSE,
        anchor="no socket interface found",
        code="RDZ003.missing",
        says="NCCL finds no interface that NCCL_SOCKET_IFNAME allows.",
        confirm="echo $NCCL_SOCKET_IFNAME; ip -br addr",
        todo="Unset NCCL_SOCKET_IFNAME, or name an interface that this host has.",
        example="n0:71:71 [0] bootstrap.cc:126 NCCL WARN Bootstrap : no socket interface found",
        source="NCCL (bootstrap.cc)",
    ),
    Symptom(
        name="nccl-memlock",
        role=Role.CAUSE,
        anchor="failed with error Cannot allocate memory",
        pattern=r"Call to ibv_",
        code="HST004.locked-memory",
        says="The limit of locked memory is too low for InfiniBand.",
        confirm="Inside of the job, not of a login shell: ulimit -l",
        todo="Raise memlock: limits.conf and LimitMEMLOCK of slurmd, docker --ulimit memlock=-1.",
        example="n0:71:90 [0] misc/ibvwrap.cc:252 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate "
        "memory",
        source="NCCL (misc/ibvwrap.cc); nccl-tests#206",
    ),
    Symptom(
        name="nccl-gid",
        role=Role.CAUSE,
        anchor="Call to ibv_modify_qp failed",
        code="P2P004.warned",
        says="InfiniBand or RoCE could not connect two ports: mostly a GID index that is not valid there, or ports of "
        "different fabrics.",
        confirm="show_gids, or ls /sys/class/infiniband/*/ports/*/gids; echo $NCCL_IB_GID_INDEX $NCCL_IB_HCA",
        todo="Unset NCCL_IB_GID_INDEX (since NCCL 2.21 it is found by itself); NCCL_IB_HCA must name ports of one "
        "fabric.",
        example="NCCL WARN Call to ibv_modify_qp failed with error Invalid argument errno 22",
        source="NCCL (misc/ibvwrap.cc, environment variables)",
    ),
    Symptom(
        name="nccl-completion",
        role=Role.CAUSE,
        anchor="Got completion from peer",
        code="P2P004.warned",
        says="The network card gave up sending to a peer (status 12: no acknowledgement after all retries): a cable, "
        "a port, a switch, RoCE without flow control, or a peer that is gone.",
        confirm="ibstat; rdma statistic show; compare symbol_error and link_downed before and after on both hosts",
        todo="Look at the ports of the two hosts that the line names; `ddpdiag check --stage fabric` finds a bad host.",
        example="n0:71:90 [0] transport/net_ib.cc:712 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<41234> "
        "with status=12 opcode=0 len=0 vendor err 129",
        source="NCCL (transport/net_ib)",
    ),
    Symptom(
        name="consumer-gpus",
        role=Role.CAUSE,
        anchor="series doesn't support faster communication broadband via P2P or IB",
        code="P2P001",
        says="accelerate refuses cards by their name, RTX 4000 (older versions: RTX 3090, too), unless the way around "
        "is set.",
        confirm="nvidia-smi topo -p2p r; nvidia-smi topo -m (cards that NVLinks join can copy to each other)",
        todo="export NCCL_P2P_DISABLE=1 NCCL_IB_DISABLE=1, or start with accelerate launch, which sets both; where "
        "NVLinks join the cards, update accelerate instead.",
        example="NotImplementedError: Using RTX 4000 series doesn't support faster communication broadband via P2P or "
        'IB. Please set `NCCL_P2P_DISABLE="1"` and `NCCL_IB_DISABLE="1" or use `accelerate launch` which will do this '
        "automatically.",
        source="accelerate (state.py); accelerate#2328",
    ),
    Symptom(
        name="nvls-invalid",
        role=Role.CAUSE,
        anchor="NCCL WARN Cuda failure",
        pattern=r"transport/nvls\.cc:\d+",
        code="GPU007.fabric",
        says="NVLink SHARP does not work on this host: mostly the fabric manager does not run as it should.",
        confirm="systemctl status nvidia-fabricmanager; nvidia-smi -q | grep -A3 Fabric",
        todo="Restart the fabric manager and reset the GPUs; until then NCCL_NVLS_ENABLE=0.",
        example="n0:71:90 [0] transport/nvls.cc:244 NCCL WARN Cuda failure 1 'invalid argument'",
        source="NCCL (transport/nvls.cc)",
    ),
    Symptom(
        name="nvls",
        role=Role.CAUSE,
        anchor="Failed to bind NVLink SHARP (NVLS) Multicast memory",
        code="GPU007.fabric",
        says="NVLink SHARP does not work on this host: mostly the fabric manager does not run as it should.",
        confirm="systemctl status nvidia-fabricmanager; nvidia-smi -q | grep -A3 Fabric",
        todo="Restart the fabric manager and reset the GPUs; until then NCCL_NVLS_ENABLE=0.",
        example="NCCL WARN Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401 'the "
        "operation cannot be performed in the present state'.",
        source="NCCL (transport/nvls.cc); pytorch#177472",
    ),
    Symptom(
        name="mnnvl",
        role=Role.CAUSE,
        anchor="is available but not working on this system. Check the IMEX",
        code="GPU007",
        says="GPUs of several hosts share NVLinks, but the service that this needs (IMEX) is not usable here.",
        confirm="ls -l /dev/nvidia-caps-imex-channels; systemctl status nvidia-imex",
        todo="Start nvidia-imex and show its channel to the container; until then NCCL_MNNVL_ENABLE=0.",
        example="NCCL WARN MNNVL (cliqueSize 8) is available but not working on this system. Check the IMEX channel "
        "configuration (/dev/nvidia-caps-imex-channels).",
        source="NCCL (mnnvl.cc)",
    ),
    Symptom(
        name="nccl-truncated",
        role=Role.CAUSE,
        anchor="NCCL WARN Message truncated : received",
        code="RUN003.mismatch",
        says="Two ranks sent messages of different sizes to each other: they are in different calls, or another job "
        "answers on this port.",
        confirm="Run once with TORCH_DISTRIBUTED_DEBUG=DETAIL",
        todo="Look for what makes ranks take different paths; check that hosts run one version of NCCL.",
        example="NCCL WARN Message truncated : received 1024 bytes instead of 256",
        source="NCCL (bootstrap.cc)",
    ),
    Symptom(
        name="net-devices-differ",
        role=Role.CAUSE,
        anchor="Detected mixed local Net device counts across ranks",
        code="P2P004.warned",
        says="Hosts have different numbers of network cards that NCCL can use: one is down, or hidden from the "
        "container.",
        confirm="On every host: ibdev2netdev, or ls /sys/class/infiniband",
        todo="Repair or leave out the host with fewer cards.",
        example="NCCL WARN Detected mixed local Net device counts across ranks (min 7, max 8). Set "
        "NCCL_IGNORE_NET_MISMATCH=1 to ignore it.",
        source="NCCL 2.30 (init.cc)",
    ),
    Symptom(
        name="p2p-disabled",
        role=Role.HINT,
        anchor="P2P is disabled between NVLINK connected GPUs",
        code="P2P001.disabled",
        says="GPUs that NVLinks join may not copy to each other directly.",
        confirm="nvidia-smi topo -p2p r; nvidia-smi nvlink -s",
        todo="Look for a registry key of the driver, a control group, or a link that is down.",
        example="NCCL WARN P2P is disabled between NVLINK connected GPUs 0 and 1. This should not be the case given "
        "their connectivity",
        source="NCCL (graph/paths.cc)",
    ),
    Symptom(
        name="gdr-disabled",
        role=Role.NOTE,
        anchor="GPU Direct RDMA Disabled for",
        code="P2P004.no-gdr",
        says="NCCL copies through the host's memory to this network card: slower, not broken.",
        confirm="lsmod | grep nvidia_peermem",
        todo="Load nvidia-peermem, or use the open kernel modules with DMA-BUF.",
        example="n0:71:90 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'",
        source="NCCL (transport/net_ib); nccl#1537",
    ),
    Symptom(
        name="nccl-peer-closed",
        role=Role.ECHO,
        anchor="Connection closed by remote peer",
        code="RUN003.died",
        says="The process at the other end of a connection of NCCL has gone.",
        confirm="Find the rank that ended first",
        todo="Look at the rank that failed first.",
        example="n0:71:90 [0] misc/socket.cc:58 NCCL WARN socketProgress: Connection closed by remote peer n1<41234>",
        source="NCCL (misc/socket.cc)",
    ),
    Symptom(
        name="nccl-connect",
        role=Role.CAUSE,
        anchor="onnect: ",
        pattern=r"socket(?:Start|Poll)Connect: [Cc]onnect (?:to|returned)(?!.*\bretrying\b)",
        code="RDZ004",
        says="NCCL cannot connect to the address that another rank offers: a firewall, or an interface that leads "
        "nowhere.",
        confirm="From the host that prints it: nc -vz ADDRESS PORT; ip -br addr on both",
        todo="export NCCL_SOCKET_IFNAME=INTERFACE that leads to the other hosts; open the ephemeral ports.",
        example="[2026-02-25 16:41:56] n0:71:90 [0] misc/socket.cc:578 NCCL WARN socketPollConnect: connect to "
        "172.17.0.1<34567> returned Connection refused, exceeded error retry count after 35 attempts",
        source="NCCL (misc/socket.cc)",
    ),
    Symptom(
        name="nccl-undefined-symbol",
        role=Role.CAUSE,
        anchor="undefined symbol: nccl",
        code="LCH003.nccl",
        says="torch found an NCCL of another version than the one it was built with.",
        confirm="pip list | grep nccl; echo $LD_LIBRARY_PATH; ldd .../torch/lib/libtorch_cuda.so | grep nccl",
        todo="Uninstall the second nvidia-nccl wheel; unset LD_LIBRARY_PATH that brings another one.",
        example="ImportError: /venv/lib/python3.11/site-packages/torch/lib/libtorch_cuda.so: undefined symbol: "
        "ncclCommRegister",
        source="pytorch#119932, nccl#1180",
    ),
)
