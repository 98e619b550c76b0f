/* Who holds one key.
 *
 * Most blocks are held by few: up to four (slot, tier) places lie in the node's own word.  More go
 * to a chain of chunks, each a bit a holder for 64 neighbouring slots in one tier, so that a prompt
 * everybody has costs one more cache line and one AND for 64 workers.
 *
 * Readers take no lock.  The word is written whole.  A chunk may be freed and used for another key
 * while a reader walks it; every change of a chain's shape therefore puts a new version in the
 * word, and a reader whose word changed meanwhile reads again.  Versions come from one counter of
 * 31 bits: for a reader to be fooled, two thousand million changes must pass within one of its
 * reads and end at the same word.
 */
#include "cachemap_private.h"

#define FEW 3 /* a chain of no more places than this goes back into the word */

static uint64_t word_of(const cachemap *map, uint32_t node) {
    return atomic_load_explicit(&map->nodes[node].set, memory_order_relaxed);
}

static void publish(cachemap *map, uint32_t node, uint64_t word) {
    atomic_store_explicit(&map->nodes[node].set, word, memory_order_release);
}

static uint64_t chain_word(cachemap *map, uint32_t first) {
    map->version = (map->version + 1) & 0x7FFFFFFF;
    return SET_IS_CHAIN | (uint64_t)map->version << 32 | first;
}

static cachemap_chunk *chunk_at(const cachemap *map, uint32_t index) {
    return &map->chunks[index];
}

static uint32_t next_of(const cachemap_chunk *chunk) {
    return atomic_load_explicit(&chunk->next, memory_order_relaxed);
}

static uint64_t bits_of(const cachemap_chunk *chunk) {
    return atomic_load_explicit(&chunk->bits, memory_order_relaxed);
}

static uint32_t place_of(const cachemap_chunk *chunk) {
    return atomic_load_explicit(&chunk->place, memory_order_relaxed);
}

static uint32_t take_chunk(cachemap *map, uint32_t place, uint64_t bits, uint32_t next) {
    uint32_t index = map->chunk_free;
    if (index)
        map->chunk_free = next_of(chunk_at(map, index));
    else if (map->chunks_fresh < map->chunks_max)
        index = map->chunks_fresh++;
    else
        return 0;
    cachemap_chunk *chunk = chunk_at(map, index);
    atomic_store_explicit(&chunk->place, place, memory_order_relaxed);
    atomic_store_explicit(&chunk->bits, bits, memory_order_relaxed);
    atomic_store_explicit(&chunk->next, next, memory_order_relaxed);
    return index;
}

static void free_chunk(cachemap *map, uint32_t index) {
    cachemap_chunk *chunk = chunk_at(map, index);
    atomic_store_explicit(&chunk->next, map->chunk_free, memory_order_relaxed);
    map->chunk_free = index;
}

static void free_chain(cachemap *map, uint32_t index) {
    while (index) {
        uint32_t next = next_of(chunk_at(map, index));
        free_chunk(map, index);
        index = next;
    }
}

static uint32_t find_chunk(const cachemap *map, uint64_t word, uint32_t place) {
    uint32_t index = (uint32_t)word;
    while (index && place_of(chunk_at(map, index)) != place) index = next_of(chunk_at(map, index));
    return index;
}

int cachemap_set_has(const cachemap *map, uint32_t node, uint32_t slot, uint32_t tier) {
    uint64_t word = word_of(map, node);
    if (word & SET_IS_CHAIN) {
        uint32_t index = find_chunk(map, word, GROUP_PLACE(slot, tier));
        return index && (bits_of(chunk_at(map, index)) >> (slot & 63) & 1);
    }
    for (int lane = 0; lane < SET_PLACES; lane++)
        if (set_place(word, lane) == PLACE(slot, tier)) return 1;
    return 0;
}

/* Turns four places in the word and one more into a chain. */
static enum set_change grow(cachemap *map, uint32_t node, uint64_t word, uint32_t slot,
                            uint32_t tier) {
    uint32_t first = 0;
    for (int lane = -1; lane < SET_PLACES; lane++) {
        uint32_t place = lane < 0 ? PLACE(slot, tier) : set_place(word, lane);
        uint32_t where = GROUP_PLACE(place >> 3, place & 7);
        uint64_t bit = 1ull << (place >> 3 & 63);
        uint32_t found = find_chunk(map, first, where);
        if (found) {
            cachemap_chunk *chunk = chunk_at(map, found);
            atomic_store_explicit(&chunk->bits, bits_of(chunk) | bit, memory_order_relaxed);
            continue;
        }
        found = take_chunk(map, where, bit, first);
        if (!found) {
            free_chain(map, first);
            return SET_FULL;
        }
        first = found;
    }
    publish(map, node, chain_word(map, first));
    return SET_CHANGED;
}

static enum set_change add_to_chain(cachemap *map, uint32_t node, uint64_t word, uint32_t slot,
                                    uint32_t tier) {
    uint32_t where = GROUP_PLACE(slot, tier);
    uint64_t bit = 1ull << (slot & 63);
    uint32_t index = find_chunk(map, word, where);
    if (!index) {
        index = take_chunk(map, where, bit, (uint32_t)word);
        if (!index) return SET_FULL;
        publish(map, node, chain_word(map, index));
        return SET_CHANGED;
    }
    cachemap_chunk *chunk = chunk_at(map, index);
    uint64_t bits = bits_of(chunk);
    if (bits & bit) return SET_UNCHANGED;
    atomic_store_explicit(&chunk->bits, bits | bit, memory_order_release);
    return SET_CHANGED;
}

enum set_change cachemap_set_add(cachemap *map, uint32_t node, uint32_t slot, uint32_t tier) {
    uint64_t word = word_of(map, node);
    if (word & SET_IS_CHAIN) return add_to_chain(map, node, word, slot, tier);
    int free_lane = -1;
    for (int lane = 0; lane < SET_PLACES; lane++) {
        uint32_t place = set_place(word, lane);
        if (place == PLACE(slot, tier)) return SET_UNCHANGED;
        if (!place) free_lane = lane;
    }
    if (free_lane < 0) return grow(map, node, word, slot, tier);
    publish(map, node, word | (uint64_t)PLACE(slot, tier) << (SET_PLACE_BITS * free_lane));
    return SET_CHANGED;
}

/* Puts a chain of few places back into the word. */
static void shrink(cachemap *map, uint32_t node) {
    uint64_t word = word_of(map, node), packed = 0;
    uint32_t index = (uint32_t)word, count = 0;
    for (; index; index = next_of(chunk_at(map, index))) {
        const cachemap_chunk *chunk = chunk_at(map, index);
        uint32_t where = place_of(chunk);
        count += (uint32_t)__builtin_popcountll(bits_of(chunk));
        if (count > FEW) return;
        for (uint64_t left = bits_of(chunk); left; left &= left - 1) {
            uint32_t slot = (where >> 3) * 64 + (uint32_t)__builtin_ctzll(left);
            packed = packed << SET_PLACE_BITS | PLACE(slot, where & 7);
        }
    }
    publish(map, node, packed);
    free_chain(map, (uint32_t)word);
}

/* Clears bits of one chunk; unlinks it when it is empty. Returns the chunk that follows. */
static uint32_t clear_bits(cachemap *map, uint32_t node, uint32_t before, uint32_t index,
                           uint64_t cleared) {
    cachemap_chunk *chunk = chunk_at(map, index);
    uint64_t bits = bits_of(chunk) & ~cleared;
    uint32_t next = next_of(chunk);
    atomic_store_explicit(&chunk->bits, bits, memory_order_release);
    if (bits) return next;
    if (before) atomic_store_explicit(&chunk_at(map, before)->next, next, memory_order_relaxed);
    uint32_t first = before ? (uint32_t)word_of(map, node) : next;
    publish(map, node, first ? chain_word(map, first) : 0);
    free_chunk(map, index);
    return next;
}

static enum set_change remove_from_chain(cachemap *map, uint32_t node, uint64_t word, uint32_t slot,
                                         uint32_t tier) {
    uint32_t where = GROUP_PLACE(slot, tier), before = 0, index = (uint32_t)word;
    uint64_t bit = 1ull << (slot & 63);
    for (; index && place_of(chunk_at(map, index)) != where; index = next_of(chunk_at(map, index)))
        before = index;
    if (!index || !(bits_of(chunk_at(map, index)) & bit)) return SET_UNCHANGED;
    clear_bits(map, node, before, index, bit);
    if (word_of(map, node) & SET_IS_CHAIN) shrink(map, node);
    return SET_CHANGED;
}

enum set_change cachemap_set_remove(cachemap *map, uint32_t node, uint32_t slot, uint32_t tier) {
    uint64_t word = word_of(map, node);
    if (word & SET_IS_CHAIN) return remove_from_chain(map, node, word, slot, tier);
    for (int lane = 0; lane < SET_PLACES; lane++) {
        if (set_place(word, lane) == PLACE(slot, tier)) {
            publish(map, node, word & ~(SET_PLACE_MASK << (SET_PLACE_BITS * lane)));
            return SET_CHANGED;
        }
    }
    return SET_UNCHANGED;
}

void cachemap_set_sweep(cachemap *map, uint32_t node) {
    uint64_t word = word_of(map, node);
    if (!(word & SET_IS_CHAIN)) {
        uint64_t kept = word;
        for (int lane = 0; lane < SET_PLACES; lane++) {
            uint32_t place = set_place(word, lane);
            if (place && map->slot_states[place >> 3] == SLOT_SWEEPING)
                kept &= ~(SET_PLACE_MASK << (SET_PLACE_BITS * lane));
        }
        if (kept != word) publish(map, node, kept);
        return;
    }
    uint32_t before = 0, index = (uint32_t)word;
    while (index) {
        const cachemap_chunk *chunk = chunk_at(map, index);
        uint64_t dead = 0, bits = bits_of(chunk);
        for (uint64_t left = bits; left; left &= left - 1) {
            uint32_t bit = (uint32_t)__builtin_ctzll(left);
            if (map->slot_states[(place_of(chunk) >> 3) * 64 + bit] == SLOT_SWEEPING)
                dead |= 1ull << bit;
        }
        uint32_t next = dead ? clear_bits(map, node, before, index, dead) : next_of(chunk);
        if (bits != dead) before = index;
        index = next;
    }
    if (word_of(map, node) & SET_IS_CHAIN) shrink(map, node);
}

uint32_t cachemap_set_chunks(const cachemap *map, uint32_t node, uint64_t *places) {
    uint64_t word = word_of(map, node);
    uint32_t chunks = 0;
    if (!(word & SET_IS_CHAIN)) {
        for (int lane = 0; lane < SET_PLACES; lane++) *places += set_place(word, lane) != 0;
        return 0;
    }
    for (uint32_t index = (uint32_t)word; index; index = next_of(chunk_at(map, index))) {
        if (index >= map->chunks_fresh || ++chunks > map->chunks_max) return UINT32_MAX;
        if (!bits_of(chunk_at(map, index))) return UINT32_MAX;
        *places += (uint32_t)__builtin_popcountll(bits_of(chunk_at(map, index)));
    }
    return chunks ? chunks : UINT32_MAX;
}
