// What NCCL writes, and the faults of the stand-in for it.
#include "nccl.h"

#include <thread>

namespace standin {

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
static FILE* out() {
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

int version_code() {
  int major = NCCL_MAJOR, minor = NCCL_MINOR, patch = NCCL_PATCH;
  if (const char* v = getenv("FAKENCCL_VERSION")) sscanf(v, "%d.%d.%d", &major, &minor, &patch);
  return major * 10000 + minor * 100 + patch;
}
static bool is_on(const char* name) { return getenv(name) && atoi(getenv(name)); }
static bool is_active(const std::string& line) {
  return line.find("] p2p:") != std::string::npos || line.find("] net bw:") != std::string::npos;
}
// A report on standard output: `ok` are the lines of checks for which no line of `found` is.
static void report(const char* name, int n, std::vector<std::string> ok, const std::vector<std::string>& found) {
  auto subject = [](const std::string& line) { return line.substr(line.find_first_not_of(' ', line.find(']') + 1), 4); };
  auto print = [](const std::string& line) { printf("%s:%d NCCL DIAG %s\n", host().c_str(), getpid(), line.c_str()); };
  print(std::string("=== ") + name + " Diagnostics ===");
  for (const std::string& line : ok)
    if (std::none_of(found.begin(), found.end(), [&](auto& other) { return subject(other) == subject(line); })) print(line);
  for (const std::string& line : found) print(line);
  print(std::string(name) + " diagnostics completed in 12.3 ms across " + std::to_string(n) + " ranks");
}
void diagnose(int rank, int n) {
  std::vector<std::string> active, passive;
  std::stringstream entries(getenv("FAKENCCL_DIAGNOSTICS") ? getenv("FAKENCCL_DIAGNOSTICS") : "");
  for (std::string line; std::getline(entries, line, '|');) {
    if (line[0] == '[') (is_active(line) ? active : passive).push_back(line);
    else if (line.rfind("ATTN ", 0) == 0 && level() >= 2)
      fprintf(out(), "\n%s:%d:%d [0] init.cc:1200 NCCL %s\n", host().c_str(), getpid(), getpid(), line.c_str());
    else if (line.rfind("INFO ", 0) == 0) INFO("%s", line.c_str() + 5);
  }
  if (version_code() < 23100 || rank) return;
  std::string across = " across " + std::to_string(n) + " ranks in comm 0x1234";
  if (is_on("NCCL_RUN_DIAGNOSTICS"))
    report("NCCL", n, {"[OK] net bw: skipped (single host or no network transport)",
                       "[OK]   p2p: verified P2P access in both directions between every GPU pair (" +
                       std::to_string(n * (n - 1)) + " peer accesses)"}, active);
  if (is_on("NCCL_RUN_RAS_DIAGNOSTICS"))
    std::thread([=] {
      usleep(12300);
      report("RAS", n, {"[OK]   GPU inventory: " + std::to_string(n) + "x NVIDIA H100 80GB HBM3 per node consistent" + across,
                        "[OK]   ECC: no uncorrected volatile errors" + across,
                        "[OK]   NVLink: 18 links per GPU, all active at consistent speed" + across}, passive);
    }).detach();
}

static const std::vector<Fault>& faults() {
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
static bool is_set(const std::string& conditions) {
  std::stringstream each(conditions);
  for (std::string condition; std::getline(each, condition, '|');) {
    size_t at = condition.find('=');
    const char* v = getenv(condition.substr(0, at).c_str());
    if (v && condition.substr(at + 1) == v) return true;
  }
  return false;
}
static int rank_of_job(int other) { return getenv("RANK") ? atoi(getenv("RANK")) : other; }
const Fault* fault(const char* kind, int rank, int call) {
  for (const Fault& f : faults())
    if (f.kind == kind && (f.rank < 0 || f.rank == rank_of_job(rank)) && (!call || call >= f.call) &&
        (f.unless.empty() || !is_set(f.unless)))
      return &f;
  return nullptr;
}

}  // namespace standin
