// Memory of the stand-in for libcudart: copies and what they take, peers, pinned memory, memory shared between processes.
#include "cudart.h"

#include <fcntl.h>
#include <sys/mman.h>

namespace standin {

// The words after "NAME=" or "NAME:" in a list with commas.
static const std::vector<std::pair<std::string, std::string>>& listed(const char* variable, char between) {
  static std::mutex m;
  static auto* all = new std::map<std::string, std::vector<std::pair<std::string, std::string>>>;
  std::lock_guard<std::mutex> l(m);
  auto [it, fresh] = all->try_emplace(variable);
  std::string text = env(variable, "");
  for (size_t at = 0; fresh && at < text.size();) {
    size_t end = std::min(text.find(',', at), text.size());
    std::string one = text.substr(at, end - at);
    size_t mid = one.find(between);
    if (mid != std::string::npos) it->second.push_back({one.substr(0, mid), one.substr(mid + 1)});
    at = end + 1;
  }
  return it->second;
}

static std::string pair_of(int from, int to) {
  auto physical = [](int i) { return std::to_string(world().devices[i]->physical); };
  return physical(from) + ">" + physical(to);
}

static char fault_between(int from, int to) {  // 'c'orrupt, 'h'ang, 'd'ie or 0
  if (from < 0 || to < 0 || from == to) return 0;
  for (const auto& [kind, where] : listed("FAKECUDA_P2P_FAULT", ':'))
    if (where == "*" || where == pair_of(from, to)) return kind[0];
  return 0;
}

static bool is_direct(int from, int to) {
  return from >= 0 && to >= 0 && from != to &&
         (world().devices[from]->peers.count(to) || world().devices[to]->peers.count(from));
}

// Bytes per second of a copy: on an H100 with NVLink 4 and PCIe 5 x16 (nvbandwidth: 55 GB/s to and from the host, some 380
// GB/s each way between two GPUs). FAKECUDA_GBPS changes them: "p2p", "staged" (between GPUs without peer access), "to"
// and "from" (the host), "pageable", "local", for one pair "0>1", for one GPU's host link "to3" and "from3".
static double rate(int from, int to, bool pinned) {
  const char* path = from < 0 && to < 0 ? "pageable" : from == to ? "local" : from < 0 ? "to" : to < 0 ? "from" : "p2p";
  std::string own = path;
  if (from < 0 && to >= 0) own += std::to_string(world().devices[to]->physical);
  if (to < 0 && from >= 0) own += std::to_string(world().devices[from]->physical);
  if (!strcmp(path, "p2p")) {
    own = pair_of(from, to);
    if (!is_direct(from, to)) own = path = "staged";
  } else if (own != path && !pinned) {
    path = "pageable";
  }
  static const std::map<std::string, double> usual{{"p2p", 380}, {"staged", 24}, {"to", 55},
                                                   {"from", 55}, {"local", 1300}, {"pageable", 12}};
  double found = usual.at(path);
  for (const auto& [name, value] : listed("FAKECUDA_GBPS", '='))
    if (name == path) found = atof(value.c_str());
  for (const auto& [name, value] : listed("FAKECUDA_GBPS", '='))
    if (name == own) found = atof(value.c_str());
  return found * 1e9;
}

// In pieces: glibc writes large blocks past the caches, which is slower here by a factor of three.
static void move_bytes(void* dst, const void* src, size_t size) {
  constexpr size_t kPiece = 256 << 10;
  if ((char*)dst > (char*)src && (char*)dst < (char*)src + size) {
    memmove(dst, src, size);
    return;
  }
  for (size_t at = 0; at < size; at += kPiece) memmove((char*)dst + at, (char*)src + at, std::min(kPiece, size - at));
}

static void moved(void* dst, const void* src, size_t size, int from, int to) {
  char fault = is_direct(from, to) ? fault_between(from, to) : 0;
  if (fault == 'h')
    for (;;) sleep(1000);
  if (fault == 'd') _exit(139);
  move_bytes(dst, src, size);
  if (fault == 'c' && size) ((char*)dst)[size / 2] ^= 0x5a;
}

constexpr double kCopySeconds = 3e-6;  // from one copy to the next, however small

static cudaError_t copy(void* dst, const void* src, size_t size, Stream* s, bool sync) {
  if (!size) return cudaSuccess;
  int from = device_of(src), to = device_of(dst);
  std::shared_ptr<char> staged;
  const void* source = src;
  bool wait = sync, pinned = (from >= 0 || is_pinned(src)) && (to >= 0 || is_pinned(dst));
  if (!sync && from < 0 && to >= 0 && !pinned) {
    staged.reset((char*)malloc(size), free);
    move_bytes(staged.get(), src, size);
    source = staged.get();
  } else if (to < 0 && !pinned) {
    wait = true;
  }
  bool again = s->last.to == dst && s->last.from == src && s->last.size == size && s->last.epoch == g_epoch && !staged;
  if (!again) s->last = {dst, src, size, ++g_epoch};
  double bytes_per_s = rate(from, to, pinned), seconds = kCopySeconds + (bytes_per_s > 0 ? size / bytes_per_s : 0);
  s->push([=](double& clock) {
    (void)staged;
    if (!again) moved(dst, source, size, from, to);
    clock += seconds;
  });
  if (wait) s->wait();
  return cudaSuccess;
}

}  // namespace standin
using namespace standin;

// ---- for the other stand-ins
EXPORT double fakecuda_gbps(int from, int to) {  // of a pair with a rate of its own, by physical index; else 0
  std::string own = std::to_string(from) + ">" + std::to_string(to);
  for (const auto& [name, value] : listed("FAKECUDA_GBPS", '='))
    if (name == own) return atof(value.c_str());
  return 0;
}

// ---- peers
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int d, int peer) {
  ENTER;
  int n = int(world().devices.size());
  if (d < 0 || d >= n || peer < 0 || peer >= n) return ret(cudaErrorInvalidDevice);
  *can = d != peer && strcmp(env("FAKECUDA_P2P", "on"), "off") != 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  ENTER;
  int can = 0;
  if (cudaError_t e = cudaDeviceCanAccessPeer(&can, tls_device, peer)) return e;
  if (!can) return ret(cudaErrorPeerAccessUnsupported);
  Device& d = use(tls_device);
  std::lock_guard<std::mutex> l(d.m);
  return d.peers.insert(peer).second ? cudaSuccess : ret(cudaErrorPeerAccessAlreadyEnabled);
}
EXPORT cudaError_t cudaDeviceDisablePeerAccess(int peer) {
  ENTER;
  return use(tls_device).peers.erase(peer) ? cudaSuccess : ret(cudaErrorPeerAccessNotEnabled);
}
EXPORT cudaError_t cudaDeviceGetP2PAttribute(int* v, cudaDeviceP2PAttr a, int s, int d) {
  if (cudaError_t e = cudaDeviceCanAccessPeer(v, s, d)) return e;
  if (a == cudaDevP2PAttrPerformanceRank) *v = 0;
  return cudaSuccess;
}

// ---- memory
EXPORT cudaError_t cudaMalloc(void** p, size_t n) {
  ENTER;
  load_ops();
  return allocate(p, n, tls_device);
}
EXPORT cudaError_t cudaFree(void* p) {
  ENTER;
  if (p) cudaDeviceSynchronize();
  return release(p);
}
EXPORT cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) {
  ENTER;
  load_ops();
  return allocate(p, n, tls_device);
}
EXPORT cudaError_t cudaFreeAsync(void* p, cudaStream_t s) {
  ENTER;
  stream_of(s)->push([p](double&) { release(p); });
  return cudaSuccess;
}
EXPORT cudaError_t cudaMallocManaged(void** p, size_t n, unsigned) {
  ENTER;
  return allocate(p, n, tls_device);
}
EXPORT cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
  ENTER;
  n = (std::max<size_t>(n, 1) + 4095) / 4096 * 4096;
  *p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*p == MAP_FAILED) return ret(cudaErrorMemoryAllocation);
  World& w = world();
  std::lock_guard<std::mutex> l(w.m);
  w.host[(char*)*p] = {n, true};
  return cudaSuccess;
}
EXPORT cudaError_t cudaMallocHost(void** p, size_t n) { return cudaHostAlloc(p, n, 0); }
EXPORT cudaError_t cudaFreeHost(void* p) {
  ENTER;
  World& w = world();
  std::lock_guard<std::mutex> l(w.m);
  auto it = w.host.find((char*)p);
  if (it == w.host.end() || !it->second.own) return ret(cudaErrorInvalidValue);
  munmap(p, it->second.size);
  w.host.erase(it);
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostRegister(void* p, size_t n, unsigned) {
  ENTER;
  World& w = world();
  std::lock_guard<std::mutex> l(w.m);
  w.host[(char*)p] = {n, false};
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostUnregister(void* p) {
  ENTER;
  World& w = world();
  std::lock_guard<std::mutex> l(w.m);
  w.host.erase((char*)p);
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostGetDevicePointer(void** d, void* h, unsigned) { *d = h; return cudaSuccess; }
EXPORT cudaError_t cudaHostGetFlags(unsigned* f, void*) { *f = 0; return cudaSuccess; }
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  ENTER;
  memset(a, 0, sizeof *a);
  int d = device_of(p);
  if (d >= 0) {
    a->type = cudaMemoryTypeDevice;
    a->device = d;
    a->devicePointer = (void*)p;
  } else if (is_pinned(p)) {
    a->type = cudaMemoryTypeHost;
    a->device = tls_device;
    a->devicePointer = a->hostPointer = (void*)p;
  } else {
    a->type = cudaMemoryTypeUnregistered;
    a->device = -2;
    a->hostPointer = (void*)p;
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemGetInfo(size_t* f, size_t* t) {
  ENTER;
  Device& d = use(tls_device);
  std::lock_guard<std::mutex> l(d.m);
  size_t context = std::min<size_t>(d.size / 8, size_t(520) << 20);
  *t = d.size;
  *f = d.size - context > d.used ? d.size - context - d.used : 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind, cudaStream_t st) {
  ENTER;
  return copy(d, s, n, stream_of(st), false);
}
EXPORT cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind) {
  ENTER;
  return copy(d, s, n, stream_of(nullptr), true);
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t st) {
  ENTER;  // through the host, where access is not enabled
  return copy(d, s, n, stream_of(st), false);
}
EXPORT cudaError_t cudaMemcpyPeer(void* d, int, const void* s, int, size_t n) {
  ENTER;
  return copy(d, s, n, stream_of(nullptr), true);
}
EXPORT cudaError_t cudaMemsetAsync(void* p, int v, size_t n, cudaStream_t st) {
  ENTER;
  g_epoch++;
  stream_of(st)->push([=](double&) { memset(p, v, n); });
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemset(void* p, int v, size_t n) {
  ENTER;
  Stream* s = stream_of(nullptr);
  s->push([=](double&) { memset(p, v, n); });
  s->wait();
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpy2DAsync(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, cudaMemcpyKind,
                                     cudaStream_t st) {
  ENTER;
  Stream* stream = stream_of(st);
  g_epoch++;
  stream->push([=](double&) {
    for (size_t row = 0; row < h; row++) memmove((char*)d + row * dp, (const char*)s + row * sp, w);
  });
  stream->wait();
  return cudaSuccess;
}

struct Handle {
  int pid, fd, device;
  size_t offset, size;
};
EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* h, void* p) {
  ENTER;
  int device = device_of(p);
  if (device < 0) return ret(cudaErrorInvalidValue);
  Device& d = *world().devices[device];
  std::lock_guard<std::mutex> l(d.m);
  size_t at = (char*)p - d.base;
  auto it = d.blocks.upper_bound(at);
  --it;
  Handle own{getpid(), d.fd, d.physical, it->first, it->second};
  memset(h, 0, sizeof *h);
  memcpy(h, &own, sizeof own);
  return cudaSuccess;
}
EXPORT cudaError_t cudaIpcOpenMemHandle(void** p, cudaIpcMemHandle_t h, unsigned) {
  ENTER;
  Handle other;
  memcpy(&other, &h, sizeof other);
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", other.pid, other.fd);
  int fd = open(path, O_RDWR);
  if (fd < 0) return ret(cudaErrorInvalidValue);
  *p = mmap(nullptr, other.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, other.offset);
  close(fd);
  if (*p == MAP_FAILED) return ret(cudaErrorInvalidValue);
  int index = tls_device;
  for (size_t i = 0; i < world().devices.size(); i++)
    if (world().devices[i]->physical == other.device) index = int(i);
  std::lock_guard<std::mutex> l(world().m);
  world().ipc[(char*)*p] = {other.size, index};
  return cudaSuccess;
}
EXPORT cudaError_t cudaIpcCloseMemHandle(void* p) {
  ENTER;
  std::lock_guard<std::mutex> l(world().m);
  auto it = world().ipc.find((char*)p);
  if (it == world().ipc.end()) return ret(cudaErrorInvalidValue);
  munmap(p, it->second.first);
  world().ipc.erase(it);
  return cudaSuccess;
}
