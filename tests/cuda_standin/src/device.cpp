// Devices of the stand-in for libcudart: which there are, and their memory.
#include "cudart.h"

#include <dlfcn.h>
#include <malloc.h>
#include <sys/mman.h>
#include <sys/syscall.h>

namespace standin {

constexpr int kMost = 16;
static bool g_initialised = false, g_forked = false;

static void after_fork() {
  if (g_initialised) g_forked = true;
}

static std::string uuid_text(int i) {
  char text[64];
  snprintf(text, sizeof text, "GPU-%08x-0000-4000-8000-00000000000%x", i, i);
  return text;
}

World& world() {
  static World* w = [] {
    World* made = new World;
    pthread_atfork(nullptr, nullptr, after_fork);
    int count = std::min(kMost, atoi(env("FAKECUDA_DEVICES", "0")));
    std::vector<int> shown;
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) {
      for (int i = 0; i < count; i++) shown.push_back(i);
    } else {
      std::string text = visible, part;
      for (size_t at = 0; at <= text.size(); at++) {
        if (at < text.size() && text[at] != ',') {
          part += text[at];
          continue;
        }
        int found = -1;
        if (part.rfind("GPU-", 0) == 0) {
          for (int i = 0; i < count; i++)
            if (uuid_text(i).rfind(part, 0) == 0) found = i;
        } else if (!part.empty() && isdigit(part[0])) {
          found = atoi(part.c_str());
        }
        part.clear();
        if (found < 0 || found >= count || std::count(shown.begin(), shown.end(), found)) break;
        shown.push_back(found);
      }
    }
    for (int i : shown) {
      Device* d = new Device;
      d->physical = i;
      d->size = size_t(atol(env("FAKECUDA_MEMORY_MB", "81559"))) << 20;
      made->devices.push_back(d);
    }
    return made;
  }();
  return *w;
}

cudaError_t enter() {
  World& w = world();
  if (g_forked) return ret(cudaErrorInitializationError);
  if (w.devices.empty()) return ret(cudaErrorNoDevice);
  g_initialised = true;
  return cudaSuccess;
}

extern "C" __attribute__((visibility("default"))) void fakecuda_count(const char* what, const char* which) {
  const char* path = env("FAKECUDA_COUNTS", "");
  if (FILE* f = *path ? fopen(path, "a") : nullptr) {
    fprintf(f, "%s %d %s\n", what, getpid(), which);
    fclose(f);
  }
}

Device& use(int index) {
  Device& d = *world().devices[index];
  std::lock_guard<std::mutex> l(d.m);
  if (!d.active) {
    double seconds = atof(env("FAKECUDA_CONTEXT_SECONDS", "0"));
    if (seconds > 0) usleep(useconds_t(seconds * 1e6));
    fakecuda_count("context", std::to_string(d.physical).c_str());
    d.fd = syscall(SYS_memfd_create, "fakecuda", 1u);
    if (ftruncate(d.fd, d.size)) perror("fakecuda: ftruncate");
    d.base = (char*)mmap(nullptr, d.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, d.fd, 0);
    if (d.base == MAP_FAILED) perror("fakecuda: mmap");
    madvise(d.base, d.size, MADV_DONTDUMP);
    d.holes[0] = d.size;
    d.used = 0;
    d.standard = new Stream;
    d.standard->device = index;
    d.active = true;
  }
  return d;
}

Stream* stream_of(cudaStream_t s) {
  if (s == nullptr || s == cudaStreamLegacy || s == cudaStreamPerThread) return use(tls_device).standard;
  return (Stream*)s;
}

int device_of(const void* p) {  // -1: not device memory
  World& w = world();
  for (size_t i = 0; i < w.devices.size(); i++) {
    Device& d = *w.devices[i];
    if (d.active && (char*)p >= d.base && (char*)p < d.base + d.size) return int(i);
  }
  std::lock_guard<std::mutex> l(w.m);
  auto it = w.ipc.upper_bound((char*)p);
  if (it != w.ipc.begin() && (--it, (char*)p < it->first + it->second.first)) return it->second.second;
  return -1;
}

bool is_pinned(const void* p) {
  World& w = world();
  std::lock_guard<std::mutex> l(w.m);
  auto it = w.host.upper_bound((char*)p);
  return it != w.host.begin() && (--it, (char*)p < it->first + it->second.size);
}

void load_ops() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Operators on the CPU: memory that they give back is kept, for new pages cost more than the work on them.
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    Dl_info me;
    std::string path = env("FAKECUDA_OPS", "");
    if (path == "none") return;
    if (path.empty() && dladdr((void*)&load_ops, &me)) {
      path = me.dli_fname;
      path = path.substr(0, path.rfind('/') + 1) + "libfakeops.so";
    }
    if (!dlsym(RTLD_DEFAULT, "_ZN3c1010Dispatcher13realSingletonEv") && logging())
      fprintf(stderr, "fakecuda: torch's symbols are not global\n");
    if (!dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) && access(path.c_str(), R_OK) == 0)
      fprintf(stderr, "fakecuda: %s\n", dlerror());
  });
}

cudaError_t allocate(void** p, size_t size, int device) {
  Device& d = use(device);
  size = (std::max<size_t>(size, 1) + 4095) / 4096 * 4096;
  std::lock_guard<std::mutex> l(d.m);
  for (auto it = d.holes.begin(); it != d.holes.end(); ++it) {
    if (it->second < size) continue;
    size_t at = it->first, left = it->second - size;
    d.holes.erase(it);
    if (left) d.holes[at + size] = left;
    d.blocks[at] = size;
    d.used += size;
    *p = d.base + at;
    return cudaSuccess;
  }
  return ret(cudaErrorMemoryAllocation);
}

cudaError_t release(void* p) {
  if (!p) return cudaSuccess;
  int device = device_of(p);
  if (device < 0) return ret(cudaErrorInvalidValue);
  Device& d = *world().devices[device];
  std::lock_guard<std::mutex> l(d.m);
  size_t at = (char*)p - d.base;
  auto it = d.blocks.find(at);
  if (it == d.blocks.end()) return ret(cudaErrorInvalidValue);
  size_t size = it->second;
  d.blocks.erase(it);
  d.used -= size;
  madvise(d.base + at, size, MADV_REMOVE);
  auto next = d.holes.lower_bound(at);
  if (next != d.holes.end() && next->first == at + size) {
    size += next->second;
    next = d.holes.erase(next);
  }
  if (next != d.holes.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == at) {
      before->second += size;
      return cudaSuccess;
    }
  }
  d.holes[at] = size;
  return cudaSuccess;
}

}  // namespace standin
using namespace standin;

// ---- for the other stand-ins
EXPORT int fakecuda_active(int device) {
  World& w = world();
  return device >= 0 && device < int(w.devices.size()) && w.devices[device]->active;
}
EXPORT int fakecuda_physical(int device) { return world().devices[device]->physical; }
EXPORT int fakecuda_initialise() { return enter(); }

// ---- devices
EXPORT cudaError_t cudaGetDeviceCount(int* n) {
  *n = 0;
  ENTER;
  *n = int(world().devices.size());
  return cudaSuccess;
}
EXPORT cudaError_t cudaSetDevice(int d) {
  ENTER;
  if (d < 0 || d >= int(world().devices.size())) return ret(cudaErrorInvalidDevice);
  tls_device = d;
  use(d);
  return cudaSuccess;
}
EXPORT cudaError_t cudaInitDevice(int d, unsigned, unsigned) {
  ENTER;
  if (d < 0 || d >= int(world().devices.size())) return ret(cudaErrorInvalidDevice);
  use(d);
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDevice(int* d) {
  ENTER;
  *d = tls_device;
  return cudaSuccess;
}
EXPORT cudaError_t cudaSetDeviceFlags(unsigned) { return cudaSuccess; }
EXPORT cudaError_t cudaGetDeviceFlags(unsigned* f) { *f = 0; return cudaSuccess; }
EXPORT cudaError_t cudaDeviceReset() { return cudaSuccess; }

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  ENTER;
  if (d < 0 || d >= int(world().devices.size())) return ret(cudaErrorInvalidDevice);
  load_ops();  // it turns cuDNN off, before anything saves that setting
  Device& dev = *world().devices[d];
  int i = dev.physical;
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", env("FAKECUDA_NAME", "NVIDIA H100 80GB HBM3"));
  unsigned char u[16] = {(unsigned char)(i >> 24), (unsigned char)(i >> 16), (unsigned char)(i >> 8), (unsigned char)i,
                         0, 0, 0x40, 0, 0x80, 0, 0, 0, 0, 0, 0, (unsigned char)i};
  memcpy(p->uuid.bytes, u, 16);
  p->totalGlobalMem = dev.size;
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  sscanf(env("FAKECUDA_CC", "9.0"), "%d.%d", &p->major, &p->minor);
  p->textureAlignment = 512;
  p->multiProcessorCount = 132;
  p->canMapHostMemory = 1;
  p->concurrentKernels = 1;
  p->ECCEnabled = 1;
  p->pciBusID = 0x10 + 0x11 * i;
  p->asyncEngineCount = 3;
  p->unifiedAddressing = 1;
  p->memoryBusWidth = 5120;
  p->l2CacheSize = 52428800;
  p->maxThreadsPerMultiProcessor = 2048;
  p->streamPrioritiesSupported = 1;
  p->globalL1CacheSupported = p->localL1CacheSupported = 1;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerMultiprocessor = 65536;
  p->managedMemory = 1;
  p->hostNativeAtomicSupported = 0;
  p->concurrentManagedAccess = 1;
  p->computePreemptionSupported = 1;
  p->cooperativeLaunch = 1;
  p->sharedMemPerBlockOptin = 232448;
  p->maxBlocksPerMultiProcessor = 32;
  p->memoryPoolsSupported = 1;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int d) {
  cudaDeviceProp p;
  if (cudaError_t e = cudaGetDeviceProperties(&p, d)) return e;
  switch (a) {
    case cudaDevAttrMaxThreadsPerBlock: *v = 1024; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    case cudaDevAttrMultiProcessorCount: *v = p.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *v = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *v = p.minor; break;
    case cudaDevAttrPciBusId: *v = p.pciBusID; break;
    case cudaDevAttrClockRate: *v = 1980000; break;
    case cudaDevAttrMemoryClockRate: *v = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *v = 5120; break;
    case cudaDevAttrUnifiedAddressing: *v = 1; break;
    case cudaDevAttrCooperativeLaunch: *v = 1; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = 232448; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break;
    case cudaDevAttrMaxRegistersPerBlock: *v = 65536; break;
    case cudaDevAttrL2CacheSize: *v = 52428800; break;
    case cudaDevAttrMemoryPoolsSupported: *v = 1; break;
    case cudaDevAttrManagedMemory: *v = 1; break;
    case cudaDevAttrConcurrentManagedAccess: *v = 1; break;
    case cudaDevAttrAsyncEngineCount: *v = 3; break;
    default: *v = 0;
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char* s, int n, int d) {
  ENTER;
  if (d < 0 || d >= int(world().devices.size())) return ret(cudaErrorInvalidDevice);
  snprintf(s, n, "0000:%02X:00.0", 0x10 + 0x11 * world().devices[d]->physical);
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetByPCIBusId(int* d, const char* id) {
  ENTER;
  char own[32];
  for (int i = 0; i < int(world().devices.size()); i++) {
    cudaDeviceGetPCIBusId(own, sizeof own, i);
    if (!strcasecmp(own, id)) return *d = i, cudaSuccess;
  }
  return ret(cudaErrorInvalidDevice);
}
EXPORT cudaError_t cudaDriverGetVersion(int* v) { *v = world().devices.empty() ? 0 : 13020; return cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int* v) { *v = 13020; return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* most) {
  ENTER;
  if (least) *least = 0;
  if (most) *most = -5;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceSynchronize() {
  ENTER;
  Waiting waiting;
  Device& d = use(tls_device);
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> l(d.m);
    all.assign(d.streams.begin(), d.streams.end());
  }
  double end = d.standard->finish();
  for (Stream* s : all) end = std::max(end, s->finish());
  waiting.until(end);
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetLimit(size_t* v, cudaLimit) { *v = 1024; return cudaSuccess; }
EXPORT cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) { return cudaSuccess; }
