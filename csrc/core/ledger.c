/* SPDX-License-Identifier: BSD-3-Clause */
#include "ledger.h"

#include <math.h>
#include <string.h>

/* Children of heap[p] are heap[4p + 1 .. 4p + 4]: half the levels of a binary heap. Measured faster, by a fifth. */
enum { ARITY = 4 };

/* Positions that are none in the heap. */
enum { ASIDE = -1, FREE = -2 };

typedef struct ledger_entry {
    double price_ns_per_byte;
    int64_t sequence;
    int64_t size_bytes;
    int32_t position;  /* in the heap, or ASIDE or FREE */
    int32_t next_free; /* while FREE; TFG_LEDGER_NONE ends the list */
} ledger_entry;

/* The heap has room for every entry, so that one set aside always finds its way back. */
struct tfg_ledger {
    tfg_allocator allocator;
    ledger_entry *entries;
    int32_t *heap;
    int32_t n_entries, entries_capacity; /* ids given out so far, free ones included */
    int32_t n_queued, heap_capacity;
    int32_t first_free;
    int32_t n_aside;
    int64_t kept_bytes;
    int64_t aside_bytes;
};

/* ---- memory ----------------------------------------------------------------------------------------------------- */

tfg_status tfg_ledger_create(const tfg_allocator *allocator, tfg_ledger **out) {
    *out = allocator->resize(allocator->ctx, NULL, 0, sizeof(tfg_ledger));
    if (*out == NULL) {
        return TFG_ERR_MEMORY;
    }
    memset(*out, 0, sizeof(tfg_ledger));
    (*out)->allocator = *allocator;
    (*out)->first_free = TFG_LEDGER_NONE;
    return TFG_OK;
}

static void free_block(const tfg_allocator *allocator, void *block, size_t size_bytes) {
    if (block != NULL) {
        allocator->resize(allocator->ctx, block, size_bytes, 0);
    }
}

void tfg_ledger_destroy(tfg_ledger *ledger) {
    if (ledger == NULL) {
        return;
    }
    const tfg_allocator allocator = ledger->allocator;
    free_block(&allocator, ledger->entries, (size_t)ledger->entries_capacity * sizeof(ledger_entry));
    free_block(&allocator, ledger->heap, (size_t)ledger->heap_capacity * sizeof(int32_t));
    free_block(&allocator, ledger, sizeof(tfg_ledger));
}

void tfg_ledger_reset(tfg_ledger *ledger) {
    ledger->n_entries = 0;
    ledger->n_queued = 0;
    ledger->first_free = TFG_LEDGER_NONE;
    ledger->n_aside = 0;
    ledger->kept_bytes = 0;
    ledger->aside_bytes = 0;
}

static tfg_status reserve(tfg_ledger *ledger, int64_t n_wanted) {
    void *block = ledger->entries;
    TFG_TRY(tfg_allocator_reserve(&ledger->allocator, &block, &ledger->entries_capacity, n_wanted,
                                  sizeof(ledger_entry)));
    ledger->entries = block;
    block = ledger->heap;
    TFG_TRY(tfg_allocator_reserve(&ledger->allocator, &block, &ledger->heap_capacity, n_wanted, sizeof(int32_t)));
    ledger->heap = block;
    return TFG_OK;
}

/* ---- the queue -------------------------------------------------------------------------------------------------- */

static bool leaves_before(const tfg_ledger *ledger, int32_t left, int32_t right) {
    const ledger_entry *l = &ledger->entries[left];
    const ledger_entry *r = &ledger->entries[right];
    if (l->price_ns_per_byte != r->price_ns_per_byte) {
        return l->price_ns_per_byte < r->price_ns_per_byte;
    }
    if (l->sequence != r->sequence) {
        return l->sequence < r->sequence;
    }
    if (l->size_bytes != r->size_bytes) {
        return l->size_bytes > r->size_bytes;
    }
    return left < right;
}

static int32_t parent_of(int32_t position) {
    return (position - 1) / ARITY;
}

static void put(tfg_ledger *ledger, int32_t position, int32_t entry) {
    ledger->heap[position] = entry;
    ledger->entries[entry].position = position;
}

/* Which child of `position` leaves first, or TFG_LEDGER_NONE: it has none. */
static int32_t first_child(const tfg_ledger *ledger, int32_t position) {
    const int64_t begin = (int64_t)position * ARITY + 1;
    const int64_t end = begin + ARITY < ledger->n_queued ? begin + ARITY : ledger->n_queued;
    if (begin >= end) {
        return TFG_LEDGER_NONE;
    }
    int32_t first = (int32_t)begin;
    for (int32_t child = first + 1; child < end; child++) {
        if (leaves_before(ledger, ledger->heap[child], ledger->heap[first])) {
            first = child;
        }
    }
    return first;
}

/* Puts the entry where it belongs, given that `position` is vacant and all else is in order. */
static void settle(tfg_ledger *ledger, int32_t position, int32_t entry) {
    while (position > 0 && leaves_before(ledger, entry, ledger->heap[parent_of(position)])) {
        put(ledger, position, ledger->heap[parent_of(position)]);
        position = parent_of(position);
    }
    for (int32_t child = first_child(ledger, position);
         child != TFG_LEDGER_NONE && leaves_before(ledger, ledger->heap[child], entry);
         child = first_child(ledger, position)) {
        put(ledger, position, ledger->heap[child]);
        position = child;
    }
    put(ledger, position, entry);
}

static void enter_queue(tfg_ledger *ledger, int32_t entry) {
    settle(ledger, ledger->n_queued++, entry);
}

/* The last of the heap fills the gap. */
static void leave_queue(tfg_ledger *ledger, int32_t entry) {
    const int32_t gap = ledger->entries[entry].position;
    const int32_t last = ledger->heap[--ledger->n_queued];
    if (last != entry) {
        settle(ledger, gap, last);
    }
}

/* ---- entries ---------------------------------------------------------------------------------------------------- */

bool tfg_ledger_holds(const tfg_ledger *ledger, int32_t entry) {
    return entry >= 0 && entry < ledger->n_entries && ledger->entries[entry].position != FREE;
}

static bool is_aside(const tfg_ledger *ledger, int32_t entry) {
    return ledger->entries[entry].position == ASIDE;
}

/* Room for it has been reserved, if none is free. */
static int32_t take_id(tfg_ledger *ledger) {
    const int32_t entry = ledger->first_free;
    if (entry == TFG_LEDGER_NONE) {
        return ledger->n_entries++;
    }
    ledger->first_free = ledger->entries[entry].next_free;
    return entry;
}

tfg_status tfg_ledger_add(tfg_ledger *ledger, int64_t size_bytes, double price_ns_per_byte, int64_t sequence,
                          int32_t *out_entry) {
    *out_entry = TFG_LEDGER_NONE;
    if (size_bytes < 0 || size_bytes > INT64_MAX - ledger->kept_bytes || isnan(price_ns_per_byte)) {
        return TFG_ERR_ARGUMENT;
    }
    if (ledger->first_free == TFG_LEDGER_NONE) {
        TFG_TRY(reserve(ledger, (int64_t)ledger->n_entries + 1));
    }
    const int32_t entry = take_id(ledger);
    ledger->entries[entry] = (ledger_entry){
        .price_ns_per_byte = price_ns_per_byte,
        .sequence = sequence,
        .size_bytes = size_bytes,
        .next_free = TFG_LEDGER_NONE,
    };
    ledger->kept_bytes += size_bytes;
    enter_queue(ledger, entry);
    *out_entry = entry;
    return TFG_OK;
}

void tfg_ledger_set_aside(tfg_ledger *ledger, int32_t entry) {
    if (tfg_ledger_holds(ledger, entry) && !is_aside(ledger, entry)) {
        leave_queue(ledger, entry);
        ledger->entries[entry].position = ASIDE;
        ledger->aside_bytes += ledger->entries[entry].size_bytes;
        ledger->n_aside++;
    }
}

void tfg_ledger_set_back(tfg_ledger *ledger, int32_t entry) {
    if (tfg_ledger_holds(ledger, entry) && is_aside(ledger, entry)) {
        ledger->aside_bytes -= ledger->entries[entry].size_bytes;
        ledger->n_aside--;
        enter_queue(ledger, entry);
    }
}

void tfg_ledger_remove(tfg_ledger *ledger, int32_t entry) {
    if (!tfg_ledger_holds(ledger, entry)) {
        return;
    }
    tfg_ledger_set_aside(ledger, entry);
    ledger_entry *e = &ledger->entries[entry];
    ledger->aside_bytes -= e->size_bytes;
    ledger->n_aside--;
    ledger->kept_bytes -= e->size_bytes;
    e->position = FREE;
    e->next_free = ledger->first_free;
    ledger->first_free = entry;
}

void tfg_ledger_reprice(tfg_ledger *ledger, int32_t entry, double price_ns_per_byte) {
    if (tfg_ledger_holds(ledger, entry)) {
        ledger_entry *e = &ledger->entries[entry];
        e->price_ns_per_byte = isnan(price_ns_per_byte) ? INFINITY : price_ns_per_byte;
        if (e->position != ASIDE) {
            settle(ledger, e->position, entry);
        }
    }
}

int32_t tfg_ledger_first(const tfg_ledger *ledger) {
    return ledger->n_queued == 0 ? TFG_LEDGER_NONE : ledger->heap[0];
}

int64_t tfg_ledger_size_bytes(const tfg_ledger *ledger, int32_t entry) {
    return tfg_ledger_holds(ledger, entry) ? ledger->entries[entry].size_bytes : 0;
}

void tfg_ledger_count(const tfg_ledger *ledger, tfg_ledger_totals *out) {
    *out = (tfg_ledger_totals){
        .kept_bytes = ledger->kept_bytes,
        .aside_bytes = ledger->aside_bytes,
        .n_kept = ledger->n_queued + ledger->n_aside,
        .n_aside = ledger->n_aside,
    };
}

/* ---- the laws --------------------------------------------------------------------------------------------------- */

/* The heap and the positions name each other, so no entry is queued twice; and each parent leaves before its child. */
static tfg_status check_queue(const tfg_ledger *ledger, tfg_error *err) {
    if (ledger->n_queued < 0 || ledger->n_queued > ledger->n_entries || ledger->n_entries > ledger->heap_capacity) {
        return tfg_fail(TFG_ERR_BROKEN, err, "%d queued, %d entries, heap room for %d", ledger->n_queued,
                        ledger->n_entries, ledger->heap_capacity);
    }
    for (int32_t position = 0; position < ledger->n_queued; position++) {
        const int32_t entry = ledger->heap[position];
        if (!tfg_ledger_holds(ledger, entry) || ledger->entries[entry].position != position) {
            return tfg_fail(TFG_ERR_BROKEN, err, "heap position %d names entry %d, which is elsewhere", position,
                            entry);
        }
        if (position > 0 && !leaves_before(ledger, ledger->heap[parent_of(position)], entry)) {
            return tfg_fail(TFG_ERR_BROKEN, err, "entry %d leaves before entry %d, its parent at heap position %d",
                            entry, ledger->heap[parent_of(position)], parent_of(position));
        }
    }
    return TFG_OK;
}

/* Visits at most n_free + 1 entries, so a ring ends too. */
static tfg_status check_free_list(const tfg_ledger *ledger, int32_t n_free, tfg_error *err) {
    int32_t n_listed = 0;
    int32_t entry = ledger->first_free;
    for (; entry != TFG_LEDGER_NONE && n_listed <= n_free; n_listed++) {
        if (entry < 0 || entry >= ledger->n_entries || ledger->entries[entry].position != FREE) {
            return tfg_fail(TFG_ERR_BROKEN, err, "entry %d of %d is on the free list and is not free", entry,
                            ledger->n_entries);
        }
        entry = ledger->entries[entry].next_free;
    }
    if (n_listed != n_free) {
        return tfg_fail(TFG_ERR_BROKEN, err, "%d entries are free, the free list has %s", n_free,
                        n_listed < n_free ? "fewer" : "more");
    }
    return TFG_OK;
}

static tfg_status check_entry(const tfg_ledger *ledger, int32_t entry, tfg_error *err) {
    const ledger_entry *e = &ledger->entries[entry];
    if (e->position < FREE || e->position >= ledger->n_queued ||
        (e->position >= 0 && ledger->heap[e->position] != entry)) {
        return tfg_fail(TFG_ERR_BROKEN, err, "entry %d: not at its heap position %d of %d", entry, e->position,
                        ledger->n_queued);
    }
    if (e->position != FREE && (e->size_bytes < 0 || isnan(e->price_ns_per_byte))) {
        return tfg_fail(TFG_ERR_BROKEN, err, "entry %d: %lld bytes at %f ns per byte", entry, (long long)e->size_bytes,
                        e->price_ns_per_byte);
    }
    return TFG_OK;
}

tfg_status tfg_ledger_check(const tfg_ledger *ledger, tfg_error *err) {
    int64_t kept_bytes = 0;
    int64_t aside_bytes = 0;
    int32_t n_free = 0;
    int32_t n_aside = 0;
    TFG_TRY(check_queue(ledger, err));
    for (int32_t entry = 0; entry < ledger->n_entries; entry++) {
        TFG_TRY(check_entry(ledger, entry, err));
        const ledger_entry *e = &ledger->entries[entry];
        n_free += e->position == FREE;
        n_aside += e->position == ASIDE;
        kept_bytes += e->position == FREE ? 0 : e->size_bytes;
        aside_bytes += e->position == ASIDE ? e->size_bytes : 0;
    }
    TFG_TRY(check_free_list(ledger, n_free, err));
    if (kept_bytes != ledger->kept_bytes || aside_bytes != ledger->aside_bytes || n_aside != ledger->n_aside) {
        return tfg_fail(TFG_ERR_BROKEN, err, "counted %lld bytes, %lld and %d aside; entries have %lld, %lld and %d",
                        (long long)ledger->kept_bytes, (long long)ledger->aside_bytes, ledger->n_aside,
                        (long long)kept_bytes, (long long)aside_bytes, n_aside);
    }
    return TFG_OK;
}
