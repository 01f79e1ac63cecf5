/* A fake libnvidia-ml.so.1: what the reading layer asks, answered from a text file (see fake.h).
 *
 * Names and layouts are those that pynvml calls, so that its own code runs. What real hardware does
 * not answer is not answered here either: a MIG device knows its memory, name and instance and not
 * its temperature; a card in MIG mode tells no utilisation.
 */
#define _GNU_SOURCE
#include "fake.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#define POLL_NS 2000000
#define SETS_MOST 64
#define REGISTERED_MOST 64
#define NO_INSTANCE 0xFFFFFFFFu
#define MIB (1024ull * 1024ull)

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct handle handles[HANDLES_MOST];
static int handle_count;
static int attached[HANDLES_MOST];
static int opened;

static void pause_ns(long ns) {
    struct timespec time = {0, ns};
    nanosleep(&time, NULL);
}

/* ---- the state file ---- */

static const char *state_path(void) {
    const char *path = getenv("FAKE_NVML_STATE");
    return path == NULL ? "" : path;
}

int state_read(struct state *state) {
    FILE *file = fopen(state_path(), "re");
    char text[SUBJECT_CHARS + KEY_CHARS + VALUE_CHARS];
    state->count = 0;
    if (file == NULL) return UNKNOWN;
    while (state->count < LINES_MOST && fgets(text, sizeof text, file) != NULL) {
        struct line *line = &state->lines[state->count];
        line->value[0] = '\0';
        if (sscanf(text, "%95s %63s %159[^\n]", line->subject, line->key, line->value) >= 2)
            state->count++;
    }
    fclose(file);
    return SUCCESS;
}

int state_lock(void) {
    char path[4096];
    snprintf(path, sizeof path, "%s.lock", state_path());
    int lock = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (lock >= 0) flock(lock, LOCK_EX);
    return lock;
}

void state_unlock(int lock) {
    if (lock >= 0) close(lock);
}

int state_write(const struct state *state) {
    char path[4096];
    snprintf(path, sizeof path, "%s.%d", state_path(), (int)getpid());
    FILE *file = fopen(path, "we");
    if (file == NULL) return UNKNOWN;
    for (int i = 0; i < state->count; i++) {
        const struct line *line = &state->lines[i];
        fprintf(file, "%s %s %s\n", line->subject, line->key, line->value);
    }
    if (fclose(file) != 0 || rename(path, state_path()) != 0) return UNKNOWN;
    return SUCCESS;
}

static int position(const struct state *state, const char *subject, const char *key) {
    for (int i = 0; i < state->count; i++)
        if (!strcmp(state->lines[i].subject, subject) && !strcmp(state->lines[i].key, key))
            return i;
    return -1;
}

const char *state_get(const struct state *state, const char *subject, const char *key) {
    int at = position(state, subject, key);
    return at < 0 ? NULL : state->lines[at].value;
}

long long state_number(
    const struct state *state, const char *subject, const char *key, long long missing) {
    const char *value = state_get(state, subject, key);
    return value == NULL ? missing : strtoll(value, NULL, 0);
}

void state_set(struct state *state, const char *subject, const char *key, const char *format, ...) {
    int at = position(state, subject, key);
    if (at < 0) {
        if (state->count == LINES_MOST) abort();
        at = state->count++;
        snprintf(state->lines[at].subject, SUBJECT_CHARS, "%s", subject);
        snprintf(state->lines[at].key, KEY_CHARS, "%s", key);
    }
    va_list values;
    va_start(values, format);
    vsnprintf(state->lines[at].value, VALUE_CHARS, format, values);
    va_end(values);
}

void state_forget(struct state *state, const char *subject) {
    int kept = 0;
    for (int i = 0; i < state->count; i++)
        if (strcmp(state->lines[i].subject, subject)) state->lines[kept++] = state->lines[i];
    state->count = kept;
}

const char *state_find(const struct state *state, const char *key, const char *value, int index) {
    for (int i = 0; i < state->count; i++) {
        const struct line *line = &state->lines[i];
        if (!strcmp(line->key, key) && (value == NULL || !strcmp(line->value, value)))
            if (index-- == 0) return line->subject;
    }
    return NULL;
}

/* ---- handles ---- */

device_t device_handle(const char *uuid) {
    pthread_mutex_lock(&mutex);
    int at = 0;
    while (at < handle_count && strcmp(handles[at].uuid, uuid)) at++;
    if (at == HANDLES_MOST) abort();
    if (at == handle_count) {
        snprintf(handles[at].uuid, SUBJECT_CHARS, "%s", uuid);
        handle_count++;
    }
    pthread_mutex_unlock(&mutex);
    return &handles[at];
}

static int is_slice(const struct state *state, const char *uuid) {
    const char *kind = state_get(state, uuid, "kind");
    return kind != NULL && !strcmp(kind, "slice");
}

/* The card itself, or the card of a slice. */
static const char *card_of(const struct state *state, const char *uuid) {
    const char *parent = state_get(state, uuid, "parent");
    return parent == NULL ? uuid : parent;
}

static int forced(const struct state *state, const char *subject, const char *function) {
    char key[KEY_CHARS + 8];
    snprintf(key, sizeof key, "error.%s", function);
    return (int)state_number(state, subject, key, SUCCESS);
}

int enter(const char *function, device_t device, struct state *state) {
    if (!__atomic_load_n(&opened, __ATOMIC_SEQ_CST)) return UNINITIALIZED;
    for (;;) {
        int read = state_read(state);
        if (read != SUCCESS) return read;
        if (!state_number(state, card_of(state, device->uuid), "hang", 0)) break;
        pause_ns(POLL_NS);
    }
    const char *card = card_of(state, device->uuid);
    if (state_get(state, device->uuid, "kind") == NULL) return GPU_IS_LOST;
    if (state_get(state, card, "kind") == NULL) return GPU_IS_LOST;
    if (state_number(state, card, "lost", 0)) return GPU_IS_LOST;
    return forced(state, device->uuid, function);
}

/* Who is given a handle keeps the card attached, until nvmlShutdown. */
static int give(const struct state *state, const char *uuid, device_t *device) {
    if (state_number(state, card_of(state, uuid), "lost", 0)) return GPU_IS_LOST;
    *device = device_handle(uuid);
    device_t card = device_handle(card_of(state, uuid));
    __atomic_store_n(&attached[card - handles], 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

/* ---- the library ---- */

/* For tests: whether this process keeps a card from being reset. */
EXPORT int fake_attached(const char *uuid) {
    return __atomic_load_n(&attached[device_handle(uuid) - handles], __ATOMIC_SEQ_CST);
}

EXPORT int nvmlInitWithFlags(unsigned flags) {
    struct state state;
    (void)flags;
    if (state_path()[0] == '\0') return LIBRARY_NOT_FOUND; /* as if it were not there */
    int read = state_read(&state);
    if (read != SUCCESS) return read;
    int code = (int)state_number(&state, "system", "init", SUCCESS);
    if (code == SUCCESS) __atomic_add_fetch(&opened, 1, __ATOMIC_SEQ_CST);
    return code;
}

EXPORT int nvmlShutdown(void) {
    if (!__atomic_load_n(&opened, __ATOMIC_SEQ_CST)) return UNINITIALIZED;
    if (__atomic_sub_fetch(&opened, 1, __ATOMIC_SEQ_CST) == 0)
        for (int i = 0; i < HANDLES_MOST; i++)
            __atomic_store_n(&attached[i], 0, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

EXPORT const char *nvmlErrorString(int code) {
    (void)code;
    return "an error of the fake library";
}

static int system_text(const char *key, char *text, unsigned size) {
    struct state state;
    int read = state_read(&state);
    if (read != SUCCESS) return read;
    const char *value = state_get(&state, "system", key);
    if (value == NULL) return NOT_SUPPORTED;
    if (strlen(value) >= size) return INSUFFICIENT_SIZE;
    strcpy(text, value);
    return SUCCESS;
}

EXPORT int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    return system_text("driver", text, size);
}

EXPORT int nvmlSystemGetNVMLVersion(char *text, unsigned size) {
    return system_text("nvml", text, size);
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
    struct state state;
    if (!opened) return UNINITIALIZED;
    int read = state_read(&state);
    if (read != SUCCESS) return read;
    *count = 0;
    while (state_find(&state, "kind", "card", (int)*count) != NULL) ++*count;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *device) {
    struct state state;
    if (!opened) return UNINITIALIZED;
    int read = state_read(&state);
    if (read != SUCCESS) return read;
    const char *uuid = state_find(&state, "kind", "card", (int)index);
    return uuid == NULL ? INVALID_ARGUMENT : give(&state, uuid, device);
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, device_t *device) {
    struct state state;
    if (!opened) return UNINITIALIZED;
    int read = state_read(&state);
    if (read != SUCCESS) return read;
    return state_get(&state, uuid, "kind") == NULL ? NOT_FOUND : give(&state, uuid, device);
}

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, device_t *device) {
    struct state state;
    if (!opened) return UNINITIALIZED;
    int read = state_read(&state);
    if (read != SUCCESS) return read;
    const char *uuid = state_find(&state, "pci", bus, 0);
    return uuid == NULL ? NOT_FOUND : give(&state, uuid, device);
}

/* ---- what a card is ---- */

static int text_of(
    const char *function, device_t device, const char *key, char *text, unsigned size) {
    struct state state;
    int code = enter(function, device, &state);
    if (code != SUCCESS) return code;
    const char *value = key == NULL ? device->uuid : state_get(&state, device->uuid, key);
    if (value == NULL) return NOT_SUPPORTED;
    if (strlen(value) >= size) return INSUFFICIENT_SIZE;
    strcpy(text, value);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetUUID(device_t device, char *text, unsigned size) {
    return text_of(__func__, device, NULL, text, size);
}

EXPORT int nvmlDeviceGetName(device_t device, char *text, unsigned size) {
    return text_of(__func__, device, "name", text, size);
}

struct pci {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
};

EXPORT int nvmlDeviceGetPciInfo_v3(device_t device, struct pci *pci) {
    memset(pci, 0, sizeof *pci);
    int code = text_of(__func__, device, "pci", pci->bus_id, sizeof pci->bus_id);
    if (code == SUCCESS)
        sscanf(pci->bus_id, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    return code;
}

EXPORT int nvmlDeviceGetCudaComputeCapability(device_t device, int *major, int *minor) {
    struct state state;
    int code = enter(__func__, device, &state);
    if (code != SUCCESS) return code;
    const char *value = state_get(&state, device->uuid, "capability");
    return value != NULL && sscanf(value, "%d.%d", major, minor) == 2 ? SUCCESS : NOT_SUPPORTED;
}

/* ---- what it reads ---- */

/* One fact, which a MIG device has only where `slices` says so. */
static int fact(
    const char *function, device_t device, const char *key, int slices, long long *value) {
    struct state state;
    int code = enter(function, device, &state);
    if (code != SUCCESS) return code;
    if (is_slice(&state, device->uuid) && !slices) return NOT_SUPPORTED;
    const char *text = state_get(&state, device->uuid, key);
    if (text == NULL) return NOT_SUPPORTED;
    *value = strtoll(text, NULL, 0);
    return SUCCESS;
}

static int number(
    const char *function, device_t device, const char *key, int slices, unsigned *out) {
    long long value = 0;
    int code = fact(function, device, key, slices, &value);
    if (code == SUCCESS) *out = (unsigned)value;
    return code;
}

static int large(const char *function, device_t device, const char *key, unsigned long long *out) {
    long long value = 0;
    int code = fact(function, device, key, 0, &value);
    if (code == SUCCESS) *out = (unsigned long long)value;
    return code;
}

struct memory {
    unsigned long long total, free, used;
};

EXPORT int nvmlDeviceGetMemoryInfo(device_t device, struct memory *memory) {
    struct state state;
    int code = enter(__func__, device, &state);
    if (code != SUCCESS) return code;
    long long total_mb = state_number(&state, device->uuid, "memory_total_mb", -1);
    long long free_mb = state_number(&state, device->uuid, "memory_free_mb", -1);
    if (total_mb < 0 || free_mb < 0) return NOT_SUPPORTED;
    memory->total = (unsigned long long)total_mb * MIB;
    memory->free = (unsigned long long)free_mb * MIB;
    memory->used = memory->total - memory->free;
    return SUCCESS;
}

struct utilization {
    unsigned gpu, memory;
};

EXPORT int nvmlDeviceGetUtilizationRates(device_t device, struct utilization *utilization) {
    struct state state;
    int code = enter(__func__, device, &state);
    if (code != SUCCESS) return code;
    long long gpu = state_number(&state, device->uuid, "gpu_pct", -1);
    long long memory = state_number(&state, device->uuid, "memory_pct", -1);
    int cut = state_number(&state, device->uuid, "mig", 0) || is_slice(&state, device->uuid);
    if (cut || gpu < 0 || memory < 0) return NOT_SUPPORTED;
    utilization->gpu = (unsigned)gpu;
    utilization->memory = (unsigned)memory;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetPcieThroughput(device_t device, unsigned counter, unsigned *kb_s) {
    return number(__func__, device, counter == 0 ? "pcie_tx_kb_s" : "pcie_rx_kb_s", 0, kb_s);
}

EXPORT int nvmlDeviceGetMaxPcieLinkGeneration(device_t device, unsigned *generation) {
    return number(__func__, device, "pcie_generation", 0, generation);
}

EXPORT int nvmlDeviceGetMaxPcieLinkWidth(device_t device, unsigned *lanes) {
    return number(__func__, device, "pcie_lanes", 0, lanes);
}

EXPORT int nvmlDeviceGetTemperature(device_t device, unsigned sensor, unsigned *celsius) {
    return sensor != 0 ? INVALID_ARGUMENT
                       : number(__func__, device, "temperature_c", 0, celsius);
}

EXPORT int nvmlDeviceGetTemperatureThreshold(
    device_t device, unsigned threshold, unsigned *celsius) {
    return threshold != 1 ? INVALID_ARGUMENT
                          : number(__func__, device, "slowdown_c", 0, celsius);
}

struct margin {
    unsigned version;
    int celsius;
};

EXPORT int nvmlDeviceGetMarginTemperature(device_t device, struct margin *margin) {
    long long value = 0;
    int code = fact(__func__, device, "margin_c", 0, &value);
    if (code == SUCCESS) margin->celsius = (int)value;
    return code;
}

EXPORT int nvmlDeviceGetPowerUsage(device_t device, unsigned *milliwatts) {
    return number(__func__, device, "power_mw", 0, milliwatts);
}

EXPORT int nvmlDeviceGetEnforcedPowerLimit(device_t device, unsigned *milliwatts) {
    return number(__func__, device, "power_limit_mw", 0, milliwatts);
}

EXPORT int nvmlDeviceGetCurrentClocksEventReasons(device_t device, unsigned long long *reasons) {
    return large(__func__, device, "clock_reasons", reasons);
}

EXPORT int nvmlDeviceGetNvLinkState(device_t device, unsigned link, unsigned *active) {
    struct state state;
    int code = enter(__func__, device, &state);
    if (code != SUCCESS) return code;
    const char *links = state_get(&state, device->uuid, "nvlinks"); /* such as 1101 */
    if (links == NULL) return NOT_SUPPORTED;
    if (link >= strlen(links)) return INVALID_ARGUMENT;
    *active = links[link] == '1';
    return SUCCESS;
}

/* ---- errors ---- */

EXPORT int nvmlDeviceGetTotalEccErrors(
    device_t device, unsigned type, unsigned counter, unsigned long long *count) {
    if (counter != 0) return NOT_SUPPORTED; /* only since the last reset */
    return large(__func__, device, type == 0 ? "ecc_corrected" : "ecc_uncorrected", count);
}

EXPORT int nvmlDeviceGetRemappedRows(
    device_t device, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
    unsigned *failed) {
    *corrected = *uncorrected = *failed = 0;
    return number(__func__, device, "remap_pending", 0, pending);
}

EXPORT int nvmlDeviceGetRetiredPagesPendingStatus(device_t device, unsigned *pending) {
    return number(__func__, device, "pages_pending", 0, pending);
}

struct field {
    unsigned id, scope;
    long long timestamp, latency_us;
    unsigned type, code;
    unsigned long long value;
};

EXPORT int nvmlDeviceGetFieldValues(device_t device, int count, struct field *fields) {
    struct state state;
    int code = enter(__func__, device, &state);
    if (code != SUCCESS) return code;
    for (int i = 0; i < count; i++) {
        const char *value = state_get(&state, device->uuid, "recovery_action");
        fields[i].code = fields[i].id == 230 && value != NULL ? SUCCESS : NOT_SUPPORTED;
        fields[i].type = 1; /* unsigned int */
        fields[i].value = value == NULL ? 0 : strtoull(value, NULL, 0);
    }
    return SUCCESS;
}

/* ---- events ---- */

struct event {
    device_t device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};

struct set {
    int used, count;
    long long serial; /* of the last event that was told, or that came before it was made */
    struct {
        device_t device;
        unsigned long long types;
    } registered[REGISTERED_MOST];
};
static struct set sets[SETS_MOST];

static long long last_serial(const struct state *state) {
    long long last = 0;
    for (int i = 0; i < state->count; i++) {
        long long serial = strtoll(state->lines[i].key, NULL, 10);
        if (!strcmp(state->lines[i].subject, "event") && serial > last) last = serial;
    }
    return last;
}

EXPORT int nvmlEventSetCreate(struct set **set) {
    struct state state;
    if (!opened) return UNINITIALIZED;
    int read = state_read(&state);
    if (read != SUCCESS) return read;
    pthread_mutex_lock(&mutex);
    *set = NULL;
    for (int i = 0; i < SETS_MOST && *set == NULL; i++)
        if (!sets[i].used) *set = &sets[i];
    if (*set != NULL) {
        memset(*set, 0, sizeof **set);
        (*set)->used = 1;
        (*set)->serial = last_serial(&state);
    }
    pthread_mutex_unlock(&mutex);
    return *set == NULL ? INSUFFICIENT_RESOURCES : SUCCESS;
}

EXPORT int nvmlEventSetFree(struct set *set) {
    set->used = 0;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetSupportedEventTypes(device_t device, unsigned long long *types) {
    return large(__func__, device, "event_types", types);
}

EXPORT int nvmlDeviceRegisterEvents(device_t device, unsigned long long types, struct set *set) {
    unsigned long long supported = 0;
    int code = large(__func__, device, "event_types", &supported);
    if (code != SUCCESS) return code;
    if (types & ~supported) return NOT_SUPPORTED;
    if (set->count == REGISTERED_MOST) return INSUFFICIENT_RESOURCES;
    set->registered[set->count].device = device;
    set->registered[set->count++].types = types;
    return SUCCESS;
}

/* The next event that `set` has not told, if it registered for it. */
static int next_event(const struct state *state, struct set *set, struct event *event) {
    for (int i = 0; i < state->count; i++) {
        const struct line *line = &state->lines[i];
        long long serial = strtoll(line->key, NULL, 10);
        if (strcmp(line->subject, "event") || serial <= set->serial) continue;
        set->serial = serial;
        char uuid[SUBJECT_CHARS];
        event->gpu_instance = event->compute_instance = NO_INSTANCE;
        if (sscanf(
                line->value, "%95s %llu %llu %u %u", uuid, &event->type, &event->data,
                &event->gpu_instance, &event->compute_instance) < 3)
            continue;
        event->device = device_handle(uuid);
        for (int j = 0; j < set->count; j++)
            if (set->registered[j].device == event->device
                && set->registered[j].types & event->type)
                return 1;
    }
    return 0;
}

EXPORT int nvmlEventSetWait_v2(struct set *set, struct event *event, unsigned timeout_ms) {
    struct state state;
    long long left_ns = (long long)timeout_ms * 1000000;
    for (;; left_ns -= POLL_NS) {
        if (!opened) return UNINITIALIZED;
        int read = state_read(&state);
        if (read != SUCCESS) return read;
        if (state_number(&state, "system", "hang", 0)) { /* it waits for longer than told to */
            left_ns += POLL_NS;
            pause_ns(POLL_NS);
            continue;
        }
        if (next_event(&state, set, event)) return SUCCESS;
        for (int i = 0; i < set->count; i++)
            if (state_number(&state, set->registered[i].device->uuid, "lost", 0))
                return GPU_IS_LOST;
        if (left_ns <= 0) return TIMEOUT;
        pause_ns(POLL_NS);
    }
}

/* ---- MIG devices, as they are; how they are made is in mig.c ---- */

EXPORT int nvmlDeviceGetMigMode(device_t device, unsigned *current, unsigned *pending) {
    struct state state;
    int code = enter(__func__, device, &state);
    if (code != SUCCESS) return code;
    long long mode = state_number(&state, device->uuid, "mig", -1);
    if (mode < 0) return NOT_SUPPORTED;
    *current = (unsigned)mode;
    *pending = (unsigned)state_number(&state, device->uuid, "mig_pending", mode);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMaxMigDeviceCount(device_t device, unsigned *count) {
    return number(__func__, device, "mig_most", 0, count);
}

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(device_t device, unsigned index, device_t *slice) {
    struct state state;
    int code = enter(__func__, device, &state);
    if (code != SUCCESS) return code;
    const char *uuid = state_find(&state, "parent", device->uuid, (int)index);
    if (uuid == NULL) return NOT_FOUND;
    *slice = device_handle(uuid);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device_t slice, device_t *device) {
    struct state state;
    int code = enter(__func__, slice, &state);
    if (code != SUCCESS) return code;
    const char *parent = state_get(&state, slice->uuid, "parent");
    if (parent == NULL) return INVALID_ARGUMENT;
    *device = device_handle(parent);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetGpuInstanceId(device_t device, unsigned *id) {
    return number(__func__, device, "gi", 1, id);
}

/* ---- how near two cards are: facts "near.UUID LEVEL" and "nvlink.UUID 1" of either ---- */

static int pair(
    const char *function, device_t one, device_t other, const char *kind, long long *value) {
    struct state state;
    char key[SUBJECT_CHARS + 16];
    int code = enter(function, one, &state);
    if (code != SUCCESS) return code;
    snprintf(key, sizeof key, "%s.%s", kind, other->uuid);
    *value = state_number(&state, one->uuid, key, -1);
    snprintf(key, sizeof key, "%s.%s", kind, one->uuid);
    if (*value < 0) *value = state_number(&state, other->uuid, key, -1);
    return *value < 0 ? NOT_SUPPORTED : SUCCESS;
}

EXPORT int nvmlDeviceGetTopologyCommonAncestor(device_t one, device_t other, unsigned *level) {
    long long value = 0;
    int code = pair(__func__, one, other, "near", &value);
    *level = (unsigned)value;
    return code;
}

EXPORT int nvmlDeviceGetP2PStatus(device_t one, device_t other, unsigned index, unsigned *status) {
    long long value = 0;
    if (index != 2) return INVALID_ARGUMENT; /* NVLink */
    int code = pair(__func__, one, other, "nvlink", &value);
    *status = value == 1 ? 0 : 5; /* OK, or not supported */
    return code;
}
