/* Object checksums, computed while copying. */
#ifndef INFERA_CHECKSUM_H
#define INFERA_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

#define CHECKSUM_LEAF_BYTES 16384

/* cffi: begin */
/* CRC32C (Castagnoli) of `len` bytes continuing from `crc`; start with 0. */
uint32_t checksum_crc32c(uint32_t crc, const void *data, size_t len);
/* cffi: end */

/* Running checksum of an object that arrives in pieces of any size, in order. */
typedef struct {
    uint64_t sum;
    uint64_t bytes;
    uint32_t leaf_crc; /* of the unfinished leaf */
} checksum_state;

/* Copies a piece and takes it in; the bytes summed are the bytes stored. `streaming` writes around
 * the cache, for objects that will not be read again soon. `target` null only sums. */
void checksum_copy(checksum_state *state, void *target, const void *source, size_t len,
                   int streaming);

/* The object's checksum; the state may not be used afterwards. */
uint64_t checksum_finish(checksum_state *state);

/* cffi: begin */
/* Copies whole blocks between a strided set of regions and contiguous objects, one call for all.
 *
 * Object i is, in order, segment s = 0..n_segments-1: segment_bytes[s] bytes at
 * segment_base[s] + block_ids[i] * segment_stride[s].  Its contiguous form is at object_address[i].
 * sums[i] receives the checksum of object i's bytes as copied. Addresses are integers so that they
 * can come from any tensor library; nothing is checked here. */
void copy_blocks_gather(const uint64_t *segment_base, const uint64_t *segment_stride,
                        const uint64_t *segment_bytes, uint64_t n_segments,
                        const uint64_t *block_ids, const uint64_t *object_address,
                        uint64_t n_objects, uint64_t *sums);
void copy_blocks_scatter(const uint64_t *segment_base, const uint64_t *segment_stride,
                         const uint64_t *segment_bytes, uint64_t n_segments,
                         const uint64_t *block_ids, const uint64_t *object_address,
                         uint64_t n_objects, uint64_t *sums);

/* Checksum of contiguous bytes, as the copies above compute it. */
uint64_t checksum_bytes(const void *data, uint64_t len);
/* cffi: end */

#endif
