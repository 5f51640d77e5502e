/* SPDX-License-Identifier: BSD-3-Clause
 *
 * fuzz_ledger: bytes as calls on a ledger, next to a plain list of what it should hold; after each call the laws are
 * proven and both must agree. Property: no input breaks a law, leaks, or makes a failed call leave a trace. Each call
 * is one byte (kind, modulo N_KINDS: more than half add, or nothing gets long), then its arguments, a byte each; past
 * the end all bytes are 0.
 *
 * Without a fuzzer it links with fuzz_main, as fuzz_tape does; bytes are bytes, so any corpus serves.
 */
#include <math.h>
#include <stdio.h>

#include "failing_allocator.h"
#include "fuzz_input.h"
#include "ledger.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size_bytes);

enum call { ADD, REMOVE, TAKE_FIRST, SET_ASIDE, SET_BACK, REPRICE, RESET, FAIL_SOON, N_CALLS };
enum { N_KINDS = 2 * N_CALLS, MAX_ENTRIES = 512 };

typedef struct row {
    double price_ns_per_byte;
    int64_t sequence;
    int64_t size_bytes;
    bool is_held;
    bool is_aside;
} row;

typedef struct machine {
    fuzz_input input;
    failing_allocator heap;
    tfg_ledger *ledger;
    int32_t n_rows; /* ids seen so far */
    row rows[MAX_ENTRIES];
} machine;

static uint8_t byte(machine *m) {
    return fuzz_byte(&m->input);
}

/* Mostly an id that was given out once. */
static int32_t entry(machine *m) {
    return fuzz_index_below(&m->input, m->n_rows);
}

/* Few different ones, so that ties are the normal case. */
static double price(machine *m) {
    static const double prices[] = {0, 1, 1, 2, 3, 0.5, -1, -0.0, INFINITY, -INFINITY, NAN, 1e300};
    return prices[byte(m) % (sizeof prices / sizeof prices[0])];
}

static bool is_row(const machine *m, int32_t id) {
    return id >= 0 && id < m->n_rows && m->rows[id].is_held;
}

static void add(machine *m) {
    const row r = {
        .price_ns_per_byte = price(m),
        .sequence = byte(m) % 4,
        .size_bytes = (int64_t)byte(m) % 8 - 1,
        .is_held = true,
    };
    int32_t id;
    const tfg_status status = tfg_ledger_add(m->ledger, r.size_bytes, r.price_ns_per_byte, r.sequence, &id);
    if (r.size_bytes < 0 || isnan(r.price_ns_per_byte)) {
        REQUIRE(status == TFG_ERR_ARGUMENT);
    }
    REQUIRE(status == TFG_OK || status == TFG_ERR_ARGUMENT || (status == TFG_ERR_MEMORY && m->heap.fail_at >= 0));
    REQUIRE(status == TFG_OK ? id >= 0 && id <= m->n_rows && !is_row(m, id) : id == TFG_LEDGER_NONE);
    if (status == TFG_OK) {
        m->n_rows += id == m->n_rows;
        m->rows[id] = r;
    }
}

/* The order of ledger.h: does `left` leave first? */
static bool leaves_before(const machine *m, int32_t left, int32_t right) {
    const row *l = &m->rows[left];
    const row *r = &m->rows[right];
    const bool is_same_price = l->price_ns_per_byte == r->price_ns_per_byte;
    const bool is_same_sequence = is_same_price && l->sequence == r->sequence;
    const bool is_same_size = is_same_sequence && l->size_bytes == r->size_bytes;
    return l->price_ns_per_byte < r->price_ns_per_byte || (is_same_price && l->sequence < r->sequence) ||
           (is_same_sequence && l->size_bytes > r->size_bytes) || (is_same_size && left < right);
}

static void compare(const machine *m) {
    tfg_ledger_totals wanted = {0};
    int32_t first = TFG_LEDGER_NONE;
    for (int32_t id = 0; id < m->n_rows; id++) {
        const row *r = &m->rows[id];
        REQUIRE(tfg_ledger_holds(m->ledger, id) == r->is_held);
        REQUIRE(tfg_ledger_size_bytes(m->ledger, id) == (r->is_held ? r->size_bytes : 0));
        wanted.kept_bytes += r->is_held ? r->size_bytes : 0;
        wanted.aside_bytes += r->is_held && r->is_aside ? r->size_bytes : 0;
        wanted.n_kept += r->is_held;
        wanted.n_aside += r->is_held && r->is_aside;
        if (r->is_held && !r->is_aside && (first == TFG_LEDGER_NONE || leaves_before(m, id, first))) {
            first = id;
        }
    }
    tfg_ledger_totals totals;
    tfg_ledger_count(m->ledger, &totals);
    REQUIRE(totals.kept_bytes == wanted.kept_bytes && totals.aside_bytes == wanted.aside_bytes);
    REQUIRE(totals.n_kept == wanted.n_kept && totals.n_aside == wanted.n_aside);
    REQUIRE(tfg_ledger_first(m->ledger) == first);
}

static void set_aside(machine *m, int32_t id, bool is_aside) {
    (is_aside ? tfg_ledger_set_aside : tfg_ledger_set_back)(m->ledger, id);
    if (is_row(m, id)) {
        m->rows[id].is_aside = is_aside;
    }
}

static void remove_entry(machine *m, int32_t id) {
    tfg_ledger_remove(m->ledger, id);
    if (is_row(m, id)) {
        m->rows[id].is_held = false;
    }
}

static void reprice(machine *m, int32_t id) {
    const double given = price(m);
    tfg_ledger_reprice(m->ledger, id, given);
    if (is_row(m, id)) {
        m->rows[id].price_ns_per_byte = isnan(given) ? INFINITY : given;
    }
}

static void one_call(machine *m) {
    const int64_t n_requests = m->heap.n_requests;
    const int32_t kind = byte(m) % N_KINDS;
    const enum call call = kind < N_CALLS ? (enum call)kind : ADD;
    switch (call) {
    case ADD:
        if (m->n_rows < MAX_ENTRIES) {
            add(m);
        }
        break;
    case REMOVE:
        remove_entry(m, entry(m));
        break;
    case TAKE_FIRST:
        remove_entry(m, tfg_ledger_first(m->ledger));
        break;
    case SET_ASIDE:
        set_aside(m, entry(m), true);
        break;
    case SET_BACK:
        set_aside(m, entry(m), false);
        break;
    case REPRICE:
        reprice(m, entry(m));
        break;
    case RESET:
        if (byte(m) % 16 == 0) {
            tfg_ledger_reset(m->ledger);
            m->n_rows = 0;
        }
        break;
    case FAIL_SOON:
        m->heap.fail_at = m->heap.n_requests + byte(m) % 3;
        break;
    case N_CALLS:
        break;
    }
    REQUIRE(call == ADD || m->heap.n_requests == n_requests);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size_bytes) {
    machine m = {.input = fuzz_input_init(bytes, size_bytes)};
    const tfg_allocator allocator = failing_allocator_init(&m.heap);
    REQUIRE(tfg_ledger_create(&allocator, &m.ledger) == TFG_OK);
    while (m.input.next < m.input.end) {
        one_call(&m);
        tfg_error err = {{0}};
        fuzz_require_laws(tfg_ledger_check(m.ledger, &err), &err);
        compare(&m);
    }
    tfg_ledger_destroy(m.ledger);
    REQUIRE(m.heap.n_live_blocks == 0 && m.heap.n_wrong_sizes == 0);
    return 0;
}
