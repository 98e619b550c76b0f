/* Fuzz target: a disk store that loads a folder in whose files anything may stand.
 *
 * A real store is made once, in memory: full segments, a tail, dropped records.  Each input edits
 * copies of its files (one byte of flags, then 6-byte edits: which file, where, and what); a new
 * store loads them, must pass its own audit, and is then used: everything is read, records are put
 * until segments are given up, and it is loaded once more.
 *
 * With flag 1 the check words of headers, record heads, tables and trailers are made right again
 * after the edits, so that nonsense gets past them.  Without it, what is served must be right.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../checksum.h"
#include "../disk_private.h"
#include "../tests/disk_memfs.h"

enum { SEGMENT_BYTES = 65536, SEGMENTS = 5, KEYS = 60, EDITS_MAX = 128, FLAG_FIX = 1 };

static memfs *master;
static uint8_t *buffer;
static uint64_t now_ns;

static void require(int condition) {
    if (!condition) abort();
}

static uint64_t length_of(uint32_t key) {
    return 1 + key * 700 % (2 * DISK_UNIT_BYTES);
}

static uint8_t byte_of(uint32_t key, uint64_t at) {
    return (uint8_t)((key * 9001 + at) * 0x9E3779B97F4A7C15ull >> 56);
}

static void fill_bytes(uint32_t key) {
    for (uint64_t i = 0; i < 2 * DISK_UNIT_BYTES; i++) buffer[i] = byte_of(key, i);
}

static void poll_store(disk_store *store) {
    disk_poll(store, now_ns += 100 * NS_PER_MS, 1000);
    require(disk_audit(store) == NULL);
}

static disk_store *load(memfs *fs) {
    static const char *const paths[1] = {"/a"};
    const uint64_t seed[2] = {3, 5};
    const disk_settings settings = {.size_bytes = SEGMENTS * SEGMENT_BYTES,
                                    .segment_bytes = SEGMENT_BYTES,
                                    .entries = 64,
                                    .depth = 1};
    char error[256];
    disk_store *store = disk_open_over(memfs_io(fs), DISK_ENGINE_INLINE, &settings, paths, 1, seed,
                                       error, sizeof error);
    require(store != NULL);
    for (int i = 0; i < 3; i++) poll_store(store);
    return store;
}

static int open_class(disk_store *store) {
    const uint8_t name[16] = "fuzzed";
    return disk_class(store, name, 0, 1, "m");
}

static void put(disk_store *store, int class_id, uint32_t key) {
    disk_object object = {.class_id = (uint32_t)class_id, .retention = 1 + key % 3};
    memcpy(object.key, &key, sizeof key);
    object.length_bytes = length_of(key);
    fill_bytes(key);
    object.sum = checksum_bytes(buffer, object.length_bytes);
    if (class_id < 0 || disk_put(store, &object, buffer, key) != DISK_OK) return;
    poll_store(store);
    disk_completion done;
    require(disk_take_completions(store, &done, 1) == 1);
}

static void read_all(disk_store *store, int must_be_right) {
    int class_id = open_class(store);
    for (uint32_t key = 0; class_id >= 0 && key < KEYS; key++) {
        uint8_t name[16] = {0};
        memcpy(name, &key, sizeof key);
        if (disk_get(store, (uint32_t)class_id, name, 0, buffer, 2 * DISK_UNIT_BYTES, 1000, key) !=
            DISK_OK)
            continue;
        poll_store(store);
        disk_completion done;
        require(disk_take_completions(store, &done, 1) == 1);
        if (done.status != DISK_OK || !must_be_right) continue;
        require(done.object.length_bytes == length_of(key));
        for (uint64_t i = 0; i < length_of(key); i++) require(buffer[i] == byte_of(key, i));
    }
}

static void make_master(void) {
    buffer = aligned_alloc(DISK_UNIT_BYTES, 2 * DISK_UNIT_BYTES);
    master = memfs_make();
    disk_store *store = load(master);
    int other = disk_class(store, (const uint8_t *)"dropped namespac", 3, 1, "n");
    for (uint32_t key = 0; key < 4; key++) put(store, other, key);
    disk_drop_class(store, (uint32_t)other);
    for (uint32_t key = 0; key < 20; key++) put(store, open_class(store), key);
    poll_store(store);
    require(disk_close(store, 1000));
    memfs_kill(master);
}

static uint8_t *file_of(memfs *fs, uint32_t number, uint64_t *size) {
    char path[DISK_FILE_PATH_BYTES];
    if (number == SEGMENTS) return memfs_bytes(fs, "/a/marks", size);
    if (number == SEGMENTS + 1) return memfs_bytes(fs, "/a/format", size);
    disk_segment_path(path, "/a", number);
    return memfs_bytes(fs, path, size);
}

/* Half of the edits are in what matters most: the first bytes of a unit. */
static void edit(memfs *fs, const uint8_t *words) {
    uint64_t size = 0;
    uint8_t *bytes = file_of(fs, words[0] % (SEGMENTS + 2), &size);
    if (!bytes || !size) return;
    uint64_t at = (uint64_t)words[1] | (uint64_t)words[2] << 8 | (uint64_t)words[3] << 16;
    if (words[5] & 2) at = at / 256 % 16 * DISK_UNIT_BYTES + at % 256;
    if (words[5] & 1)
        bytes[at % size] ^= (uint8_t)(1u << (words[4] & 7));
    else
        bytes[at % size] = words[4];
}

static void fix_segment(uint8_t *bytes) {
    DISK_SEAL((disk_segment_block *)bytes);
    for (uint64_t at = DISK_UNIT_BYTES; at < SEGMENT_BYTES; at += DISK_UNIT_BYTES) {
        disk_record_block *head = (disk_record_block *)(bytes + at);
        if (head->magic == DISK_MAGIC_RECORD) DISK_SEAL(head);
    }
    disk_trailer_block *trailer = (disk_trailer_block *)(bytes + SEGMENT_BYTES - DISK_UNIT_BYTES);
    uint64_t table_bytes = trailer->class_count * sizeof(disk_class_row) +
                           (uint64_t)trailer->record_count * sizeof(disk_record_row);
    if (trailer->table_offset < SEGMENT_BYTES &&
        table_bytes <= SEGMENT_BYTES - trailer->table_offset)
        trailer->table_check = checksum_crc32c(0, bytes + trailer->table_offset, table_bytes);
    DISK_SEAL(trailer);
}

static void fix_marks(uint8_t *bytes, uint64_t size) {
    disk_marks_block *head = (disk_marks_block *)bytes;
    uint64_t rows_bytes = (uint64_t)head->drop_count * sizeof(disk_drop_row);
    if (size < sizeof *head) return;
    if (rows_bytes <= size - sizeof *head)
        head->rows_check = checksum_crc32c(0, bytes + sizeof *head, rows_bytes);
    DISK_SEAL(head);
}

static void fix_checks(memfs *fs) {
    uint64_t size = 0;
    for (uint32_t number = 0; number < SEGMENTS; number++) {
        uint8_t *bytes = file_of(fs, number, &size);
        if (bytes && size == SEGMENT_BYTES) fix_segment(bytes);
    }
    uint8_t *marks = file_of(fs, SEGMENTS, &size);
    if (marks) fix_marks(marks, size);
    uint8_t *format = file_of(fs, SEGMENTS + 1, &size);
    if (format && size == sizeof(disk_format_block)) DISK_SEAL((disk_format_block *)format);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    if (!master) make_master();
    if (size < 1) return 0;
    memfs *fs = memfs_copy(master);
    for (size_t i = 0; i < EDITS_MAX && 1 + i * 6 + 6 <= size; i++) edit(fs, input + 1 + i * 6);
    int is_fixed = input[0] & FLAG_FIX;
    if (is_fixed) fix_checks(fs);
    disk_store *store = load(fs);
    read_all(store, !is_fixed);
    for (uint32_t key = 20; key < KEYS; key++) put(store, open_class(store), key);
    read_all(store, !is_fixed);
    require(disk_close(store, 1000));
    memfs_kill(fs);
    store = load(fs);
    read_all(store, !is_fixed);
    require(disk_close(store, 1000));
    memfs_free(fs);
    return 0;
}
