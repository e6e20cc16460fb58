/* Makes the n-th write, fsync, close or rename of a guidance file fail, stop half-way, hang or kill the process. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NONE, ENOSPC_, EIO_, SHORT_, KILL_BEFORE, KILL_HALF, KILL_AFTER, HANG };
enum { WRITE, SYNC, RENAME, CLOSE };
static int call_, mode_;
static long left_ = -1;

void tk_arm(int call, long n, int mode) { call_ = call; mode_ = mode; left_ = n; }
long tk_left(void) { return left_; }

static int guidance(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    return strstr(path, ".tkg") != NULL;
}

static int hit(int call) {
    if (left_ < 0 || call != call_) return NONE;
    return __sync_sub_and_fetch(&left_, 1) == -1 ? mode_ : NONE;
}

static void hang(void) { for (;;) pause(); }
static void die(void) { kill(getpid(), SIGKILL); pause(); }

ssize_t write(int fd, const void *buf, size_t n) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "write");
    int mode = left_ >= 0 && guidance(fd) ? hit(WRITE) : NONE;
    if (mode == HANG) hang();
    if (mode == ENOSPC_) { real(fd, buf, n / 2); errno = ENOSPC; return -1; }
    if (mode == EIO_) { errno = EIO; return -1; }
    if (mode == SHORT_) return real(fd, buf, n > 1 ? n / 2 : n);
    if (mode == KILL_BEFORE) die();
    if (mode == KILL_HALF) { real(fd, buf, n / 2); die(); }
    ssize_t r = real(fd, buf, n);
    if (mode == KILL_AFTER) die();
    return r;
}

/* The first n bytes of a vector. */
static ssize_t front(ssize_t (*real)(int, const struct iovec *, int), int fd, const struct iovec *v, int count, size_t n) {
    struct iovec part[1024];
    int used = 0;
    for (; used < count && used < 1024 && n > 0; used++) {
        part[used] = v[used];
        if (part[used].iov_len > n) part[used].iov_len = n;
        n -= part[used].iov_len;
    }
    return real(fd, part, used);
}

ssize_t writev(int fd, const struct iovec *v, int count) {
    static ssize_t (*real)(int, const struct iovec *, int);
    if (!real) real = dlsym(RTLD_NEXT, "writev");
    int mode = left_ >= 0 && guidance(fd) ? hit(WRITE) : NONE;
    size_t n = 0;
    for (int i = 0; i < count; i++) n += v[i].iov_len;
    if (mode == HANG) hang();
    if (mode == ENOSPC_) { front(real, fd, v, count, n / 2); errno = ENOSPC; return -1; }
    if (mode == EIO_) { errno = EIO; return -1; }
    if (mode == SHORT_) return front(real, fd, v, count, n > 1 ? n / 2 : n);
    if (mode == KILL_BEFORE) die();
    if (mode == KILL_HALF) { front(real, fd, v, count, n / 2); die(); }
    ssize_t r = real(fd, v, count);
    if (mode == KILL_AFTER) die();
    return r;
}

ssize_t pwrite64(int fd, const void *buf, size_t n, off_t at) {
    static ssize_t (*real)(int, const void *, size_t, off_t);
    if (!real) real = dlsym(RTLD_NEXT, "pwrite64");
    size_t half = n / 2 & ~(size_t)4095; /* direct writes are of whole blocks */
    int mode = left_ >= 0 && guidance(fd) ? hit(WRITE) : NONE;
    if (mode == ENOSPC_) { if (half) real(fd, buf, half, at); errno = ENOSPC; return -1; }
    if (mode == EIO_) { errno = EIO; return -1; }
    if (mode == SHORT_) return real(fd, buf, half ? half : n, at);
    if (mode == KILL_BEFORE) die();
    if (mode == KILL_HALF) { if (half) real(fd, buf, half, at); die(); }
    ssize_t r = real(fd, buf, n, at);
    if (mode == KILL_AFTER) die();
    return r;
}

static int sync_(int fd, const char *name) {
    int (*real)(int) = dlsym(RTLD_NEXT, name);
    int mode = left_ >= 0 ? hit(SYNC) : NONE;
    if (mode == EIO_) { errno = EIO; return -1; }
    if (mode == ENOSPC_) { errno = ENOSPC; return -1; }
    if (mode == KILL_BEFORE) die();
    int r = real(fd);
    if (mode == KILL_AFTER) die();
    return r;
}
int fsync(int fd) { return sync_(fd, "fsync"); }
int fdatasync(int fd) { return sync_(fd, "fdatasync"); }

int rename(const char *a, const char *b) {
    int (*real)(const char *, const char *) = dlsym(RTLD_NEXT, "rename");
    int mode = left_ >= 0 ? hit(RENAME) : NONE;
    if (mode == EIO_ || mode == ENOSPC_) { errno = EIO; return -1; }
    if (mode == KILL_BEFORE) die();
    int r = real(a, b);
    if (mode == KILL_AFTER) die();
    return r;
}

int close(int fd) {
    static int (*real)(int);
    if (!real) real = dlsym(RTLD_NEXT, "close");
    int mode = left_ >= 0 && guidance(fd) ? hit(CLOSE) : NONE;
    if (mode == KILL_BEFORE) die();
    int r = real(fd);
    if (mode == EIO_) { errno = EIO; return -1; }
    if (mode == ENOSPC_) { errno = ENOSPC; return -1; }
    return r;
}
