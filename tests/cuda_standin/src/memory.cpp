// Memory of the stand-in for libcudart: peers, device and pinned memory, memory shared between processes.
#include "cudart.h"

#include <fcntl.h>
#include <sys/mman.h>

using namespace standin;

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
  stream_of(s)->push([p](double&) {
    settled();
    release(p);
  });
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
  settled();
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
  stream_of(st)->push([=](double&) {
    settled();
    memset(p, v, n);
    settled();
  });
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemset(void* p, int v, size_t n) {
  ENTER;
  Stream* s = stream_of(nullptr);
  s->push([=](double&) {
    settled();
    memset(p, v, n);
  });
  s->wait();
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpy2DAsync(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, cudaMemcpyKind,
                                     cudaStream_t st) {
  ENTER;
  Stream* stream = stream_of(st);
  stream->push([=](double&) {
    settled();
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
