/* A hash table of chains, and for each segment the list of what is in it.
 *
 * Content keys are hashed with a secret seed, so that nobody can aim at one chain.  The shard is
 * not part of the hash: whether a record is whole is answered by one chain.  Entries are numbered
 * and never move, so that lists are numbers.
 */
#include "disk_index.h"

#include <stdlib.h>
#include <string.h>

#include "mix.h"

int disk_index_make(disk_index *index, uint32_t capacity, uint32_t segments,
                    const uint64_t seed[2]) {
    uint32_t buckets = 64;
    while (buckets < capacity && buckets < 1u << 31) buckets *= 2;
    *index = (disk_index){.capacity = capacity, .bucket_mask = buckets - 1};
    memcpy(index->seed, seed, sizeof index->seed);
    index->entries = calloc(capacity, sizeof *index->entries);
    index->buckets = malloc(buckets * sizeof *index->buckets);
    index->segment_heads = malloc(segments * sizeof *index->segment_heads);
    if (!index->entries || !index->buckets || !index->segment_heads) {
        disk_index_free(index);
        return 0;
    }
    memset(index->buckets, 0xFF, buckets * sizeof *index->buckets);
    memset(index->segment_heads, 0xFF, segments * sizeof *index->segment_heads);
    index->free_entry = DISK_NONE;
    return 1;
}

void disk_index_free(disk_index *index) {
    free(index->entries);
    free(index->buckets);
    free(index->segment_heads);
    *index = (disk_index){0};
}

static uint32_t *bucket_of(const disk_index *index, uint32_t class_id, const uint64_t key[2]) {
    uint64_t hash = mix_words(key[0] ^ index->seed[0], key[1] ^ index->seed[1]);
    hash = mix_words(hash ^ class_id, 0x9E3779B97F4A7C15ull);
    return &index->buckets[hash & index->bucket_mask];
}

static int is_of(const disk_entry *entry, uint32_t class_id, const uint64_t key[2]) {
    return entry->key[0] == key[0] && entry->key[1] == key[1] && entry->class_id == class_id;
}

uint32_t disk_index_find(const disk_index *index, uint32_t class_id, const uint8_t key[16],
                         uint32_t shard) {
    uint64_t words[2];
    memcpy(words, key, sizeof words);
    uint32_t at = *bucket_of(index, class_id, words);
    while (at != DISK_NONE) {
        const disk_entry *entry = &index->entries[at];
        if (is_of(entry, class_id, words) && entry->shard == shard) return at;
        at = entry->next_of_bucket;
    }
    return DISK_NONE;
}

uint64_t disk_index_mask(const disk_index *index, uint32_t class_id, const uint8_t key[16],
                         uint32_t now_s) {
    uint64_t words[2], mask = 0;
    memcpy(words, key, sizeof words);
    uint32_t at = *bucket_of(index, class_id, words);
    while (at != DISK_NONE) {
        const disk_entry *entry = &index->entries[at];
        if (is_of(entry, class_id, words) && entry->state == DISK_ENTRY_READY &&
            (entry->expires_s == 0 || entry->expires_s > now_s))
            mask |= 1ull << entry->shard;
        at = entry->next_of_bucket;
    }
    return mask;
}

static void link_segment(disk_index *index, uint32_t at) {
    disk_entry *entry = &index->entries[at];
    uint32_t *head = &index->segment_heads[entry->segment];
    entry->previous_of_segment = DISK_NONE;
    entry->next_of_segment = *head;
    if (*head != DISK_NONE) index->entries[*head].previous_of_segment = at;
    *head = at;
}

static void unlink_segment(disk_index *index, uint32_t at) {
    const disk_entry *entry = &index->entries[at];
    if (entry->previous_of_segment != DISK_NONE)
        index->entries[entry->previous_of_segment].next_of_segment = entry->next_of_segment;
    else
        index->segment_heads[entry->segment] = entry->next_of_segment;
    if (entry->next_of_segment != DISK_NONE)
        index->entries[entry->next_of_segment].previous_of_segment = entry->previous_of_segment;
}

/* Entries that were never used are taken in order, so that untouched memory stays so. */
static uint32_t take_entry(disk_index *index) {
    if (index->count == index->capacity) return DISK_NONE;
    if (index->free_entry == DISK_NONE) return index->count;
    uint32_t at = index->free_entry;
    index->free_entry = index->entries[at].next_of_bucket;
    return at;
}

uint32_t disk_index_add(disk_index *index, const disk_entry *fresh) {
    uint32_t at = take_entry(index);
    if (at == DISK_NONE) return DISK_NONE;
    disk_entry *entry = &index->entries[at];
    *entry = *fresh;
    uint32_t *head = bucket_of(index, entry->class_id, entry->key);
    entry->next_of_bucket = *head;
    *head = at;
    link_segment(index, at);
    index->count++;
    return at;
}

void disk_index_remove(disk_index *index, uint32_t at) {
    disk_entry *entry = &index->entries[at];
    unlink_segment(index, at);
    uint32_t *link = bucket_of(index, entry->class_id, entry->key);
    while (*link != at) link = &index->entries[*link].next_of_bucket;
    *link = entry->next_of_bucket;
    entry->state = DISK_ENTRY_FREE;
    entry->next_of_bucket = index->free_entry;
    index->free_entry = at;
    index->count--;
}

void disk_index_move(disk_index *index, uint32_t at, uint16_t segment, uint32_t start_unit,
                     uint64_t sequence) {
    unlink_segment(index, at);
    disk_entry *entry = &index->entries[at];
    entry->segment = segment;
    entry->start_unit = start_unit;
    entry->sequence = sequence;
    entry->uses = 0;
    link_segment(index, at);
}
