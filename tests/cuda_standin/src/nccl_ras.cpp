// NCCL's RAS: each process answers clients with the state of its communicators, in the JSON of 2.28.7 and newer
// (src/ras/client_support.cc), if NCCL_RAS_ADDR is set. What peers have launched is in the memory that they share.
#include "nccl.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <thread>

namespace standin {

static std::mutex guard;
static std::vector<ncclComm*> known;
static const char* kCounted[] = {"", "AllReduce", "Reduce", "Broadcast", "AllGather", "ReduceScatter"};

static bool responds(int pid) {
  char state = 'X';
  if (FILE* f = fopen(("/proc/" + std::to_string(pid) + "/stat").c_str(), "r")) {
    if (fscanf(f, "%*d (%*[^)]) %c", &state) != 1) state = 'X';
    fclose(f);
  }
  return !strchr("TtZX", state);
}
static std::string place(Peer& peer, int rank) {
  std::stringstream s;
  s << "{\"rank\": " << rank << ", \"host\": \"127.0.0.1\", \"pid\": " << peer.pid << ", \"cuda_dev\": " << peer.device
    << ", \"nvml_dev\": " << fakecuda_physical(peer.device) << ", \"status\": {";
  return s.str();
}
static std::string communicator(ncclComm* c) {
  std::string ranks, missing;
  for (int r = 0; r < c->n; r++) {
    Peer& peer = c->peer(r);
    if (!responds(peer.pid)) {
      missing += (missing.empty() ? "" : ", ") + place(peer, r) + "\"unresponsive\": true, \"considered_dead\": false}}";
      continue;
    }
    ranks += (ranks.empty() ? "" : ", ") + place(peer, r) + "\"init_state\": 0, \"async_error\": 0}, \"collective_counts\": {";
    for (int kind = 1; kind < 6; kind++)
      ranks += std::string(kind > 1 ? ", \"" : "\"") + kCounted[kind] + "\": " + std::to_string(peer.launched[kind].load());
    ranks += "}}";
  }
  char id[32];
  snprintf(id, sizeof id, "0x%llx", hash(c->name));
  return std::string("{\"hash\": \"") + id + "\", \"size\": " + std::to_string(c->n) + ", \"ranks\": [" + ranks +
         "], \"missing_ranks\": [" + missing + "]}";
}
static std::string status() {
  std::lock_guard<std::mutex> l(guard);
  std::string all;
  for (ncclComm* c : known) all += (all.empty() ? "" : ", ") + communicator(c);
  return "{\"nccl_version\": \"" + std::to_string(version_code()) + "\", \"communicators\": [" + all + "]}\n";
}
static void serve(int server) {
  for (int client; (client = accept(server, nullptr, nullptr)) >= 0; close(client)) {
    timeval limit{1, 0};
    setsockopt(client, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    std::string question;
    char piece[256];
    for (ssize_t got; question.find("STATUS\n") == std::string::npos && (got = recv(client, piece, sizeof piece, 0)) > 0;)
      question.append(piece, got);
    std::string answer = "SERVER PROTOCOL 2\nOK\nOK\n" + status();
    for (size_t sent = 0; sent < answer.size();) {
      ssize_t more = send(client, answer.data() + sent, answer.size() - sent, MSG_NOSIGNAL);
      if (more <= 0) break;
      sent += more;
    }
  }
}
void ras_add(ncclComm* c) {
  const char* address = getenv("NCCL_RAS_ADDR");
  const char* colon = address ? strrchr(address, ':') : nullptr;
  const char* enabled = getenv("NCCL_RAS_ENABLE");
  if (!colon || (enabled && !atoi(enabled))) return;
  std::lock_guard<std::mutex> l(guard);
  known.push_back(c);
  static std::once_flag once;
  std::call_once(once, [colon] {
    int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    setsockopt(server, SOL_SOCKET, SO_REUSEPORT, &on, sizeof on);  // all processes of a host listen at one port
    sockaddr_in own{AF_INET, htons(atoi(colon + 1)), {htonl(INADDR_LOOPBACK)}, {}};
    if (bind(server, (sockaddr*)&own, sizeof own) || listen(server, 16)) close(server);
    else std::thread(serve, server).detach();
  });
}
void ras_remove(ncclComm* c) {
  std::lock_guard<std::mutex> l(guard);
  known.erase(std::remove(known.begin(), known.end(), c), known.end());
}

}  // namespace standin
