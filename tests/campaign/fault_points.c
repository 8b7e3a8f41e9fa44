/* Preloaded into a command: counts the file operations that change something under a directory, and
   breaks one of them. See tests/campaign/fault_points.py.

   What is counted stands in memory that a forked child shares with its parent, who reads it; only
   the process that was armed is counted and broken, none that it starts. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NOTHING, KILL, FULL, BROKEN }; /* a fault */
enum { ANY, TAKES_SPACE };            /* of an operation: a full disk refuses what takes space */

struct shared {
    pid_t armed;
    int fault, at, count;
    char root[PATH_MAX], last[64 + PATH_MAX];
};
static struct shared *shared;

__attribute__((constructor)) static void share(void)
{
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

/* From here on, in this process: break operation number `at` (from 1) under `root`. */
void fault_arm(const char *root, int fault, int at)
{
    strncpy(shared->root, root, PATH_MAX - 1);
    shared->fault = fault;
    shared->at = at;
    shared->count = 0;
    shared->last[0] = 0;
    shared->armed = getpid();
}

int fault_count(void) { return shared->count; }

/* What was broken, in words; "" if nothing was. */
const char *fault_last(void) { return shared->last; }

static int is_under(const char *path)
{
    size_t length = strlen(shared->root);
    return !strncmp(path, shared->root, length) && (path[length] == '/' || !path[length]);
}

static int path_of(int fd, char *path)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return 1;
}

/* Count an operation. Returns 0 to let it through, else the error to give. `*torn` is set where half
   of it is to be done before the process is killed, or told that the disk is full. */
static int strike(const char *what, const char *path, int kind, int *torn)
{
    if (shared->fault == FULL && kind != TAKES_SPACE)
        return 0;
    int number = ++shared->count;
    if (shared->fault == NOTHING || !shared->at || number < shared->at)
        return 0;
    if (number == shared->at) {
        snprintf(shared->last, sizeof shared->last, "%s %s", what, path);
        if (torn)
            *torn = shared->fault != BROKEN;
        if (shared->fault == KILL && !torn)
            kill(getpid(), SIGKILL);
        return shared->fault == BROKEN ? EIO : ENOSPC;
    }
    return shared->fault == FULL ? ENOSPC : 0;
}

static int strike_path(const char *what, int folder, const char *path, int kind)
{
    char whole[2 * PATH_MAX], base[PATH_MAX];
    int kept = errno;
    if (!shared || shared->armed != getpid())
        return 0;
    if (path[0] == '/')
        snprintf(whole, sizeof whole, "%s", path);
    else {
        if (folder == AT_FDCWD ? !getcwd(base, sizeof base) : !path_of(folder, base))
            base[0] = 0;
        snprintf(whole, sizeof whole, "%s/%s", base, path);
    }
    int error = is_under(whole) ? strike(what, whole, kind, NULL) : 0;
    errno = error ? error : kept;
    return error;
}

static int strike_fd(const char *what, int fd, int kind, int *torn)
{
    char path[PATH_MAX];
    int kept = errno;
    if (!shared || shared->armed != getpid())
        return 0;
    int error = path_of(fd, path) && is_under(path) ? strike(what, path, kind, torn) : 0;
    errno = error ? error : kept;
    return error;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define ON_PATH(type, name, parameters, arguments, folder, path, kind) \
    type name parameters                                              \
    {                                                                 \
        if (strike_path(#name, folder, path, kind))                   \
            return -1;                                                \
        return REAL(name) arguments;                                  \
    }
#define ON_FD(type, name, parameters, arguments, fd, kind) \
    type name parameters                                   \
    {                                                      \
        if (strike_fd(#name, fd, kind, NULL))              \
            return -1;                                     \
        return REAL(name) arguments;                       \
    }

static int opens(int folder, const char *path, int flags)
{
    int takes = flags & (O_CREAT | O_TRUNC) ? TAKES_SPACE : ANY;
    return (flags & (O_ACCMODE | O_CREAT | O_TRUNC)) && strike_path("open", folder, path, takes);
}

#define MODE(flags)                        \
    va_list rest;                          \
    va_start(rest, flags);                 \
    mode_t mode = va_arg(rest, mode_t);    \
    va_end(rest);

int open(const char *path, int flags, ...)
{
    MODE(flags)
    return opens(AT_FDCWD, path, flags) ? -1 : REAL(open)(path, flags, mode);
}
int open64(const char *path, int flags, ...)
{
    MODE(flags)
    return opens(AT_FDCWD, path, flags) ? -1 : REAL(open64)(path, flags, mode);
}
int openat(int folder, const char *path, int flags, ...)
{
    MODE(flags)
    return opens(folder, path, flags) ? -1 : REAL(openat)(folder, path, flags, mode);
}
int openat64(int folder, const char *path, int flags, ...)
{
    MODE(flags)
    return opens(folder, path, flags) ? -1 : REAL(openat64)(folder, path, flags, mode);
}

/* Half of a write is done where the process is killed in it, or where the disk is full. */
static int write_half(const char *what, int fd, size_t size, size_t *now)
{
    int torn = 0;
    int error = strike_fd(what, fd, TAKES_SPACE, &torn);
    *now = size;
    if (error && torn && size > 1) {
        *now = size / 2;
        return 0;
    }
    if (error && shared->fault == KILL)
        kill(getpid(), SIGKILL);
    return error;
}

static ssize_t after(ssize_t done, int torn)
{
    if (torn && shared->fault == KILL)
        kill(getpid(), SIGKILL);
    return done;
}

ssize_t write(int fd, const void *data, size_t size)
{
    size_t now;
    if (write_half("write", fd, size, &now))
        return -1;
    return after(REAL(write)(fd, data, now), now != size);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset)
{
    size_t now;
    if (write_half("pwrite", fd, size, &now))
        return -1;
    return after(REAL(pwrite)(fd, data, now, offset), now != size);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset)
{
    size_t now;
    if (write_half("pwrite", fd, size, &now))
        return -1;
    return after(REAL(pwrite64)(fd, data, now, offset), now != size);
}

ON_FD(ssize_t, writev, (int fd, const struct iovec *v, int n), (fd, v, n), fd, TAKES_SPACE)
ON_FD(int, fsync, (int fd), (fd), fd, ANY)
ON_FD(int, fdatasync, (int fd), (fd), fd, ANY)
ON_FD(int, ftruncate, (int fd, off_t size), (fd, size), fd, ANY)
ON_FD(int, ftruncate64, (int fd, off64_t size), (fd, size), fd, ANY)
ON_PATH(int, rename, (const char *a, const char *b), (a, b), AT_FDCWD, b, TAKES_SPACE)
ON_PATH(int, renameat, (int f, const char *a, int g, const char *b), (f, a, g, b), g, b, TAKES_SPACE)
ON_PATH(int, renameat2, (int f, const char *a, int g, const char *b, unsigned flags),
        (f, a, g, b, flags), g, b, TAKES_SPACE)
ON_PATH(int, unlink, (const char *path), (path), AT_FDCWD, path, ANY)
ON_PATH(int, unlinkat, (int f, const char *path, int flags), (f, path, flags), f, path, ANY)
ON_PATH(int, rmdir, (const char *path), (path), AT_FDCWD, path, ANY)
ON_PATH(int, mkdir, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path, TAKES_SPACE)
ON_PATH(int, mkdirat, (int f, const char *path, mode_t mode), (f, path, mode), f, path, TAKES_SPACE)
ON_PATH(int, link, (const char *a, const char *b), (a, b), AT_FDCWD, b, TAKES_SPACE)
ON_PATH(int, linkat, (int f, const char *a, int g, const char *b, int flags), (f, a, g, b, flags), g,
        b, TAKES_SPACE)
ON_PATH(int, symlink, (const char *a, const char *b), (a, b), AT_FDCWD, b, TAKES_SPACE)
ON_PATH(int, symlinkat, (const char *a, int g, const char *b), (a, g, b), g, b, TAKES_SPACE)
ON_PATH(int, chmod, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path, ANY)
