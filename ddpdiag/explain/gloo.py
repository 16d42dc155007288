"""What gloo prints: interfaces, connections between ranks, collectives that do not match."""

from ddpdiag.explain.cards import Role, Symptom

SYMPTOMS = (
    Symptom(
        name="gloo-loopback",
        role=Role.CAUSE,
        anchor="SO_ERROR: Connection refused, remote=[127.",
        code="RDZ002.own",
        says="A rank was offered a loopback address by another host, and found nobody there: that host's own name "
        "leads to 127.x, as Debian's and Ubuntu's /etc/hosts have it.",
        confirm="On every host: getent hosts $(hostname)",
        todo="export GLOO_SOCKET_IFNAME=INTERFACE with the one that leads to the other hosts, or correct /etc/hosts.",
        example="RuntimeError: Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:152] timed out "
        "connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:4493",
        source="torch 2.13 (gloo/transport/tcp/pair.cc), observed",
    ),
    Symptom(
        name="gloo-docker-bridge",
        role=Role.CAUSE,
        anchor="remote=[172.17.",
        pattern=r"SO_ERROR: |failed to connect",
        code="RDZ003.shared",
        says="A rank was offered an address of 172.17.0.0/16, which is docker0's on every host: each host finds itself "
        "there instead of its peer.",
        confirm="On every host: ip -br addr; getent hosts $(hostname)",
        todo="export GLOO_SOCKET_IFNAME=INTERFACE (and NCCL_SOCKET_IFNAME) with the one that leads to the other hosts.",
        example="RuntimeError: Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:152] timed out "
        "connecting: SO_ERROR: Connection refused, remote=[172.17.0.1]:10126",
        source="gloo/transport/tcp/pair.cc; docker's default bridge",
    ),
    Symptom(
        name="gloo-refused",
        role=Role.CAUSE,
        anchor="SO_ERROR: Connection refused",
        code="RDZ004.refused",
        says="A rank was refused at the address that another one offered: a firewall rejects the ports of process "
        "groups there, the other process has died, or a file:// store of an earlier job was used again.",
        confirm="From the host that prints it: nc -vz ADDRESS PORT while `nc -l PORT` runs on the other one",
        todo="Open the ephemeral ports (net.ipv4.ip_local_port_range) between the hosts; with file://, a new file.",
        example="RuntimeError: Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:152] timed out "
        "connecting: SO_ERROR: Connection refused, remote=[10.0.0.2]:10126",
        source="torch 2.13 (gloo/transport/tcp/pair.cc), observed",
    ),
    Symptom(
        name="no-route",
        role=Role.CAUSE,
        anchor="No route to host",
        pattern=r"[Gg]loo|SO_ERROR|c10d|NCCL|socket\w{0,20}Connect|client socket|TCPStore",
        code="RDZ004.unreachable",
        says="There is no way from one host to an address of another, or a firewall says so.",
        confirm="On the host that prints it: ip route get ADDRESS; nc -vz ADDRESS PORT",
        todo="Correct the route or the firewall; or name the interface that has a way (GLOO_SOCKET_IFNAME, "
        "NCCL_SOCKET_IFNAME).",
        example="RuntimeError: Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:152] timed out "
        "connecting: SO_ERROR: No route to host, remote=[10.0.0.2]:10126",
        source="gloo/transport/tcp/pair.cc; NCCL misc/socket.cc",
    ),
    Symptom(
        name="gloo-connect-timeout",
        role=Role.WAIT,
        anchor="Connect timeout [",
        pattern=r"gloo/|connectFullMesh",
        code="RDZ004.dropped",
        says="Ranks met in the store, but a connection between two of them never came: a firewall drops the ports of "
        "process groups, a rank offers an address that leads elsewhere, or it died meanwhile. gloo waits five times "
        "its time-out for this.",
        confirm="Between two hosts: nc -l 45000 on one, nc -vz HOST 45000 on the other, in both directions",
        todo="Open the ephemeral ports between the hosts; name the interface with GLOO_SOCKET_IFNAME.",
        example="RuntimeError: Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.h:311] Connect timeout "
        "[none]",
        source="torch 2.13 (gloo/transport/tcp/pair.h), observed",
    ),
    Symptom(
        name="gloo-interface-missing",
        role=Role.CAUSE,
        anchor="Unable to find address for",
        code="RDZ003.missing",
        says="GLOO_SOCKET_IFNAME names an interface that this host does not have, or that has no address. gloo wants "
        "exact names; NCCL takes prefixes, so that one value may fit NCCL and not gloo.",
        confirm="On the host that prints it: ip -br addr",
        todo="Set GLOO_SOCKET_IFNAME to an interface that this host has; names may differ between hosts.",
        example="RuntimeError: [enforce fail at ../gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find "
        "address for: eno1",
        source="torch 2.13 (gloo/transport/tcp/device.cc), observed",
    ),
    Symptom(
        name="gloo-loopback-fallback",
        role=Role.HINT,
        anchor="Unable to resolve hostname to a (local) address",
        code="RDZ002.own",
        says="This host cannot resolve its own name, so gloo offers the loopback address: harmless on one host, and a "
        "hang among several.",
        confirm="getent hosts $(hostname)",
        todo="Put the host's name into /etc/hosts with its real address, or export GLOO_SOCKET_IFNAME=INTERFACE.",
        example="[W ProcessGroupGloo.cpp:752] Warning: Unable to resolve hostname to a (local) address. Using the "
        "loopback address as fallback. Manually set the network interface to bind to with GLOO_SOCKET_IFNAME.",
        source="torch 2.13 (ProcessGroupGloo.cpp), observed",
    ),
    Symptom(
        name="gloo-size-mismatch",
        role=Role.CAUSE,
        anchor="Received data size doesn't match expected size",
        code="RUN003.mismatch",
        says="Ranks called collectives with different sizes or in a different order. The rank that prints this has "
        "the smaller buffer, and may be the innocent one.",
        confirm="Run once with TORCH_DISTRIBUTED_DEBUG=DETAIL: it prints both shapes",
        todo="Look for what depends on the rank before a collective: the last batch, a condition, a model that "
        "differs.",
        example="[enforce fail at ../gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 400000 vs 4. "
        "Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?",
        source="torch 2.13 (gloo/transport/tcp/pair.cc), observed",
    ),
    Symptom(
        name="collective-mismatch",
        role=Role.CAUSE,
        anchor="Detected mismatch between collectives on ranks",
        code="RUN003.mismatch",
        says="Two ranks called different collectives, or the same one with different shapes, at the same point.",
        confirm="The message shows both ranks and both shapes",
        todo="Look for what makes these ranks take different paths: `if rank == 0`, uneven batches, a skipped step.",
        example="RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
        "CollectiveFingerPrint(SequenceNumber=0, OpType=ALLREDUCE, TensorShape=[400000]), but Rank 1 is running "
        "collective: CollectiveFingerPrint(SequenceNumber=0, OpType=ALLREDUCE, TensorShape=[1]).",
        source="torch 2.13 (ProcessGroupWrapper.cpp)",
    ),
    Symptom(
        name="monitored-barrier",
        role=Role.WAIT,
        anchor="failed to pass monitoredBarrier in",
        pattern=r"Ranks? (?P<missing>\d{1,6}(?:, \d{1,6}){0,99}) failed",
        code="RUN003.hung",
        says="The ranks that are named did not come to the barrier in time: they died, hang, or took another path.",
        confirm="py-spy dump --pid PID of a named rank, on its host",
        todo="Start with the output of the named ranks.",
        example="[Rank 0]: Ranks 2 failed to pass monitoredBarrier in 3000 ms",
        source="torch 2.13 (ProcessGroupGloo.cpp)",
    ),
    Symptom(
        name="gloo-operation-timeout",
        role=Role.WAIT,
        anchor="Timed out waiting ",
        pattern=r"Timed out waiting \d+ms for (?:recv|send) operation",
        code="RUN003.hung",
        says="A rank waited in a collective for another one that did not send: it hangs, is stopped, took another "
        "path, or large packets do not pass between the hosts. Nobody is named.",
        confirm="py-spy dump --pid PID on every host: who stands outside of the collective? ping -M do -s 8972 HOST",
        todo="`ddpdiag check` names who hangs, and RDZ004 tells whether large packets pass.",
        example="RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv "
        "operation to complete",
        source="torch 2.13 (gloo/transport/tcp/unbound_buffer.cc), observed",
    ),
    Symptom(
        name="peer-closed",
        role=Role.ECHO,
        anchor="Connection closed by peer [",
        code="RUN003.died",
        says="Another rank ended while this one waited for it. This line is never the cause.",
        confirm="Find the rank that ended first: other errors, exit codes, the kernel's log",
        todo="Look at the rank that failed first.",
        example="RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:8066. This is "
        "typically caused by a remote worker crashing.",
        source="torch 2.13 (gloo/transport/tcp/pair.cc)",
    ),
    Symptom(
        name="peer-reset",
        role=Role.ECHO,
        anchor="Connection reset by peer",
        code="RUN003.died",
        says="Another process ended, or was killed, while this one was connected to it.",
        confirm="Find the process that ended first: other errors, exit codes, the kernel's log",
        todo="Look at the rank that failed first.",
        example="RuntimeError: [../gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:33499: Connection reset by "
        "peer. This is typically caused by a remote worker crashing.",
        source="torch 2.13 (gloo/transport/tcp/pair.cc)",
    ),
    Symptom(
        name="broken-pipe",
        role=Role.ECHO,
        anchor="Broken pipe",
        code="RUN003.died",
        says="A process wrote to another one that has ended.",
        confirm="Find the process that ended first",
        todo="Look at the rank that failed first.",
        example="[W socket.cpp:464] [c10d] sendBytes failed on SocketImpl(fd=3): Broken pipe",
        source="torch (c10d/socket.cpp)",
    ),
)
