/* SPDX-License-Identifier: BSD-3-Clause */
#include <string.h>

#include "chain.h"
#include "failing_allocator.h"
#include "random_tape.h"

enum { MAX_BLOCKS = 80, MAX_OPTIONS = 4, SHORT = 5, MANY_SLOTS = 32, REFUSED = -7, NEVER = 0x10101010 };
enum { OWN = MANY_SLOTS + 1, N_MOMENTS = (SHORT + 1) * SHORT * 32 * 243 }; /* two options each */
enum { GREEDY, EXACT, ROTOR, N_PLANNERS };

static random_source source;
static failing_allocator heap;
static tfg_allocator allocator;

/* A chain that owns its blocks. */
typedef struct chain {
    tfg_chain_option options[MAX_BLOCKS][MAX_OPTIONS];
    tfg_chain_block blocks[MAX_BLOCKS];
    tfg_chain is;
} chain;

typedef struct answer {
    int32_t option[MAX_BLOCKS + 1];
    tfg_chain_option total; /* of the rotor: the ns */
    tfg_status status;
    tfg_error err;
} answer;

static answer ask(int32_t planner, const tfg_chain *chain, int64_t budget, int32_t n_bins) {
    answer a = {.total = {REFUSED, REFUSED}, .err = {{0}}};
    memset(a.option, 0xee, sizeof a.option);
    if (planner == GREEDY) {
        a.status = tfg_chain_greedy(chain, budget, a.option, &a.total, &a.err);
    } else if (planner == EXACT) {
        a.status = tfg_chain_exact(&allocator, chain, budget, n_bins, a.option, &a.total, &a.err);
    } else {
        a.status = tfg_chain_rotor(&allocator, chain, budget, n_bins, &a.total.ns, &a.err);
    }
    const bool is_untouched = a.status != TFG_OK || planner == ROTOR;
    CHECK_EQ(heap.n_live_blocks + heap.n_wrong_sizes, 0);
    CHECK_EQ(a.option[is_untouched ? 0 : chain->n_blocks], (int32_t)0xeeeeeeee);
    CHECK((a.total.kept_bytes == REFUSED) == is_untouched && (a.total.ns == REFUSED) == (a.status != TFG_OK));
    return a;
}

static int64_t rotor_ns(const chain *c, int64_t budget, int32_t n_bins) {
    return ask(ROTOR, &c->is, budget, n_bins).total.ns;
}

/* Sizes are multiples of the unit; prices rise to 12 ns per unit at most. */
static void random_block(chain *c, int32_t i, int32_t n_options, int64_t output_bytes, int64_t unit) {
    int32_t price = 12;
    tfg_chain_option at = {output_bytes + random_below(&source, 4) * unit, 216 + random_below(&source, 9)};
    for (int32_t k = n_options - 1; k >= 0; k--) {
        const int32_t step = 1 + random_below(&source, 6);
        c->options[i][k] = at;
        price = random_below(&source, price + 1);
        at = (tfg_chain_option){at.kept_bytes + step * unit, at.ns - step * price};
    }
    c->blocks[i] = (tfg_chain_block){c->options[i], n_options, random_below(&source, 5) * unit,
                                     random_below(&source, 10), random_below(&source, 7) * unit,
                                     random_below(&source, 9) * unit};
}

/* In one of four the blocks are alike, but for one number of each. */
static void random_chain(chain *c, int32_t n_blocks, int32_t max_options, int64_t unit) {
    const bool are_alike = random_one_in(&source, 4);
    c->is = (tfg_chain){c->blocks, n_blocks};
    for (int32_t i = n_blocks - 1; i >= 0; i--) {
        tfg_chain_block *it = &c->blocks[i];
        int64_t *const numbers[] = {&it->input_bytes, &it->pass_ns, &it->forward_bytes, &it->backward_bytes};
        const int64_t output_bytes = i + 1 < n_blocks ? it[1].input_bytes : 4 * unit * are_alike;
        random_block(c, i, 1 + random_below(&source, max_options), output_bytes, unit);
        if (are_alike && i + 1 < n_blocks) {
            *it = it[1];
            *numbers[random_below(&source, 4)] = random_below(&source, 5) * unit;
        }
    }
}

static int64_t sum_bytes(const chain *c, bool is_last) {
    int64_t sum = 0;
    for (int32_t i = 0; i < c->is.n_blocks; i++) {
        sum += c->blocks[i].options[is_last ? c->blocks[i].n_options - 1 : 0].kept_bytes;
    }
    return sum;
}

/* ---- inputs always kept ------------------------------------------------------------------------------------------ */

/* The least ns of all ways to choose from block i on; NEVER when none fits. */
static int64_t brute_ns(const chain *c, int32_t i, int64_t budget) {
    int64_t least = i == c->is.n_blocks && budget >= 0 ? 0 : NEVER;
    for (int32_t k = 0; i < c->is.n_blocks && k < c->blocks[i].n_options; k++) {
        const int64_t ns = c->blocks[i].options[k].ns + brute_ns(c, i + 1, budget - c->blocks[i].options[k].kept_bytes);
        least = ns < least ? ns : least;
    }
    return least;
}

/* The totals are right and fit. Returns the largest step of any block. */
static int64_t check_total(const chain *c, const answer *a, int64_t budget) {
    tfg_chain_option total = {0, 0};
    int64_t step_ns = 0;
    for (int32_t i = 0; i < c->is.n_blocks; i++) {
        total.kept_bytes += c->blocks[i].options[a->option[i]].kept_bytes;
        total.ns += c->blocks[i].options[a->option[i]].ns;
        for (int32_t k = 1; k < c->blocks[i].n_options; k++) {
            const int64_t ns = c->blocks[i].options[k].ns - c->blocks[i].options[k - 1].ns;
            step_ns = ns > step_ns ? ns : step_ns;
        }
    }
    CHECK(a->total.kept_bytes == total.kept_bytes && a->total.ns == total.ns);
    CHECK(total.kept_bytes <= budget);
    return step_ns;
}

static void test_chain_greedy_walks_the_cheapest_step_of_all_blocks(void) {
    chain c = {{{{9, 0}, {5, 4}, {2, 10}}, {{7, 1}, {4, 3}}, {{6, 0}}, {{8, 0}, {4, 4}}},
               {{c.options[0], 3, 0, 0, 0, 0}, {c.options[1], 2, 0, 0, 0, 0}, {c.options[2], 1, 0, 0, 0, 0},
                {c.options[3], 2, 0, 0, 0, 0}}, {c.blocks, 4}};
    const int32_t kept_bytes[] = {30, 27, 23, 19, 16}; /* prices 2/3; 1 and 1, the earlier first; 2 */
    const char *wanted[] = {"0000", "0100", "1100", "1101", "2101"};
    for (int32_t step = 0, budget = 40; budget >= 16; budget--) {
        const answer a = ask(GREEDY, &c.is, budget, 0);
        step += kept_bytes[step] > budget;
        CHECK_EQ(a.total.kept_bytes, kept_bytes[step]);
        for (int32_t i = 0; i < 4; i++) {
            CHECK_EQ(a.option[i], wanted[step][i] - '0');
        }
    }
}

static void test_chain_greedy_and_exact_against_all_ways_to_choose(void) {
    int32_t n_beaten = 0;
    for (int32_t round = 0; round < 2000; round++) {
        const int64_t unit = random_one_in(&source, 2) ? 1 : 1000;
        chain c;
        random_chain(&c, random_below(&source, 6), MAX_OPTIONS, unit);
        const int64_t least = sum_bytes(&c, true);
        const int32_t n_units = random_below(&source, 2 + (int32_t)((sum_bytes(&c, false) - least) / unit));
        const int64_t budget = least + n_units * unit;
        const int64_t best_ns = brute_ns(&c, 0, budget);
        const answer greedy = ask(GREEDY, &c.is, budget, 0);
        const int64_t step_ns = check_total(&c, &greedy, budget);
        CHECK(greedy.total.ns >= best_ns && greedy.total.ns <= best_ns + step_ns);
        n_beaten += greedy.total.ns > best_ns;
        const answer exact = ask(EXACT, &c.is, budget, n_units < 2 ? 2 : n_units); /* sizes are whole bins */
        check_total(&c, &exact, budget);
        CHECK_EQ(exact.total.ns, best_ns);
        const int32_t n_bins = 2 + random_below(&source, 20);
        const int64_t bin_bytes = n_units * unit < n_bins ? 1 : n_units * unit / n_bins;
        const answer coarse = ask(EXACT, &c.is, budget, n_bins);
        check_total(&c, &coarse, budget);
        CHECK(coarse.total.ns >= best_ns && coarse.total.ns <= greedy.total.ns);
        CHECK(coarse.total.ns <= brute_ns(&c, 0, budget - n_bins - bin_bytes * c.is.n_blocks));
    }
    printf("    2000 small chains: greedy is not the best in %d\n", n_beaten);
    CHECK(n_beaten > 100);
}

/* ---- inputs may be dropped: equal blocks ------------------------------------------------------------------------- */

static int64_t again[MAX_BLOCKS + 1][MANY_SLOTS + 1]; /* t(l, c), by its recursion */

static void test_chain_revolve_is_the_least_by_recursion(void) {
    for (int32_t c = 1; c <= MANY_SLOTS; c++) {
        for (int32_t l = 1; l <= MAX_BLOCKS; l++) {
            again[l][c] = c == 1 || l == 1 ? l * (l - 1) / 2 : INT64_MAX;
            for (int32_t j = 1; c > 1 && j < l; j++) {
                const int64_t n = j + again[l - j][c - 1] + again[j][c];
                again[l][c] = n < again[l][c] ? n : again[l][c];
            }
            CHECK_EQ(tfg_chain_revolve(l, c), again[l][c]);
        }
    }
    CHECK(again[32][32] == 31 && again[32][16] == 46 && again[32][8] == 54 && again[32][7] == 55 && again[32][5] == 68);
    CHECK_EQ(tfg_chain_revolve(INT32_MAX, 1), (int64_t)INT32_MAX * (INT32_MAX - 1) / 2);
    CHECK_EQ(tfg_chain_revolve(INT32_MAX, 2), 65535LL * INT32_MAX - 65537LL * 65536 * 65535 / 6); /* r is 65535 */
    CHECK_EQ(tfg_chain_revolve(INT32_MAX, INT32_MAX), INT32_MAX - 1);
    CHECK_EQ(tfg_chain_revolve(1, 0) + tfg_chain_revolve(0, 0) + tfg_chain_revolve(-3, -3), 0);
    CHECK_EQ(tfg_chain_revolve(2, 0), INT64_MAX);
}

/* A block keeps OWN bytes, more than all slots, so never while another block runs. */
static void test_chain_rotor_replays_equal_blocks_as_often_as_revolve(void) {
    for (int32_t l = 1; l <= MAX_BLOCKS; l++) {
        chain c = {.is = {c.blocks, l}};
        for (int32_t i = 0; i < l; i++) {
            c.options[i][0] = (tfg_chain_option){OWN, 3};
            c.blocks[i] = (tfg_chain_block){c.options[i], 1, 1, 1, 2, OWN};
        }
        for (int32_t slots = 1; slots <= MANY_SLOTS; slots++) {
            /* Nothing ever passes over the last block, but then the blocks are not equal. */
            c.blocks[l - 1].pass_ns = l < 24 && slots % 2 == 0 ? 7 : 1;
            CHECK_EQ(rotor_ns(&c, OWN + slots, OWN + slots), 3 * l + again[l][slots]);
        }
    }
}

/* ---- inputs may be dropped: all schedules of short chains -------------------------------------------------------- */

/* What there is between two operations. */
typedef struct moment {
    int32_t n_left; /* blocks whose backward is still to come */
    int32_t hand;   /* the last pass made this block's input, which is not stored; 0: there is none */
    int32_t inputs; /* bit i: the input of block i is stored */
    int32_t kept[SHORT]; /* 0, or 1 + the option whose bytes are stored; the next block's input is among them */
} moment;

static struct {
    const chain *c;
    int64_t budget;
    bool may_let_go; /* of a stored input, before it is used */
    int32_t least_ns[N_MOMENTS]; /* NEVER, or from the first moment on */
    moment queue[N_MOMENTS]; /* to go on from */
    int64_t n_in, n_out;
} all;

static int32_t *moment_ns(const moment *at) {
    int32_t number = (at->n_left * SHORT + at->hand) * 32 + at->inputs;
    for (int32_t i = 0; i < SHORT; i++) {
        number = number * 3 + at->kept[i];
    }
    return &all.least_ns[number];
}

static void reach(moment at, int64_t ns) {
    if (ns < *moment_ns(&at)) {
        *moment_ns(&at) = (int32_t)ns;
        all.queue[all.n_in++ % N_MOMENTS] = at;
    }
}

static int64_t moment_bytes(const moment *at) {
    int64_t sum = 0;
    for (int32_t i = 0; i < SHORT; i++) {
        sum += at->inputs >> i & 1 ? all.c->blocks[i].input_bytes : 0;
        sum += at->kept[i] > 0 ? all.c->blocks[i].options[at->kept[i] - 1].kept_bytes : 0;
    }
    return sum;
}

/* All that can be done with block i. Block 0's input is always there and not counted. */
static void reach_by(const moment *at, int32_t i, int64_t ns) {
    const tfg_chain_block *block = &all.c->blocks[i];
    const int64_t free_bytes = all.budget - moment_bytes(at);
    const bool is_stored = (at->inputs >> i & 1) != 0;
    const bool is_there = i == 0 || is_stored || at->kept[i - 1] > 0;
    const bool is_runnable = block->forward_bytes <= free_bytes - (is_there ? 0 : block->input_bytes);
    moment next = *at;
    next.hand = i + 1;
    if (is_runnable && (is_there || at->hand == i) && i + 1 < at->n_left && block[1].input_bytes <= free_bytes) {
        reach(next, ns + block->pass_ns);
    }
    next.hand = 0;
    next.inputs = at->inputs ^ 1 << i;
    if (i > 0 && (is_stored ? all.may_let_go : at->hand == i)) {
        reach(next, ns);
    }
    next.inputs = at->inputs;
    for (int32_t k = 0; is_runnable && is_there && at->kept[i] == 0 && k < block->n_options; k++) {
        next.kept[i] = k + 1;
        if (block->options[k].kept_bytes <= free_bytes) {
            reach(next, ns + block->options[k].ns);
        }
    }
    next = *at;
    next.hand = next.kept[i] = 0;
    next.inputs &= ~(1 << i);
    next.n_left = i;
    if (is_there && i + 1 == at->n_left && at->kept[i] > 0 &&
        block->backward_bytes <= free_bytes + block->options[at->kept[i] - 1].kept_bytes) {
        reach(next, ns);
    }
}

/* The least ns of all schedules, or REFUSED. */
static int64_t search_ns(const chain *c, int64_t budget, bool may_let_go) {
    all.c = c;
    all.budget = budget;
    all.may_let_go = may_let_go;
    memset(all.least_ns, 0x10, sizeof all.least_ns);
    for (reach((moment){.n_left = c->is.n_blocks}, 0); all.n_out < all.n_in; all.n_out++) {
        const moment at = all.queue[all.n_out % N_MOMENTS];
        for (int32_t i = 0; i < at.n_left; i++) {
            reach_by(&at, i, *moment_ns(&at));
        }
    }
    const int32_t ns = *moment_ns(&(moment){.n_left = 0});
    return ns == NEVER ? REFUSED : ns;
}

static void test_chain_rotor_against_all_schedules(void) {
    int32_t n_ways = 0, n_let_go = 0;
    for (int32_t round = 0; round < 600; round++) {
        chain c;
        random_chain(&c, 1 + random_below(&source, SHORT), 2, 1);
        const int32_t budget = random_below(&source, 12 + (int32_t)sum_bytes(&c, false));
        const int64_t ns = search_ns(&c, budget, false);
        const int64_t let_go_ns = search_ns(&c, budget, true);
        const int64_t coarse_ns = rotor_ns(&c, budget, 8);
        CHECK_EQ(rotor_ns(&c, budget, budget < 2 ? 2 : budget), ns);
        CHECK(let_go_ns <= ns && (let_go_ns >= 0) == (ns >= 0) && (coarse_ns < 0 || coarse_ns >= ns));
        n_ways += ns > 0;
        n_let_go += let_go_ns < ns;
    }
    printf("    600 short chains, %d of them feasible: letting go early is better in %d\n", n_ways, n_let_go);
    CHECK(n_ways > 300);
}

/* ---- arguments and memory ---------------------------------------------------------------------------------------- */

static void test_chain_tells_the_least_budget(void) {
    for (int32_t round = 0; round < 3000; round++) {
        const int32_t planner = round % N_PLANNERS;
        const int32_t n_bins = 2 + random_below(&source, 40);
        chain c;
        random_chain(&c, random_below(&source, 9), MAX_OPTIONS, 1 + random_below(&source, 30));
        const answer none = ask(planner, &c.is, INT64_MIN, n_bins);
        long long least = -1;
        CHECK(sscanf(none.err.text, "budget: wanted at least %lld bytes", &least) == 1 && least >= 0);
        CHECK_EQ(ask(planner, &c.is, least - 1, n_bins).status, TFG_ERR_ARGUMENT);
        CHECK_EQ(ask(planner, &c.is, least, n_bins).status, TFG_OK);
        CHECK_EQ(ask(planner, &c.is, least + random_below(&source, 500), n_bins).status, TFG_OK);
        CHECK_EQ(ask(planner, &c.is, INT64_MAX, n_bins).status, TFG_OK);
    }
}

static void check_all(const tfg_chain *chain, tfg_status wanted, const char *words) {
    for (int32_t planner = GREEDY; planner < N_PLANNERS; planner++) {
        const answer a = ask(planner, chain, INT64_MAX, 8);
        CHECK_EQ(a.status, wanted);
        CHECK(strstr(a.err.text, words) != NULL);
    }
}

static void test_chain_refuses_bad_numbers(void) {
    chain c = {{{{9, 0}, {5, 4}, {2, 10}}, {{9, 0}, {5, 4}, {2, 10}}},
               {{c.options[0], 3, 0, 0, 0, 0}, {c.options[1], 3, 0, 0, 0, 0}}, {c.blocks, 2}};
    tfg_chain_option *it = c.options[1];
    tfg_chain_block *block = &c.blocks[1];
    const int64_t all_bytes = (INT64_C(1) << 60) - 18, all_ns = (INT64_C(1) << 61) / 3 - 20;
    const struct {
        int64_t *number;
        int64_t bad, good;
        const char *words;
    } rows[] = {
        {&it[1].kept_bytes, 9, 6, "block 1, option 1"},      {&it[2].kept_bytes, -1, 0, "block 1, option 2"},
        {&it[0].ns, -1, 0, "block 1, option 0"},             {&it[2].ns, 3, 9, "block 1, option 2"},
        {&it[2].ns, 6, 7, "block 1, option 2"},              {&block->input_bytes, 3, 2, "block 0, option 2"},
        {&block->input_bytes, -1, 0, "block 1: a number"},   {&block->pass_ns, -1, 0, "block 1: a number"},
        {&block->forward_bytes, -1, 0, "block 1: a number"}, {&block->backward_bytes, -1, 0, "block 1: a number"},
        {&block->forward_bytes, all_bytes + 1, all_bytes, "block 1: a number"},
        {&block->pass_ns, all_ns + 1, all_ns, "block 1: a number"}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const int64_t before = *rows[i].number;
        *rows[i].number = rows[i].bad;
        check_all(&c.is, TFG_ERR_ARGUMENT, rows[i].words);
        *rows[i].number = rows[i].good;
        check_all(&c.is, TFG_OK, "");
        *rows[i].number = before;
    }
    CHECK(ask(EXACT, &c.is, 99, 1).status == TFG_ERR_ARGUMENT && ask(ROTOR, &c.is, 99, 1).status == TFG_ERR_ARGUMENT);
    check_all(&(tfg_chain){c.blocks, -1}, TFG_ERR_ARGUMENT, "-1 blocks");
    check_all(&(tfg_chain){NULL, 2}, TFG_ERR_ARGUMENT, "2 blocks");
    check_all(&(tfg_chain){NULL, 0}, TFG_OK, "");
    block->n_options = 0;
    check_all(&c.is, TFG_ERR_ARGUMENT, "block 1: 0 options");
    block[-1].options = NULL;
    check_all(&c.is, TFG_ERR_ARGUMENT, "block 0: 3 options");
}

static void test_chain_survives_a_failing_allocator(void) {
    chain c;
    random_chain(&c, 6, MAX_OPTIONS, 1);
    for (int32_t planner = EXACT; planner < N_PLANNERS; planner++) {
        CHECK_EQ(ask(planner, &c.is, INT64_MAX, INT32_MAX).status, TFG_ERR_FULL);
        const int64_t before = heap.fail_at = heap.n_requests;
        CHECK_EQ(ask(planner, &c.is, 500, 50).status, TFG_ERR_MEMORY);
        CHECK_EQ(ask(planner, &c.is, 500, 50).status, TFG_OK);
        CHECK_EQ(heap.n_requests, before + 2); /* so there is but one to fail */
    }
}

int main(int argc, char **argv) {
    source.state = random_seed(argc, argv);
    allocator = failing_allocator_init(&heap);
    RUN(test_chain_greedy_walks_the_cheapest_step_of_all_blocks);
    RUN(test_chain_greedy_and_exact_against_all_ways_to_choose);
    RUN(test_chain_revolve_is_the_least_by_recursion);
    RUN(test_chain_rotor_replays_equal_blocks_as_often_as_revolve);
    RUN(test_chain_rotor_against_all_schedules);
    RUN(test_chain_tells_the_least_budget);
    RUN(test_chain_refuses_bad_numbers);
    RUN(test_chain_survives_a_failing_allocator);
    return check_finish();
}
