"""What is printed while processes look for each other: names, ports, the store, files that all share."""

from ddpdiag.explain.cards import Role, Symptom

SYMPTOMS = (
    Symptom(
        name="port-taken",
        role=Role.CAUSE,
        anchor="ddress already in use",
        # Alone it is what torch printed before 1.10.
        pattern=r"server socket|EADDRINUSE|c10d|DistNetworkError|TCPStore|"
        r"^(?:message: |RuntimeError: )?[Aa]ddress already in use$",
        code="RDZ005.taken",
        says="Another process listens on MASTER_PORT of rank 0's host: another job with the same default port, one "
        "that did not end, or a second launcher of this job.",
        confirm="On rank 0's host: ss -ltnp 'sport = :29500'",
        todo="End the process that holds the port, or take another: "
        "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 9000)); on a single host torchrun --standalone.",
        example="torch.distributed.DistNetworkError: The server socket has failed to listen on any local network "
        "address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        source="torch 2.13 (c10d/socket.cpp)",
    ),
    Symptom(
        name="client-timeout",
        role=Role.WAIT,
        anchor="The client socket has timed out after",
        code="RDZ005",
        says="A process did not reach MASTER_ADDR:MASTER_PORT. torch prints this for a name that is unknown, a host on "
        "which nobody listens, a firewall that drops, and one that rejects alike.",
        confirm="On the host that prints it: getent hosts $MASTER_ADDR; nc -vz $MASTER_ADDR $MASTER_PORT",
        todo="Let `ddpdiag check --stage rendezvous` tell the four apart; look first whether rank 0 was started.",
        example="torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to "
        "connect to (n0, 29500).",
        source="torch 2.13 (c10d/socket.cpp)",
    ),
    Symptom(
        name="client-failed",
        role=Role.WAIT,
        anchor="The client socket has failed to connect to",
        code="RDZ005",
        says="A connection to the coordinator was refused or found no way; c10d goes on trying until its time-out.",
        confirm="On the host that prints it: nc -vz $MASTER_ADDR $MASTER_PORT",
        todo="Look whether rank 0 was started, then for a firewall; `ddpdiag check --stage rendezvous` tells which.",
        example="[W socket.cpp:601] [c10d] The client socket has failed to connect to [n0]:29500 (errno: 111 - "
        "Connection refused).",
        source="torch (c10d/socket.cpp)",
    ),
    Symptom(
        name="name-unknown",
        role=Role.HINT,
        anchor="network addresses of (",
        pattern=r"cannot be retrieved \(gai error",
        code="RDZ002.unknown",
        says="This host's resolver does not know the name of the coordinator. If it happens once while pods start, it "
        "is harmless; before a time-out it is the reason.",
        confirm="On the host that prints it: getent hosts $MASTER_ADDR",
        todo="Give MASTER_ADDR as a name that every host knows, or as an address; under Slurm expand the list of nodes "
        "with scontrol show hostnames.",
        example="[W socket.cpp:697] [c10d] The IPv6 network addresses of (n0, 29500) cannot be retrieved (gai error: "
        "-2 - Name or service not known).",
        source="torch 2.13 (c10d/socket.cpp)",
    ),
    Symptom(
        name="name-unknown-python",
        role=Role.CAUSE,
        anchor="socket.gaierror",
        code="RDZ002.unknown",
        says="A name could not be resolved on this host.",
        confirm="On the host that prints it: getent hosts NAME",
        todo="Correct /etc/hosts or DNS of that host, or give an address.",
        example="socket.gaierror: [Errno -3] Temporary failure in name resolution",
        source="Python (socket)",
    ),
    Symptom(
        name="clients-missing",
        role=Role.WAIT,
        anchor="clients joined",
        pattern=r"Timed out after \d+ seconds waiting for clients",
        code="RUN001.absent",
        says="Rank 0 waited for all ranks, and some never came. torch does not say which.",
        confirm="Look for ranks that printed nothing, or that failed before this line; squeue -j JOB -o %N for hosts.",
        todo="Read the output of the missing ranks first; `ddpdiag check` calls the roll and names them.",
        example="torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 3/4 clients "
        "joined.",
        source="torch 2.13 (c10d/TCPStore.cpp)",
    ),
    Symptom(
        name="key-missing",
        role=Role.WAIT,
        anchor="wait timeout after",
        pattern=r"keys: (?:/default_pg/\d+//\w+//\d+/(?P<missing>\d{1,6})\b)?",
        code="RUN001.absent",
        says="A process waited for what another one should have written into the store; the last number of the key is "
        "the rank that did not come (or the node, if the key has torchelastic in it).",
        confirm="Read the output of the rank that the key names.",
        todo="Start with that rank: it died, was never started, does not reach the store, or has another world size.",
        example="torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//cpu//0/1",
        source="torch 2.13 (c10d/TCPStore.cpp), observed",
    ),
    Symptom(
        name="unique-id-timeout",
        role=Role.WAIT,
        anchor="and retrieving ncclUniqueId from [",
        pattern=r"\[(?P<rank>\d{1,6})\] is setting up NCCL communicator .* from \[(?P<missing>\d{1,6})\]",
        code="RUN003.hung",
        says="A rank waited for another one (mostly rank 0) to begin the same first collective. Most often that one "
        "still reads or downloads data, or waits for input; or it has died.",
        confirm="Look at what the awaited rank did meanwhile: py-spy dump --pid PID on its host.",
        todo="Do slow preparations before init_process_group, or give init_process_group a longer timeout.",
        example="[rank1]: torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving "
        "ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Socket Timeout",
        source="torch (ProcessGroupNCCL.cpp); LLaMA-Factory#424, accelerate#2528",
    ),
    Symptom(
        name="store-gone",
        role=Role.ECHO,
        anchor="Connection was likely closed. Did the remote server shutdown or crash?",
        code="RUN002.lost",
        says="The process that holds the store (rank 0, or torchrun's agent) has gone. Something ended it before.",
        confirm="Read the end of the output of rank 0 and of torchrun on the first host.",
        todo="Find out why rank 0 or the first agent ended.",
        example="torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did "
        "the remote server shutdown or crash?",
        source="torch 2.13 (c10d/TCPStore.cpp)",
    ),
    Symptom(
        name="rendezvous-timeout",
        role=Role.WAIT,
        anchor="RendezvousTimeoutError",
        code="RUN001.absent",
        says="torchrun waited for other hosts that did not come: one was not started, or has another --rdzv-id, "
        "--rdzv-endpoint or --nnodes.",
        confirm="Compare torchrun's command line on all hosts: ps -ef | grep torchrun",
        todo="Start torchrun on every host, with the same id, endpoint and number of hosts.",
        example="torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
        source="torch 2.13 (elastic/rendezvous)",
    ),
    Symptom(
        name="rendezvous-connection",
        role=Role.WAIT,
        anchor="RendezvousConnectionError",
        code="RDZ005",
        says="torchrun lost, or never had, the connection to its rendezvous endpoint.",
        confirm="On the host that prints it: nc -vz HOST PORT with the host and port of --rdzv-endpoint",
        todo="Open that port between the hosts; look whether the first torchrun still runs.",
        example="torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store "
        "has failed. See inner exception for details.",
        source="torch 2.13 (elastic/rendezvous/c10d_rendezvous_backend.py)",
    ),
    Symptom(
        name="variable-missing",
        role=Role.CAUSE,
        anchor="expected, but not set",
        pattern=r"nvironment variable \w+",
        code="LCH001",
        says="The script was started without a launcher, or by one that does not set RANK, WORLD_SIZE, MASTER_ADDR "
        "and MASTER_PORT.",
        confirm="In the same shell or step: env | grep -E 'RANK|WORLD_SIZE|MASTER'",
        todo="Start it with torchrun; or, under srun, export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID "
        "WORLD_SIZE=$SLURM_NTASKS.",
        example="ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK "
        "expected, but not set",
        source="torch 2.13 (distributed/rendezvous.py)",
    ),
    Symptom(
        name="port-out-of-range",
        role=Role.CAUSE,
        anchor="port must have value from 0 to 65535",
        code="RDZ005",
        says="MASTER_PORT is no port.",
        confirm="echo $MASTER_PORT",
        todo="Choose one of 1024 to 32767; derived from a job's number, keep it in range with a modulo.",
        example="ValueError: port must have value from 0 to 65535 but was 70000.",
        source="torch 2.13 (observed)",
    ),
    Symptom(
        name="file-store-full",
        role=Role.CAUSE,
        anchor="DistStoreError: No space left on device",
        code="RDZ006.full",
        says="The directory of the file:// store has no room on this host.",
        confirm="df -h DIR; df -i DIR",
        todo="Make room there, or take another directory that all hosts share.",
        example="torch.distributed.DistStoreError: No space left on device",
        source="torch 2.13 (c10d/FileStore.cpp), observed",
    ),
    Symptom(
        name="file-store-read-only",
        role=Role.CAUSE,
        anchor="DistStoreError: Read-only file system",
        code="RDZ006.read-only",
        says="The directory of the file:// store is mounted read-only on this host.",
        confirm="findmnt -T DIR",
        todo="Mount it writable, or take another directory that all hosts share.",
        example="torch.distributed.DistStoreError: Read-only file system",
        source="torch 2.13 (c10d/FileStore.cpp), observed",
    ),
    Symptom(
        name="file-store-denied",
        role=Role.CAUSE,
        anchor="DistStoreError: Permission denied",
        code="RDZ006.denied",
        says="The file:// store may not be written by this user on this host.",
        confirm="ls -ld DIR; touch DIR/probe",
        todo="Correct the directory's owner or mode, or take another one.",
        example="torch.distributed.DistStoreError: Permission denied",
        source="torch 2.13 (c10d/FileStore.cpp)",
    ),
    Symptom(
        name="file-store-locks",
        role=Role.CAUSE,
        anchor="No locks available",
        pattern=r"^(?!.*unable to lock file)",
        code="RDZ006.locks",
        says="The file system does not give locks on this host, which a file:// store needs.",
        confirm="flock DIR/probe true",
        todo="Start the lock manager (NFS: lockd, rpc.statd), or mount with locks (Lustre: flock).",
        example="torch.distributed.DistStoreError: No locks available",
        source="torch 2.13 (c10d/FileStore.cpp), observed",
    ),
    Symptom(
        name="file-store-wait",
        role=Role.WAIT,
        anchor="RuntimeError: Wait timeout",
        code="RDZ006",
        says="A process waited in a file:// store for another one that never wrote there: it is not started, or it "
        "sees another directory, or an old file was used again.",
        confirm="ls -l FILE on every host: same size, same time?",
        todo="Give each job a file of its own on a file system that all hosts share.",
        example="RuntimeError: Wait timeout",
        source="torch 2.13 (c10d/FileStore.cpp), observed",
    ),
    Symptom(
        name="no-libuv",
        role=Role.CAUSE,
        anchor="use_libuv was requested but PyTorch was built without libuv support",
        code="LCH003",
        says="This build of torch has no libuv, which its store takes by default.",
        confirm="python -c 'import torch; print(torch.__config__.show())'",
        todo="export USE_LIBUV=0 on all ranks, or install a build with libuv.",
        example="torch.distributed.DistStoreError: use_libuv was requested but PyTorch was built without libuv "
        "support, run with USE_LIBUV=0 to disable it.",
        source="torch 2.13 (c10d/TCPStore.cpp)",
    ),
    Symptom(
        name="reverse-lookup",
        role=Role.NOTE,
        anchor="The hostname of the client socket cannot be retrieved. err=",
        code="RDZ002.reverse",
        says="An address has no name in DNS. Harmless by itself; a name server that does not answer at all makes each "
        "connection slow.",
        confirm="time getent hosts ADDRESS",
        todo="Nothing, unless the start is slow: then give the hosts names in /etc/hosts or DNS.",
        example="[W1122 05:12:27.271453898 socket.cpp:207] [c10d] The hostname of the client socket cannot be "
        "retrieved. err=-3",
        source="torch 2.13 (c10d/socket.cpp)",
    ),
)
