"""What torch prints of NCCL: its watchdog, and errors that NCCL returned."""

from ddpdiag.explain.cards import Role, Symptom

_FIRST_WARN = "Run again with NCCL_DEBUG=INFO, and read the first line with NCCL WARN of any rank"

SYMPTOMS = (
    Symptom(
        name="watchdog",
        role=Role.WAIT,
        anchor="Watchdog caught collective operation timeout",
        pattern=r"(?:Rank (?P<rank>\d{1,6})\].{0,200})?Watchdog caught(?:.{0,80}SeqNum=(?P<work>\d{1,15}))?",
        code="RUN003.hung",
        says="A collective did not end in time. Whoever prints this waited; the rank at fault printed another SeqNum "
        "or OpType, or nothing at all. NumelIn=1 early in a job is a barrier: one rank still prepares its data.",
        confirm="Compare SeqNum and OpType of all ranks; TORCH_FR_BUFFER_SIZE=2000 and torchfrtrace show who lacks "
        "what",
        todo="Look at the rank with the lowest last enqueued work, or that is silent; "
        "`ddpdiag check` if the path is suspect.",
        example="[rank1]:[E ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for "
        "600004 milliseconds before timing out.",
        source="torch (ProcessGroupNCCL.cpp); Megatron-LM#1207",
    ),
    Symptom(
        name="last-work",
        role=Role.WAIT,
        anchor="ast enqueued NCCL work: ",
        pattern=r"\(default_pg\) Rank (?P<rank>\d{1,6})\].{0,400}ast enqueued NCCL work: (?P<work>\d{1,15})",
        code="RUN003.hung",
        says="torch tells how far this rank came. A rank whose last enqueued collective has a lower number than the "
        "others' never called the one for which they wait.",
        confirm="TORCH_FR_BUFFER_SIZE=2000 and torchfrtrace DIR show which calls are missing",
        todo="Look at the rank with the lowest number: its data loader, a condition on the rank, an exception.",
        example="[rank1]:[E ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank 1] Exception (either an "
        "error or timeout) detected by watchdog at work: 808, last enqueued NCCL work: 811, last completed NCCL work: "
        "807.",
        source="torch (ProcessGroupNCCL.cpp); Megatron-LM#1207",
    ),
    Symptom(
        name="watchdog-stuck",
        role=Role.WAIT,
        anchor="watchdog got stuck for",
        code="RUN003.hung",
        says="A call into CUDA or NCCL did not return on this rank: a kernel that waits for other ranks, or a driver "
        "that hangs.",
        confirm="cat /proc/PID/stack; dmesg | grep -i xid; py-spy dump --pid PID",
        todo="Look for Xid errors on that host, and for ranks that ended before.",
        example="[rank1]:[E ProcessGroupNCCL.cpp:1536] [PG ID 0 PG GUID 0 Rank 1] ProcessGroupNCCL's watchdog got "
        "stuck for 480 seconds without making progress in monitoring enqueued collectives.",
        source="torch (ProcessGroupNCCL.cpp)",
    ),
    Symptom(
        name="heartbeat",
        role=Role.WAIT,
        anchor="Heartbeat monitor timed out",
        code="RUN003.hung",
        says="torch's watchdog thread itself stands still on this rank: a call into CUDA or NCCL did not return.",
        confirm="cat /proc/PID/stack; dmesg | grep -i xid; py-spy dump --pid PID",
        todo="Look for Xid errors on that host, and for ranks that ended before.",
        example="[rank1]:[F ProcessGroupNCCL.cpp:1557] [PG ID 0 PG GUID 0 Rank 1] [PG ID 0 Rank 1] Heartbeat monitor "
        "timed out! Process will be terminated after dumping debug info.",
        source="torch (ProcessGroupNCCL.cpp)",
    ),
    Symptom(
        name="dump-signal",
        role=Role.ECHO,
        anchor="Received a dump signal",
        code="RUN003.hung",
        says="Another rank timed out, and asks this one to write down what it did.",
        confirm="Find the first rank whose watchdog spoke",
        todo="Read the flight recorder's files of all ranks: torchfrtrace DIR.",
        example="[rank0]:[E ProcessGroupNCCL.cpp:1484] [PG ID 0 PG GUID 0 Rank 0] Received a dump signal due to a "
        "collective timeout from rank 3 and we will try our best to dump the debug info.",
        source="torch (ProcessGroupNCCL.cpp)",
    ),
    Symptom(
        name="dump-observed",
        role=Role.ECHO,
        anchor="Observed flight recorder dump signal from another rank",
        code="RUN003.hung",
        says="Another rank timed out, and asks this one to write down what it did.",
        confirm="Find the first rank whose watchdog spoke",
        todo="Read the flight recorder's files of all ranks: torchfrtrace DIR.",
        example="[rank5]:[E ProcessGroupNCCL.cpp:1700] [PG ID 0 PG GUID 0(default_pg) Rank 5] Observed flight recorder "
        "dump signal from another rank via TCPStore.",
        source="torch (ProcessGroupNCCL.cpp)",
    ),
    Symptom(
        name="taken-down",
        role=Role.ECHO,
        anchor="Some NCCL operations have failed or timed out",
        code="RUN003.hung",
        says="torch ends this process because a collective failed before.",
        confirm="Read the lines before it",
        todo="Look for the first error of any rank.",
        example="[E ProcessGroupNCCL.cpp:414] Some NCCL operations have failed or timed out. Due to the asynchronous "
        "nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data.",
        source="torch (ProcessGroupNCCL.cpp)",
    ),
    Symptom(
        name="communicator-aborted",
        role=Role.ECHO,
        anchor="NCCL communicator was aborted on rank",
        pattern=r"aborted on rank (?P<rank>\d{1,6})",
        code="RUN003.hung",
        says="The communicator was given up after an earlier failure.",
        confirm="Read the lines before it",
        todo="Look for the first error of any rank.",
        example="torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.",
        source="torch (ProcessGroupNCCL.cpp)",
    ),
    Symptom(
        name="remote-error",
        role=Role.ECHO,
        anchor="ncclRemoteError",
        code="RUN003.died",
        says="A process on the other side ended, or the network to it failed. This line is never the cause.",
        confirm="Find the rank that ended first; if none did, look at the network",
        todo="Look at the rank that failed first.",
        example="torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:1691, ncclRemoteError: A "
        "call failed possibly due to a network error or a remote process exiting prematurely.",
        source="torch (NCCLUtils), NCCL (init.cc)",
    ),
    Symptom(
        name="barrier-device",
        role=Role.HINT,
        anchor="to perform barrier as devices used by this process are currently unknown",
        code="GPU002.shared",
        says="torch guesses which GPU this rank uses. If the guess is wrong, the job hangs or all ranks take GPU 0.",
        confirm="nvidia-smi: is a process on more than one GPU?",
        todo="torch.cuda.set_device(LOCAL_RANK) before init_process_group, and init_process_group(device_id=...).",
        example="[rank0]:[W225 15:57:58.192362886 ProcessGroupNCCL.cpp:4561] [PG ID 0 PG GUID 0 Rank 0]  using GPU 0 "
        "to perform barrier as devices used by this process are currently unknown.",
        source="torch (ProcessGroupNCCL.cpp); pytorch#60752",
    ),
    Symptom(
        name="nccl-system-error",
        role=Role.FAILURE,
        anchor="unhandled system error",
        code="P2P004.warned",
        says="A system call of NCCL failed: sockets, shared memory, InfiniBand. The line says not which.",
        confirm=_FIRST_WARN,
        todo="Search the log for NCCL WARN; `ddpdiag check` tries the ways one by one (P2P003).",
        example="RuntimeError: NCCL error in: ../ProcessGroupNCCL.cpp:1191, unhandled system error, "
        "NCCL version 2.21.5",
        source="NCCL (init.cc)",
    ),
    Symptom(
        name="nccl-cuda-error",
        role=Role.FAILURE,
        anchor="unhandled cuda error",
        code="P2P004.warned",
        says="A call of NCCL into CUDA failed. The line says not which.",
        confirm=_FIRST_WARN,
        todo="Search the log for NCCL WARN and CUDA error; `ddpdiag check --stage gpu,collective,p2p`.",
        example="torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:1333, unhandled cuda error "
        "(run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5",
        source="NCCL (init.cc)",
    ),
    Symptom(
        name="nccl-internal-error",
        role=Role.FAILURE,
        anchor="ncclInternalError",
        code="P2P004.warned",
        says="NCCL gave up inside: mostly after failed connections, a topology that it does not understand, or ranks "
        "that disagree.",
        confirm=_FIRST_WARN,
        todo="Search the log for NCCL WARN; check that all ranks see the same NCCL and the same variables.",
        example="torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:1970, internal error, "
        "ncclInternalError: Internal check failed.",
        source="torch (NCCLUtils), NCCL (init.cc)",
    ),
    Symptom(
        name="nccl-invalid-usage",
        role=Role.FAILURE,
        anchor="ncclInvalidUsage",
        code="GPU002.shared",
        says="NCCL was called in a way that it does not allow; in training mostly two ranks on one GPU.",
        confirm=_FIRST_WARN,
        todo="Look which GPU each rank takes: torch.cuda.set_device(LOCAL_RANK) must come first.",
        example="ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
        source="torch (NCCLUtils), NCCL (init.cc)",
    ),
)
