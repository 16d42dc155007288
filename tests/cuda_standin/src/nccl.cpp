// Communicators and the interface of the stand-in for NCCL.
#include "nccl.h"

#include <fcntl.h>

#include <random>

namespace standin {

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
    int code = version_code();
    say(1, "", 0, "NCCL version %d.%d.%d+cuda13.2", code / 10000, code / 100 % 100, code % 100);
    INFO("cudaDriverVersion 13020");
    INFO("NCCL version %d.%d.%d+cuda13.2", code / 10000, code / 100 % 100, code % 100);
    INFO("NET/Plugin: Could not find: libnccl-net.so");
    for (const char* v : {"NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE", "NCCL_P2P_LEVEL"})
      if (getenv(v)) INFO("%s set by environment to %s.", v, getenv(v));
    INFO("NET/Socket : Using [0]lo:127.0.0.1<0>");
    INFO("Using network Socket");
  });
  INFO("%s comm %p rank %d nranks %d cudaDev %d nvmlDev %d busId %lx commId 0x%llx - Init START", call, c, rank, n, c->device,
       fakecuda_physical(c->device), bus << 12, id);
  fakecuda_count("communicator", (name + " " + std::to_string(n)).c_str());
  if (const char* seconds = getenv("FAKENCCL_COMMUNICATOR_SECONDS")) usleep(useconds_t(atof(seconds) * 1e6));
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
  diagnose(rank, n);
  ras_add(c);
  return ncclSuccess;
}

void release(ncclComm* c) {
  while (c->running) usleep(200);
  ras_remove(c);
  if (c->base) munmap(c->base, total(c->n));
  c->base = nullptr;  // the object leaks: torch may still ask it for its error
}
}  // namespace standin
using namespace standin;

extern "C" {
#pragma GCC visibility push(default)

ncclResult_t ncclGetVersion(int* v) { *v = version_code(); return ncclSuccess; }
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
