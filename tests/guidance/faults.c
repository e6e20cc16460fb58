/* Makes the n-th write, fsync or rename of a guidance file fail, stop half-way or kill the process. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { NONE, ENOSPC_, EIO_, SHORT_, KILL_BEFORE, KILL_HALF, KILL_AFTER };
enum { WRITE, SYNC, RENAME };
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

static void die(void) { kill(getpid(), SIGKILL); pause(); }

ssize_t write(int fd, const void *buf, size_t n) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "write");
    int mode = left_ >= 0 && guidance(fd) ? hit(WRITE) : NONE;
    if (mode == ENOSPC_) { real(fd, buf, n / 2); errno = ENOSPC; return -1; }
    if (mode == EIO_) { errno = EIO; return -1; }
    if (mode == SHORT_) return real(fd, buf, n > 1 ? n / 2 : n);
    if (mode == KILL_BEFORE) die();
    if (mode == KILL_HALF) { real(fd, buf, n / 2); die(); }
    ssize_t r = real(fd, buf, n);
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
