/* A stand-in for libnvidia-ml.so.1: the functions that ddpdiag's probes call, answered from tables.
 *
 * names.h and tables.h are written by fake_nvml.py from one JSON file. It looks in this file for ENTER(function) and
 * GIVE(target, key), so these are the names that a JSON file may use. What a file leaves out is not supported, as
 * with the real library. Structures and numbers are those of nvml.h (driver 580).
 */
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "names.h"

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, VERSION_MISMATCH = 25 };
enum { MAX_LINKS = 18, MAX_PROCESSES = 8, MAX_ADDRESSES = 64, MAX_GPUS = 16, CAPABILITIES = 4 };

struct value { int given; long long first, later; };
struct answer { int code; unsigned sleep_seconds; };
struct link { struct value state, speed, errors[6]; const char *remote; };
struct process { unsigned pid; unsigned long long used; };
struct gpu {
    const char *uuid, *name, *bus_id;
    struct value values[KEYS];
    struct answer answers[FUNCTIONS];
    unsigned links, processes, graphics;
    struct link link[MAX_LINKS];
    struct process process[MAX_PROCESSES], drawing[MAX_PROCESSES];
    /* To each GPU, itself included. */
    struct value levels[MAX_GPUS], p2p[CAPABILITIES][MAX_GPUS];
};

#include "tables.h"

/* What is asked a second time may have another answer: a counter that rises while a job runs. */
static long long told(const struct value *value) {
    static const struct value *asked[8192];
    static size_t count;
    for (size_t i = 0; i < count; i++)
        if (asked[i] == value) return value->later;
    if (value->first != value->later && count < sizeof asked / sizeof *asked) asked[count++] = value;
    return value->first;
}

static int enter(const struct answer *answer) {
    if (answer->sleep_seconds) sleep(answer->sleep_seconds);
    return answer->code;
}

#define ENTER(function) \
    do { int code = enter(&gpu->answers[F_##function]); if (code) return code; } while (0)
#define ENTER_SYSTEM(function) \
    do { int code = enter(&system_answers[F_##function]); if (code) return code; } while (0)
#define GIVE_VALUE(target, value) \
    do { if (!(value)->given) return NOT_SUPPORTED; *(target) = told(value); } while (0)
#define GIVE(target, key) GIVE_VALUE(target, &gpu->values[K_##key])

static int text(char *target, unsigned size, const char *source) {
    if (!source) return NOT_SUPPORTED;
    snprintf(target, size, "%s", source);
    return SUCCESS;
}

/* The system -------------------------------------------------------------------------------------------------------- */

static const struct gpu *gpus = first_gpus;

/* Starts of all processes are counted in the file $FAKE_NVML_STARTS; from number $FAKE_NVML_LATER on, the GPUs are as
 * the JSON file's "later" has them. */
static void count_start(void) {
    const char *path = getenv("FAKE_NVML_STARTS"), *later = getenv("FAKE_NVML_LATER");
    struct stat status;
    if (!path || !later) return;
    int file = open(path, O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (file < 0) return;
    if (write(file, ".", 1) == 1 && !fstat(file, &status) && status.st_size >= atol(later)) gpus = later_gpus;
    close(file);
}

static void pause_for(const char *variable) {
    const char *seconds = getenv(variable);
    if (seconds) usleep((useconds_t)(1e6 * atof(seconds)));
}

/* How often this process has NVML open, and its lock on the file of each GPU that it uses. */
static unsigned opened;
static int used[MAX_GPUS];

/* The first user of a GPU on this host waits until the driver has started it. Each user has a shared lock on the GPU's
 * file until it shuts NVML down or ends; who gets an exclusive one is alone. */
static void use(unsigned index) {
    const char *folder = getenv("FAKE_NVML_DRIVER");
    char path[4096];
    if (!folder || used[index]) return;
    snprintf(path, sizeof path, "%s/gpu-%u", folder, index);
    int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    snprintf(path, sizeof path, "%s/start-%u", folder, index);
    int start = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || start < 0) abort();
    flock(start, LOCK_EX);
    if (!flock(file, LOCK_EX | LOCK_NB)) {
        pause_for("FAKE_NVML_GPU_SECONDS");
        if (write(file, ".", 1) != 1) abort();
    }
    flock(file, LOCK_SH);
    close(start);
    used[index] = file;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    count_start();
    ENTER_SYSTEM(nvmlInitWithFlags);
    if (!opened++) pause_for("FAKE_NVML_OPEN_SECONDS");
    return SUCCESS;
}

int nvmlShutdown(void) {
    if (opened && --opened) return SUCCESS;
    for (unsigned i = 0; i < MAX_GPUS; i++) {
        if (used[i]) close(used[i]);
        used[i] = 0;
    }
    return SUCCESS;
}

const char *nvmlErrorString(int code) { return code == SUCCESS ? "Success" : "an error of the fake library"; }

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    ENTER_SYSTEM(nvmlSystemGetDriverVersion);
    return text(version, size, DRIVER);
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    ENTER_SYSTEM(nvmlDeviceGetCount_v2);
    *count = GPUS;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, const struct gpu **device) {
    if (index >= GPUS) return INVALID_ARGUMENT;
    const struct gpu *gpu = &gpus[index];
    ENTER(nvmlDeviceGetHandleByIndex_v2);
    use(index);
    *device = gpu;
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, const struct gpu **device) {
    for (unsigned i = 0; i < GPUS; i++)
        if (!strcmp(gpus[i].uuid, uuid)) return nvmlDeviceGetHandleByIndex_v2(i, device);
    return NOT_FOUND;
}

/* Who it is --------------------------------------------------------------------------------------------------------- */

int nvmlDeviceGetName(const struct gpu *gpu, char *name, unsigned size) {
    ENTER(nvmlDeviceGetName);
    return text(name, size, gpu->name);
}

int nvmlDeviceGetUUID(const struct gpu *gpu, char *uuid, unsigned size) {
    ENTER(nvmlDeviceGetUUID);
    return text(uuid, size, gpu->uuid);
}

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(const struct gpu *gpu, struct pci *pci) {
    ENTER(nvmlDeviceGetPciInfo_v3);
    memset(pci, 0, sizeof *pci);
    return text(pci->bus_id, sizeof pci->bus_id, gpu->bus_id);
}

/* One number each --------------------------------------------------------------------------------------------------- */

#define NUMBER(function, type, key) \
    int function(const struct gpu *gpu, type *target) { ENTER(function); GIVE(target, key); return SUCCESS; }

NUMBER(nvmlDeviceGetComputeMode, unsigned, compute_mode)
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, clock_events)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, clock_events)
NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned, power_limit_mw)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, default_power_limit_mw)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, pcie_generation_max)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, pcie_width)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, pcie_width_max)
NUMBER(nvmlDeviceGetPcieReplayCounter, unsigned, pcie_replays)
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, unsigned, retired_pending)

NUMBER(nvmlDeviceGetPowerUsage, unsigned, power_mw)

int nvmlDeviceGetClockInfo(const struct gpu *gpu, unsigned type, unsigned *mhz) {
    ENTER(nvmlDeviceGetClockInfo);
    if (type == 1) GIVE(mhz, sm_mhz);
    else return INVALID_ARGUMENT;
    return SUCCESS;
}

struct utilization { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(const struct gpu *gpu, struct utilization *rates) {
    ENTER(nvmlDeviceGetUtilizationRates);
    rates->memory = 0;
    GIVE(&rates->gpu, busy_percent);
    return SUCCESS;
}

int nvmlDeviceGetTemperature(const struct gpu *gpu, int sensor, unsigned *celsius) {
    ENTER(nvmlDeviceGetTemperature);
    if (sensor != 0) return INVALID_ARGUMENT;
    GIVE(celsius, celsius);
    return SUCCESS;
}

int nvmlDeviceGetMigMode(const struct gpu *gpu, unsigned *current, unsigned *pending) {
    ENTER(nvmlDeviceGetMigMode);
    GIVE(current, mig);
    GIVE(pending, mig);
    return SUCCESS;
}

/* Memory ------------------------------------------------------------------------------------------------------------ */

struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(const struct gpu *gpu, struct memory *memory) {
    ENTER(nvmlDeviceGetMemoryInfo);
    GIVE(&memory->total, memory_bytes);
    GIVE(&memory->used, used_bytes);
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(const struct gpu *gpu, struct memory_v2 *memory) {
    ENTER(nvmlDeviceGetMemoryInfo_v2);
    if (memory->version != 0x02000028) return VERSION_MISMATCH;
    GIVE(&memory->total, memory_bytes);
    GIVE(&memory->used, used_bytes);
    memory->reserved = 0;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(const struct gpu *gpu, unsigned type, unsigned counter, unsigned long long *count) {
    ENTER(nvmlDeviceGetTotalEccErrors);
    if (type == 1 && counter == 0) GIVE(count, uncorrected_volatile);
    else if (type == 0 && counter == 0) GIVE(count, corrected_volatile);
    else return INVALID_ARGUMENT;
    return SUCCESS;
}

int nvmlDeviceGetMemoryErrorCounter(const struct gpu *gpu, unsigned type, unsigned counter, unsigned where,
                                    unsigned long long *count) {
    ENTER(nvmlDeviceGetMemoryErrorCounter);
    if (type != 1 || where != 7 || counter != 0) return NOT_SUPPORTED;
    GIVE(count, sram_volatile);
    return SUCCESS;
}

struct sram {
    unsigned version;
    unsigned long long aggregate_parity, aggregate_secded, aggregate_corrected;
    unsigned long long volatile_parity, volatile_secded, volatile_corrected;
    unsigned long long buckets[5];
    unsigned threshold_exceeded;
};
int nvmlDeviceGetSramEccErrorStatus(const struct gpu *gpu, struct sram *sram) {
    ENTER(nvmlDeviceGetSramEccErrorStatus);
    if (sram->version != 0x1000068) return VERSION_MISMATCH;
    GIVE(&sram->volatile_secded, sram_volatile);
    GIVE(&sram->threshold_exceeded, sram_threshold_exceeded);
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(const struct gpu *gpu, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failed) {
    ENTER(nvmlDeviceGetRemappedRows);
    GIVE(corrected, remapped_correctable);
    GIVE(uncorrected, remapped_uncorrectable);
    GIVE(pending, remap_pending);
    GIVE(failed, remap_failed);
    return SUCCESS;
}

struct process_info { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };

static int list_processes(unsigned known, const struct process *from, unsigned *count, struct process_info *to) {
    if (!to || *count < known) {
        *count = known;
        return known ? INSUFFICIENT_SIZE : SUCCESS;
    }
    *count = known;
    for (unsigned i = 0; i < known; i++) to[i] = (struct process_info){from[i].pid, from[i].used, -1u, -1u};
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(const struct gpu *gpu, unsigned *count, struct process_info *processes) {
    ENTER(nvmlDeviceGetComputeRunningProcesses_v3);
    return list_processes(gpu->processes, gpu->process, count, processes);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(const struct gpu *gpu, unsigned *count, struct process_info *processes) {
    ENTER(nvmlDeviceGetGraphicsRunningProcesses_v3);
    return list_processes(gpu->graphics, gpu->drawing, count, processes);
}

/* Links ------------------------------------------------------------------------------------------------------------- */

int nvmlDeviceGetNvLinkState(const struct gpu *gpu, unsigned link, unsigned *state) {
    ENTER(nvmlDeviceGetNvLinkState);
    if (link >= gpu->links) return gpu->links ? INVALID_ARGUMENT : NOT_SUPPORTED;
    GIVE_VALUE(state, &gpu->link[link].state);
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(const struct gpu *gpu, unsigned link, unsigned *kind) {
    ENTER(nvmlDeviceGetNvLinkRemoteDeviceType);
    if (link >= gpu->links) return NOT_SUPPORTED;
    GIVE(kind, nvlink_remote);
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(const struct gpu *gpu, unsigned link, struct pci *pci) {
    ENTER(nvmlDeviceGetNvLinkRemotePciInfo_v2);
    if (link >= gpu->links) return NOT_SUPPORTED;
    memset(pci, 0, sizeof *pci);
    return text(pci->bus_id, sizeof pci->bus_id, gpu->link[link].remote);
}

int nvmlDeviceGetTopologyCommonAncestor(const struct gpu *gpu, const struct gpu *other, unsigned *level) {
    ENTER(nvmlDeviceGetTopologyCommonAncestor);
    GIVE_VALUE(level, &gpu->levels[other - gpus]);
    return SUCCESS;
}

int nvmlDeviceGetP2PStatus(const struct gpu *gpu, const struct gpu *other, unsigned capability, unsigned *status) {
    ENTER(nvmlDeviceGetP2PStatus);
    if (capability >= CAPABILITIES || other == gpu) return INVALID_ARGUMENT;
    GIVE_VALUE(status, &gpu->p2p[capability][other - gpus]);
    return SUCCESS;
}

int nvmlDeviceGetNvLinkErrorCounter(const struct gpu *gpu, unsigned link, unsigned counter, unsigned long long *count) {
    ENTER(nvmlDeviceGetNvLinkErrorCounter);
    if (link >= gpu->links || counter >= 5) return INVALID_ARGUMENT;
    GIVE_VALUE(count, &gpu->link[link].errors[counter]);
    return SUCCESS;
}

struct field {
    unsigned id, scope;
    long long timestamp, latency;
    unsigned type;
    int code;
    union { double d; unsigned ui; unsigned long long ull; } value;
};

/* The recovery action, and of a link its speed, replays, recoveries and CRC errors. */
static int field(const struct gpu *gpu, struct field *field) {
    const struct link *link = field->scope < gpu->links ? &gpu->link[field->scope] : NULL;
    /* Who does not look at the code takes this for a reboot. */
    field->type = 1;
    field->value.ull = 2;
    if (field->id == 230) {
        GIVE(&field->value.ui, recovery_action);
        return SUCCESS;
    }
    if (!link) return NOT_SUPPORTED;
    field->type = 3;
    if (field->id == 164) GIVE_VALUE(&field->value.ull, &link->speed);
    else if (field->id == 161) GIVE_VALUE(&field->value.ull, &link->errors[0]);
    else if (field->id == 162) GIVE_VALUE(&field->value.ull, &link->errors[1]);
    else if (field->id == 163) GIVE_VALUE(&field->value.ull, &link->errors[2]);
    else if (field->id == 215) GIVE_VALUE(&field->value.ull, &link->errors[5]);
    else return NOT_SUPPORTED;
    return SUCCESS;
}

int nvmlDeviceGetFieldValues(const struct gpu *gpu, int count, struct field *fields) {
    ENTER(nvmlDeviceGetFieldValues);
    for (int i = 0; i < count; i++) fields[i].code = field(gpu, &fields[i]);
    return SUCCESS;
}

struct fabric { unsigned char cluster[16]; int status; unsigned clique; unsigned char state; };
int nvmlDeviceGetGpuFabricInfo(const struct gpu *gpu, struct fabric *fabric) {
    ENTER(nvmlDeviceGetGpuFabricInfo);
    GIVE(&fabric->state, fabric_state);
    GIVE(&fabric->status, fabric_status);
    return SUCCESS;
}

struct fabric_v {
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
    unsigned health_mask;
    unsigned char health_summary; /* from version 3 on */
};
int nvmlDeviceGetGpuFabricInfoV(const struct gpu *gpu, struct fabric_v *fabric) {
    ENTER(nvmlDeviceGetGpuFabricInfoV);
    if (fabric->version != 0x02000024 && fabric->version != 0x03000028) return VERSION_MISMATCH;
    GIVE(&fabric->state, fabric_state);
    GIVE(&fabric->status, fabric_status);
    GIVE(&fabric->health_mask, fabric_health_mask);
    if (fabric->version == 0x03000028) GIVE(&fabric->health_summary, fabric_health_summary);
    return SUCCESS;
}
