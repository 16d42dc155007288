// Stand-in for libnccl.so.2: collectives between processes of one machine through /dev/shm, run on the stream's thread of
// the libcudart stand-in, so that they hang there while a peer does not come, until the communicator is aborted.
//
// FAKENCCL_GBPS="p2p=365,shm=22,net=2.4"   bus bandwidth of a ring over the transport that was chosen; 0: as fast as it goes
// FAKENCCL_SLACK_SECONDS                   by how much ranks may be late without a delay for the others
// FAKENCCL_FAULT, several with ";": a word, then who, when and how:
//   hang         operations never end            raise        they fail with ncclRemoteError, asynchronously
//   kill         SIGKILL                         corrupt      an element of what arrives is wrong
//   slow         take `factor` times as long     init-hang    making a communicator never ends
//   init-raise   it fails with ncclSystemError   init-slow    it takes `seconds`
//   rank=1       only this rank (RANK, else the communicator's); corrupt: rank 1 without it
//   call=20      from the 20th operation of a communicator on
//   unless=NCCL_P2P_DISABLE=1                    not where the variable has this value
// NCCL_DEBUG, NCCL_DEBUG_FILE (%h, %p) as with NCCL: to standard output by default.
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

#define EXPORT __attribute__((visibility("default")))
extern "C" int fakecuda_physical(int device);
extern "C" double* fakecuda_clock();
extern "C" double fakecuda_gbps(int from, int to);

namespace {

constexpr size_t kSlot = 1 << 20, kMail = 256 << 10;

double machine_now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

// ---- what NCCL writes
int level() {
  const char* v = getenv("NCCL_DEBUG");
  if (!v) return 0;
  if (!strcasecmp(v, "VERSION")) return 1;
  if (!strcasecmp(v, "WARN")) return 2;
  if (!strcasecmp(v, "INFO") || !strcasecmp(v, "ABORT")) return 3;
  return !strcasecmp(v, "TRACE") ? 4 : 0;
}
std::string host() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  if (char* dot = strchr(name, '.')) *dot = 0;
  return name;
}
FILE* out() {
  static FILE* f = [] {
    const char* pattern = getenv("NCCL_DEBUG_FILE");
    if (!pattern || level() <= 1) return stdout;
    std::string path;
    for (const char* c = pattern; *c; c++) {
      if (*c != '%') path += *c;
      else if (*++c == 'h') path += host();
      else if (*c == 'p') path += std::to_string(getpid());
      else if (*c) path += *c;
      else break;
    }
    FILE* made = fopen(path.c_str(), "w");
    if (made) setbuf(made, nullptr);
    return made ? made : stdout;
  }();
  return f;
}
thread_local char tls_error[1024] = "";
void say(int at, const char* where, int line, const char* format, ...) {
  char text[1024], whole[1400];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  if (at == 2) snprintf(tls_error, sizeof tls_error, "%s", text);
  if (level() < at) return;
  int device = 0;
  cudaGetDevice(&device);
  std::string head = host() + ":" + std::to_string(getpid()) + ":" + std::to_string(syscall(SYS_gettid));
  if (at == 2)
    snprintf(whole, sizeof whole, "\n%s [%d] %s:%d NCCL WARN %s\n", head.c_str(), device, where, line, text);
  else if (at == 1)
    snprintf(whole, sizeof whole, "%s\n", text);
  else
    snprintf(whole, sizeof whole, "%s [%d] NCCL INFO %s\n", head.c_str(), device, text);
  fputs(whole, out());
  fflush(out());
}
#define INFO(...) say(3, "", 0, __VA_ARGS__)
#define WARN(where, line, ...) say(2, where, line, __VA_ARGS__)

// ---- faults
struct Fault {
  std::string kind, unless;
  int rank = -1, call = 1;
  double factor = 1, seconds = 0;
};
const std::vector<Fault>& faults() {
  static auto* all = [] {
    auto* found = new std::vector<Fault>;
    std::stringstream entries(getenv("FAKENCCL_FAULT") ? getenv("FAKENCCL_FAULT") : "");
    for (std::string entry; std::getline(entries, entry, ';');) {
      std::stringstream words(entry);
      Fault f;
      words >> f.kind;
      for (std::string word; words >> word;) {
        std::string name = word.substr(0, word.find('=')), value = word.substr(word.find('=') + 1);
        if (name == "rank") f.rank = stoi(value);
        else if (name == "call") f.call = stoi(value);
        else if (name == "factor") f.factor = stod(value);
        else if (name == "seconds") f.seconds = stod(value);
        else if (name == "unless") f.unless = value;
        else fprintf(stderr, "fakenccl: what is %s?\n", word.c_str()), abort();
      }
      found->push_back(f);
    }
    return found;
  }();
  return *all;
}
bool is_set(const std::string& condition) {
  size_t at = condition.find('=');
  const char* v = getenv(condition.substr(0, at).c_str());
  return v && condition.substr(at + 1) == v;
}
int rank_of_job(int other) { return getenv("RANK") ? atoi(getenv("RANK")) : other; }
// The fault of this kind that holds for a rank of a communicator at its n-th operation (0: before the first).
const Fault* fault(const char* kind, int rank, int call = 0) {
  for (const Fault& f : faults())
    if (f.kind == kind && (f.rank < 0 || f.rank == rank_of_job(rank)) && (!call || call >= f.call) &&
        (f.unless.empty() || !is_set(f.unless)))
      return &f;
  return nullptr;
}

// ---- shared memory
struct Peer {
  std::atomic<int> here;
  int pid, device;
  long bus;
  unsigned long long host;
  int color, key;
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
size_t total(int n) { return n * sizeof(Peer) + 4096 + (n + 1) * kSlot + size_t(n) * n * (sizeof(Mail) + 2 * kMail); }

}  // namespace

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

  Peer& peer(int r) { return ((Peer*)base)[r]; }
  char* slot(int r) { return base + (n * sizeof(Peer) + 4095) / 4096 * 4096 + r * kSlot; }
  Mail& mail(int from, int to) {
    return *(Mail*)(slot(n + 1) + (size_t(from) * n + to) * (sizeof(Mail) + 2 * kMail));
  }
  char* letter(int from, int to, uint64_t i) { return (char*)(&mail(from, to) + 1) + (i % 2) * kMail; }
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

namespace {

size_t size_of(ncclDataType_t t) {
  switch (t) {
    case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    default: return 8;
  }
}

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

template <class T>
void combine(T* to, const T* from, size_t count, int op) {
  switch (op) {
    case ncclProd: for (size_t i = 0; i < count; i++) to[i] = to[i] * from[i]; break;
    case ncclMax: for (size_t i = 0; i < count; i++) to[i] = std::max<T>(to[i], from[i]); break;
    case ncclMin: for (size_t i = 0; i < count; i++) to[i] = std::min<T>(to[i], from[i]); break;
    default: for (size_t i = 0; i < count; i++) to[i] = to[i] + from[i];
  }
}
template <class T>
void scale(T* to, size_t count, double by) {
  for (size_t i = 0; i < count; i++) to[i] = T(double(to[i]) * by);
}
template <class T>
void divide(T* to, size_t count, int by) {
  for (size_t i = 0; i < count; i++) to[i] = T(to[i] / T(by));
}
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
const char* kNames[] = {"", "AllReduce", "Reduce", "Broadcast", "AllGather", "ReduceScatter", "AlltoAll", "Gather", "Scatter",
                        "Send", "Recv"};

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

double scale_of(ncclComm* c, int op, bool& has) {
  std::lock_guard<std::mutex> l(c->m);
  auto it = c->scales.find(op);
  has = it != c->scales.end();
  if (!has) return 1;
  if (!it->second.second) return it->second.first;
  const void* p = it->second.second;
  double v = 1;
  ncclDataType_t type = c->scale_types[op];
  TYPES(v = double(*(const T*)p));
  return v;
}

bool collective(ncclComm* c, const Op& o) {
  size_t unit = size_of(o.type);
  ncclDataType_t type = o.type;
  int n = c->n, me = c->rank;
  // Who posted something else: NCCL's kernels would wait for each other.
  auto& mine = c->peer(me).posted;
  mine = {o.kind, o.root, 0, o.count, machine_now(), c->factor};
  if (!c->barrier()) return false;
  for (int r = 0; r < n; r++) {
    auto& other = c->peer(r).posted;
    c->latest = std::max(c->latest, other.begun);
    c->factor = std::max(c->factor, other.factor);
    if (other.kind != mine.kind || other.count != mine.count || other.root != mine.root) {
      while (!c->abort) usleep(1000);
      return false;
    }
  }
  if (!c->barrier()) return false;
  bool each = o.kind == kReduceScatter || o.kind == kAlltoAll || o.kind == kScatter;  // a block for each rank
  size_t most = (each ? kSlot / n : kSlot) / unit / 16 * 16;
  char* sum = c->slot(n);
  bool scaled;
  double by = scale_of(c, o.op, scaled);
  bool own = o.kind != kBroadcast && o.kind != kScatter;
  for (size_t at = 0; at < o.count; at += most) {
    size_t k = std::min(most, o.count - at);
    if (own || o.root == me) {
      if (each)
        for (int r = 0; r < n; r++) memcpy(c->slot(me) + r * most * unit, o.in + (r * o.count + at) * unit, k * unit);
      else
        memcpy(c->slot(me), o.in + at * unit, k * unit);
      if (scaled) TYPES(scale((T*)c->slot(me), each ? n * most : k, by));
    }
    if (!c->barrier()) return false;
    switch (o.kind) {
      case kAllReduce:
      case kReduce: {
        size_t part = (k + n - 1) / n, from = std::min(k, part * me), many = std::min(k, from + part) - from;
        memcpy(sum + from * unit, c->slot(0) + from * unit, many * unit);
        for (int r = 1; r < n; r++) TYPES(combine((T*)(sum + from * unit), (T*)(c->slot(r) + from * unit), many, o.op));
        if (o.op == ncclAvg) TYPES(divide((T*)(sum + from * unit), many, n));
        if (!c->barrier()) return false;
        if (o.kind == kAllReduce || o.root == me) memcpy(o.out + at * unit, sum, k * unit);
        break;
      }
      case kBroadcast:
        if (o.out && (o.root != me || o.in != o.out)) memcpy(o.out + at * unit, c->slot(o.root), k * unit);
        break;
      case kAllGather:
      case kGather:
        if (o.kind == kAllGather || o.root == me)
          for (int r = 0; r < n; r++) memcpy(o.out + (r * o.count + at) * unit, c->slot(r), k * unit);
        break;
      case kReduceScatter: {
        char* to = o.out + at * unit;
        memcpy(to, c->slot(0) + me * most * unit, k * unit);
        for (int r = 1; r < n; r++) TYPES(combine((T*)to, (T*)(c->slot(r) + me * most * unit), k, o.op));
        if (o.op == ncclAvg) TYPES(divide((T*)to, k, n));
        break;
      }
      case kAlltoAll:
        for (int r = 0; r < n; r++)
          memcpy(o.out + (r * o.count + at) * unit, c->slot(r) + me * most * unit, k * unit);
        break;
      case kScatter: memcpy(o.out + at * unit, c->slot(o.root) + me * most * unit, k * unit); break;
      default: break;
    }
    if (o.kind != kAllReduce && o.kind != kReduce && !c->barrier()) return false;
  }
  // What a rank broadcasts is not written into its own memory again.
  const Fault* wrong_here = fault("corrupt", me, c->done);
  if (wrong_here && (wrong_here->rank >= 0 || me == 1) && n > 1 && o.out && o.count && !(o.kind == kBroadcast && o.root == me)) {
    char* wrong = o.out + (o.count / 2) * unit;
    wrong[unit - 1] ^= 0x41;
  }
  return true;
}

bool letters(ncclComm* c, const std::vector<Op>& ops) {
  std::vector<size_t> at(ops.size(), 0);
  size_t left = ops.size();
  std::vector<bool> over(ops.size(), false);
  int idle = 0;
  double begun = machine_now();
  for (const Op& o : ops)
    (o.kind == kSend ? c->mail(c->rank, o.root).sent : c->mail(o.root, c->rank).received) = begun;
  while (left) {
    if (c->abort) return false;
    bool moved = false;
    std::map<std::pair<int, int>, bool> busy;  // an earlier letter of the same way goes first
    for (size_t i = 0; i < ops.size(); i++) {
      if (over[i]) continue;
      const Op& o = ops[i];
      auto way = std::make_pair(int(o.kind), o.root);
      if (busy[way]) continue;
      busy[way] = true;
      size_t bytes = o.count * size_of(o.type), k = std::min(kMail, bytes - at[i]);
      Mail& m = o.kind == kSend ? c->mail(c->rank, o.root) : c->mail(o.root, c->rank);
      uint64_t head = m.head.load(), tail = m.tail.load();
      if (o.kind == kSend) {
        if (head - tail >= 2) continue;
        memcpy(c->letter(c->rank, o.root, head), o.in + at[i], k);
        m.size[head % 2] = k;
        m.head.store(head + 1);
      } else {
        if (head == tail) continue;
        k = std::min(k, m.size[tail % 2]);
        memcpy(o.out + at[i], c->letter(o.root, c->rank, tail), k);
        m.tail.store(tail + 1);
      }
      moved = true;
      at[i] += k;
      if (at[i] < bytes) continue;
      over[i] = true, left--;
      c->latest = std::max(c->latest, o.kind == kSend ? m.received.load() : m.sent.load());
    }
    idle = moved ? 0 : idle + 1;
    if (idle > 30) usleep(idle < 1000 ? 30 : 500);
    else if (idle) sched_yield();
  }
  return true;
}

// What a link or ring moves, over the bus bandwidth as nccl-tests defines it, and what NCCL takes for no bytes at all.
double modelled(ncclComm* c, const std::vector<Op>& ops) {
  double moved = 0, received = 0, n = c->n;
  for (const Op& o : ops) {
    double bytes = double(o.count) * size_of(o.type);
    switch (o.kind) {
      case kAllReduce: moved += bytes * 2 * (n - 1) / n; break;
      case kAllGather: case kReduceScatter: case kAlltoAll: case kGather: case kScatter: moved += bytes * (n - 1); break;
      case kRecv: received += bytes; break;
      default: moved += bytes;
    }
  }
  double latency = 8e-6 + 1.5e-6 * (n - 1);
  return (c->rate > 0 ? latency + std::max(moved, received) / c->rate : latency) * c->factor;
}

void run(void* data) {
  std::unique_ptr<Task> task((Task*)data);
  ncclComm* c = task->comm;
  for (int i = 0; !c->abort && c->turn != task->ticket; i++) usleep(i < 1000 ? 20 : 500);
  int call = int(++c->done);
  double begun = c->latest = machine_now();
  const Fault* slow = fault("slow", c->rank, call);
  c->factor = slow ? slow->factor : 1;
  if (fault("kill", c->rank, call)) kill(getpid(), SIGKILL);
  bool hang = fault("hang", c->rank, call);
  if (fault("raise", c->rank, call) && !c->abort) {
    c->error = ncclRemoteError;
    c->last = "NCCL WARN [Proxy Service] socket progress: Connection closed by remote peer";
    hang = true;
  }
  if (hang)
    while (!c->abort) usleep(1000);
  if (!c->abort) {
    if (task->ops[0].kind >= kSend) letters(c, task->ops);
    else for (const Op& o : task->ops) if (!collective(c, o)) break;
  }
  // The GPU's time: from the last rank's start on, of which so much is forgiven as busy cores make ranks late.
  double late = std::max(0.0, c->latest - begun - c->slack), end = begun + late + modelled(c, task->ops);
  if (double* clock = fakecuda_clock()) *clock += end - begun;
  while (c->factor > 1 && !c->abort && machine_now() < end) usleep(500);  // so that an abort ends it
  c->turn++;
  c->running--;
}

// ---- groups
thread_local int tls_depth = 0;
struct Pending {
  ncclComm* comm;
  cudaStream_t stream;
  Op op;
};
thread_local std::vector<Pending>* tls_pending = nullptr;

ncclResult_t enqueue(ncclComm* c, cudaStream_t s, std::vector<Op> ops) {
  int before = 0;
  cudaGetDevice(&before);
  if (before != c->device) cudaSetDevice(c->device);
  c->running++;
  auto* task = new Task{c, c->tickets++, std::move(ops)};
  cudaError_t e = cudaLaunchHostFunc(s, run, task);
  if (before != c->device) cudaSetDevice(before);
  if (e) {
    WARN("enqueue.cc", 1700, "Cuda failure %d '%s'", e, cudaGetErrorString(e));
    c->running--;
    delete task;
    return ncclUnhandledCudaError;
  }
  return ncclSuccess;
}
ncclResult_t post(ncclComm* c, cudaStream_t s, Op op) {
  if (!c || !c->base) {
    WARN("argcheck.cc", 40, "%s : comm argument is NULL", kNames[op.kind]);
    return ncclInvalidArgument;
  }
  if (op.root < 0 || op.root >= c->n) {
    WARN("argcheck.cc", 70, "%s : invalid root %d (root should be in the 0..%d range)", kNames[op.kind], op.root, c->n);
    return ncclInvalidArgument;
  }
  if (c->error) return ncclResult_t(c->error.load());
  if (level() >= 3)
    INFO("%s: opCount %lx sendbuff %p recvbuff %p count %zu datatype %d op %d root %d comm %p [nranks=%d] stream %p",
         kNames[op.kind], (unsigned long)c->done, op.in, op.out, op.count, op.type, op.op, op.root, c, c->n, s);
  if (!op.count) return ncclSuccess;
  if (tls_depth) {
    if (!tls_pending) tls_pending = new std::vector<Pending>;
    tls_pending->push_back({c, s, op});
    return ncclSuccess;
  }
  return enqueue(c, s, {op});
}
ncclResult_t flush() {
  if (!tls_pending) return ncclSuccess;
  std::vector<Pending> all;
  all.swap(*tls_pending);
  std::vector<bool> taken(all.size(), false);
  for (size_t i = 0; i < all.size(); i++) {
    if (taken[i]) continue;
    std::vector<Op> ops{all[i].op};
    if (all[i].op.kind >= kSend)
      for (size_t j = i + 1; j < all.size(); j++)
        if (!taken[j] && all[j].op.kind >= kSend && all[j].comm == all[i].comm && all[j].stream == all[i].stream) {
          ops.push_back(all[j].op);
          taken[j] = true;
        }
    if (ncclResult_t r = enqueue(all[i].comm, all[i].stream, ops)) return r;
  }
  return ncclSuccess;
}

unsigned long long hash(const std::string& s) {
  unsigned long long h = 1469598103934665603ull;
  for (unsigned char ch : s) h = (h ^ ch) * 1099511628211ull;
  return h;
}

// Bytes per second of a ring: of an H100 with NVLink 4 some 365 GB/s busbw; over the slowest pair, where one has its own.
double rate_of(ncclComm* c, const std::string& via) {
  const char* path = via[0] == 'P' ? "p2p" : via[0] == 'S' ? "shm" : "net";
  double found = via[0] == 'P' ? 365 : via[0] == 'S' ? 22 : 2.4;
  std::stringstream words(getenv("FAKENCCL_GBPS") ? getenv("FAKENCCL_GBPS") : "");
  for (std::string word; std::getline(words, word, ',');)
    if (word.rfind(std::string(path) + "=", 0) == 0) found = atof(word.c_str() + strlen(path) + 1);
  for (int r = 0; via[0] == 'P' && r < c->n; r++)
    if (double pair = fakecuda_gbps((c->peer(r).bus - 0x10) / 0x11, (c->peer((r + 1) % c->n).bus - 0x10) / 0x11))
      found = std::min(found, pair);
  return found * 1e9;
}

ncclResult_t create(ncclComm_t* made, int n, const std::string& name, int rank, const ncclConfig_t* config, const char* call) {
  *made = nullptr;
  if (n < 1 || rank < 0 || rank >= n) {
    WARN("init.cc", 2100, "Invalid rank requested : %d/%d", rank, n);
    return ncclInvalidArgument;
  }
  double start = machine_now();
  auto* c = new ncclComm;
  c->rank = rank;
  c->n = n;
  c->name = name;
  if (config) c->config = *config;
  if (cudaError_t e = cudaGetDevice(&c->device)) {
    WARN("init.cc", 2080, "Cuda failure %d '%s'", e, cudaGetErrorString(e));
    delete c;
    return ncclUnhandledCudaError;
  }
  long bus = 0x10 + 0x11 * fakecuda_physical(c->device);
  unsigned long long id = hash(name);
  static std::once_flag once;
  std::call_once(once, [] {
    say(1, "", 0, "NCCL version %d.%d.%d+cuda13.2", NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH);
    INFO("cudaDriverVersion 13020");
    INFO("NCCL version %d.%d.%d+cuda13.2", NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH);
    INFO("NET/Plugin: Could not find: libnccl-net.so");
    for (const char* v : {"NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE", "NCCL_P2P_LEVEL"})
      if (getenv(v)) INFO("%s set by environment to %s.", v, getenv(v));
    INFO("NET/Socket : Using [0]lo:127.0.0.1<0>");
    INFO("Using network Socket");
  });
  INFO("%s comm %p rank %d nranks %d cudaDev %d nvmlDev %d busId %lx commId 0x%llx - Init START", call, c, rank, n, c->device,
       fakecuda_physical(c->device), bus << 12, id);
  if (const Fault* f = fault("init-slow", rank)) usleep(useconds_t(f->seconds * 1e6));
  if (fault("init-raise", rank)) {
    WARN("transport/p2p.cc", 275, "Cuda failure 217 'peer access is not supported between these two devices'");
    delete c;
    return ncclSystemError;
  }
  int fd = shm_open(("/fakenccl-" + name).c_str(), O_RDWR | O_CREAT, 0600);
  if (fd < 0 || ftruncate(fd, total(n))) {
    WARN("misc/shmutils.cc", 96, "Error: failed to extend /dev/shm/nccl-%s to %zu bytes, error: %s (%d)", name.c_str(), total(n), strerror(errno), errno);
    delete c;
    return ncclSystemError;
  }
  c->base = (char*)mmap(nullptr, total(n), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  Peer& own = c->peer(rank);
  own.pid = getpid();
  own.device = c->device;
  own.bus = bus;
  own.host = hash(host());
  own.here.store(1);
  bool hang = fault("init-hang", rank);
  *made = c;  // ncclCommAbort may come from another thread
  if (hang)
    while (!c->abort) usleep(1000);
  bool all = c->barrier2();
  if (rank == 0 || !all) shm_unlink(("/fakenccl-" + name).c_str());
  if (!all) return ncclInternalError;
  for (int r = 0; r < n; r++)
    if (r != rank && c->peer(r).host == own.host && c->peer(r).bus == own.bus) {
      WARN("init.cc", 1060, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %lx", rank, r, bus << 12);
      c->barrier2();
      *made = nullptr;
      return ncclInvalidUsage;
    }
  c->barrier2();
  std::string via = "P2P/CUMEM";
  const char* p2p = getenv("NCCL_P2P_DISABLE");
  const char* shm = getenv("NCCL_SHM_DISABLE");
  int can = 1;
  if (n > 1) cudaDeviceCanAccessPeer(&can, c->device, c->device ? 0 : 1), cudaGetLastError();
  if ((p2p && atoi(p2p)) || !can) via = shm && atoi(shm) ? "NET/Socket/0" : "SHM/direct/direct";
  c->rate = rate_of(c, via);
  c->slack = getenv("FAKENCCL_SLACK_SECONDS") ? atof(getenv("FAKENCCL_SLACK_SECONDS"))
                                              : 0.004 * std::max(1.0, double(n) / sysconf(_SC_NPROCESSORS_ONLN));
  int local = 0, locals = 0;
  std::map<unsigned long long, int> nodes;
  for (int r = 0; r < n; r++) {
    nodes[c->peer(r).host]++;
    if (c->peer(r).host == own.host) locals++, local += r < rank;
  }
  INFO("comm %p rank %d nRanks %d nNodes %d localRanks %d localRank %d MNNVL 0", c, rank, n, int(nodes.size()), locals, local);
  std::string ring;
  for (int r = 0; r < n; r++) ring += " " + std::to_string(r);
  const int channels = 2;
  if (rank == 0)
    for (int ch = 0; ch < channels; ch++) INFO("Channel %02d/%02d :%s", ch, channels, ring.c_str());
  INFO("P2P Chunksize set to %d", via[0] == 'P' ? 524288 : 131072);
  int next = (rank + 1) % n;
  for (int ch = 0; n > 1 && ch < channels; ch++) {
    if (via[0] == 'N' || c->peer(next).host != own.host)
      INFO("Channel %02d/0 : %d[%d] -> %d[%d] [send] via NET/Socket/0", ch, rank, c->device, next, c->peer(next).device);
    else
      INFO("Channel %02d/0 : %d[%d] -> %d[%d] via %s", ch, rank, c->device, next, c->peer(next).device, via.c_str());
  }
  INFO("Connected all rings, use ring PXN 0 GDR 1");
  INFO("%d coll channels, %d collnet channels, 0 nvls channels, %d p2p channels, %d p2p channels per peer", channels, channels,
       channels, channels);
  INFO("%s comm %p rank %d nranks %d cudaDev %d nvmlDev %d busId %lx commId 0x%llx - Init COMPLETE", call, c, rank, n, c->device,
       fakecuda_physical(c->device), bus << 12, id);
  INFO("Init timings - %s: rank %d nranks %d total %.2f (kernels 0.00, alloc 0.00, bootstrap 0.00, allgathers 0.00, topo 0.00, "
       "graphs 0.00, connections 0.00, rest 0.00)", call, rank, n, machine_now() - start);
  return ncclSuccess;
}

void release(ncclComm* c) {
  while (c->running) usleep(200);
  if (c->base) munmap(c->base, total(c->n));
  c->base = nullptr;  // the object leaks: torch may still ask it for its error
}

}  // namespace

extern "C" {
#pragma GCC visibility push(default)

ncclResult_t ncclGetVersion(int* v) { *v = NCCL_VERSION_CODE; return ncclSuccess; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "%08x%08x%08x", random(), random(), unsigned(getpid()));
  return ncclSuccess;
}
ncclResult_t ncclCommGetUniqueId(ncclComm_t, ncclUniqueId* id) { return ncclGetUniqueId(id); }
ncclResult_t ncclCommInitRankConfig(ncclComm_t* c, int n, ncclUniqueId id, int rank, ncclConfig_t* config) {
  return create(c, n, id.internal, rank, config, "ncclCommInitRankConfig");
}
ncclResult_t ncclCommInitRank(ncclComm_t* c, int n, ncclUniqueId id, int rank) {
  return create(c, n, id.internal, rank, nullptr, "ncclCommInitRank");
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* c, int n, int rank, int, ncclUniqueId* ids, ncclConfig_t* config) {
  return create(c, n, ids[0].internal, rank, config, "ncclCommInitRankScalable");
}
ncclResult_t ncclCommInitAll(ncclComm_t* c, int n, const int*) {
  if (n != 1) return ncclInvalidUsage;
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  return create(c, 1, id.internal, 0, nullptr, "ncclCommInitAll");
}
ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t* made, ncclConfig_t* config) {
  *made = nullptr;
  c->peer(c->rank).color = color;
  c->peer(c->rank).key = key;
  if (!c->barrier2()) return ncclInternalError;
  std::vector<std::pair<int, int>> members;
  for (int r = 0; r < c->n; r++)
    if (c->peer(r).color == color) members.push_back({c->peer(r).key, r});
  std::sort(members.begin(), members.end());
  uint64_t number = c->splits++;
  if (!c->barrier2()) return ncclInternalError;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  int rank = 0;
  for (size_t i = 0; i < members.size(); i++)
    if (members[i].second == c->rank) rank = int(i);
  return create(made, int(members.size()), c->name + "-" + std::to_string(number) + "-" + std::to_string(color), rank,
                config ? config : &c->config, "ncclCommSplit");
}
ncclResult_t ncclCommFinalize(ncclComm_t c) {
  if (!c) return ncclInvalidArgument;
  while (c->running && !c->abort) usleep(200);
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t c) {
  if (!c) return ncclSuccess;
  INFO("comm %p rank %d nranks %d cudaDev %d busId %lx - Destroy COMPLETE", c, c->rank, c->n, c->device, c->peer(c->rank).bus << 12);
  release(c);
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t c) {
  if (!c) return ncclSuccess;
  c->abort = true;
  long bus = c->base ? c->peer(c->rank).bus << 12 : 0;
  release(c);
  INFO("comm %p rank %d nranks %d cudaDev %d busId %lx - Abort COMPLETE", c, c->rank, c->n, c->device, bus);
  return ncclSuccess;
}
ncclResult_t ncclCommRevoke(ncclComm_t c, int) { c->abort = true; return ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t* e) { *e = ncclResult_t(c->error.load()); return ncclSuccess; }
const char* ncclGetErrorString(ncclResult_t r) {
  switch (r) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError: return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}
const char* ncclGetLastError(ncclComm_t c) { return c && !c->last.empty() ? c->last.c_str() : tls_error; }
ncclResult_t ncclCommCount(ncclComm_t c, int* n) { *n = c->n; return ncclSuccess; }
ncclResult_t ncclCommCuDevice(ncclComm_t c, int* d) { *d = c->device; return ncclSuccess; }
ncclResult_t ncclCommUserRank(ncclComm_t c, int* r) { *r = c->rank; return ncclSuccess; }
ncclResult_t ncclCommRegister(ncclComm_t, void*, size_t, void** h) { *h = (void*)1; return ncclSuccess; }
ncclResult_t ncclCommDeregister(ncclComm_t, void*) { return ncclSuccess; }
ncclResult_t ncclCommWindowRegister(ncclComm_t, void*, size_t, ncclWindow_t* w, int) { *w = nullptr; return ncclSuccess; }
ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) { return ncclSuccess; }
ncclResult_t ncclMemAlloc(void** p, size_t n) { return cudaMalloc(p, n) ? ncclUnhandledCudaError : ncclSuccess; }
ncclResult_t ncclMemFree(void* p) { return cudaFree(p) ? ncclUnhandledCudaError : ncclSuccess; }
ncclResult_t ncclCommMemStats(ncclComm_t, ncclCommMemStat_t, uint64_t* v) { *v = 0; return ncclSuccess; }
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type, ncclScalarResidence_t where, ncclComm_t c) {
  std::lock_guard<std::mutex> l(c->m);
  int made = c->next_op++;
  double v = 1;
  if (where == ncclScalarHostImmediate) TYPES(v = double(*(const T*)scalar));
  c->scales[made] = {v, where == ncclScalarHostImmediate ? nullptr : scalar};
  c->scale_types[made] = type;
  *op = ncclRedOp_t(made);
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclGroupStart() { tls_depth++; return ncclSuccess; }
ncclResult_t ncclGroupEnd() { return --tls_depth == 0 ? flush() : ncclSuccess; }
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t*) { return ncclGroupEnd(); }

ncclResult_t ncclAllReduce(const void* in, void* out, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
  return post(c, s, {kAllReduce, (const char*)in, (char*)out, n, t, op, 0});
}
ncclResult_t ncclReduce(const void* in, void* out, size_t n, ncclDataType_t t, ncclRedOp_t op, int root, ncclComm_t c, cudaStream_t s) {
  return post(c, s, {kReduce, (const char*)in, (char*)out, n, t, op, root});
}
ncclResult_t ncclBroadcast(const void* in, void* out, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s) {
  return post(c, s, {kBroadcast, (const char*)in, (char*)out, n, t, 0, root});
}
ncclResult_t ncclBcast(void* p, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s) {
  return ncclBroadcast(p, p, n, t, root, c, s);
}
ncclResult_t ncclAllGather(const void* in, void* out, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t s) {
  return post(c, s, {kAllGather, (const char*)in, (char*)out, n, t, 0, 0});
}
ncclResult_t ncclReduceScatter(const void* in, void* out, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
  return post(c, s, {kReduceScatter, (const char*)in, (char*)out, n, t, op, 0});
}
ncclResult_t ncclAlltoAll(const void* in, void* out, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t s) {
  return post(c, s, {kAlltoAll, (const char*)in, (char*)out, n, t, 0, 0});
}
ncclResult_t ncclGather(const void* in, void* out, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s) {
  return post(c, s, {kGather, (const char*)in, (char*)out, n, t, 0, root});
}
ncclResult_t ncclScatter(const void* in, void* out, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s) {
  return post(c, s, {kScatter, (const char*)in, (char*)out, n, t, 0, root});
}
ncclResult_t ncclSend(const void* in, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) {
  return post(c, s, {kSend, (const char*)in, nullptr, n, t, 0, peer});
}
ncclResult_t ncclRecv(void* out, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) {
  return post(c, s, {kRecv, nullptr, (char*)out, n, t, 0, peer});
}
#pragma GCC visibility pop
}

