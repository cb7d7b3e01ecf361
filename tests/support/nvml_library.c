/* SPDX-License-Identifier: Apache-2.0
 *
 * A small libnvidia-ml.so.1 for tests. Every call reads the script named by NVML_SCRIPT anew:
 *
 *   device UUID PCI            the next physical device
 *   mig PARENT_UUID UUID       a slice; reachable by UUID only
 *   migmode UUID CURRENT       MIG mode of a device; without the line the query is not supported
 *   process UUID PID BYTES     a row of a device's process table; BYTES may be 18446744073709551615
 *   rc FUNCTION CODE           FUNCTION returns CODE
 *   race N                     the next N reads of a process table find that it grew
 *
 * A handle is the number of the device line, from 1. The device-level memory query counts its calls and is refused.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define OK 0
#define INVALID_ARGUMENT 2
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define INSUFFICIENT_SIZE 7
#define MOST 64

typedef struct {
    unsigned int pid;
    unsigned long long used;
    unsigned int gi, ci;
} process_t;

typedef struct {
    char uuid[96], pci[32];
    int slice, mode;
    process_t rows[MOST];
    int count;
} device_t;

static device_t devices[MOST];
static int device_count, races, raced, memory_queries;
static char names[MOST][96];
static int codes[MOST], code_count;

static device_t *by_uuid(const char *uuid) {
    for (int i = 0; i < device_count; i++)
        if (!strcasecmp(devices[i].uuid, uuid)) return &devices[i];
    return NULL;
}

static void add(const char *uuid, const char *pci, int slice) {
    device_t *d = &devices[device_count++];
    memset(d, 0, sizeof *d);
    snprintf(d->uuid, sizeof d->uuid, "%s", uuid);
    snprintf(d->pci, sizeof d->pci, "%s", pci);
    d->slice = slice;
    d->mode = -1;
}

static void load(void) {
    char line[512], word[32], a[96], b[96];
    unsigned long long bytes;
    unsigned int pid;
    int number;
    const char *path = getenv("NVML_SCRIPT");
    FILE *file = path ? fopen(path, "r") : NULL;
    device_count = code_count = races = 0;
    if (!file) return;
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "device %95s %95s", a, b) == 2) add(a, b, 0);
        else if (sscanf(line, "migmode %95s %d", a, &number) == 2) { device_t *d = by_uuid(a); if (d) d->mode = number; }
        else if (sscanf(line, "mig %95s %95s", a, b) == 2) add(b, "", 1);
        else if (sscanf(line, "process %95s %u %llu", a, &pid, &bytes) == 3) {
            device_t *d = by_uuid(a);
            if (d) { process_t p = {pid, bytes, 0xFFFFFFFFu, 0xFFFFFFFFu}; d->rows[d->count++] = p; }
        }
        else if (sscanf(line, "rc %95s %d", a, &number) == 2) { strcpy(names[code_count], a); codes[code_count++] = number; }
        else if (sscanf(line, "%31s %d", word, &number) == 2 && !strcmp(word, "race")) races = number;
    }
    fclose(file);
}

static int scripted(const char *function) {
    load();
    for (int i = 0; i < code_count; i++)
        if (!strcmp(names[i], function)) return codes[i];
    return OK;
}

#define SCRIPTED(name) do { int code = scripted(name); if (code != OK) return code; } while (0)

static device_t *device(void *handle) {
    long number = (long)handle;
    return number >= 1 && number <= device_count ? &devices[number - 1] : NULL;
}

int nvmlInitWithFlags(unsigned int flags) { (void)flags; SCRIPTED("nvmlInit"); return OK; }
int nvmlInit_v2(void) { SCRIPTED("nvmlInit"); return OK; }
int nvmlShutdown(void) { SCRIPTED("nvmlShutdown"); return OK; }
const char *nvmlErrorString(int code) { (void)code; return "scripted error"; }

int nvmlDeviceGetCount_v2(unsigned int *count) {
    SCRIPTED("nvmlDeviceGetCount");
    *count = 0;
    for (int i = 0; i < device_count; i++) *count += !devices[i].slice;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle) {
    SCRIPTED("nvmlDeviceGetHandleByIndex");
    for (int i = 0; i < device_count; i++)
        if (!devices[i].slice && index-- == 0) { *handle = (void *)(long)(i + 1); return OK; }
    return INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    SCRIPTED("nvmlDeviceGetHandleByUUID");
    device_t *d = by_uuid(uuid);
    if (!d) return NOT_FOUND;
    *handle = (void *)(long)(d - devices + 1);
    return OK;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, void **handle) {
    SCRIPTED("nvmlDeviceGetHandleByPciBusId");
    for (int i = 0; i < device_count; i++)
        if (!devices[i].slice && !strcasecmp(devices[i].pci, pci)) { *handle = (void *)(long)(i + 1); return OK; }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned int length) {
    SCRIPTED("nvmlDeviceGetUUID");
    device_t *d = device(handle);
    if (!d) return INVALID_ARGUMENT;
    snprintf(uuid, length, "%s", d->uuid);
    return OK;
}

int nvmlDeviceGetMigMode(void *handle, unsigned int *current, unsigned int *pending) {
    SCRIPTED("nvmlDeviceGetMigMode");
    device_t *d = device(handle);
    if (!d) return INVALID_ARGUMENT;
    if (d->mode < 0) return NOT_SUPPORTED;
    *current = *pending = (unsigned int)d->mode;
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned int *count, process_t *rows) {
    SCRIPTED("nvmlDeviceGetComputeRunningProcesses");
    device_t *d = device(handle);
    if (!d) return INVALID_ARGUMENT;
    if (rows && raced < races) { raced++; return INSUFFICIENT_SIZE; }
    if (*count < (unsigned int)d->count || (!rows && d->count)) { *count = d->count; return INSUFFICIENT_SIZE; }
    *count = d->count;
    for (int i = 0; i < d->count; i++) rows[i] = d->rows[i];
    return OK;
}

int nvmlDeviceGetMemoryInfo(void *handle, void *info) {
    (void)handle; (void)info;
    memory_queries++;
    return NOT_SUPPORTED;
}
int nvmlDeviceGetMemoryInfo_v2(void *handle, void *info) { return nvmlDeviceGetMemoryInfo(handle, info); }

int test_memory_queries(void) { return memory_queries; }
void test_reset(void) { raced = memory_queries = 0; }
