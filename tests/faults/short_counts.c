/* Calls that do less than they were asked to, as POSIX lets them: strace can only say that they did, and then what it
   says of a read isn't true. Loaded before the C library, this has one call on a file of a folder do half of it.

   cc -shared -fPIC -o short_counts.so short_counts.c -ldl */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX], chosen[32];
static int number, seen, log_file = -1;

/* From now on, the number-th `call` on a file below `place` is shortened; `list` gets a line for each of any name. */
void shorten(const char *place, const char *call, int nth, const char *list) {
    snprintf(folder, sizeof folder, "%s/", place);
    snprintf(chosen, sizeof chosen, "%s", call);
    number = nth, seen = 0;
    log_file = open(list, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0666);
}

/* How many of `count` bytes this call is to ask for. Parts of large requests stay aligned, as direct reads need. */
static size_t allowed(const char *call, int file, size_t count) {
    char link[64], path[PATH_MAX], line[PATH_MAX + 64];
    if (log_file < 0 || file == log_file || count < 2) return count;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return count;
    path[length] = 0;
    if (strncmp(path, folder, strlen(folder))) return count;
    int hit = !strcmp(call, chosen) && __atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST) == number;
    size_t half = count / 2 > 4096 ? count / 2 / 4096 * 4096 : count / 2;
    int written = snprintf(line, sizeof line, "%s %s%s\n", call, path, hit ? " SHORT" : "");
    syscall(SYS_write, log_file, line, written);
    return hit ? half : count;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define PLAIN(result, name, data)                                                              \
    result name(int file, data memory, size_t count) {                                         \
        return NEXT(name)(file, memory, allowed(#name, file, count));                          \
    }
#define PLACED(name, call, data, offset)                                                       \
    ssize_t name(int file, data memory, size_t count, offset at) {                             \
        return NEXT(name)(file, memory, allowed(call, file, count), at);                       \
    }
#define FIRST_PART(call)                                                                       \
    struct iovec first = parts[0];                                                             \
    first.iov_len = allowed(call, file, first.iov_len);                                        \
    int whole = first.iov_len == parts[0].iov_len;
#define VECTOR(name, call, offset)                                                             \
    ssize_t name(int file, const struct iovec *parts, int count, offset at) {                  \
        FIRST_PART(call)                                                                       \
        return NEXT(name)(file, whole ? parts : &first, whole ? count : 1, at);                \
    }
#define FLAGGED(name, call, offset)                                                            \
    ssize_t name(int file, const struct iovec *parts, int count, offset at, int flags) {       \
        FIRST_PART(call)                                                                       \
        return NEXT(name)(file, whole ? parts : &first, whole ? count : 1, at, flags);         \
    }

PLAIN(ssize_t, read, void *)
PLAIN(ssize_t, write, const void *)
PLACED(pread, "pread", void *, off_t)
PLACED(pread64, "pread", void *, off64_t)
PLACED(pwrite, "pwrite", const void *, off_t)
PLACED(pwrite64, "pwrite", const void *, off64_t)
VECTOR(preadv, "preadv", off_t)
VECTOR(preadv64, "preadv", off64_t)
FLAGGED(preadv2, "preadv", off_t)
FLAGGED(preadv64v2, "preadv", off64_t)
