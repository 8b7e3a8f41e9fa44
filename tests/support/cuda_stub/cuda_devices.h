/* Which devices there are, and what they can do. Included by cuda_stub.c alone. */

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
