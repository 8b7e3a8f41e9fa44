/* A stand-in for libnvidia-ml.so.1 that plays GPUs from a text file.
 *
 * The real pynvml runs against it, so that what is tested is the code that meets a real driver.
 * The file is named by NVML_STUB_STATE, is written by stub.py (which describes its lines) and is
 * read again whenever it changes. What a GPU's lines leave out is NVML_ERROR_NOT_SUPPORTED.
 */
#include <pthread.h>
#include <unistd.h>

#include "nvml_state.h"

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, VERSION_MISMATCH = 25,
};
typedef struct { uint pid; ull memory; uint gpu_instance, compute_instance; } process_info;
typedef void *device; /* (index of the GPU + 1) * 256 + (index of the MIG instance + 1, or 0) */

static int references;
static pid_t owner; /* the process that initialised: a forked child has to do so itself */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void unlock(int *held) { (void)held; pthread_mutex_unlock(&mutex); }
#define LOCKED \
    __attribute__((cleanup(unlock), unused)) int held = pthread_mutex_lock(&mutex)

/* -- which error, which device ----------------------------------------------------------------- */

/* A rule names a function with or without its version, or all of them by `*`. */
static int injected(const rule *all, int count, const char *function) {
    for (int i = 0; i < count; i++) {
        size_t length = strlen(all[i].function);
        const char *rest = function + length;
        if (!strcmp(all[i].function, "*")
            || (!strncmp(all[i].function, function, length) && (!*rest || !strncmp(rest, "_v", 2))))
            return all[i].code;
    }
    return SUCCESS;
}

static int enter(const char *function) {
    if (!refresh()) return references ? UNINITIALIZED : DRIVER_NOT_LOADED;
    if (!references || owner != getpid()) return UNINITIALIZED;
    return injected(rules, rule_count, function);
}

static int find(const char *function, device handle, gpu **g, part **p) {
    int failed = enter(function);
    if (failed) return failed;
    uintptr_t number = (uintptr_t)handle;
    size_t index = number / 256 - 1, which = number % 256;
    if (number < 256 || index >= (size_t)gpu_count) return INVALID_ARGUMENT;
    *g = &gpus[index];
    if (which > (size_t)(*g)->part_count) return INVALID_ARGUMENT;
    *p = which ? &(*g)->parts[which - 1] : &(*g)->whole;
    return injected((*g)->rules, (*g)->rule_count, function);
}

#define DRIVER_CALL                     \
    LOCKED;                             \
    int failed = enter(__func__);       \
    if (failed) return failed
#define DEVICE_CALL(handle)                             \
    LOCKED;                                             \
    gpu *g = NULL;                                      \
    part *p = NULL;                                     \
    int failed = find(__func__, handle, &g, &p);        \
    if (failed) return failed
#define WHOLE_GPU_CALL(handle) \
    DEVICE_CALL(handle);       \
    if (p != &g->whole) return NOT_SUPPORTED
#define REQUIRE(condition) if (!(condition)) return NOT_SUPPORTED

static device handle_of(int index, int which) {
    return (device)(uintptr_t)((index + 1) * 256 + which);
}

static int text(char *to, uint size, const char *from) {
    if (strlen(from) >= size) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

/* -- the library ------------------------------------------------------------------------------- */

int nvmlInitWithFlags(uint flags) {
    (void)flags;
    LOCKED;
    if (!refresh()) return DRIVER_NOT_LOADED;
    int code = injected(rules, rule_count, __func__);
    if (code) return code;
    if (owner != getpid()) references = 0; /* a forked child, on its own */
    references++;
    owner = getpid();
    return SUCCESS;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); } /* torch */

int nvmlShutdown(void) {
    LOCKED;
    if (!references) return UNINITIALIZED;
    references--;
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    (void)code;
    return "an error played by the stub";
}

int nvmlSystemGetDriverVersion(char *version, uint size) {
    DRIVER_CALL;
    return text(version, size, driver);
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    DRIVER_CALL;
    *version = 13000;
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(uint *count) {
    DRIVER_CALL;
    *count = (uint)gpu_count;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(uint index, device *handle) {
    DRIVER_CALL;
    if (index >= (uint)gpu_count) return INVALID_ARGUMENT;
    *handle = handle_of((int)index, 0);
    return injected(gpus[index].rules, gpus[index].rule_count, __func__);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device *handle) {
    DRIVER_CALL;
    for (int i = 0; i < gpu_count; i++) {
        int code = injected(gpus[i].rules, gpus[i].rule_count, __func__);
        int which = strcmp(gpus[i].whole.uuid, uuid) ? -1 : 0;
        for (int j = 0; j < gpus[i].part_count; j++)
            if (!strcmp(gpus[i].parts[j].uuid, uuid)) which = j + 1;
        if (which < 0) continue;
        *handle = handle_of(i, which);
        return code;
    }
    return NOT_FOUND;
}

/* `domain:bus:slot.0`, each in hexadecimal. */
int nvmlDeviceGetHandleByPciBusId_v2(const char *place, device *handle) {
    DRIVER_CALL;
    uint domain, bus, slot;
    if (sscanf(place, "%x:%x:%x", &domain, &bus, &slot) != 3) return INVALID_ARGUMENT;
    for (int i = 0; i < gpu_count; i++)
        if (gpus[i].domain == domain && gpus[i].bus == bus && gpus[i].slot == slot) {
            *handle = handle_of(i, 0);
            return injected(gpus[i].rules, gpus[i].rule_count, __func__);
        }
    return NOT_FOUND;
}

/* -- one device -------------------------------------------------------------------------------- */

#define TEXT_OF(name, field)                            \
    int name(device handle, char *to, uint size) {      \
        DEVICE_CALL(handle);                            \
        REQUIRE(p->field[0]);                           \
        return text(to, size, p->field);                \
    }
TEXT_OF(nvmlDeviceGetUUID, uuid)
TEXT_OF(nvmlDeviceGetName, name)

int nvmlDeviceGetIndex(device handle, uint *index) {
    DEVICE_CALL(handle);
    *index = (uint)(p == &g->whole ? g - gpus : p - g->parts);
    return SUCCESS;
}

typedef struct {
    char legacy_id[16];
    uint domain, bus, device, device_id, subsystem_id;
    char id[32];
} pci_info;

int nvmlDeviceGetPciInfo_v3(device handle, pci_info *pci) {
    WHOLE_GPU_CALL(handle);
    REQUIRE(g->has_pci);
    memset(pci, 0, sizeof *pci);
    pci->domain = g->domain;
    pci->bus = g->bus;
    pci->device = g->slot;
    snprintf(pci->legacy_id, 16, "%04X:%02X:%02X.0", g->domain & 0xffff, g->bus & 0xff, g->slot & 31);
    snprintf(pci->id, sizeof pci->id, "%08X:%02X:%02X.0", g->domain, g->bus, g->slot);
    return SUCCESS;
}

/* As the driver does: the first version counts what it keeps for itself as used. */
int nvmlDeviceGetMemoryInfo(device handle, ull *memory) {
    DEVICE_CALL(handle);
    REQUIRE(p->has_memory);
    memory[0] = p->total;
    memory[1] = p->total - p->used - p->reserved;
    memory[2] = p->used + p->reserved;
    return SUCCESS;
}

typedef struct { uint version; ull total, reserved, free, used; } memory_v2;

int nvmlDeviceGetMemoryInfo_v2(device handle, memory_v2 *memory) {
    DEVICE_CALL(handle);
    REQUIRE(p->has_memory);
    if (memory->version != (sizeof *memory | 2 << 24)) return VERSION_MISMATCH;
    memory->total = p->total;
    memory->reserved = p->reserved;
    memory->free = p->total - p->used - p->reserved;
    memory->used = p->used;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(device handle, uint *rates) {
    WHOLE_GPU_CALL(handle);
    REQUIRE(g->has_utilisation && !g->mig); /* the driver does not know it of a divided GPU */
    rates[0] = g->utilisation;
    rates[1] = g->memory_utilisation;
    return SUCCESS;
}

int nvmlDeviceGetTemperature(device handle, uint sensor, uint *temperature) {
    WHOLE_GPU_CALL(handle);
    REQUIRE(g->has_temperature);
    if (sensor) return INVALID_ARGUMENT;
    *temperature = (uint)g->temperature;
    return SUCCESS;
}

typedef struct { uint version, sensor; int temperature; } temperature_v1;

int nvmlDeviceGetTemperatureV(device handle, temperature_v1 *temperature) {
    WHOLE_GPU_CALL(handle);
    REQUIRE(g->has_temperature);
    if (temperature->version != (sizeof *temperature | 1 << 24)) return VERSION_MISMATCH;
    if (temperature->sensor) return INVALID_ARGUMENT;
    temperature->temperature = g->temperature;
    return SUCCESS;
}

#define NUMBER(name, number, condition, value)      \
    int name(device handle, number *out) {          \
        WHOLE_GPU_CALL(handle);                     \
        REQUIRE(condition);                         \
        *out = (number)(value);                     \
        return SUCCESS;                             \
    }
NUMBER(nvmlDeviceGetMinorNumber, uint, 1, g - gpus)
NUMBER(nvmlDeviceGetPowerUsage, uint, g->has_power, g->power)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, uint, g->has_limit, g->limit)
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, ull, g->has_reasons, g->reasons)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, ull, g->has_reasons, g->reasons)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, uint, g->has_pcie, g->generation)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, uint, g->has_pcie, g->lanes)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, uint, g->has_pcie, g->most_lanes)
NUMBER(nvmlDeviceGetMaxMigDeviceCount, uint, 1, g->has_mig ? 2 * MAX_PARTS : 0)

#define CLOCK(name, field)                                      \
    int name(device handle, uint type, uint *megahertz) {       \
        WHOLE_GPU_CALL(handle);                                 \
        REQUIRE(type < 4 && g->has_##field[type]);              \
        *megahertz = g->field[type];                            \
        return SUCCESS;                                         \
    }
CLOCK(nvmlDeviceGetClockInfo, clock)
CLOCK(nvmlDeviceGetMaxClockInfo, top_clock)

int nvmlDeviceGetNvLinkState(device handle, uint link, uint *state) {
    WHOLE_GPU_CALL(handle);
    REQUIRE(g->has_nvlinks);
    if (link >= g->links) return INVALID_ARGUMENT;
    *state = link < g->links_up;
    return SUCCESS;
}

/* Which device a link leads to is not played. */
int nvmlDeviceGetNvLinkRemoteDeviceType(device handle) {
    WHOLE_GPU_CALL(handle);
    return NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(device handle) {
    WHOLE_GPU_CALL(handle);
    return NOT_SUPPORTED;
}

/* -- processes --------------------------------------------------------------------------------- */

static void gather(const part *p, int kind, uint *found, uint room, process_info *infos) {
    for (int i = 0; i < p->process_count; i++) {
        if (p->processes[i].kind != kind) continue;
        if (*found < room && infos)
            infos[*found] = (process_info){
                p->processes[i].pid, p->processes[i].memory, p->gpu_instance, p->compute_instance};
        (*found)++;
    }
}

static int list_processes(const char *function, device handle, int kind, uint *count,
                          process_info *infos) {
    LOCKED;
    gpu *g = NULL;
    part *p = NULL;
    int failed = find(function, handle, &g, &p);
    if (failed) return failed;
    uint found = 0, room = *count;
    gather(p, kind, &found, room, infos);
    for (int i = 0; p == &g->whole && i < g->part_count; i++)
        gather(&g->parts[i], kind, &found, room, infos);
    *count = found;
    return found <= room ? SUCCESS : INSUFFICIENT_SIZE;
}

#define LISTING(name, kind)                                             \
    int name(device handle, uint *count, process_info *infos) {         \
        return list_processes(__func__, handle, kind, count, infos);    \
    }
LISTING(nvmlDeviceGetComputeRunningProcesses, COMPUTE)
LISTING(nvmlDeviceGetComputeRunningProcesses_v2, COMPUTE)
LISTING(nvmlDeviceGetComputeRunningProcesses_v3, COMPUTE)
LISTING(nvmlDeviceGetGraphicsRunningProcesses_v2, GRAPHICS)
LISTING(nvmlDeviceGetGraphicsRunningProcesses_v3, GRAPHICS)

/* -- MIG --------------------------------------------------------------------------------------- */

int nvmlDeviceGetMigMode(device handle, uint *current, uint *pending) {
    WHOLE_GPU_CALL(handle);
    REQUIRE(g->has_mig);
    *current = *pending = (uint)g->mig;
    return SUCCESS;
}

/* Instances sit in the odd places only, since a driver too leaves holes where one was destroyed. */
int nvmlDeviceGetMigDeviceHandleByIndex(device handle, uint index, device *instance) {
    WHOLE_GPU_CALL(handle);
    if (index % 2 == 0 || index / 2 >= (uint)g->part_count) return NOT_FOUND;
    *instance = handle_of((int)(g - gpus), (int)index / 2 + 1);
    return SUCCESS;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device handle, device *parent) {
    DEVICE_CALL(handle);
    if (p == &g->whole) return INVALID_ARGUMENT;
    *parent = handle_of((int)(g - gpus), 0);
    return SUCCESS;
}

#define PART_NUMBER(name, field)                \
    int name(device handle, uint *id) {         \
        DEVICE_CALL(handle);                    \
        if (p == &g->whole) return NOT_FOUND;   \
        *id = p->field;                         \
        return SUCCESS;                         \
    }
PART_NUMBER(nvmlDeviceGetGpuInstanceId, gpu_instance)
PART_NUMBER(nvmlDeviceGetComputeInstanceId, compute_instance)
