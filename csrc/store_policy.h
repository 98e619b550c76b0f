/* Who may keep what, and for how long: retention, time to live, quotas. */
#ifndef INFERA_STORE_POLICY_H
#define INFERA_STORE_POLICY_H

#include <stdint.h>

#include "store.h"

/* cffi: begin */
/* How much a record is worth keeping: the low 3 bits of a record's flags. */
enum store_retention {
    STORE_RETAIN_NONE = 0,      /* not to be stored at all: refused */
    STORE_RETAIN_EPHEMERAL = 1, /* first to go */
    STORE_RETAIN_SHORT = 2,     /* the normal one */
    STORE_RETAIN_LONG = 3,   /* goes last, as long as all of these hold no more than their share */
    STORE_RETAIN_PINNED = 4, /* never evicted; refused when all of these would exceed their share */
    STORE_RETENTIONS = 5,
};

enum {
    STORE_LONG_SHARE = 2,      /* the share is the arena divided by this */
    STORE_PINNED_SHARE = 4,    /* likewise */
    STORE_TENANTS_MAX = 1024,  /* two of them reserved: no tenant, and all that found no entry */
    STORE_EXPIRE_STEPS = 4096, /* records with a time to live that one store_expire looks at */
};

typedef struct {
    uint64_t tag;
    uint64_t bytes; /* of its records, those being written included, whole extents */
    uint32_t records;
    uint32_t is_overflow; /* 1: all tenants that found no entry of their own */
} store_tenant_usage;

/* Sets the most that all records of one namespace, and of one tenant, may take; 0: no limit. Who
 * would exceed it gives up its own oldest first. Records without a tenant tag are nobody's. */
void store_set_quotas(store *state, uint64_t namespace_bytes, uint64_t tenant_bytes);

/* Sets the clock by which records expire (seconds of the wall clock), for the store and for
 * clients. What has expired is a miss at once and removed by the store_expire calls that follow. */
void store_set_clock(store *state, uint32_t now_s);

/* Gives present records of a class another retention class: one (`key`), or all (null). Returns how
 * many have it now. For STORE_RETAIN_PINNED those over the share stay as they are and are counted
 * in pinned_refused_total; STORE_RETAIN_NONE changes nothing. */
uint64_t store_set_retention(store *state, uint32_t class_id, const uint8_t *key,
                             uint32_t retention);

/* Tenants that have records, from *cursor (start with 0) on; 0 when the end is reached. */
uint64_t store_tenants(const store *state, uint64_t *cursor, store_tenant_usage *usages,
                       uint64_t max);
/* Bytes of all records of the namespace that a class belongs to, those being written included. */
uint64_t store_namespace_bytes(const store *state, uint32_t class_id);
/* cffi: end */

#endif
