/* Cutting a card: MIG mode, GPU instances, compute instances, and who runs on them.
 *
 * A card that has the fact "mig" is an H100 of 80 GB; its profiles and placements are those of
 * NVIDIA's MIG user guide. What is made is written to the state file, and outlives a process:
 *
 *     GI-<card>-<id>        kind gi, card UUID, id N, profile ID, start N, size N
 *     CI-<card>-<gi>-<ci>   kind ci, card UUID, gi N, id N, profile N, slices N, slice MIG-...
 *     MIG-...               as nvml.c reads it
 *     PID-<pid>             kind process, on UUID, memory_mb N
 *
 * Facts of a card for tests: "mig_reset 1": its mode changes only with a reset;
 * "fail_after.FUNCTION N": the call after N good ones fails, once. "system root 0": it is not root.
 */
#include "fake.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ARGUMENT_VERSION_MISMATCH 25
#define RESET_REQUIRED 16
#define INFO_V2 0x02000098u
#define COMPUTE_INFO_V2 0x02000088u
#define COMPUTE_SLICES 7
#define INSTANCES_MOST 7
#define PROFILES_MOST 0x12u
#define COMPUTE_PROFILES_MOST 0x9u
#define NO_INSTANCE 0xFFFFFFFFu
#define MIB (1024ull * 1024ull)

struct placement {
    unsigned start, size;
};

struct profile {
    unsigned number, id, slices, most, multiprocessors, copy_engines, decoders, jpegs, ofas;
    unsigned long long memory_mb;
    const char *name;
    unsigned size, starts;          /* memory slices; bit N: it may begin at slice N */
};

static const struct profile PROFILES[] = {
    {0x0, 19, 1, 7, 16, 1, 1, 1, 0, 9984, "MIG 1g.10gb", 1, 0x7F},
    {0x7, 20, 1, 1, 16, 1, 1, 1, 1, 9984, "MIG 1g.10gb+me", 1, 0x7F},
    {0x9, 15, 1, 4, 26, 1, 1, 1, 0, 20096, "MIG 1g.20gb", 2, 0x55},
    {0x1, 14, 2, 3, 32, 2, 2, 2, 0, 20096, "MIG 2g.20gb", 2, 0x15},
    {0x2, 9, 3, 2, 60, 3, 3, 3, 0, 40448, "MIG 3g.40gb", 4, 0x11},
    {0x3, 5, 4, 1, 64, 4, 4, 4, 0, 40448, "MIG 4g.40gb", 4, 0x01},
    {0x4, 0, 7, 1, 132, 8, 7, 7, 1, 81152, "MIG 7g.80gb", 8, 0x01},
};
#define PROFILES_KNOWN (sizeof PROFILES / sizeof PROFILES[0])

/* Compute instances by their profile, which is its own id; 0: no such. */
static const unsigned COMPUTE[] = {1, 2, 3, 4, 7, 0, 0, 0, 0};

static const struct profile *profile_of(unsigned id) {
    for (unsigned i = 0; i < PROFILES_KNOWN; i++)
        if (PROFILES[i].id == id) return &PROFILES[i];
    return NULL;
}

/* ---- entering, with the card's facts ---- */

static int privileged(const struct state *state) {
    return state_number(state, "system", "root", 1) ? SUCCESS : NO_PERMISSION;
}

/* A function of a card that can be cut. */
static int card_enter(const char *function, device_t device, struct state *state) {
    int code = enter(function, device, state);
    if (code != SUCCESS) return code;
    return state_get(state, device->uuid, "mig") == NULL ? NOT_SUPPORTED : SUCCESS;
}

/* A function of an instance: its card's facts count, and it has to be there still. */
static int instance_enter(
    const char *function, device_t instance, const char *kind, struct state *state,
    device_t *card) {
    int code = state_read(state);
    if (code != SUCCESS) return code;
    const char *found = state_get(state, instance->uuid, "kind");
    if (found == NULL || strcmp(found, kind)) return INVALID_ARGUMENT;
    *card = device_handle(state_get(state, instance->uuid, "card"));
    code = card_enter(function, *card, state);
    return code != SUCCESS ? code : privileged(state);
}

/* Whether this call is the one that a test lets fail. */
static int fails(struct state *state, const char *card, const char *function) {
    char key[KEY_CHARS];
    snprintf(key, sizeof key, "fail_after.%s", function);
    long long left = state_number(state, card, key, -1);
    if (left < 0) return 0;
    state_set(state, card, key, "%lld", left - 1);
    state_write(state);
    return left == 0;
}

static long long of_instance(const struct state *state, device_t instance, const char *key) {
    return state_number(state, instance->uuid, key, 0);
}

static const char *child(
    const struct state *state, const char *kind, const char *card, long long gi, int index) {
    for (int i = 0;; i++) {
        const char *subject = state_find(state, "kind", kind, i);
        if (subject == NULL) return NULL;
        const char *of = state_get(state, subject, "card");
        if (of == NULL || strcmp(of, card)) continue;
        if (gi >= 0 && state_number(state, subject, "gi", -1) != gi) continue;
        if (index-- == 0) return subject;
    }
}

static int runs_on(const struct state *state, const char *uuid) {
    return uuid != NULL && state_find(state, "on", uuid, 0) != NULL;
}

/* ---- mode ---- */

static void clear(struct state *state, const char *card) {
    const char *subject;
    while ((subject = child(state, "ci", card, -1, 0)) != NULL) {
        char slice[SUBJECT_CHARS], own[SUBJECT_CHARS];
        snprintf(own, sizeof own, "%s", subject);
        snprintf(slice, sizeof slice, "%.95s", state_get(state, own, "slice"));
        state_forget(state, slice);
        state_forget(state, own);
    }
    while ((subject = child(state, "gi", card, -1, 0)) != NULL) {
        char own[SUBJECT_CHARS];
        snprintf(own, sizeof own, "%s", subject);
        state_forget(state, own);
    }
}

static int set_mode(device_t device, unsigned mode, int *status, struct state *state) {
    int code = card_enter("nvmlDeviceSetMigMode", device, state);
    if (code == SUCCESS) code = privileged(state);
    if (code != SUCCESS) return code;
    if (mode > 1) return INVALID_ARGUMENT;
    *status = SUCCESS;
    if (state_number(state, device->uuid, "mig_reset", 0)) *status = RESET_REQUIRED;
    if (runs_on(state, device->uuid)) *status = IN_USE;
    state_set(state, device->uuid, "mig_pending", "%u", mode);
    if (*status == SUCCESS) {
        state_set(state, device->uuid, "mig", "%u", mode);
        if (state_get(state, device->uuid, "mig_most") == NULL)
            state_set(state, device->uuid, "mig_most", "%d", INSTANCES_MOST);
        if (!mode) clear(state, device->uuid);
    }
    return state_write(state);
}

EXPORT int nvmlDeviceSetMigMode(device_t device, unsigned mode, int *status) {
    struct state state;
    int lock = state_lock();
    int code = set_mode(device, mode, status, &state);
    state_unlock(lock);
    return code;
}

/* ---- profiles and placements ---- */

struct profile_info_v2 {
    unsigned version, id, p2p, slices, most, multiprocessors, copy_engines, decoders, encoders,
        jpegs, ofas;
    unsigned long long memory_mb;
    char name[96];
};
_Static_assert(sizeof(struct profile_info_v2) == (INFO_V2 & 0xFFFFFF), "as NVML has it");

EXPORT int nvmlDeviceGetGpuInstanceProfileInfoV(
    device_t device, unsigned number, struct profile_info_v2 *info) {
    struct state state;
    int code = card_enter(__func__, device, &state);
    if (code != SUCCESS) return code;
    if (info->version != INFO_V2) return ARGUMENT_VERSION_MISMATCH;
    if (number >= PROFILES_MOST) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < PROFILES_KNOWN; i++) {
        const struct profile *one = &PROFILES[i];
        if (one->number != number) continue;
        *info = (struct profile_info_v2){
            INFO_V2, one->id, 0, one->slices, one->most, one->multiprocessors, one->copy_engines,
            one->decoders, 0, one->jpegs, one->ofas, one->memory_mb, ""};
        strcpy(info->name, one->name);
        return SUCCESS;
    }
    return NOT_SUPPORTED;
}

EXPORT int nvmlDeviceGetGpuInstancePossiblePlacements_v2(
    device_t device, unsigned id, struct placement *placements, unsigned *count) {
    struct state state;
    int code = card_enter(__func__, device, &state);
    if (code == SUCCESS) code = privileged(&state);
    if (code != SUCCESS) return code;
    const struct profile *profile = profile_of(id);
    if (profile == NULL) return NOT_SUPPORTED;
    unsigned room = *count;
    *count = 0;
    for (unsigned start = 0; start < 8; start++) {
        if (!(profile->starts >> start & 1)) continue;
        if (placements != NULL && *count == room) return INSUFFICIENT_SIZE;
        if (placements != NULL) placements[*count] = (struct placement){start, profile->size};
        ++*count;
    }
    return SUCCESS;
}

/* ---- GPU instances ---- */

struct instance_info {
    device_t device;
    unsigned id, profile;
    struct placement placement;
};

static int room_for(
    const struct state *state, const char *card, const struct profile *profile, unsigned start) {
    unsigned long long slices = profile->slices, same = 0;
    for (int i = 0;; i++) {
        const char *other = child(state, "gi", card, -1, i);
        if (other == NULL) break;
        unsigned id = (unsigned)state_number(state, other, "profile", -1);
        unsigned begin = (unsigned)state_number(state, other, "start", 0);
        unsigned size = (unsigned)state_number(state, other, "size", 0);
        slices += profile_of(id)->slices;
        same += id == profile->id;
        if (begin < start + profile->size && start < begin + size) return 0;
    }
    return slices <= COMPUTE_SLICES && same < profile->most;
}

static int create(
    device_t device, unsigned id, const struct placement *placement, device_t *instance,
    struct state *state) {
    const char *function = "nvmlDeviceCreateGpuInstanceWithPlacement";
    char subject[SUBJECT_CHARS];
    int code = card_enter(function, device, state);
    if (code == SUCCESS) code = privileged(state);
    if (code != SUCCESS) return code;
    if (!state_number(state, device->uuid, "mig", 0)) return NOT_SUPPORTED;
    const struct profile *profile = profile_of(id);
    if (profile == NULL) return NOT_SUPPORTED;
    if (placement->start > 7 || !(profile->starts >> placement->start & 1)
        || placement->size != profile->size)
        return INVALID_ARGUMENT;
    if (fails(state, device->uuid, function)) return UNKNOWN;
    if (!room_for(state, device->uuid, profile, placement->start)) return INSUFFICIENT_RESOURCES;
    int number = 1;
    do
        snprintf(subject, sizeof subject, "GI-%.64s-%d", device->uuid, number);
    while (state_get(state, subject, "kind") != NULL && ++number);
    state_set(state, subject, "kind", "gi");
    state_set(state, subject, "card", "%s", device->uuid);
    state_set(state, subject, "id", "%d", number);
    state_set(state, subject, "profile", "%u", id);
    state_set(state, subject, "start", "%u", placement->start);
    state_set(state, subject, "size", "%u", placement->size);
    *instance = device_handle(subject);
    return state_write(state);
}

EXPORT int nvmlDeviceCreateGpuInstanceWithPlacement(
    device_t device, unsigned id, const struct placement *placement, device_t *instance) {
    struct state state;
    int lock = state_lock();
    int code = create(device, id, placement, instance, &state);
    state_unlock(lock);
    return code;
}

static int destroy(device_t instance, const char *kind, const char *function, struct state *state) {
    device_t card;
    int code = instance_enter(function, instance, kind, state, &card);
    if (code != SUCCESS) return code;
    if (fails(state, card->uuid, function)) return UNKNOWN;
    if (!strcmp(kind, "gi")) {
        if (child(state, "ci", card->uuid, of_instance(state, instance, "id"), 0) != NULL)
            return IN_USE;
    } else {
        char slice[SUBJECT_CHARS];
        snprintf(slice, sizeof slice, "%.95s", state_get(state, instance->uuid, "slice"));
        if (runs_on(state, slice)) return IN_USE;
        state_forget(state, slice);
    }
    state_forget(state, instance->uuid);
    return state_write(state);
}

EXPORT int nvmlGpuInstanceDestroy(device_t instance) {
    struct state state;
    int lock = state_lock();
    int code = destroy(instance, "gi", __func__, &state);
    state_unlock(lock);
    return code;
}

EXPORT int nvmlDeviceGetGpuInstances(
    device_t device, unsigned id, device_t *instances, unsigned *count) {
    struct state state;
    int code = card_enter(__func__, device, &state);
    if (code == SUCCESS) code = privileged(&state);
    if (code != SUCCESS) return code;
    if (!state_number(&state, device->uuid, "mig", 0)) return NOT_SUPPORTED;
    *count = 0;
    for (int i = 0;; i++) {
        const char *subject = child(&state, "gi", device->uuid, -1, i);
        if (subject == NULL) return SUCCESS;
        if (state_number(&state, subject, "profile", -1) == (long long)id)
            instances[(*count)++] = device_handle(subject);
    }
}

EXPORT int nvmlDeviceGetGpuInstanceById(device_t device, unsigned id, device_t *instance) {
    struct state state;
    int code = card_enter(__func__, device, &state);
    if (code == SUCCESS) code = privileged(&state);
    if (code != SUCCESS) return code;
    for (int i = 0;; i++) {
        const char *subject = child(&state, "gi", device->uuid, -1, i);
        if (subject == NULL) return NOT_FOUND;
        if (state_number(&state, subject, "id", -1) != (long long)id) continue;
        *instance = device_handle(subject);
        return SUCCESS;
    }
}

EXPORT int nvmlGpuInstanceGetInfo(device_t instance, struct instance_info *info) {
    struct state state;
    device_t card;
    int code = instance_enter(__func__, instance, "gi", &state, &card);
    if (code != SUCCESS) return code;
    *info = (struct instance_info){
        card, (unsigned)of_instance(&state, instance, "id"),
        (unsigned)of_instance(&state, instance, "profile"),
        {(unsigned)of_instance(&state, instance, "start"),
         (unsigned)of_instance(&state, instance, "size")}};
    return SUCCESS;
}

/* ---- compute instances ---- */

struct compute_profile_info_v2 {
    unsigned version, id, slices, most, multiprocessors, copy_engines, decoders, encoders, jpegs,
        ofas;
    char name[96];
};
_Static_assert(
    sizeof(struct compute_profile_info_v2) == (COMPUTE_INFO_V2 & 0xFFFFFF), "as NVML has it");

struct compute_info {
    device_t device;
    device_t instance;
    unsigned id, profile;
    struct placement placement;
};

static const struct profile *profile_in(const struct state *state, device_t instance) {
    return profile_of((unsigned)of_instance(state, instance, "profile"));
}

EXPORT int nvmlGpuInstanceGetComputeInstanceProfileInfoV(
    device_t instance, unsigned number, unsigned engines, struct compute_profile_info_v2 *info) {
    struct state state;
    device_t card;
    int code = instance_enter(__func__, instance, "gi", &state, &card);
    if (code != SUCCESS) return code;
    if (info->version != COMPUTE_INFO_V2) return ARGUMENT_VERSION_MISMATCH;
    if (number >= COMPUTE_PROFILES_MOST || engines != 0) return INVALID_ARGUMENT;
    const struct profile *profile = profile_in(&state, instance);
    unsigned slices = COMPUTE[number];
    if (slices == 0 || slices > profile->slices) return NOT_SUPPORTED;
    *info = (struct compute_profile_info_v2){
        COMPUTE_INFO_V2, number, slices, profile->slices / slices,
        profile->multiprocessors / profile->slices * slices, profile->copy_engines,
        profile->decoders, 0, profile->jpegs, profile->ofas, ""};
    if (slices == profile->slices)
        snprintf(info->name, sizeof info->name, "%s", profile->name);
    else
        snprintf(info->name, sizeof info->name, "MIG %uc.%s", slices, profile->name + 4);
    return SUCCESS;
}

/* The same instance at the same place has the same UUID again, as on hardware. */
static void slice_uuid(const char *text, char *uuid) {
    uint64_t parts[2] = {0xcbf29ce484222325u, 0x84222325cbf29ce4u};
    for (int i = 0; i < 2; i++)
        for (const char *at = text; *at; at++)
            parts[i] = (parts[i] ^ (uint8_t)*at) * 0x100000001b3u;
    snprintf(
        uuid, SUBJECT_CHARS, "MIG-%08x-%04x-5%03x-a%03x-%012llx", (unsigned)(parts[0] >> 32),
        (unsigned)(parts[0] >> 16 & 0xFFFF), (unsigned)(parts[0] & 0xFFF),
        (unsigned)(parts[1] >> 52), (unsigned long long)(parts[1] & 0xFFFFFFFFFFFF));
}

static int fill(device_t instance, unsigned id, device_t *compute, struct state *state) {
    const char *function = "nvmlGpuInstanceCreateComputeInstance";
    char subject[SUBJECT_CHARS], place[2 * SUBJECT_CHARS], slice[SUBJECT_CHARS];
    device_t card;
    int code = instance_enter(function, instance, "gi", state, &card);
    if (code != SUCCESS) return code;
    if (fails(state, card->uuid, function)) return UNKNOWN;
    const struct profile *profile = profile_in(state, instance);
    if (id >= COMPUTE_PROFILES_MOST || COMPUTE[id] == 0) return INVALID_ARGUMENT;
    long long gi = of_instance(state, instance, "id"), taken = COMPUTE[id];
    for (int i = 0; child(state, "ci", card->uuid, gi, i) != NULL; i++)
        taken += state_number(state, child(state, "ci", card->uuid, gi, i), "slices", 0);
    if (taken > profile->slices) return INSUFFICIENT_RESOURCES;
    int number = 0;
    do
        snprintf(subject, sizeof subject, "CI-%.60s-%lld-%d", card->uuid, gi, number);
    while (state_get(state, subject, "kind") != NULL && ++number);
    snprintf(
        place, sizeof place, "%s %u %lld %u %d", card->uuid, profile->id,
        of_instance(state, instance, "start"), id, number);
    slice_uuid(place, slice);
    state_set(state, subject, "kind", "ci");
    state_set(state, subject, "card", "%s", card->uuid);
    state_set(state, subject, "gi", "%lld", gi);
    state_set(state, subject, "id", "%d", number);
    state_set(state, subject, "profile", "%u", id);
    state_set(state, subject, "slices", "%u", COMPUTE[id]);
    state_set(state, subject, "slice", "%s", slice);
    state_set(state, slice, "kind", "slice");
    state_set(state, slice, "parent", "%s", card->uuid);
    state_set(state, slice, "gi", "%lld", gi);
    state_set(state, slice, "ci", "%d", number);
    const char *name = state_get(state, card->uuid, "name");
    state_set(state, slice, "name", "%.60s %s", name == NULL ? "NVIDIA H100" : name, profile->name);
    state_set(state, slice, "memory_total_mb", "%llu", profile->memory_mb);
    state_set(state, slice, "memory_free_mb", "%llu", profile->memory_mb - 10);
    *compute = device_handle(subject);
    return state_write(state);
}

EXPORT int nvmlGpuInstanceCreateComputeInstance(
    device_t instance, unsigned id, device_t *compute) {
    struct state state;
    int lock = state_lock();
    int code = fill(instance, id, compute, &state);
    state_unlock(lock);
    return code;
}

EXPORT int nvmlComputeInstanceDestroy(device_t compute) {
    struct state state;
    int lock = state_lock();
    int code = destroy(compute, "ci", __func__, &state);
    state_unlock(lock);
    return code;
}

EXPORT int nvmlGpuInstanceGetComputeInstances(
    device_t instance, unsigned id, device_t *found, unsigned *count) {
    struct state state;
    device_t card;
    int code = instance_enter(__func__, instance, "gi", &state, &card);
    if (code != SUCCESS) return code;
    long long gi = of_instance(&state, instance, "id");
    *count = 0;
    for (int i = 0;; i++) {
        const char *subject = child(&state, "ci", card->uuid, gi, i);
        if (subject == NULL) return SUCCESS;
        if (state_number(&state, subject, "profile", -1) == (long long)id)
            found[(*count)++] = device_handle(subject);
    }
}

EXPORT int nvmlGpuInstanceGetComputeInstanceById(
    device_t instance, unsigned id, device_t *compute) {
    struct state state;
    device_t card;
    int code = instance_enter(__func__, instance, "gi", &state, &card);
    if (code != SUCCESS) return code;
    long long gi = of_instance(&state, instance, "id");
    for (int i = 0;; i++) {
        const char *subject = child(&state, "ci", card->uuid, gi, i);
        if (subject == NULL) return NOT_FOUND;
        if (state_number(&state, subject, "id", -1) != (long long)id) continue;
        *compute = device_handle(subject);
        return SUCCESS;
    }
}

EXPORT int nvmlComputeInstanceGetInfo_v2(device_t compute, struct compute_info *info) {
    struct state state;
    char subject[SUBJECT_CHARS];
    device_t card;
    int code = instance_enter(__func__, compute, "ci", &state, &card);
    if (code != SUCCESS) return code;
    long long gi = of_instance(&state, compute, "gi");
    snprintf(subject, sizeof subject, "GI-%.64s-%lld", card->uuid, gi);
    *info = (struct compute_info){
        card, device_handle(subject), (unsigned)of_instance(&state, compute, "id"),
        (unsigned)of_instance(&state, compute, "profile"),
        {0, (unsigned)of_instance(&state, compute, "slices")}};
    return SUCCESS;
}

EXPORT int nvmlDeviceGetComputeInstanceId(device_t device, unsigned *id) {
    struct state state;
    int code = enter(__func__, device, &state);
    if (code != SUCCESS) return code;
    long long found = state_number(&state, device->uuid, "ci", -1);
    *id = (unsigned)found;
    return found < 0 ? INVALID_ARGUMENT : SUCCESS;
}

/* ---- who runs there ---- */

struct process {
    unsigned pid;
    unsigned long long used_bytes;
    unsigned gpu_instance, compute_instance;
};

/* A card tells of its slices, too, but to root only; a slice tells of itself. */
static int runs_within(const struct state *state, const char *on, const char *uuid) {
    const char *parent = privileged(state) == SUCCESS ? state_get(state, on, "parent") : NULL;
    return !strcmp(on, uuid) || (parent != NULL && !strcmp(parent, uuid));
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(
    device_t device, unsigned *count, struct process *processes) {
    struct state state;
    int code = enter(__func__, device, &state);
    if (code != SUCCESS) return code;
    unsigned room = processes == NULL ? 0 : *count;
    *count = 0;
    for (int i = 0;; i++) {
        const char *subject = state_find(&state, "kind", "process", i);
        if (subject == NULL) break;
        const char *on = state_get(&state, subject, "on");
        if (on == NULL || !runs_within(&state, on, device->uuid)) continue;
        if (*count < room)
            processes[*count] = (struct process){
                (unsigned)strtoul(subject + strlen("PID-"), NULL, 10),
                (unsigned long long)state_number(&state, subject, "memory_mb", 0) * MIB,
                (unsigned)state_number(&state, on, "gi", NO_INSTANCE),
                (unsigned)state_number(&state, on, "ci", NO_INSTANCE)};
        ++*count;
    }
    return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}
