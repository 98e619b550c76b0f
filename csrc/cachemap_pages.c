/* Pages below the grain (SGLang's default is one token), gathered into grains.
 *
 * Every page is remembered with its tokens and its parent within the grain.  The page that
 * completes a grain enters the grain's key, as long as every page of the grain is held.  Pages may
 * leave in any order: a page that goes takes out every grain it is part of, and stays, not held,
 * only as long as other pages follow it.  A grain that branches in the middle shares its first
 * pages.
 *
 * Costs about 100 bytes a page; this memory is the writer's own.  Of the lower tiers only RAM has
 * pages: nobody writes single tokens to a disk.
 */
#include <stdlib.h>
#include <string.h>

#include "cachemap_engine.h"

#define FIRST_ROOM   256
#define HBM_PAGE     5u /* what an alias's tier says when it leads to a page */
#define RAM_PAGE     6u
#define COUNT_MAX    UINT16_MAX
#define NO_PAGE_TIER 0u

static uint32_t page_tier(uint32_t tier) {
    return tier == CACHEMAP_HBM ? HBM_PAGE : tier == CACHEMAP_RAM ? RAM_PAGE : NO_PAGE_TIER;
}

static uint32_t page_place(const cachemap_holder *holder, uint32_t tier) {
    return PLACE(engine_slot(holder), page_tier(tier));
}

static uint32_t find_page(const cachemap_engine *engine, const cachemap_holder *holder,
                          uint32_t tier, uint64_t hash) {
    const cachemap_alias *alias = cachemap_alias_find(engine->map, hash, page_place(holder, tier));
    return alias ? alias->node : 0;
}

static uint32_t take_page(cachemap_engine *engine) {
    uint32_t page = engine->page_free;
    if (page) {
        engine->page_free = engine->pages[page].next;
        return page;
    }
    if (engine->pages_fresh >= engine->pages_room) {
        uint64_t room = engine->pages_room ? 2ull * engine->pages_room : FIRST_ROOM;
        if (room > engine->map->entries_max) room = engine->map->entries_max;
        if (room <= engine->pages_fresh) return 0;
        engine_page *grown = realloc(engine->pages, room * sizeof *grown);
        if (!grown) return 0;
        engine->pages = grown;
        engine->pages_room = (uint32_t)room;
    }
    return engine->pages_fresh++;
}

static void link_page(cachemap_engine *engine, uint32_t page, uint32_t parent) {
    engine_page *made = &engine->pages[page];
    made->parent = parent;
    made->before = 0;
    made->next = parent ? engine->pages[parent].child : 0;
    if (made->next) engine->pages[made->next].before = page;
    if (parent) engine->pages[parent].child = page;
}

/* Frees a page that nothing follows, and then what only it kept. */
static void free_page(cachemap_engine *engine, cachemap_holder *holder, uint32_t page) {
    while (page && !engine->pages[page].count && !engine->pages[page].child) {
        engine_page *gone = &engine->pages[page];
        uint32_t parent = gone->parent;
        if (gone->next) engine->pages[gone->next].before = gone->before;
        if (gone->before)
            engine->pages[gone->before].next = gone->next;
        else if (parent)
            engine->pages[parent].child = gone->next;
        cachemap_alias *alias =
            cachemap_alias_find(engine->map, gone->hash, page_place(holder, gone->tier));
        if (alias) cachemap_alias_erase(engine->map, alias);
        engine->aliases--;
        gone->next = engine->page_free;
        engine->page_free = page;
        page = parent;
    }
}

/* A page that is held; one that is only kept for what follows it does not count. */
static uint32_t find_held(const cachemap_engine *engine, const cachemap_holder *holder,
                          uint32_t tier, uint64_t hash) {
    uint32_t page = find_page(engine, holder, tier, hash);
    return page && engine->pages[page].count ? page : 0;
}

/* Whether every page of the grain up to this one is held. */
static int is_whole(const cachemap_engine *engine, uint32_t page) {
    while (page && engine->pages[page].count) page = engine->pages[page].parent;
    return page == 0;
}

static void enter_grain(cachemap_engine *engine, cachemap_holder *holder, engine_page *page) {
    uint64_t key[2];
    if (page->filled != GRAIN_TOKENS || page->node) return;
    cachemap_load_key(page->key, key);
    if (cachemap_enter(engine->map, holder, page->tier, key, cachemap_hash(engine->map->seed, key),
                       1, &page->node)) {
        engine_note(engine, CACHEMAP_STORED, 1);
        if (page->tier == CACHEMAP_HBM && cachemap_unpredict(engine->map, holder, page->node))
            engine_note(engine, CACHEMAP_PREDICTIONS_CONFIRMED, 1);
        return;
    }
    page->node = 0;
    engine_note(engine, CACHEMAP_REFUSED_FULL, 1);
}

static void leave_grain(cachemap_engine *engine, cachemap_holder *holder, engine_page *page) {
    if (!page->node) return;
    if (page->tier == CACHEMAP_HBM) cachemap_unpredict(engine->map, holder, page->node);
    cachemap_leave(engine->map, holder, page->tier, page->node, 1);
    page->node = 0;
    engine_note(engine, CACHEMAP_REMOVED, 1);
}

/* Visits a page and all that follow it in its grain, without recursion; `enters` decides what
 * happens to complete grains. A page that is not held hides what follows it from entering. */
static void visit(cachemap_engine *engine, cachemap_holder *holder, uint32_t top, int enters) {
    uint32_t page = top;
    while (1) {
        engine_page *at = &engine->pages[page];
        if (enters && at->count)
            enter_grain(engine, holder, at);
        else if (!enters)
            leave_grain(engine, holder, at);
        if (at->child && (!enters || at->count)) {
            page = at->child;
            continue;
        }
        while (page != top && !engine->pages[page].next) page = engine->pages[page].parent;
        if (page == top) return;
        page = engine->pages[page].next;
    }
}

/* Fills a new page and gives it its key; `parent` 0 when it begins a grain, after `before`. */
static void fill_page(cachemap_engine *engine, uint32_t page, uint32_t parent,
                      const uint8_t before[KEY_BYTES], const uint32_t *tokens, uint32_t size) {
    engine_page *made = &engine->pages[page];
    memcpy(made->key, before, KEY_BYTES);
    memcpy(made->tokens, tokens, size * sizeof *tokens);
    made->filled = (uint8_t)(size + (parent ? engine->pages[parent].filled : 0));
    if (made->filled != GRAIN_TOKENS) return;
    uint32_t whole[GRAIN_TOKENS], at = GRAIN_TOKENS;
    for (uint32_t from = page; from && at >= size; from = engine->pages[from].parent) {
        at -= size;
        memcpy(whole + at, engine->pages[from].tokens, size * sizeof *tokens);
    }
    infera_key_chain(before, whole, GRAIN_TOKENS, made->key);
}

static uint32_t add_page(cachemap_engine *engine, cachemap_holder *holder, uint32_t tier,
                         uint64_t hash, uint32_t parent, const uint8_t before[KEY_BYTES],
                         const uint32_t *tokens, uint32_t size) {
    uint32_t page = take_page(engine);
    cachemap_alias *alias =
        page ? cachemap_alias_add(engine->map, hash, page_place(holder, tier)) : NULL;
    if (!alias) {
        if (page) {
            engine->pages[page].next = engine->page_free;
            engine->page_free = page;
        }
        engine_note(engine, CACHEMAP_REFUSED_FULL, 1);
        return 0;
    }
    alias->node = page;
    holder->has_pages = 1;
    engine->aliases++;
    engine_page *made = &engine->pages[page];
    memset(made, 0, sizeof *made);
    made->hash = hash;
    made->count = 1;
    made->tier = (uint8_t)tier;
    link_page(engine, page, parent);
    fill_page(engine, page, parent, before, tokens, size);
    return page;
}

/* Whether a known page is the one that is told of now. */
static int is_same(const cachemap_engine *engine, uint32_t page, uint32_t parent,
                   const uint8_t before[KEY_BYTES], const uint32_t *tokens, uint32_t size) {
    const engine_page *known = &engine->pages[page];
    uint32_t filled = size + (parent ? engine->pages[parent].filled : 0);
    if (known->filled != filled || known->parent != parent ||
        memcmp(known->tokens, tokens, size * sizeof *tokens))
        return 0;
    if (parent) return 1;
    return memcmp(known->key, before, KEY_BYTES) == 0;
}

static void drop_page(cachemap_engine *engine, cachemap_holder *holder, uint32_t page) {
    visit(engine, holder, page, 0);
    engine->pages[page].count = 0;
    free_page(engine, holder, page);
}

/* Enters one page; returns it, or 0 when it was refused. */
static uint32_t store_page(cachemap_engine *engine, cachemap_holder *holder, uint32_t tier,
                           uint64_t hash, uint32_t parent, const uint8_t before[KEY_BYTES],
                           const uint32_t *tokens, uint32_t size) {
    uint32_t page = find_page(engine, holder, tier, hash);
    if (page && page == parent) return 0; /* nothing follows itself */
    if (page && !is_same(engine, page, parent, before, tokens, size)) {
        /* One name for two pages: what hangs on the old one can no longer be told apart. */
        engine_note(engine, CACHEMAP_ALIAS_CHANGED, 1);
        drop_page(engine, holder, page);
        if (find_page(engine, holder, tier, hash)) return 0;
        page = 0;
    }
    if (!page) {
        page = add_page(engine, holder, tier, hash, parent, before, tokens, size);
        if (!page) return 0;
    } else if (engine->pages[page].count < COUNT_MAX) {
        engine->pages[page].count++;
    }
    if (is_whole(engine, page)) visit(engine, holder, page, 1);
    return page;
}

void engine_pages_stored(cachemap_engine *engine, cachemap_holder *holder, uint32_t tier,
                         const engine_event *event, const uint8_t *root) {
    uint32_t size = (uint32_t)event->block_size_tokens, parent = 0;
    uint8_t begin[KEY_BYTES];
    if (page_tier(tier) == NO_PAGE_TIER) {
        engine_note(engine, CACHEMAP_OTHER_MEDIUM, event->hash_count);
        return;
    }
    if (event->has_parent) {
        parent = find_held(engine, holder, tier, event->parent);
        uint32_t above = parent ? 0 : find_held(engine, holder, CACHEMAP_HBM, event->parent);
        if (above && engine->pages[above].filled == GRAIN_TOKENS) {
            root =
                memcpy(begin, engine->pages[above].key, KEY_BYTES); /* its upper part is in HBM */
        } else if (!parent) {
            engine_note(engine, CACHEMAP_UNKNOWN_PARENT, event->hash_count);
            return;
        }
    }
    uint64_t known = 0;
    for (; known < event->hash_count; known++) {
        const uint8_t *before = parent ? engine->pages[parent].key : root;
        uint8_t kept[KEY_BYTES];
        memcpy(kept, before, KEY_BYTES);
        /* A complete grain's last page gives its key; the next page begins a new grain. */
        uint32_t inside = parent && engine->pages[parent].filled < GRAIN_TOKENS ? parent : 0;
        if (inside && engine->pages[inside].filled % size) break; /* sizes that do not fit */
        parent = store_page(engine, holder, tier, engine->hashes[known], inside, kept,
                            engine->tokens + known * size, size);
        if (!parent) break;
    }
    engine_note(engine, CACHEMAP_PAGES, known);
    engine_note(engine, CACHEMAP_UNKNOWN_PARENT, event->hash_count - known);
}

int engine_page_removed(cachemap_engine *engine, cachemap_holder *holder, uint32_t tier,
                        uint64_t hash) {
    if (page_tier(tier) == NO_PAGE_TIER || !engine->pages) return 0;
    uint32_t page = find_page(engine, holder, tier, hash);
    if (!page || !engine->pages[page].count) return 0;
    if (--engine->pages[page].count) return 1;
    visit(engine, holder, page, 0);
    free_page(engine, holder, page);
    return 1;
}

void engine_pages_reset(cachemap_engine *engine) {
    free(engine->pages);
    engine->pages = NULL;
    engine->pages_room = engine->page_free = 0;
    engine->pages_fresh = 1;
}
