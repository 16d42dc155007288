// What NCCL writes, and the faults of the stand-in for it.
#include "nccl.h"

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
