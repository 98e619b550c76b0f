/* Mixing two words into one for hash tables: both halves of their 128-bit product, folded. Not a
 * cryptographic hash; tables that others can fill key it with secret words. */
#ifndef INFERA_MIX_H
#define INFERA_MIX_H

#include <stdint.h>

static inline uint64_t mix_words(uint64_t a, uint64_t b) {
    __uint128_t product = (__uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

#endif
