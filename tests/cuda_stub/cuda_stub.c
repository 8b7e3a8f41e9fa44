/* A CUDA whose devices, memory, streams and copies are real (host memory), and whose kernels, matrix
 * products and collectives compute nothing but are counted.
 *
 * Preloaded, it answers in place of the driver, the runtime, cuBLAS and NCCL; everything above them
 * is the real thing. Its GPUs are those of the NVML stub's file (NVML_STUB_STATE), or
 * CUDA_STUB_DEVICES of its own. CUDA_STUB_BYTES limits the memory of each device of this process.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <unistd.h>

#include "driver_types.h"
#include "vector_types.h"

#include "../nvml_stub/nvml_state.h"

typedef cudaError_t error;

/* -- what is counted --------------------------------------------------------------------------- */

enum {
    LAUNCHES, CASTS, GEMMS, H2D, H2D_PAGEABLE, D2H, D2D, H2D_BYTES, D2H_BYTES, SYNCS, NCCL, MEMSETS,
    MALLOCS, HOST_ALLOCS, BAD_DEVICES, COUNTERS,
};
static atomic_long counters[2][COUNTERS]; /* of threads that train, and of the others */
static void (*on_sync)(void); /* called where a thread that trains waits for a device */
static void (*on_launch)(const char *kernel);

long cuda_stub_count(int which, int background) { return counters[background][which]; }
void cuda_stub_on_sync(void (*callback)(void)) { on_sync = callback; }
void cuda_stub_on_launch(void (*callback)(const char *)) { on_launch = callback; }

/* A step waits for the main thread and for autograd's; not for those that read ahead or save. */
static int background(void) {
    static _Thread_local int known; /* 0 not yet, 1 trains, 2 does not */
    if (!known) {
        char name[16] = "";
        pthread_getname_np(pthread_self(), name, sizeof name);
        known = getpid() == gettid() || !strncmp(name, "pt_autograd", 11) ? 1 : 2;
    }
    return known == 2;
}

static atomic_long *counter(int which) { return &counters[background()][which]; }

static error synced(void) {
    (*counter(SYNCS))++;
    if (on_sync && !background()) on_sync();
    return cudaSuccess;
}

/* -- which devices ----------------------------------------------------------------------------- */

enum { MOST_DEVICES = 64 };
static const ull DEFAULT_BYTES = 80ULL << 30;
static int visible[MOST_DEVICES], visible_count = -1;
static pthread_mutex_t choosing = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local int device;

static int on_bus(const void *a, const void *b) {
    const gpu *x = a, *y = b;
    ull first = (ull)x->domain << 32 | x->bus << 8 | x->slot;
    ull second = (ull)y->domain << 32 | y->bus << 8 | y->slot;
    return first < second ? -1 : first > second;
}

static void invent(void) {
    const char *count = getenv("CUDA_STUB_DEVICES");
    gpu_count = count ? atoi(count) : 1;
    for (int i = 0; i < gpu_count; i++) {
        snprintf(gpus[i].whole.uuid, TEXT, "GPU-%08x-0000-4000-8000-%012x", i + 1, i + 1);
        copy(gpus[i].whole.name, "NVIDIA H100 that computes nothing");
        gpus[i].whole.total = DEFAULT_BYTES;
        gpus[i].bus = (uint)i + 1;
    }
}

/* As the driver reads CUDA_VISIBLE_DEVICES: up to the first entry that names no device; indices or
 * beginnings of UUIDs; one named twice is an error, and nothing is visible. */
static void choose(const char *list) {
    while (*list && visible_count < MOST_DEVICES) {
        size_t length = strcspn(list, ",");
        int found = -1;
        if (!strncmp(list, "GPU-", 4)) {
            for (int i = 0; i < gpu_count; i++)
                if (!strncasecmp(gpus[i].whole.uuid, list, length)) found = found < 0 ? i : -2;
        } else if (*list >= '0' && *list <= '9') found = atoi(list);
        if (found < 0 || found >= gpu_count) return;
        for (int i = 0; i < visible_count; i++)
            if (visible[i] == found) {
                visible_count = 0;
                return;
            }
        visible[visible_count++] = found;
        list += length + (list[length] == ',');
    }
}

static int device_count(void) {
    pthread_mutex_lock(&choosing);
    if (visible_count < 0) {
        const char *order = getenv("CUDA_DEVICE_ORDER"), *list = getenv("CUDA_VISIBLE_DEVICES");
        if (!refresh()) invent();
        if (order && !strcmp(order, "PCI_BUS_ID")) qsort(gpus, (size_t)gpu_count, sizeof *gpus, on_bus);
        visible_count = 0;
        if (list) choose(list);
        else
            while (visible_count < gpu_count) {
                visible[visible_count] = visible_count;
                visible_count++;
            }
    }
    pthread_mutex_unlock(&choosing);
    return visible_count;
}

static const gpu *gpu_of(int d) { return d >= 0 && d < device_count() ? &gpus[visible[d]] : NULL; }

static ull total_of(const gpu *g) {
    const char *bytes = getenv("CUDA_STUB_BYTES");
    return bytes ? strtoull(bytes, NULL, 10) : g->whole.total;
}

static ull room_of(const gpu *g) {
    ull taken = getenv("CUDA_STUB_BYTES") ? 0 : g->whole.used + g->whole.reserved;
    ull total = total_of(g);
    return total > taken ? total - taken : 0;
}

error cudaGetDeviceCount(int *count) {
    *count = device_count();
    return *count ? cudaSuccess : cudaErrorNoDevice;
}

error cudaGetDevice(int *d) {
    *d = device;
    return cudaSuccess;
}

error cudaSetDevice(int d) {
    if (!gpu_of(d)) {
        (*counter(BAD_DEVICES))++;
        return cudaErrorInvalidDevice;
    }
    device = d;
    return cudaSuccess;
}

/* `GPU-` and 32 hexadecimal digits between dashes. */
static void read_uuid(char *bytes, const char *text) {
    int digits = 0;
    memset(bytes, 0, 16);
    for (const char *c = text + 4; *c && digits < 32; c++) {
        if (*c == '-') continue;
        int digit = *c <= '9' ? *c - '0' : (*c | 32) - 'a' + 10;
        bytes[digits / 2] |= (char)(digits % 2 ? digit : digit << 4);
        digits++;
    }
}

error cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    const gpu *g = gpu_of(d);
    if (!g) return cudaErrorInvalidDevice;
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", g->whole.name);
    read_uuid(p->uuid.bytes, g->whole.uuid);
    p->totalGlobalMem = total_of(g);
    p->pciDomainID = (int)g->domain;
    p->pciBusID = (int)g->bus;
    p->pciDeviceID = (int)g->slot;
    p->major = 9; /* an H100's numbers */
    p->multiProcessorCount = 132;
    p->l2CacheSize = 50 << 20;
    p->warpSize = 32;
    p->totalConstMem = p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerBlockOptin = 232448;
    p->sharedMemPerMultiprocessor = 233472;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->maxGridSize[0] = p->memPitch = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->textureAlignment = 512;
    p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = 1;
    p->cooperativeLaunch = p->clusterLaunch = p->memoryPoolsSupported = 1;
    return cudaSuccess;
}

error cudaDeviceGetAttribute(int *value, int attribute, int d) {
    struct cudaDeviceProp p;
    error failed = cudaGetDeviceProperties(&p, d);
    if (failed) return failed;
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
        case cudaDevAttrMaxBlocksPerMultiprocessor: *value = p.maxBlocksPerMultiProcessor; break;
        case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
        case cudaDevAttrMaxGridDimY: *value = p.maxGridSize[1]; break;
        case cudaDevAttrMaxRegistersPerBlock: *value = p.regsPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)p.sharedMemPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)p.sharedMemPerMultiprocessor; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
        case cudaDevAttrPciBusId: *value = p.pciBusID; break;
        case cudaDevAttrPciDeviceId: *value = p.pciDeviceID; break;
        case cudaDevAttrPciDomainId: *value = p.pciDomainID; break;
        case cudaDevAttrWarpSize: *value = p.warpSize; break;
        default: *value = 1;
    }
    return cudaSuccess;
}

error cudaDeviceGetPCIBusId(char *text, int length, int d) {
    const gpu *g = gpu_of(d);
    if (!g) return cudaErrorInvalidDevice;
    snprintf(text, (size_t)length, "%04x:%02x:%02x.0", g->domain, g->bus, g->slot);
    return cudaSuccess;
}

error cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

error cudaDeviceCanAccessPeer(int *can, int a, int b) {
    *can = a != b;
    return cudaSuccess;
}

error cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return (void)peer, (void)flags, 0; }
error cudaDeviceSynchronize(void) { return synced(); }
error cudaDriverGetVersion(int *version) { return *version = 13000, 0; }
error cudaRuntimeGetVersion(int *version) { return *version = 13000, 0; }
error cudaGetLastError(void) { return cudaSuccess; }
error cudaPeekAtLastError(void) { return cudaSuccess; }
const char *cudaGetErrorName(error e) { return e == 2 ? "cudaErrorMemoryAllocation" : "cudaError"; }
const char *cudaGetErrorString(error e) {
    switch (e) {
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        default: return "the CUDA stub refuses this";
    }
}

/* -- memory ------------------------------------------------------------------------------------ */

typedef struct { char *start; size_t size; int device, on_host; } block;
enum { MOST_BLOCKS = 1 << 16 };
static block blocks[MOST_BLOCKS];
static int block_count;
static atomic_long used[MOST_DEVICES];
static pthread_mutex_t memory = PTHREAD_MUTEX_INITIALIZER;

static error remember(void *start, size_t size, int on_host) {
    pthread_mutex_lock(&memory);
    int place = 0;
    while (place < block_count && blocks[place].start) place++;
    if (place == MOST_BLOCKS) abort();
    if (place == block_count) block_count++;
    blocks[place] = (block){start, size, device, on_host};
    pthread_mutex_unlock(&memory);
    return cudaSuccess;
}

/* The block that holds an address, or size 0; forgotten if `start` is where it begins. */
static block find_block(const void *address, int forget) {
    block found = {0};
    pthread_mutex_lock(&memory);
    for (int i = 0; i < block_count; i++) {
        block *b = &blocks[i];
        if (!b->start || (const char *)address < b->start) continue;
        if (forget ? address != b->start : (const char *)address >= b->start + b->size) continue;
        found = *b;
        if (forget) b->start = NULL;
        break;
    }
    pthread_mutex_unlock(&memory);
    return found;
}

static error take(size_t size) {
    const gpu *g = gpu_of(device);
    (*counter(MALLOCS))++;
    if (!g) return cudaErrorNoDevice;
    if ((ull)used[device] + size > room_of(g)) return cudaErrorMemoryAllocation;
    used[device] += (long)size;
    return cudaSuccess;
}

static void give_back(int of, size_t size) { used[of] -= (long)size; }

long cuda_stub_used(int d) { return used[d]; }

static void *reserve(size_t size, int access) {
    return mmap(NULL, size, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

error cudaMalloc(void **start, size_t size) {
    *start = NULL;
    error failed = take(size);
    if (failed) return failed;
    *start = reserve(size, PROT_READ | PROT_WRITE);
    return *start == MAP_FAILED ? abort(), 0 : remember(*start, size, 0);
}

error cudaFree(void *start) {
    block b = start ? find_block(start, 1) : (block){0};
    if (b.size) {
        munmap(b.start, b.size);
        give_back(b.device, b.size);
    }
    return cudaSuccess;
}

error cudaMallocAsync(void **start, size_t size, cudaStream_t s) { return (void)s, cudaMalloc(start, size); }
error cudaFreeAsync(void *start, cudaStream_t s) { return (void)s, cudaFree(start); }

error cudaHostAlloc(void **start, size_t size, unsigned flags) {
    (void)flags;
    (*counter(HOST_ALLOCS))++;
    *start = reserve(size ? size : 1, PROT_READ | PROT_WRITE);
    return *start == MAP_FAILED ? cudaErrorMemoryAllocation : remember(*start, size ? size : 1, 1);
}

error cudaFreeHost(void *start) {
    block b = find_block(start, 1);
    if (b.size) munmap(b.start, b.size);
    return cudaSuccess;
}

error cudaHostRegister(void *start, size_t size, unsigned flags) {
    (void)flags;
    (*counter(HOST_ALLOCS))++;
    return remember(start, size, 1);
}

error cudaHostUnregister(void *start) { return find_block(start, 1), cudaSuccess; }

error cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    const gpu *g = gpu_of(device);
    if (!g) return cudaErrorNoDevice;
    *total = total_of(g);
    *free_bytes = room_of(g) - (size_t)used[device];
    return cudaSuccess;
}

error cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *address) {
    block b = find_block(address, 0);
    memset(a, 0, sizeof *a);
    a->type = !b.size ? cudaMemoryTypeUnregistered : b.on_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    a->device = b.device;
    if (b.size) a->devicePointer = (void *)address;
    if (b.on_host) a->hostPointer = (void *)address;
    return cudaSuccess;
}

/* What leaves the device a few bytes at a time is read by the host as a number: a loss, a norm, how
 * many are nonzero. No kernel wrote it, so it would be whatever lay there before; 0 is one that all
 * ranks agree on. Anything longer comes back as it went there. */
enum { A_FEW = 16 };
static int tells_numbers; /* someone else has computed them */

void cuda_stub_tell_numbers(int really) { tells_numbers = really; }

static int moved(void *to, const void *from, size_t size, int kind) {
    if (kind == cudaMemcpyDefault) {
        int into = find_block(to, 0).size && !find_block(to, 0).on_host;
        int out = find_block(from, 0).size && !find_block(from, 0).on_host;
        kind = into && out ? cudaMemcpyDeviceToDevice : into ? cudaMemcpyHostToDevice
             : out ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost;
    }
    if (kind == cudaMemcpyHostToDevice) {
        (*counter(H2D))++;
        *counter(H2D_BYTES) += (long)size;
        if (!find_block(from, 0).on_host) (*counter(H2D_PAGEABLE))++;
    } else if (kind == cudaMemcpyDeviceToHost) {
        (*counter(D2H))++;
        *counter(D2H_BYTES) += (long)size;
        if (size <= A_FEW && !tells_numbers) {
            memset(to, 0, size);
            return 0;
        }
    } else (*counter(D2D))++;
    if (size && to != from) memmove(to, from, size);
    return 0;
}

error cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    moved(to, from, size, kind);
    return synced();
}

error cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, cudaStream_t s) {
    return (void)s, moved(to, from, size, kind);
}

error cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t size, cudaStream_t s) {
    return (void)a, (void)b, (void)s, moved(to, from, size, cudaMemcpyDeviceToDevice);
}

error cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                        size_t height, int kind, cudaStream_t s) {
    (void)s;
    for (size_t row = 0; row < height; row++)
        moved((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, kind);
    return cudaSuccess;
}

error cudaMemsetAsync(void *start, int value, size_t size, cudaStream_t s) {
    (void)s;
    (*counter(MEMSETS))++;
    memset(start, value, size);
    return cudaSuccess;
}

error cudaMemset(void *start, int value, size_t size) { return cudaMemsetAsync(start, value, size, NULL); }

error cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset, int kind) {
    return (void)symbol, (void)from, (void)size, (void)offset, (void)kind, 0;
}

error cudaGetSymbolAddress(void **address, const void *symbol) {
    static char zeros[1 << 16];
    return (void)symbol, *address = zeros, 0;
}

/* The driver's own memory calls, of which expandable segments are made. */
enum { GRANULE = 2 << 20 };
typedef struct { size_t size; int device; } physical;

int cuMemGetAllocationGranularity(size_t *granularity, const void *properties, int option) {
    return (void)properties, (void)option, *granularity = GRANULE, 0;
}

int cuMemAddressReserve(ull *start, size_t size, size_t alignment, ull address, ull flags) {
    (void)alignment, (void)address, (void)flags;
    void *found = reserve(size, PROT_NONE);
    if (found == MAP_FAILED) return cudaErrorMemoryAllocation;
    remember(found, size, 0);
    *start = (ull)(uintptr_t)found;
    return 0;
}

int cuMemAddressFree(ull start, size_t size) {
    find_block((void *)(uintptr_t)start, 1);
    return munmap((void *)(uintptr_t)start, size);
}

int cuMemCreate(ull *handle, size_t size, const void *properties, ull flags) {
    (void)properties, (void)flags;
    error failed = take(size);
    if (failed) return failed;
    physical *made = malloc(sizeof *made);
    *made = (physical){size, device};
    *handle = (ull)(uintptr_t)made;
    return 0;
}

int cuMemRelease(ull handle) {
    physical *made = (physical *)(uintptr_t)handle;
    give_back(made->device, made->size);
    free(made);
    return 0;
}

int cuMemMap(ull start, size_t size, size_t offset, ull handle, ull flags) {
    (void)offset, (void)handle, (void)flags;
    return mprotect((void *)(uintptr_t)start, size, PROT_READ | PROT_WRITE);
}

int cuMemUnmap(ull start, size_t size) {
    madvise((void *)(uintptr_t)start, size, MADV_DONTNEED);
    return mprotect((void *)(uintptr_t)start, size, PROT_NONE);
}

int cuMemSetAccess(ull start, size_t size, const void *access, size_t count) {
    return (void)start, (void)size, (void)access, (void)count, 0;
}

/* -- streams and events ------------------------------------------------------------------------ */

static atomic_long next = 0x1000;
static error made(void **handle) { return *handle = (void *)(next += 16), cudaSuccess; }

error cudaStreamCreate(cudaStream_t *s) { return made((void **)s); }
error cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { return (void)f, made((void **)s); }
error cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) { return (void)f, (void)p, made((void **)s); }
error cudaStreamDestroy(cudaStream_t s) { return (void)s, 0; }
error cudaStreamSynchronize(cudaStream_t s) { return (void)s, synced(); }
error cudaStreamQuery(cudaStream_t s) { return (void)s, 0; }
error cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) { return (void)s, (void)e, (void)f, 0; }
error cudaStreamGetPriority(cudaStream_t s, int *priority) { return (void)s, *priority = 0, 0; }
error cudaStreamIsCapturing(cudaStream_t s, int *status) { return (void)s, *status = 0, 0; }
error cudaStreamGetCaptureInfo(cudaStream_t s, int *status) { return (void)s, *status = 0, 0; }
error cudaThreadExchangeStreamCaptureMode(int *mode) { return (void)mode, 0; }
error cudaEventCreate(cudaEvent_t *e) { return made((void **)e); }
error cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { return (void)f, made((void **)e); }
error cudaEventDestroy(cudaEvent_t e) { return (void)e, 0; }
error cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return (void)e, (void)s, 0; }
error cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) { return (void)e, (void)s, (void)f, 0; }
error cudaEventQuery(cudaEvent_t e) { return (void)e, 0; }
error cudaEventSynchronize(cudaEvent_t e) { return (void)e, synced(); }
error cudaEventElapsedTime(float *milliseconds, cudaEvent_t a, cudaEvent_t b) {
    return (void)a, (void)b, *milliseconds = 1, 0;
}
error cudaStreamAddCallback(cudaStream_t s, void (*call)(cudaStream_t, error, void *), void *data, unsigned f) {
    (void)f;
    call(s, cudaSuccess, data);
    return cudaSuccess;
}
error cudaLaunchHostFunc(cudaStream_t s, void (*call)(void *), void *data) {
    (void)s;
    call(data);
    return cudaSuccess;
}

/* -- kernels ----------------------------------------------------------------------------------- */

/* Host function → the kernel's mangled name, as the libraries register them when they are loaded. */
enum { NAMES = 1 << 19 };
static struct { const void *function; const char *name; } names[NAMES];

static size_t name_place(const void *function) {
    size_t place = ((uintptr_t)function >> 4) * 0x9E3779B97F4A7C15ULL >> 45;
    while (names[place].function && names[place].function != function) place = (place + 1) % NAMES;
    return place;
}

void **__cudaRegisterFatBinary(void *binary) { return binary; }
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
char __cudaInitModule(void **handle) { return (void)handle, 1; }
void __cudaRegisterVar(void **handle) { (void)handle; }
void __cudaRegisterFunction(void **handle, const char *function, char *text, const char *name) {
    (void)handle, (void)text;
    size_t place = name_place(function);
    names[place].function = function;
    names[place].name = name;
}

static error launched(const void *function) {
    const char *name = names[name_place(function)].name;
    (*counter(LAUNCHES))++;
    if (name && (strstr(name, "direct_copy_kernel") || strstr(name, "float16_copy_kernel")))
        (*counter(CASTS))++; /* to another type, or to another layout */
    if (on_launch) on_launch(name ? name : "?");
    return cudaSuccess;
}

static _Thread_local struct { dim3 grid, threads; size_t shared; void *stream; } configuration;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 threads, size_t shared, void *stream) {
    configuration.grid = grid;
    configuration.threads = threads;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}

error __cudaPopCallConfiguration(dim3 *grid, dim3 *threads, size_t *shared, void **stream) {
    *grid = configuration.grid;
    *threads = configuration.threads;
    *shared = configuration.shared;
    *stream = configuration.stream;
    return cudaSuccess;
}

error __cudaGetKernel(const void **kernel, const void *function) { return *kernel = function, 0; }
error __cudaLaunchKernel(const void *kernel) { return launched(kernel); }
error cudaLaunchKernel(const void *function) { return launched(function); }
error cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *function) { return (void)c, launched(function); }
int cuLaunchKernel(const void *function) { return launched(function); }
int cuLaunchKernelEx(const void *c, const void *function) { return (void)c, launched(function); }

error cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *function) {
    (void)function;
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->ptxVersion = a->binaryVersion = 90;
    a->numRegs = 32;
    a->maxDynamicSharedSizeBytes = 232448;
    return cudaSuccess;
}
error cudaFuncSetAttribute(const void *f, int a, int v) { return (void)f, (void)a, (void)v, 0; }
error cudaKernelSetAttributeForDevice(void *k, int a, int v, int d) { return (void)k, (void)a, (void)v, (void)d, 0; }
error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count) { return *count = 2, 0; }
error cudaOccupancyMaxActiveClusters(int *count) { return *count = 16, 0; }
error cudaProfilerStart(void) { return cudaSuccess; }
error cudaProfilerStop(void) { return cudaSuccess; }

/* -- the driver -------------------------------------------------------------------------------- */

int cuInit(unsigned flags) { return (void)flags, 0; }
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuDeviceGet(int *d, int ordinal) { return *d = ordinal, 0; }
int cuDeviceGetAttribute(int *value) { return *value = 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) { return (void)d, *flags = 0, *active = 1, 0; }
int cuCtxGetCurrent(void **context) { return *context = (void *)1, 0; }
int cuCtxSetCurrent(void *context) { return (void)context, 0; }
int cuCtxGetDevice(int *d) { return *d = device, 0; }
int cuStreamGetCtx(void *stream, void **context) { return (void)stream, *context = (void *)1, 0; }
int cuGetErrorString(int code, const char **text) { return *text = cudaGetErrorString(code), 0; }
int cuPointerGetAttribute(int *value) { return *value = 0; }
int cuTensorMapEncodeTiled(void) { return 0; }
static int refused(void) { return cudaErrorNotSupported; }

error cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, ull flags, int *status) {
    (void)version, (void)flags;
    void *found = dlsym(RTLD_DEFAULT, name);
    *function = found ? found : (void *)refused;
    if (status) *status = 0;
    return cudaSuccess;
}

/* -- torch ------------------------------------------------------------------------------------- */

/* cuDNN plans its kernels with its own heuristics, which are not played: torch takes its own kernels
 * instead, as with torch.backends.cudnn.enabled = False. bool at::Context::userEnabledCuDNN() const
 * and userEnabledCuDNNSDP(), torch 2.11 to 2.13. */
char _ZNK2at7Context16userEnabledCuDNNEv(void) { return 0; }
char _ZNK2at7Context19userEnabledCuDNNSDPEv(void) { return 0; }

#include "cuda_libraries.h"
