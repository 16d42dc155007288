// Copies of the stand-in for libcudart: what they take, what they do wrong, and when they are made.
#include "cudart.h"

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

// Copies are repeated many times where they are timed. What is known of memory until somebody else than a copy may look at
// it or change it: `same`, that a block holds what another holds, so that the same copy again has nothing to do; `late`,
// that a block of pinned memory is to hold it. A copy out of that is made from where it comes from; most are never made.
struct Known {
  const void *to, *from;
  size_t size;
};
static std::mutex g_known;
static std::vector<Known> g_same, g_late;

static bool overlaps(const void* a, const void* b, size_t size, size_t other) {
  return (char*)a < (char*)b + other && (char*)b < (char*)a + size;
}

static void forget(const void* block, size_t size) {  // it is written to
  for (const Known& k : g_late) {
    bool whole = k.to >= block && (char*)k.to + k.size <= (char*)block + size;
    if (overlaps(k.from, block, k.size, size) || (overlaps(k.to, block, k.size, size) && !whole))
      move_bytes((void*)k.to, k.from, k.size);
  }
  auto is_about = [&](const Known& k) { return overlaps(k.to, block, k.size, size) || overlaps(k.from, block, k.size, size); };
  g_same.erase(std::remove_if(g_same.begin(), g_same.end(), is_about), g_same.end());
  g_late.erase(std::remove_if(g_late.begin(), g_late.end(), is_about), g_late.end());
}

void settled() {
  std::lock_guard<std::mutex> l(g_known);
  for (const Known& k : g_late) move_bytes((void*)k.to, k.from, k.size);
  g_late.clear();
  g_same.clear();
}

static void moved(void* dst, const void* src, size_t size, int from, int to, bool fleeting) {
  char fault = is_direct(from, to) ? fault_between(from, to) : 0;
  if (fault == 'h')
    for (;;) sleep(1000);
  if (fault == 'd') _exit(139);
  std::lock_guard<std::mutex> l(g_known);
  const void* source = src;
  for (const Known& k : g_late)
    if (k.to == src && k.size == size) source = k.from;
    else if (overlaps(k.to, src, k.size, size)) move_bytes((void*)k.to, k.from, k.size);
  for (const Known& k : g_same)
    if (k.to == dst && k.from == source && k.size == size && !fleeting) return;
  forget(dst, size);
  if (from >= 0 && to < 0 && !fleeting) {
    g_late.push_back({dst, source, size});
    return;
  }
  move_bytes(dst, source, size);
  if (fault == 'c' && size) ((char*)dst)[size / 2] ^= 0x5a;
  if (g_same.size() > 256) g_same.clear();
  if (!fleeting) g_same.push_back({dst, source, size});
}

constexpr double kCopySeconds = 3e-6;  // from one copy to the next, however small

cudaError_t copy(void* dst, const void* src, size_t size, Stream* s, bool sync) {
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
  double bytes_per_s = rate(from, to, pinned), seconds = kCopySeconds + (bytes_per_s > 0 ? size / bytes_per_s : 0);
  s->push([=](double& clock) {
    (void)staged;
    moved(dst, source, size, from, to, !pinned);
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
