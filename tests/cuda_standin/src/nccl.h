// Stand-in for libnccl.so.2: collectives between processes of one machine through /dev/shm, run on the stream's thread of
// the libcudart stand-in, so that they hang there while a peer does not come, until the communicator is aborted.
//
// FAKENCCL_GBPS="p2p=365,shm=22,net=2.4"   bus bandwidth of a ring over the transport that was chosen; 0: as fast as it goes
// FAKENCCL_SLACK_SECONDS                   by how much ranks may be late without a delay for the others
// FAKENCCL_COMMUNICATOR_SECONDS            what making a communicator takes
// FAKENCCL_FAULT, several with ";": a word, then who, when and how:
//   hang         operations never end            raise        they fail with ncclRemoteError, asynchronously
//   kill         SIGKILL                         corrupt      an element of what arrives is wrong
//   slow         take `factor` times as long     init-hang    making a communicator never ends
//   init-raise   it fails with ncclSystemError   init-slow    it takes `seconds`
//   connect-slow posting a communicator's first operation takes `seconds`: since 2.22 NCCL connects its ranks there
//   rank=1       only this rank (RANK, else the communicator's); corrupt: rank 1 without it
//   call=20      from the 20th operation of a communicator on
//   unless=NCCL_P2P_DISABLE=1                    not where the variable has this value; several with "|"
// FAKENCCL_VERSION="2.32.3"                the version that it reports; from 2.31 on it has diagnostics
// FAKENCCL_DIAGNOSTICS                     what it finds beside "[OK]", each line as NCCL has it, separated by "|": "[INFO] ECC:
//                                          ...", "ATTN ..." or "INFO NET/IB: WQE stall ..." for its log
// NCCL_DEBUG, NCCL_DEBUG_FILE (%h, %p) as with NCCL: to standard output by default.
// NCCL_RAS_ADDR="localhost:PORT"           RAS answers there; without it there is none
// NCCL_RUN_DIAGNOSTICS, NCCL_RUN_RAS_DIAGNOSTICS: reports on standard output, that of RAS from another thread.
#pragma once
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <sstream>
#include <string>
#include <vector>

extern "C" int fakecuda_physical(int device);
extern "C" double* fakecuda_clock();
extern "C" void fakecuda_count(const char* what, const char* which);
extern "C" double fakecuda_gbps(int from, int to);

namespace standin {

constexpr size_t kSlot = 1 << 20, kMail = 256 << 10;

inline double machine_now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

// ---- what NCCL writes (nccl_log.cpp)
extern thread_local char tls_error[1024];
int level();
std::string host();
void say(int at, const char* where, int line, const char* format, ...);
int version_code();
void diagnose(int rank, int n);
unsigned long long hash(const std::string& s);
#define INFO(...) say(3, "", 0, __VA_ARGS__)
#define WARN(where, line, ...) say(2, where, line, __VA_ARGS__)

// ---- faults
struct Fault {
  std::string kind, unless;
  int rank = -1, call = 1;
  double factor = 1, seconds = 0;
};
// The fault of this kind that holds for a rank of a communicator at its n-th operation (0: before the first).
const Fault* fault(const char* kind, int rank, int call = 0);

// ---- shared memory
struct Peer {
  std::atomic<int> here;
  int pid, device;
  long bus;
  unsigned long long host;
  int color, key;
  std::atomic<uint64_t> launched[6];       // collectives, by the first values of Kind
  alignas(64) std::atomic<uint64_t> bar;   // on the stream
  alignas(64) std::atomic<uint64_t> bar2;  // on the calling threads
  struct { int kind, root, type; size_t count; double begun, factor; } posted;
};
struct Mail {
  alignas(64) std::atomic<uint64_t> head;
  alignas(64) std::atomic<uint64_t> tail;
  size_t size[2];
  std::atomic<double> sent, received;  // when either end began
};
inline size_t total(int n) { return n * sizeof(Peer) + 4096 + (n + 1) * kSlot + size_t(n) * n * (sizeof(Mail) + 2 * kMail); }
}  // namespace standin

struct ncclComm {
  int rank, n, device;
  std::string name;
  char* base = nullptr;
  std::atomic<bool> abort{false};
  std::atomic<int> running{0}, error{0};
  uint64_t bar = 0, bar2 = 0, splits = 0, done = 0;
  std::atomic<uint64_t> tickets{0}, turn{0};  // operations of one communicator run in the order of their calls, on any stream
  std::mutex m;
  std::map<int, std::pair<double, const void*>> scales;
  std::map<int, ncclDataType_t> scale_types;
  int next_op = ncclNumOps;
  std::string last;
  double rate = 0, slack = 0, latest = 0, factor = 1;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;

  standin::Peer& peer(int r) { return ((standin::Peer*)base)[r]; }
  char* slot(int r) { return base + (n * sizeof(standin::Peer) + 4095) / 4096 * 4096 + r * standin::kSlot; }
  standin::Mail& mail(int from, int to) {
    return *(standin::Mail*)(slot(n + 1) + (size_t(from) * n + to) * (sizeof(standin::Mail) + 2 * standin::kMail));
  }
  char* letter(int from, int to, uint64_t i) { return (char*)(&mail(from, to) + 1) + (i % 2) * standin::kMail; }
  bool wait(std::atomic<uint64_t>& a, uint64_t least) {
    for (int i = 0; a.load(std::memory_order_acquire) < least; i++) {
      if (abort) return false;
      if (i < 30) sched_yield();
      else usleep(i < 1000 ? 30 : 500);
    }
    return true;
  }
  bool barrier() {
    peer(rank).bar.store(++bar, std::memory_order_release);
    for (int r = 0; r < n; r++)
      if (!wait(peer(r).bar, bar)) return false;
    return true;
  }
  bool barrier2() {
    peer(rank).bar2.store(++bar2, std::memory_order_release);
    for (int r = 0; r < n; r++)
      if (!wait(peer(r).bar2, bar2)) return false;
    return true;
  }
};

namespace standin {

void ras_add(ncclComm* c);
void ras_remove(ncclComm* c);

struct BF16 {
  uint16_t v;
  operator float() const {
    uint32_t u = uint32_t(v) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
  }
  BF16() = default;
  BF16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    v = uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
};

#define TYPES(CALL)                                     \
  switch (type) {                                       \
    case ncclInt8: { using T = int8_t; CALL; break; }   \
    case ncclUint8: { using T = uint8_t; CALL; break; } \
    case ncclInt32: { using T = int32_t; CALL; break; } \
    case ncclUint32: { using T = uint32_t; CALL; break; } \
    case ncclInt64: { using T = int64_t; CALL; break; } \
    case ncclUint64: { using T = uint64_t; CALL; break; } \
    case ncclFloat16: { using T = _Float16; CALL; break; } \
    case ncclFloat32: { using T = float; CALL; break; } \
    case ncclFloat64: { using T = double; CALL; break; } \
    case ncclBfloat16: { using T = BF16; CALL; break; } \
    default: break;                                     \
  }
enum Kind { kAllReduce = 1, kReduce, kBroadcast, kAllGather, kReduceScatter, kAlltoAll, kGather, kScatter, kSend, kRecv };
extern const char* kNames[];

struct Op {
  Kind kind;
  const char* in;
  char* out;
  size_t count;
  ncclDataType_t type;
  int op, root;  // or the peer
};
struct Task {
  ncclComm* comm;
  uint64_t ticket;
  std::vector<Op> ops;
};

// ---- collectives (nccl_collectives.cpp)
ncclResult_t post(ncclComm* c, cudaStream_t s, Op op);
extern thread_local int tls_depth;  // of ncclGroupStart
ncclResult_t flush();

}  // namespace standin
