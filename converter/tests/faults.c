// Preloaded into the program under test. Counts the calls that open, read, change or flush files below $FAULT_IN; the
// $FAULT_AT-th (from 1) meets $FAULT_DO: "kill" ends the program before it, "torn" in the middle of a write, "EIO" makes it
// fail, "ENOSPC" makes it and all later ones that need space fail. At a normal end the count is left in $FAULT_COUNT.
// "shrink" empties the file $FAULT_FILE and goes on, "touch" gives it a new time, "remove" removes it.
// "no O_DIRECT" and "no O_DIRECT writes" refuse to open, and to write, files past the page cache, as some file systems do, and
// need no $FAULT_AT; $FAULT_COUNT is then how often.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static atomic_int calls;
static const char *in, *todo;
static int at;

__attribute__((constructor)) static void begin(void) {
    in = getenv("FAULT_IN");
    todo = getenv("FAULT_DO");
    const char *number = getenv("FAULT_AT");
    at = number ? atoi(number) : 0;
}

__attribute__((destructor)) static void end(void) {
    const char *path = getenv("FAULT_COUNT");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (file) {
        fprintf(file, "%d", atomic_load(&calls));
        fclose(file);
    }
}

enum kind { READS, NEEDS_SPACE, OTHER };
enum verdict { GO_ON, FAIL, TEAR };

static enum verdict judge(const char *path, enum kind kind) {
    if (!in || !todo || strncmp(todo, "no O_DIRECT", 11) == 0 || strncmp(path, in, strlen(in)) != 0) return GO_ON;
    int call = atomic_fetch_add(&calls, 1) + 1;
    if (at == 0 || call < at) return GO_ON;
    if (strcmp(todo, "ENOSPC") == 0) {
        errno = ENOSPC;
        return kind == NEEDS_SPACE ? FAIL : GO_ON;
    }
    if (call != at) return GO_ON;
    if (strcmp(todo, "EIO") == 0) {
        errno = EIO;
        return FAIL;
    }
    if (strcmp(todo, "torn") == 0 && kind == NEEDS_SPACE) return TEAR;
    if (strcmp(todo, "shrink") == 0) {
        const char *file = getenv("FAULT_FILE");
        if (!file || truncate(file, 0) != 0) abort();
        return GO_ON;
    }
    if (strcmp(todo, "touch") == 0) {
        const char *file = getenv("FAULT_FILE");
        if (!file || utimensat(AT_FDCWD, file, NULL, 0) != 0) abort();
        return GO_ON;
    }
    if (strcmp(todo, "remove") == 0) {
        const char *file = getenv("FAULT_FILE");
        if (!file || unlink(file) != 0) abort();
        return GO_ON;
    }
    raise(SIGKILL);
    return GO_ON;
}

static enum verdict judge_fd(int fd, enum kind kind) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t len = readlink(link, path, sizeof path - 1);
    if (len < 0) return GO_ON;
    path[len] = 0;
    return judge(path, kind);
}

// Whether a file is opened, or written, past the page cache where that is to be refused.
static int refuses(int flags, const char *what) {
    if (!todo || strcmp(todo, what) != 0 || !(flags & O_DIRECT)) return 0;
    atomic_fetch_add(&calls, 1);
    errno = EINVAL;
    return 1;
}

#define NEXT(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))

int open64(const char *path, int flags, ...) {
    va_list list;
    va_start(list, flags);
    mode_t mode = flags & O_CREAT ? va_arg(list, mode_t) : 0;
    va_end(list);
    if (refuses(flags, "no O_DIRECT")) return -1;
    enum verdict verdict = judge(path, flags & O_CREAT ? NEEDS_SPACE : OTHER);
    if (verdict == TEAR) raise(SIGKILL);
    return verdict == FAIL ? -1 : NEXT(int, "open64", const char *, int, ...)(path, flags, mode);
}

ssize_t write(int fd, const void *bytes, size_t len) {
    enum verdict verdict = judge_fd(fd, NEEDS_SPACE);
    if (verdict == FAIL) return -1;
    ssize_t done = NEXT(ssize_t, "write", int, const void *, size_t)(fd, bytes, verdict == TEAR ? len / 2 : len);
    if (verdict == TEAR) raise(SIGKILL);
    return done;
}

ssize_t pwrite64(int fd, const void *bytes, size_t len, off64_t offset) {
    if (refuses(fcntl(fd, F_GETFL), "no O_DIRECT writes")) return -1;
    enum verdict verdict = judge_fd(fd, NEEDS_SPACE);
    if (verdict == FAIL) return -1;
    ssize_t done =
        NEXT(ssize_t, "pwrite64", int, const void *, size_t, off64_t)(fd, bytes, verdict == TEAR ? len / 2 : len, offset);
    if (verdict == TEAR) raise(SIGKILL);
    return done;
}

ssize_t read(int fd, void *bytes, size_t len) {
    return judge_fd(fd, READS) == FAIL ? -1 : NEXT(ssize_t, "read", int, void *, size_t)(fd, bytes, len);
}

ssize_t pread64(int fd, void *bytes, size_t len, off64_t offset) {
    if (judge_fd(fd, READS) == FAIL) return -1;
    return NEXT(ssize_t, "pread64", int, void *, size_t, off64_t)(fd, bytes, len, offset);
}

int fsync(int fd) {
    return judge_fd(fd, OTHER) == FAIL ? -1 : NEXT(int, "fsync", int)(fd);
}

int fdatasync(int fd) {
    return judge_fd(fd, OTHER) == FAIL ? -1 : NEXT(int, "fdatasync", int)(fd);
}

int ftruncate64(int fd, off64_t len) {
    return judge_fd(fd, OTHER) == FAIL ? -1 : NEXT(int, "ftruncate64", int, off64_t)(fd, len);
}

int rename(const char *from, const char *to) {
    return judge(from, OTHER) == FAIL ? -1 : NEXT(int, "rename", const char *, const char *)(from, to);
}

int mkdir(const char *path, mode_t mode) {
    return judge(path, OTHER) == FAIL ? -1 : NEXT(int, "mkdir", const char *, mode_t)(path, mode);
}

int rmdir(const char *path) {
    return judge(path, OTHER) == FAIL ? -1 : NEXT(int, "rmdir", const char *)(path);
}

int unlink(const char *path) {
    return judge(path, OTHER) == FAIL ? -1 : NEXT(int, "unlink", const char *)(path);
}
