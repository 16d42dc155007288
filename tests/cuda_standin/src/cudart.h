// The stand-in for libcudart.so.13: "device memory" is host memory (one sparse memfd for each device), every stream has a
// thread and a queue of its own. No kernels: launching one says which, and returns cudaErrorNotSupported.
//
// FAKECUDA_DEVICES=N           devices (default 0); CUDA_VISIBLE_DEVICES is honoured (indices and UUIDs)
// FAKECUDA_MEMORY_MB           of each device (default 81559)
// FAKECUDA_NAME, FAKECUDA_CC   default "NVIDIA H100 80GB HBM3", 9.0
// FAKECUDA_P2P=off             cudaDeviceCanAccessPeer says no
// FAKECUDA_P2P_FAULT           "corrupt:0>1,hang:2>3,die:1>0": what direct copies between these devices do ("*" for any)
// FAKECUDA_GBPS                "p2p=380,0>1=40,to=52,to3=12": rates of copies, see copies.cpp
// FAKECUDA_CONTEXT_SECONDS     what the first use of a device takes
// FAKECUDA_COUNTS=FILE         a line is added to it for each context ("context PID DEVICE") and for each rank of each
//                              communicator ("communicator PID NAME RANKS")
// FAKECUDA_LOG=1               stubs and launches that are not supported, once each
//
// The clock. Work takes longer here than on a GPU, so a stream has a clock of its own: what it does ends when the GPU would
// have ended it, and events and the process's stopwatch (fakecuda_stopwatch, which time.perf_counter becomes) show that
// time. What is to take longer than it does is waited for. Operators that run on the CPU take what they take.
#pragma once
#include <cuda_runtime_api.h>

#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace standin {

inline thread_local cudaError_t tls_last = cudaSuccess;
inline thread_local int tls_device = 0;
// How far the process's stopwatch is behind the machine's clock: what waiting for devices took longer than on a GPU.
inline std::atomic<double> g_lag{0};

inline double machine_now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}
inline double now() { return machine_now() - g_lag; }

inline const char* env(const char* name, const char* other) {
  const char* value = getenv(name);
  return value && *value ? value : other;
}
inline bool logging() {
  static bool on = atoi(env("FAKECUDA_LOG", "0"));
  return on;
}
inline cudaError_t ret(cudaError_t e) {
  if (e != cudaSuccess) tls_last = e;
  return e;
}

void settled();  // memory may be looked at or changed by others than copies: see copies.cpp
void skip_queue(bool counts = true);  // the calling thread has waited for a core: that takes no time

// A host thread waits for a device: its stopwatch goes on from the moment at which the GPU would have been ready.
class Waiting {
  double begun = (skip_queue(), now());

 public:
  void until(double ready) {
    settled();
    skip_queue(false);
    double lag = machine_now() - std::max(begun, ready), known = g_lag;
    while (lag > known && !g_lag.compare_exchange_weak(known, lag)) {
    }
  }
};

struct Marker {
  std::mutex m;
  std::condition_variable cv;
  bool done = false;
  double at = 0;
  void finish(double when) {
    std::lock_guard<std::mutex> l(m);
    at = when;
    done = true;
    cv.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> l(m);
    cv.wait(l, [&] { return done; });
  }
  bool ready() {
    std::lock_guard<std::mutex> l(m);
    return done;
  }
};

struct Stream {
  using Work = std::function<void(double& clock)>;  // moves the clock to its end
  struct Item {
    Work work;
    double posted;
  };
  int device;
  unsigned flags = 0;
  int priority = 0;
  unsigned long long id = 0;
  std::mutex m;
  std::condition_variable cv, idle;
  std::deque<Item> q;
  uint64_t pushed = 0, finished = 0;
  double clock = 0;
  bool started = false, stop = false;

  void push(Work work);
  void run();
  bool ready();
  double finish();  // waits for what was pushed; when the GPU would have done it
  void wait();
};

struct Event {
  std::mutex m;
  unsigned flags = 0;
  int device = 0;
  std::shared_ptr<Marker> marker;
  std::shared_ptr<Marker> get() {
    std::lock_guard<std::mutex> l(m);
    return marker;
  }
};

struct Device {
  int physical = 0;
  char* base = nullptr;
  size_t size = 0, used = 0;
  int fd = -1;
  bool active = false;
  std::map<size_t, size_t> holes, blocks;
  std::set<int> peers;
  Stream* standard = nullptr;
  std::set<Stream*> streams;
  std::mutex m;
};

struct Host {
  size_t size;
  bool own;
};

struct World {
  std::vector<Device*> devices;
  std::mutex m;
  std::map<char*, Host> host;
  std::map<char*, std::pair<size_t, int>> ipc;  // mapped memory of other processes -> size, device
  unsigned long long streams = 10;
};

World& world();
cudaError_t enter();
Device& use(int index);
Stream* stream_of(cudaStream_t s);
int device_of(const void* p);  // -1: not device memory
bool is_pinned(const void* p);
void load_ops();
cudaError_t allocate(void** p, size_t size, int device);
cudaError_t release(void* p);
cudaError_t copy(void* dst, const void* src, size_t size, Stream* s, bool sync);

}  // namespace standin

#define ENTER                                           \
  do {                                                  \
    if (cudaError_t e_ = standin::enter()) return e_;   \
  } while (0)
