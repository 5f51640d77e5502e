/* SPDX-License-Identifier: BSD-3-Clause */
#include <math.h>
#include <string.h>

#include "cut.h"
#include "failing_allocator.h"
#include "random_tape.h"

enum { MAX_OPS = 512, MAX_NODES = 2048, MAX_REFS = 4096, MOST_BRUTE_OPS = 11, N_RANDOM = 4000 };

static random_source source;

/* A graph under construction, and its prices. */
typedef struct region {
    tfg_cut_op ops[MAX_OPS];
    tfg_cut_node nodes[MAX_NODES];
    int32_t refs[MAX_REFS];
    double prices[MAX_NODES];
    int32_t n_ops, n_nodes, n_refs;
} region;

static int32_t add_node(region *r, int64_t size_bytes, bool is_wanted, bool is_root) {
    r->nodes[r->n_nodes] = (tfg_cut_node){size_bytes, is_wanted, is_root};
    return r->n_nodes++;
}

static void begin_op(region *r, int64_t cost_ns) { r->ops[r->n_ops++] = (tfg_cut_op){cost_ns, r->n_refs, 0, 0}; }

static void read_node(region *r, int32_t node) {
    r->refs[r->n_refs++] = node;
    r->ops[r->n_ops - 1].n_reads++;
}

static void write_node(region *r, int32_t node) {
    r->refs[r->n_refs++] = node;
    r->ops[r->n_ops - 1].n_writes++;
}

/* One operator from one node to a new one. */
static int32_t step(region *r, int64_t cost_ns, int32_t from, int64_t size_bytes, bool is_wanted) {
    const int32_t made = add_node(r, size_bytes, is_wanted, false);
    begin_op(r, cost_ns);
    read_node(r, from);
    write_node(r, made);
    return made;
}

static tfg_cut_graph graph_of(const region *r) {
    return (tfg_cut_graph){r->ops, r->nodes, r->refs, r->n_ops, r->n_nodes, r->n_refs};
}

static tfg_status price(region *r, const tfg_allocator *allocator, tfg_error *err) {
    tfg_cut *cut;
    TFG_TRY(tfg_cut_create(allocator, &cut));
    const tfg_cut_graph graph = graph_of(r);
    const tfg_status status = tfg_cut_prices(cut, &graph, r->prices, err);
    tfg_cut_destroy(cut);
    return status;
}

static void price_well(region *r) {
    failing_allocator heap;
    const tfg_allocator allocator = failing_allocator_init(&heap);
    tfg_error err = {{0}};
    CHECK_EQ(price(r, &allocator, &err), TFG_OK);
    CHECK_EQ(err.text[0], '\0');
    CHECK_EQ(heap.n_live_blocks, 0);
    CHECK_EQ(heap.n_wrong_sizes, 0);
}

static void check_near(double got, double wanted) {
    CHECK(fabs(got - wanted) <= 1e-9 * wanted || (isinf(got) && isinf(wanted)));
}

/* ---- by hand ----------------------------------------------------------------------------------------------------- */

static void test_cut_draws_its_picture(void) {
    static region r;
    memset(&r, 0, sizeof r);
    const int32_t x = add_node(&r, 1000, false, true);
    const int32_t h = step(&r, 10, x, 500, false);
    const int32_t a = step(&r, 1, h, 100, true), b = step(&r, 1, h, 100, true);
    price_well(&r);
    check_near(r.prices[a], 0.06);
    check_near(r.prices[b], 0.06);
    check_near(r.prices[h], 0.06);
    CHECK(isinf(r.prices[x]));
}

static void test_cut_lets_a_cheap_end_of_a_chain_go_first(void) {
    static region r;
    memset(&r, 0, sizeof r);
    const int32_t x = add_node(&r, 0, false, true);
    const int32_t dear = step(&r, 1000, x, 100, true), cheap = step(&r, 1, dear, 100, true);
    price_well(&r);
    check_near(r.prices[dear], 10);
    check_near(r.prices[cheap], 0.01);
}

static void test_cut_gives_all_outputs_of_an_operator_one_price(void) {
    static region r;
    memset(&r, 0, sizeof r);
    const int32_t x = add_node(&r, 0, false, true), a = add_node(&r, 30, true, false), b = add_node(&r, 70, true, false);
    begin_op(&r, 50);
    read_node(&r, x);
    write_node(&r, a);
    write_node(&r, b);
    price_well(&r);
    check_near(r.prices[a], 0.5);
    check_near(r.prices[b], 0.5);
}

static void test_cut_never_lets_go_of_what_is_simply_there(void) {
    static region r;
    memset(&r, 0, sizeof r);
    const int32_t x = add_node(&r, 10, true, true), orphan = add_node(&r, 10, true, false);
    const int32_t pinned = add_node(&r, 10, true, true);
    begin_op(&r, 5);
    read_node(&r, x);
    read_node(&r, orphan);
    write_node(&r, pinned);
    const int32_t after = step(&r, 5, pinned, 10, true), empty = step(&r, 5, x, 0, true);
    price_well(&r);
    CHECK(isinf(r.prices[x]) && isinf(r.prices[orphan]) && isinf(r.prices[pinned]) && isinf(r.prices[empty]));
    check_near(r.prices[after], 0.5);
}

static void test_cut_of_nothing(void) {
    static region r;
    memset(&r, 0, sizeof r);
    price_well(&r);
}

/* ---- against every choice there is -------------------------------------------------------------------------------- */

static region random_region(int32_t n_ops) {
    region r = {.n_ops = 0};
    const bool has_equals = random_below(&source, 3) == 0; /* ties */
    for (int32_t i = random_below(&source, 3); i >= 0; i--) {
        add_node(&r, random_below(&source, 50), random_below(&source, 2) == 0, random_below(&source, 4) != 0);
    }
    for (int32_t o = 0; o < n_ops; o++) {
        const int32_t n_there = r.n_nodes;
        begin_op(&r, has_equals ? 7 * random_below(&source, 2) : random_below(&source, 1000));
        for (int32_t i = random_below(&source, 3); i >= 0; i--) {
            read_node(&r, random_below(&source, 2) == 0 ? n_there - 1 : random_below(&source, n_there));
        }
        for (int32_t i = random_below(&source, 4) == 0; i >= 0; i--) {
            const int64_t size_bytes = has_equals ? 10 : random_below(&source, 100);
            write_node(&r, add_node(&r, size_bytes, random_below(&source, 3) != 0, random_below(&source, 8) == 0));
        }
    }
    return r;
}

static bool is_there(const region *r, int32_t node, const int32_t *makers) {
    return r->nodes[node].is_root || makers[node] < 0;
}

/* May these operators replay, and no others? What each reads must be kept, a root, or replayed. */
static bool is_closed(const region *r, uint32_t replayed, const int32_t *makers) {
    for (int32_t o = 0; o < r->n_ops; o++) {
        const tfg_cut_op *op = &r->ops[o];
        for (int32_t i = 0; i < op->n_reads && (replayed >> o & 1) != 0; i++) {
            const int32_t node = r->refs[op->first_ref + i];
            if (!is_there(r, node, makers) && !r->nodes[node].is_wanted && (replayed >> makers[node] & 1) == 0) {
                return false;
            }
        }
    }
    return true;
}

/* price * bytes kept + ns replayed. A pinned operator (all it makes are roots) gains nothing, so no best choice has it. */
static double worth(const region *r, uint32_t replayed, double price_ns_per_byte, const int32_t *makers) {
    double cost = 0;
    for (int32_t o = 0; o < r->n_ops; o++) {
        cost += (replayed >> o & 1) != 0 ? (double)r->ops[o].cost_ns : 0;
    }
    for (int32_t n = 0; n < r->n_nodes; n++) {
        const bool is_free = is_there(r, n, makers) || !r->nodes[n].is_wanted || (replayed >> makers[n] & 1) != 0;
        cost += is_free ? 0 : price_ns_per_byte * (double)r->nodes[n].size_bytes;
    }
    return cost;
}

/* What replays when everything priced at or below p leaves: its makers, and what those read and nobody kept. */
static uint32_t replayed_at(const region *r, double p, const int32_t *makers) {
    uint32_t replayed = 0;
    for (int32_t n = 0; n < r->n_nodes; n++) {
        if (r->nodes[n].is_wanted && !is_there(r, n, makers) && r->prices[n] <= p) {
            replayed |= 1U << makers[n];
        }
    }
    for (int32_t o = r->n_ops - 1; o >= 0; o--) {
        const tfg_cut_op *op = &r->ops[o];
        for (int32_t i = 0; i < op->n_reads && (replayed >> o & 1) != 0; i++) {
            const int32_t node = r->refs[op->first_ref + i];
            if (!is_there(r, node, makers) && !r->nodes[node].is_wanted) {
                replayed |= 1U << makers[node];
            }
        }
    }
    return replayed;
}

static void check_best_at(const region *r, double p, const int32_t *makers) {
    double best = INFINITY;
    for (uint32_t replayed = 0; replayed < 1U << r->n_ops; replayed++) {
        if (is_closed(r, replayed, makers)) {
            const double cost = worth(r, replayed, p, makers);
            best = cost < best ? cost : best;
        }
    }
    const double got = worth(r, replayed_at(r, p, makers), p, makers);
    CHECK(got <= best + 1e-9 * (1 + best));
}

static void check_all_prices(const region *r) {
    int32_t makers[MAX_NODES];
    memset(makers, 0xff, sizeof makers);
    for (int32_t o = 0; o < r->n_ops; o++) {
        for (int32_t i = 0; i < r->ops[o].n_writes; i++) {
            makers[r->refs[r->ops[o].first_ref + r->ops[o].n_reads + i]] = o;
        }
    }
    check_best_at(r, 0, makers);
    for (int32_t n = 0; n < r->n_nodes; n++) {
        if (r->nodes[n].is_wanted && !isinf(r->prices[n])) {
            check_best_at(r, r->prices[n], makers);
            check_best_at(r, r->prices[n] * 0.999, makers);
            check_best_at(r, r->prices[n] * 1.001, makers);
        }
    }
}

static void test_cut_is_the_best_choice_at_every_price(void) {
    for (int32_t i = 0; i < N_RANDOM; i++) {
        region r = random_region(1 + random_below(&source, MOST_BRUTE_OPS));
        price_well(&r);
        check_all_prices(&r);
    }
}

static void test_cut_prices_of_large_graphs_do_not_depend_on_the_scratch(void) {
    failing_allocator heap;
    const tfg_allocator allocator = failing_allocator_init(&heap);
    tfg_cut *cut;
    CHECK_EQ(tfg_cut_create(&allocator, &cut), TFG_OK);
    for (int32_t i = 0; i < 40; i++) {
        static region r;
        static double again[MAX_NODES];
        r = random_region(1 + random_below(&source, MAX_OPS - 1));
        price_well(&r);
        const tfg_cut_graph graph = graph_of(&r);
        CHECK_EQ(tfg_cut_prices(cut, &graph, again, NULL), TFG_OK);
        CHECK_EQ(memcmp(again, r.prices, (size_t)r.n_nodes * sizeof(double)), 0);
    }
    tfg_cut_destroy(cut);
    tfg_cut_destroy(NULL);
    CHECK_EQ(heap.n_live_blocks, 0);
}

/* ---- what can go wrong ------------------------------------------------------------------------------------------- */

static void test_cut_survives_every_failing_request(void) {
    failing_allocator heap;
    tfg_allocator allocator = failing_allocator_init(&heap);
    static region r;
    r = random_region(20);
    CHECK_EQ(price(&r, &allocator, NULL), TFG_OK);
    const int64_t n_requests = heap.n_requests;
    CHECK(n_requests > 5);
    for (int64_t k = 0; k < n_requests; k++) {
        allocator = failing_allocator_init(&heap);
        heap.fail_at = k;
        CHECK_EQ(price(&r, &allocator, NULL), TFG_ERR_MEMORY);
        CHECK_EQ(heap.n_live_blocks, 0);
    }
}

static void check_refused(region r) {
    failing_allocator heap;
    const tfg_allocator allocator = failing_allocator_init(&heap);
    tfg_error err = {{0}};
    CHECK_EQ(price(&r, &allocator, &err), TFG_ERR_ARGUMENT);
    CHECK(err.text[0] != '\0');
    CHECK_EQ(heap.n_live_blocks, 0);
}

static void test_cut_refuses_graphs_that_are_none(void) {
    static region good, bad;
    memset(&good, 0, sizeof good);
    const int32_t x = add_node(&good, 8, false, true);
    step(&good, 3, step(&good, 3, x, 8, true), 8, true);
    price_well(&good);
    bad = good, bad.n_ops = -1, check_refused(bad);
    bad = good, bad.refs[1] = 9, check_refused(bad);
    bad = good, bad.refs[0] = -1, check_refused(bad);
    bad = good, bad.refs[3] = 1, check_refused(bad);                          /* made twice */
    bad = good, bad.refs[0] = 2, check_refused(bad);                          /* read before it is made */
    bad = good, bad.ops[1].first_ref = 3, check_refused(bad);                 /* past the end */
    bad = good, bad.ops[0].n_reads = INT32_MAX, check_refused(bad);           /* far past the end */
    bad = good, bad.ops[0].cost_ns = -1, check_refused(bad);
    bad = good, bad.nodes[1].size_bytes = -1, check_refused(bad);
    bad = good, bad.nodes[1].size_bytes = INT64_MAX, check_refused(bad);
}

int main(int argc, char **argv) {
    source = (random_source){random_seed(argc, argv)};
    RUN(test_cut_draws_its_picture);
    RUN(test_cut_lets_a_cheap_end_of_a_chain_go_first);
    RUN(test_cut_gives_all_outputs_of_an_operator_one_price);
    RUN(test_cut_never_lets_go_of_what_is_simply_there);
    RUN(test_cut_of_nothing);
    RUN(test_cut_is_the_best_choice_at_every_price);
    RUN(test_cut_prices_of_large_graphs_do_not_depend_on_the_scratch);
    RUN(test_cut_survives_every_failing_request);
    RUN(test_cut_refuses_graphs_that_are_none);
    return check_finish();
}
