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
    MALLOCS, HOST_ALLOCS, BAD_DEVICES, H2D_ASIDE, COUNTERS,
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

#include "cuda_devices.h"

#include "cuda_memory.h"

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

static size_t size_of_type(const char *mangled) {
    static const char *names[] = {"b", "a", "h", "s", "f", "i", "d", "l", "N3c104HalfE", "N3c108BFloat16E"};
    static const size_t sizes[] = {1, 1, 1, 2, 4, 4, 8, 8, 2, 2};
    for (int i = 0; i < 10; i++)
        if (!strncmp(mangled, names[i], strlen(names[i]))) return sizes[i];
    return 0;
}

/* The one kernel that is played, where its tensor is contiguous: what was filled with zeros shall
 * not hold what lay there before. vectorized_elementwise_kernel(int, FillFunctor, array<char *, 1>). */
static void fill(const char *name, void **words) {
    const char *type = strstr(name, "FillFunctorI");
    size_t size = type ? size_of_type(type + strlen("FillFunctorI")) : 0;
    if (!size || !strstr(name, "vectorized_elementwise_kernel")) return;
    char *start = *(char **)words[2];
    for (int i = 0; i < *(int *)words[0]; i++) memcpy(start + i * size, words[1], size);
}

static error launched(const void *function, void **words) {
    const char *name = names[name_place(function)].name;
    if (name && words) fill(name, words);
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
error cudaLaunchKernel(const void *function, dim3 grid, dim3 threads, void **words) {
    return (void)grid, (void)threads, launched(function, words);
}
error __cudaLaunchKernel(const void *kernel, dim3 grid, dim3 threads, void **words) {
    return (void)grid, (void)threads, launched(kernel, words);
}
error cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *function, void **words) {
    return (void)c, launched(function, words);
}
int cuLaunchKernel(const void *function) { return launched(function, NULL); }
int cuLaunchKernelEx(const void *c, const void *function) { return (void)c, launched(function, NULL); }

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
int cuDeviceGetAttribute(int *value, int attribute) {
    *value = attribute == 97 ? 232448 : 0; /* CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN */
    return 0;
}
int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) { return (void)d, *flags = 0, *active = 1, 0; }
int cuCtxGetCurrent(void **context) { return *context = (void *)1, 0; }
int cuCtxSetCurrent(void *context) { return (void)context, 0; }
int cuCtxGetDevice(int *d) { return *d = device, 0; }
int cuStreamGetCtx(void *stream, void **context) { return (void)stream, *context = (void *)1, 0; }
int cuGetErrorString(int code, const char **text) { return *text = cudaGetErrorString(code), 0; }
int cuPointerGetAttribute(int *value) { return *value = 0; }
int cuTensorMapEncodeTiled(void) { return 0; }

/* Triton's: a kernel that it has compiled is known by its name. */
int cuModuleLoadData(void **module) { return *module = (void *)1, 0; }
int cuModuleLoad(void **module) { return *module = (void *)1, 0; }
int cuModuleUnload(void) { return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    (void)module;
    char *known = *function = strdup(name);
    __cudaRegisterFunction(NULL, known, NULL, known);
    return 0;
}
int cuFuncGetAttribute(int *value, int attribute) {
    *value = attribute == 0 ? 1024 : 0; /* CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK */
    return 0;
}
int cuFuncSetAttribute(void) { return 0; }
int cuFuncSetCacheConfig(void) { return 0; }
int cuDevicePrimaryCtxRetain(void **context) { return *context = (void *)1, 0; }
int cuCtxGetLimit(size_t *value) { return *value = 0, 0; }
int cuCtxSetLimit(void) { return 0; }
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
