/* Runs a fuzz target where the compiler brings no libFuzzer.
 *
 * `target SECONDS SEED` makes inputs from the seed: fresh ones, and mutations of recent ones.  No
 * coverage guides it, so it finds less than libFuzzer, but it needs nothing.  When the target dies,
 * the input is written to `crash-SEED-NUMBER`; `target FILE` runs one input again.
 */
#include <inttypes.h>
#include <sanitizer/common_interface_defs.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { INPUT_BYTES_MAX = 4096, POOL = 64, EXECUTIONS_PER_LOOK = 32 };

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size);

typedef struct {
    uint8_t bytes[INPUT_BYTES_MAX];
    size_t size;
} sample;

static sample pool[POOL], current;
static uint64_t seed, dice, number;

static uint64_t roll(uint64_t limit) { /* splitmix64 */
    uint64_t value = dice += 0x9E3779B97F4A7C15ull;
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9ull;
    value = (value ^ value >> 27) * 0x94D049BB133111EBull;
    return (value ^ value >> 31) % limit;
}

static void fill_fresh(sample *fresh) {
    uint64_t longest = roll(4) ? 64 : INPUT_BYTES_MAX;
    fresh->size = roll(longest) + 1;
    for (size_t i = 0; i < fresh->size; i++) fresh->bytes[i] = (uint8_t)roll(256);
}

static void mutate(sample *changed) {
    static const uint8_t odd[] = {0, 1, 0x7F, 0x80, 0xFF, 16, 64};
    for (uint64_t left = 1 + roll(8); left; left--) {
        size_t at = roll(changed->size);
        switch (roll(4)) {
        case 0:
            changed->bytes[at] = (uint8_t)roll(256);
            break;
        case 1:
            changed->bytes[at] ^= (uint8_t)(1u << roll(8));
            break;
        case 2:
            changed->bytes[at] = odd[roll(sizeof odd)];
            break;
        default:
            changed->size = at + 1;
            break;
        }
    }
}

static void keep_input(void) {
    char name[64];
    snprintf(name, sizeof name, "crash-%" PRIu64 "-%" PRIu64, seed, number);
    FILE *file = fopen(name, "wb");
    if (!file) return;
    fwrite(current.bytes, 1, current.size, file);
    fclose(file);
    fprintf(stderr, "the input is in %s\n", name);
}

static void on_abort(int signal_number) {
    keep_input();
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

static int run_file(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) {
        perror(path);
        return 2;
    }
    current.size = fread(current.bytes, 1, sizeof current.bytes, file);
    fclose(file);
    LLVMFuzzerTestOneInput(current.bytes, current.size);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 2) return run_file(argv[1]);
    if (argc != 3) {
        fprintf(stderr, "usage: %s SECONDS SEED | FILE\n", argv[0]);
        return 2;
    }
    seed = dice = strtoull(argv[2], NULL, 10);
    time_t end = time(NULL) + atoi(argv[1]);
    __sanitizer_set_death_callback(keep_input);
    signal(SIGABRT, on_abort);
    printf("seed %" PRIu64 "\n", seed);
    fflush(stdout);
    for (; number % EXECUTIONS_PER_LOOK || time(NULL) < end; number++) {
        sample *parent = &pool[roll(POOL)];
        if (!parent->size || roll(2)) {
            fill_fresh(&current);
        } else {
            current = *parent;
            mutate(&current);
        }
        LLVMFuzzerTestOneInput(current.bytes, current.size);
        *parent = current;
    }
    printf("%" PRIu64 " inputs, none of them fatal\n", number);
    return 0;
}
