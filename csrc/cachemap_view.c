/* Opening the cache map for reading, and what it says of itself. */
#include <stdlib.h>
#include <string.h>

#include "cachemap_private.h"
#include "checksum.h"

/* The header must be one that cachemap_create writes for its number of entries: then every offset
 * fits the mapping. */
static int check_header(const cachemap_header *header, uint64_t bytes) {
    if (header->magic != CACHEMAP_MAGIC) return CACHEMAP_BAD_MAGIC;
    if (header->layout_version != CACHEMAP_LAYOUT_VERSION) return CACHEMAP_BAD_VERSION;
    uint64_t needed = cachemap_bytes(header->entries_max);
    int is_sound = needed && needed <= bytes && header->bytes == needed &&
                   header->header_bytes == CACHEMAP_HEADER_BYTES &&
                   header->check == checksum_crc32c(0, header, offsetof(cachemap_header, check));
    return is_sound ? CACHEMAP_OK : CACHEMAP_BAD_GEOMETRY;
}

cachemap_view *cachemap_view_open(const void *base, uint64_t bytes, int *status) {
    *status = CACHEMAP_BAD_GEOMETRY;
    if (bytes < CACHEMAP_HEADER_BYTES) return NULL;
    cachemap_header header;
    memcpy((void *)&header, base, offsetof(cachemap_header, is_abandoned));
    *status = check_header(&header, bytes);
    if (*status != CACHEMAP_OK) return NULL;
    cachemap_view *view = calloc(1, sizeof *view);
    if (!view) {
        *status = CACHEMAP_NO_MEMORY;
        return NULL;
    }
    const char *start = base;
    view->header = base;
    view->holders = (const cachemap_holder *)(start + header.holders_offset);
    view->nodes = (const cachemap_node *)(start + header.nodes_offset);
    view->buckets = (const cachemap_bucket *)(start + header.buckets_offset);
    view->chunks = (const cachemap_chunk *)(start + header.chunks_offset);
    memcpy(view->seed, header.seed, sizeof view->seed);
    view->nodes_max = header.nodes_max;
    view->bucket_count = header.bucket_count;
    view->chunks_max = header.chunks_max;
    return view;
}

void cachemap_view_close(cachemap_view *view) {
    free(view);
}

static uint64_t read_word(const _Atomic uint64_t *word) {
    return atomic_load_explicit(word, memory_order_relaxed);
}

void cachemap_read_facts(const cachemap_view *view, cachemap_facts *facts) {
    const cachemap_header *header = view->header;
    facts->entries = read_word(&header->entries);
    facts->entries_max = header->entries_max;
    facts->nodes = read_word(&header->nodes);
    facts->predicted = read_word(&header->predicted);
    facts->aliases = read_word(&header->aliases);
    facts->sweeping = read_word(&header->sweeping);
    facts->holders = read_word(&header->holders);
    facts->is_abandoned = read_word(&header->is_abandoned);
    facts->beat_ms = read_word(&header->beat_ms);
    for (uint32_t source = 0; source < CACHEMAP_SOURCES; source++)
        for (uint32_t counter = 0; counter < CACHEMAP_COUNTERS; counter++)
            facts->counters[source * CACHEMAP_COUNTERS + counter] =
                read_word(&header->counters[source][counter]);
}

int cachemap_read_holder(const cachemap_view *view, uint64_t handle, cachemap_holder_facts *facts) {
    memset(facts, 0, sizeof *facts);
    uint64_t index = handle & 0xFFFF;
    if (!handle || index > CACHEMAP_HOLDERS_MAX) return 0;
    const cachemap_holder *first = &view->holders[index];
    if (read_word(&first->handle) != handle) return 0;
    facts->frames = read_word(&first->frames);
    facts->block_size_tokens =
        atomic_load_explicit(&first->block_size_tokens, memory_order_relaxed);
    while (index && index <= CACHEMAP_HOLDERS_MAX && facts->groups < CACHEMAP_GROUPS_MAX) {
        const cachemap_holder *holder = &view->holders[index];
        for (uint32_t tier = 0; tier < CACHEMAP_TIERS; tier++)
            facts->blocks[tier] += read_word(&holder->blocks[tier]);
        facts->groups++;
        index = atomic_load_explicit(&holder->next_group, memory_order_relaxed);
    }
    return 1;
}
