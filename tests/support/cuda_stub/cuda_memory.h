/* Memory and copies, which are real. Included by cuda_stub.c alone. */

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
 * ranks agree on. A single byte answers whether all is well: 1. Anything longer comes back as it went there. */
enum { A_FEW = 16 };
static _Thread_local int tells_numbers; /* this thread has computed them itself */

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
            memset(to, size == 1, size);
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
    long before = *counter(H2D_BYTES);
    moved(to, from, size, kind);
    if (s) *counter(H2D_ASIDE) += *counter(H2D_BYTES) - before;
    return cudaSuccess;
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
