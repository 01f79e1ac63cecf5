/* What the parts of the fake libnvidia-ml.so.1 share: the state file and the handles.
 *
 * The state file, named by FAKE_NVML_STATE, is plain text, one fact a line:
 *
 *     SUBJECT KEY VALUE
 *
 * SUBJECT is "system", "event", or the UUID of a card or MIG slice; VALUE is the rest of the line.
 * It is read again at every call, so a test changes the world by renaming a new file over it. A
 * fact that is missing is one that the hardware cannot give: NVML_ERROR_NOT_SUPPORTED.
 */
#ifndef FAKE_NVML_H
#define FAKE_NVML_H

#include <stdio.h>

#define LINES_MOST 1024
#define SUBJECT_CHARS 96
#define KEY_CHARS 64
#define VALUE_CHARS 160
#define HANDLES_MOST 256
#define EXPORT __attribute__((visibility("default")))

/* nvmlReturn_t, as far as it is used. */
enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10,
    LIBRARY_NOT_FOUND = 12,
    GPU_IS_LOST = 15,
    IN_USE = 19,
    INSUFFICIENT_RESOURCES = 23,
    UNKNOWN = 999
};

struct line {
    char subject[SUBJECT_CHARS];
    char key[KEY_CHARS];
    char value[VALUE_CHARS];
};

struct state {
    int count;
    struct line lines[LINES_MOST];
};

/* What an opaque nvmlDevice_t points to: the same for the same UUID while the process lives. */
struct handle {
    char uuid[SUBJECT_CHARS];
};
typedef struct handle *device_t;

/* Reads the state file: SUCCESS, or UNKNOWN where it cannot be read. */
int state_read(struct state *state);

/* Writes it back, by a rename: SUCCESS or UNKNOWN. Between state_read and this, hold state_lock(),
 * so that no other caller of the library writes meanwhile; tests take the same lock (FILE.lock). */
int state_write(const struct state *state);
int state_lock(void);       /* a descriptor, or -1 */
void state_unlock(int lock);

/* A fact; NULL: it is missing. It points into `state`. */
const char *state_get(const struct state *state, const char *subject, const char *key);

/* A fact as a number; `missing` where there is none. */
long long state_number(
    const struct state *state, const char *subject, const char *key, long long missing);

/* Sets a fact, or adds it; `format` as for printf. */
void state_set(struct state *state, const char *subject, const char *key, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Forgets all facts of a subject. */
void state_forget(struct state *state, const char *subject);

/* The `index`-th subject, in the file's order, that has this `key` with this `value` (NULL: any);
 * NULL: there are no more. */
const char *state_find(const struct state *state, const char *key, const char *value, int index);

/* The handle of a card or slice, whether or not it is there. */
device_t device_handle(const char *uuid);

/* What every exported function that takes a card or slice begins with: reads `state`, waits while
 * the card hangs ("hang 1"), and gives what the function is to return at once, or SUCCESS:
 * UNINITIALIZED before nvmlInit; GPU_IS_LOST for a card that is "lost 1" or not in the file (any
 * more), and for its slices; NOT_SUPPORTED and so on where a fact "error.FUNCTION CODE" says so. */
int enter(const char *function, device_t device, struct state *state);

#endif
