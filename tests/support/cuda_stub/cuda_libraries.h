/* cuBLAS and NCCL, which compute nothing and are counted. Included by cuda_stub.c alone. */

/* -- cuBLAS ------------------------------------------------------------------------------------ */

static char something[4096]; /* what handles point to */

#define SUCCEEDS(name) int name(void) { return 0; }
#define COUNTED(name, which)   \
    int name(void) {           \
        (*counter(which))++;    \
        return 0;              \
    }
#define GEMM(name) COUNTED(name, GEMMS)

int cublasCreate_v2(void **handle) { return *handle = something, 0; }
int cublasGetMathMode(void *handle, int *mode) { return (void)handle, *mode = 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return (void)handle, *mode = 0; }
SUCCEEDS(cublasDestroy_v2)
SUCCEEDS(cublasSetMathMode)
SUCCEEDS(cublasSetPointerMode_v2)
SUCCEEDS(cublasSetSmCountTarget)
SUCCEEDS(cublasSetStream_v2)
SUCCEEDS(cublasSetWorkspace_v2)
GEMM(cublasSgemm_v2) GEMM(cublasDgemm_v2) GEMM(cublasCgemm_v2) GEMM(cublasZgemm_v2)
GEMM(cublasGemmEx) GEMM(cublasSgemmEx) GEMM(cublasGemmStridedBatchedEx)
GEMM(cublasSgemmStridedBatched) GEMM(cublasDgemmStridedBatched)
GEMM(cublasSgemv_v2) GEMM(cublasDgemv_v2) GEMM(cublasDotEx) GEMM(cublasSdot_v2) GEMM(cublasDdot_v2)

size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtCreate(void **handle) { return *handle = something, 0; }
int cublasLtMatmulAlgoGetHeuristic(void *a, void *b, void *c, void *d, void *e, void *f, void *g,
                                   int wanted, void *results, int *found) {
    (void)a, (void)b, (void)c, (void)d, (void)e, (void)f, (void)g, (void)wanted, (void)results;
    return *found = 1, 0;
}
int cublasLtMatmulDescCreate(void **made) { return *made = something, 0; }
int cublasLtMatrixLayoutCreate(void **made) { return *made = something, 0; }
int cublasLtMatmulPreferenceCreate(void **made) { return *made = something, 0; }
SUCCEEDS(cublasLtMatmulDescDestroy) SUCCEEDS(cublasLtMatmulDescSetAttribute)
SUCCEEDS(cublasLtMatmulPreferenceDestroy) SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)
SUCCEEDS(cublasLtMatrixLayoutDestroy) SUCCEEDS(cublasLtMatrixLayoutSetAttribute)
GEMM(cublasLtMatmul)

/* -- NCCL -------------------------------------------------------------------------------------- */

typedef struct { char bytes[128]; } unique_id;
typedef struct { int size, rank; } communicator;
static communicator communicators[1024];
static int communicator_count;

static int join(void **made, int size, int rank) {
    if (communicator_count == sizeof communicators / sizeof *communicators) abort();
    communicators[communicator_count] = (communicator){size, rank};
    *made = &communicators[communicator_count++];
    return 0;
}

int ncclGetUniqueId(unique_id *id) { return memset(id, 7, sizeof *id), 0; }
int ncclGetVersion(int *version) { return *version = 22907, 0; }
int ncclCommInitRank(void **c, int size, unique_id id, int rank) { return (void)id, join(c, size, rank); }
int ncclCommInitRankConfig(void **c, int size, unique_id id, int rank, void *config) {
    return (void)id, (void)config, join(c, size, rank);
}
int ncclCommInitRankScalable(void **c, int size, int rank) { return join(c, size, rank); }
int ncclCommSplit(void *parent, int color, int key, void **c) {
    /* NCCL would ask all ranks how many have the same color. Where nobody says it, nothing is gathered. */
    const char *size = getenv("CUDA_STUB_SPLIT");
    return (void)parent, (void)color, join(c, size ? atoi(size) : 0, key);
}
int ncclCommGetAsyncError(void *c, int *state) { return (void)c, *state = 0; }
int ncclCommCount(communicator *c, int *count) { return *count = c->size, 0; }
int ncclCommUserRank(communicator *c, int *rank) { return *rank = c->rank, 0; }
int ncclRedOpCreatePreMulSum(int *op) { return *op = 100, 0; }
const char *ncclGetErrorString(int code) { return (void)code, "an error of the CUDA stub's NCCL"; }
const char *ncclGetLastError(void *c) { return (void)c, ""; }
SUCCEEDS(ncclCommAbort) SUCCEEDS(ncclCommDestroy) SUCCEEDS(ncclCommFinalize)
SUCCEEDS(ncclCommRegister) SUCCEEDS(ncclCommDeregister) SUCCEEDS(ncclCommMemStats)
SUCCEEDS(ncclCommWindowRegister) SUCCEEDS(ncclCommWindowDeregister)
SUCCEEDS(ncclGroupStart) SUCCEEDS(ncclGroupEnd) SUCCEEDS(ncclRedOpDestroy)

/* What a rank has is taken for what every rank has: it stays finite, and its own part is right. */

static size_t bytes_of(size_t count, int type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return count * sizes[type];
}

static int collected(void *to, const void *from, size_t size) {
    (*counter(NCCL))++;
    if (size && to != from) memmove(to, from, size);
    return 0;
}

int ncclAllReduce(const void *from, void *to, size_t count, int type) {
    return collected(to, from, bytes_of(count, type));
}
int ncclReduce(const void *from, void *to, size_t count, int type) {
    return collected(to, from, bytes_of(count, type));
}
int ncclBroadcast(const void *from, void *to, size_t count, int type) {
    return collected(to, from, bytes_of(count, type));
}
int ncclBcast(void *at, size_t count, int type) { return collected(at, at, bytes_of(count, type)); }
int ncclAlltoAll(const void *from, void *to, size_t count, int type, communicator *c) {
    return collected(to, from, c->size * bytes_of(count, type));
}
int ncclAllGather(const void *from, void *to, size_t count, int type, communicator *c) {
    size_t size = bytes_of(count, type);
    for (int rank = 0; rank < c->size; rank++)
        if ((char *)to + rank * size != from) memmove((char *)to + rank * size, from, size);
    return collected(to, to, 0);
}
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, communicator *c) {
    (void)op;
    size_t size = bytes_of(count, type);
    return collected(to, (const char *)from + (c->size ? c->rank : 0) * size, size);
}
int ncclSend(void) { return collected(NULL, NULL, 0); }
int ncclRecv(void) { return collected(NULL, NULL, 0); }
