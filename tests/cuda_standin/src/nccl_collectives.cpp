// Collectives and messages of the stand-in for NCCL: values, what they take, and when they end.
#include "nccl.h"

namespace standin {

size_t size_of(ncclDataType_t t) {
  switch (t) {
    case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    default: return 8;
  }
}

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
const char* kNames[] = {"", "AllReduce", "Reduce", "Broadcast", "AllGather", "ReduceScatter", "AlltoAll", "Gather", "Scatter",
                        "Send", "Recv"};

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
  if (const Fault* f = c->tickets ? nullptr : fault("connect-slow", c->rank)) usleep(useconds_t(f->seconds * 1e6));
  for (const Op& op : ops)
    if (op.kind <= kReduceScatter) c->peer(c->rank).launched[op.kind]++;
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
  const char* subsystems = getenv("NCCL_DEBUG_SUBSYS");
  if (level() >= 3 && subsystems && (strstr(subsystems, "COLL") || strstr(subsystems, "ALL")))
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

}  // namespace standin
