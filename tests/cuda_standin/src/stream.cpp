// Streams and events of the stand-in for libcudart.
#include "cudart.h"

namespace standin {

static thread_local double* tls_clock = nullptr;
static thread_local cudaStreamCaptureMode tls_mode = cudaStreamCaptureModeGlobal;

void skip_queue(bool counts) {
  static thread_local int pid = 0;
  static thread_local FILE* file = nullptr;
  static thread_local unsigned long long seen = 0;
  bool first = pid != getpid();  // a forked child has a copy of its parent's thread-local variables
  if (first) {
    pid = getpid();
    file = fopen("/proc/thread-self/schedstat", "re");
    if (file) setbuf(file, nullptr);
  }
  unsigned long long ran, waited;
  if (!file) return;
  rewind(file);
  if (fscanf(file, "%llu %llu", &ran, &waited) != 2) return;
  if (counts && !first)
    for (double known = g_lag; !g_lag.compare_exchange_weak(known, known + (waited - seen) * 1e-9);) {
    }
  seen = waited;
}

void Stream::push(Work work) {
  skip_queue();
  double posted = now();
  std::lock_guard<std::mutex> l(m);
  if (!started) {
    started = true;
    std::thread([this] { run(); }).detach();
  }
  q.push_back({std::move(work), posted});
  pushed++;
  cv.notify_one();
}

void Stream::run() {
  char name[16];
  snprintf(name, sizeof name, "cuda%d-s%llu", device, id % 10000);
  pthread_setname_np(pthread_self(), name);
  tls_device = device;
  tls_clock = &clock;
  for (;;) {
    Item item;
    {
      std::unique_lock<std::mutex> l(m);
      cv.wait(l, [&] { return !q.empty() || stop; });
      if (q.empty()) return;  // the object leaks: others may still look at it
      item = std::move(q.front());
      q.pop_front();
    }
    clock = std::max(clock, item.posted);
    item.work(clock);
    for (double left; (left = clock - now()) > 0;) usleep(useconds_t(std::min(left, 0.01) * 1e6) + 1);
    item.work = nullptr;
    std::lock_guard<std::mutex> l(m);
    finished++;
    idle.notify_all();
  }
}

bool Stream::ready() {
  {
    std::lock_guard<std::mutex> l(m);
    if (pushed != finished) return false;
  }
  settled();
  return true;
}

double Stream::finish() {
  std::unique_lock<std::mutex> l(m);
  uint64_t until = pushed;
  idle.wait(l, [&] { return finished >= until; });
  return finished == until ? clock : 0;
}

void Stream::wait() {
  Waiting waiting;
  waiting.until(finish());
}

}  // namespace standin
using namespace standin;

// ---- for the other stand-ins
EXPORT double* fakecuda_clock() { return tls_clock; }  // of the stream whose thread calls; null on others
EXPORT double fakecuda_stopwatch() {
  skip_queue();
  return now();
}

// ---- streams and events
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned flags, int priority) {
  ENTER;
  Device& d = use(tls_device);
  Stream* made = new Stream;
  made->device = tls_device;
  made->flags = flags;
  made->priority = priority;
  made->id = world().streams++;
  std::lock_guard<std::mutex> l(d.m);
  d.streams.insert(made);
  *s = (cudaStream_t)made;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned f) { return cudaStreamCreateWithPriority(s, f, 0); }
EXPORT cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t s) {
  ENTER;
  Stream* st = stream_of(s);
  Device& d = use(st->device);
  {
    std::lock_guard<std::mutex> l(d.m);
    d.streams.erase(st);
  }
  std::lock_guard<std::mutex> l(st->m);
  st->stop = true;
  st->cv.notify_all();
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t s) {
  ENTER;
  return stream_of(s)->ready() ? cudaSuccess : ret(cudaErrorNotReady);
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  ENTER;
  stream_of(s)->wait();
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t s, int* p) {
  ENTER;
  *p = stream_of(s)->priority;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetFlags(cudaStream_t s, unsigned* f) {
  ENTER;
  *f = stream_of(s)->flags;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetId(cudaStream_t s, unsigned long long* id) {
  ENTER;
  *id = stream_of(s)->id;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetDevice(cudaStream_t s, int* d) {
  ENTER;
  *d = stream_of(s)->device;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* s) {
  ENTER;
  *s = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* s, unsigned long long* id,
                                            cudaGraph_t* g, const cudaGraphNode_t** n, const cudaGraphEdgeData** e,
                                            size_t* count) {
  ENTER;
  *s = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (g) *g = nullptr;
  if (n) *n = nullptr;
  if (e) *e = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* m) {
  std::swap(*m, tls_mode);
  return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t fn, void* data) {
  ENTER;
  stream_of(s)->push([=](double& clock) {
    settled();
    double begin = machine_now(), before = clock;
    fn(data);
    if (clock == before) clock += machine_now() - begin;  // a collective moves the clock itself
    settled();
  });
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t fn, void* data, unsigned) {
  ENTER;
  stream_of(s)->push([=](double&) { fn(s, cudaSuccess, data); });
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned flags) {
  ENTER;
  Event* made = new Event;
  made->flags = flags;
  made->device = tls_device;
  use(tls_device);
  *e = (cudaEvent_t)made;
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t e) {
  ENTER;
  delete (Event*)e;
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) {
  ENTER;
  Event* event = (Event*)e;
  Stream* stream = stream_of(s);
  if (event->device != stream->device) return ret(cudaErrorInvalidResourceHandle);
  auto marker = std::make_shared<Marker>();
  {
    std::lock_guard<std::mutex> l(event->m);
    event->marker = marker;
  }
  stream->push([marker](double& clock) { marker->finish(clock); });
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
EXPORT cudaError_t cudaEventQuery(cudaEvent_t e) {
  ENTER;
  auto marker = ((Event*)e)->get();
  if (marker && !marker->ready()) return ret(cudaErrorNotReady);
  settled();
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  ENTER;
  if (auto marker = ((Event*)e)->get()) {
    Waiting waiting;
    marker->wait();
    waiting.until(marker->at);
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  ENTER;
  auto one = ((Event*)a)->get(), other = ((Event*)b)->get();
  if (!one || !other || (((Event*)a)->flags | ((Event*)b)->flags) & cudaEventDisableTiming)
    return ret(cudaErrorInvalidResourceHandle);
  if (!one->ready() || !other->ready()) return ret(cudaErrorNotReady);
  *ms = float((other->at - one->at) * 1e3);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  ENTER;
  auto marker = ((Event*)e)->get();
  if (marker && !marker->ready())
    stream_of(s)->push([marker](double& clock) {
      marker->wait();
      clock = std::max(clock, marker->at);
    });
  return cudaSuccess;
}

