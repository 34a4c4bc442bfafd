/* The calls for pools that processes share, and messages with descriptors. */
#ifndef SHARED_POOLS_H
#define SHARED_POOLS_H

#include "vmm.h"

#include <sys/socket.h>

typedef struct CUmemPool_st *CUmemoryPool;
struct pool_props {
    int type, handle_types;
    struct location location;
    void *win32;
    size_t most_bytes;
    unsigned char reserved[56];
};
struct export_data {
    unsigned char reserved[64];
};
CUresult cuDriverGetVersion(int *version);
CUresult cuMemPoolCreate(CUmemoryPool *pool, const struct pool_props *props);
CUresult cuMemPoolDestroy(CUmemoryPool pool);
CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep_bytes);
CUresult cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value);
CUresult cuMemPoolExportToShareableHandle(void *out, CUmemoryPool pool, int type, unsigned long long flags);
CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *pool, void *handle, int type, unsigned long long flags);
CUresult cuMemPoolExportPointer(struct export_data *data, CUdeviceptr address);
CUresult cuMemPoolImportPointer(CUdeviceptr *address, CUmemoryPool pool, struct export_data *data);
CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream);
CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream);
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream);

/* The kind of handle that is a descriptor. */
enum { DESCRIPTOR = 1 };

static const struct pool_props exportable_pool = {.type = 1, .handle_types = DESCRIPTOR, .location = {.type = 1}};

static inline void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    exit(1);
}

/* A descriptor below 0 is none. */
static inline void send_message(int to, const void *data, size_t bytes, int descriptor) {
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec part = {(void *)data, bytes};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1};
    if (descriptor >= 0) {
        header.msg_control = control;
        header.msg_controllen = sizeof control;
        struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(rights), &descriptor, sizeof(int));
    }
    if (sendmsg(to, &header, 0) != (ssize_t)bytes) {
        fail("the other process has gone");
    }
}

static inline int receive_message(int from, void *data, size_t bytes) {
    char control[CMSG_SPACE(sizeof(int))];
    struct iovec part = {data, bytes};
    struct msghdr header = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    if (recvmsg(from, &header, 0) != (ssize_t)bytes) {
        fail("the other process has gone");
    }
    struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
    int descriptor = -1;
    if (rights != NULL) {
        memcpy(&descriptor, CMSG_DATA(rights), sizeof(int));
    }
    return descriptor;
}

#endif
