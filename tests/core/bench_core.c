/* SPDX-License-Identifier: BSD-3-Clause
 *
 * bench_core: what the core's decisions take, in figures to print. Built with -O3 and no sanitizer: make -C tests/core bench
 */
#define _POSIX_C_SOURCE 200809L
#include <time.h>

#include "cut.h"
#include "ledger.h"
#include "random_tape.h"

static void *heap_resize(void *ctx, void *block, size_t old_bytes, size_t new_bytes) {
    (void)ctx, (void)old_bytes;
    if (new_bytes == 0) {
        free(block);
        return NULL;
    }
    return realloc(block, new_bytes);
}

static const tfg_allocator heap = {heap_resize, NULL};
static random_source source = {1};

static double now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e9 * (double)now.tv_sec + (double)now.tv_nsec;
}

/* ---- prices ------------------------------------------------------------------------------------------------------- */

enum { MAX_OPS = 600, MAX_REFS = 4 * MAX_OPS };

/* A region of operators that read one or two recent values; two thirds of what they make is saved. */
static double price_random_ns(tfg_cut *cut, int32_t n_ops) {
    static tfg_cut_op ops[MAX_OPS];
    static tfg_cut_node nodes[MAX_OPS + 1];
    static int32_t refs[MAX_REFS];
    static double prices[MAX_OPS + 1];
    int32_t n_refs = 0;
    nodes[0] = (tfg_cut_node){4096, false, true};
    for (int32_t o = 0; o < n_ops; o++) {
        const int32_t n_reads = 1 + random_below(&source, 2), first_ref = n_refs;
        for (int32_t i = 0; i < n_reads; i++) {
            const int32_t back = random_below(&source, 6);
            refs[n_refs++] = o > back ? o - back : o;
        }
        refs[n_refs++] = o + 1;
        nodes[o + 1] = (tfg_cut_node){1 + random_below(&source, 1 << 20), random_below(&source, 3) != 0, false};
        ops[o] = (tfg_cut_op){1 + random_below(&source, 1000000), first_ref, n_reads, 1};
    }
    const tfg_cut_graph graph = {ops, nodes, refs, n_ops, n_ops + 1, n_refs};
    const double before_ns = now_ns();
    CHECK_EQ(tfg_cut_prices(cut, &graph, prices, NULL), TFG_OK);
    return now_ns() - before_ns;
}

static void bench_prices(int32_t n_ops) {
    enum { N_ROUNDS = 200 };
    tfg_cut *cut;
    double all_ns = 0, most_ns = 0;
    CHECK_EQ(tfg_cut_create(&heap, &cut), TFG_OK);
    for (int32_t i = 0; i < N_ROUNDS; i++) {
        const double ns = price_random_ns(cut, n_ops);
        all_ns += ns;
        most_ns = ns > most_ns ? ns : most_ns;
    }
    tfg_cut_destroy(cut);
    printf("cut     %6d operators   %8.3f ms a structure, at most %.3f ms\n", n_ops, all_ns / N_ROUNDS / 1e6, most_ns / 1e6);
}

/* ---- evictions ---------------------------------------------------------------------------------------------------- */

static void bench_evictions(int32_t n_entries) {
    tfg_ledger *ledger;
    int32_t entry;
    CHECK_EQ(tfg_ledger_create(&heap, &ledger), TFG_OK);
    const double begun_ns = now_ns();
    for (int32_t i = 0; i < n_entries; i++) {
        CHECK_EQ(tfg_ledger_add(ledger, 4096, (double)random_below(&source, 1 << 30), i, &entry), TFG_OK);
    }
    const double filled_ns = now_ns();
    while ((entry = tfg_ledger_first(ledger)) != TFG_LEDGER_NONE) {
        tfg_ledger_remove(ledger, entry);
    }
    const double drained_ns = now_ns();
    tfg_ledger_destroy(ledger);
    printf("ledger  %6d entries     %8.0f ns to enter, %.0f ns to evict\n", n_entries, (filled_ns - begun_ns) / n_entries,
           (drained_ns - filled_ns) / n_entries);
}

int main(void) {
    bench_prices(10);
    bench_prices(100);
    bench_prices(600);
    bench_evictions(1000);
    bench_evictions(100000);
    return check_finish();
}
