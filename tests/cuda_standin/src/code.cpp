// Errors and code of the stand-in for libcudart: kernels are known by name, and cannot be launched.
#include "cudart.h"

#include <dlfcn.h>

namespace standin {

const std::map<int, std::pair<const char*, const char*>>& errors() {
  static auto* all = new std::map<int, std::pair<const char*, const char*>>{
      {0, {"cudaSuccess", "no error"}},
      {1, {"cudaErrorInvalidValue", "invalid argument"}},
      {2, {"cudaErrorMemoryAllocation", "out of memory"}},
      {3, {"cudaErrorInitializationError", "initialization error"}},
      {35, {"cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"}},
      {100, {"cudaErrorNoDevice", "no CUDA-capable device is detected"}},
      {101, {"cudaErrorInvalidDevice", "invalid device ordinal"}},
      {217, {"cudaErrorPeerAccessUnsupported", "peer access is not supported between these two devices"}},
      {400, {"cudaErrorInvalidResourceHandle", "invalid resource handle"}},
      {500, {"cudaErrorSymbolNotFound", "named symbol not found"}},
      {600, {"cudaErrorNotReady", "device not ready"}},
      {700, {"cudaErrorIllegalAddress", "an illegal memory access was encountered"}},
      {704, {"cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"}},
      {705, {"cudaErrorPeerAccessNotEnabled", "peer access has not been enabled"}},
      {801, {"cudaErrorNotSupported", "operation not supported"}},
      {999, {"cudaErrorUnknown", "unknown error"}},
  };
  return *all;
}

std::map<const void*, const char*>& functions() {
  static auto* all = new std::map<const void*, const char*>;
  return *all;
}
std::mutex g_functions;

cudaError_t not_launched(const void* function) {
  static auto* told = new std::set<std::string>;
  std::lock_guard<std::mutex> l(g_functions);
  auto it = functions().find(function);
  std::string name = it == functions().end() ? "?" : it->second;
  if (told->insert(name).second) fprintf(stderr, "fakecuda: cannot launch the kernel %s\n", name.c_str());
  return ret(cudaErrorNotSupported);
}


}  // namespace standin
using namespace standin;

EXPORT cudaError_t fakecuda_unsupported(const char* name, char* told) {
  if (!*told && logging()) fprintf(stderr, "fakecuda: %s is not there\n", name);
  *told = 1;
  return ret(cudaErrorNotSupported);
}

// ---- errors
EXPORT cudaError_t cudaGetLastError() {
  cudaError_t e = tls_last;
  tls_last = cudaSuccess;
  return e;
}
EXPORT cudaError_t cudaPeekAtLastError() { return tls_last; }
EXPORT const char* cudaGetErrorString(cudaError_t e) {
  auto it = errors().find(e);
  return it == errors().end() ? "unrecognized error code" : it->second.second;
}
EXPORT const char* cudaGetErrorName(cudaError_t e) {
  auto it = errors().find(e);
  return it == errors().end() ? "cudaErrorUnknown" : it->second.first;
}

// ---- code
EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT char __cudaInitModule(void**) { return 1; }
EXPORT void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*,
                                   int*) {
  std::lock_guard<std::mutex> l(g_functions);
  functions()[host] = name;
}
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORT void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
EXPORT void __cudaRegisterHostVar(void**, const char*, char*, size_t) {}
EXPORT void __cudaRegisterUnifiedTable(void**, void*) {}
namespace standin {
struct Call {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local std::vector<Call>* tls_calls = nullptr;
}  // namespace standin
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  if (!tls_calls) tls_calls = new std::vector<Call>;
  tls_calls->push_back({grid, block, shared, stream});
  return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  Call c = tls_calls->back();
  tls_calls->pop_back();
  *grid = c.grid;
  *block = c.block;
  *shared = c.shared;
  *(void**)stream = c.stream;
  return cudaSuccess;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* f) { *k = (cudaKernel_t)f; return cudaSuccess; }
EXPORT cudaError_t cudaGetKernel(cudaKernel_t* k, const void* f) { *k = (cudaKernel_t)f; return cudaSuccess; }
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3, dim3, void**, size_t, cudaStream_t) {
  ENTER;
  return not_launched(k);
}
EXPORT cudaError_t cudaLaunchKernel(const void* f, dim3, dim3, void**, size_t, cudaStream_t) {
  ENTER;
  return not_launched(f);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* f, void**) {
  ENTER;
  return not_launched(f);
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* f, dim3, dim3, void**, size_t, cudaStream_t) {
  ENTER;
  return not_launched(f);
}
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  ENTER;
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->binaryVersion = a->ptxVersion = 90;
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
EXPORT cudaError_t cudaFuncSetCacheConfig(const void*, cudaFuncCache) { return cudaSuccess; }
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) {
  *n = 2;
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  *n = 2;
  return cudaSuccess;
}
EXPORT cudaError_t cudaProfilerStart() { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop() { return cudaSuccess; }

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* found) {
  *f = dlsym(RTLD_DEFAULT, name);
  if (!*f) *f = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
  if (!*f && logging()) fprintf(stderr, "fakecuda: no driver entry %s\n", name);
  if (found) *found = *f ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *f || found ? cudaSuccess : ret(cudaErrorSymbolNotFound);
}
EXPORT cudaError_t cudaGetDriverEntryPoint(const char* name, void** f, unsigned long long flags,
                                           cudaDriverEntryPointQueryResult* found) {
  return cudaGetDriverEntryPointByVersion(name, f, 13020, flags, found);
}
