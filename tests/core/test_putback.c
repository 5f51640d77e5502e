/* SPDX-License-Identifier: BSD-3-Clause */
#include <string.h>

#include "putback.h"
#include "random_tape.h"

enum { MAX_VALUES = 512, MAX_ROOM = 64 };

static random_source source;

/* One path: the arguments of one choice, and the answer. */
typedef struct path {
    int64_t size_bytes[MAX_VALUES];
    int64_t cost_ns[MAX_VALUES];
    uint8_t is_kept[MAX_VALUES];
    int32_t n;
    int64_t room_bytes;
} path;

static void choose(path *p) {
    tfg_error err = {{0}};
    memset(p->is_kept, 0xee, sizeof p->is_kept);
    CHECK_EQ(tfg_putback_choose(p->size_bytes, p->cost_ns, p->n, p->room_bytes, p->is_kept, &err), TFG_OK);
    CHECK_EQ(err.text[0], '\0');
    CHECK_EQ(p->is_kept[p->n], 0xee);
}

static path path_of_equals(int32_t n, int64_t room_bytes) {
    path p = {.n = n, .room_bytes = room_bytes};
    for (int32_t i = 0; i < n; i++) {
        p.size_bytes[i] = 1;
        p.cost_ns[i] = 1;
    }
    return p;
}

static int64_t kept_bytes(const path *p) {
    int64_t sum = 0;
    for (int32_t i = 0; i < p->n; i++) {
        sum += p->is_kept[i] ? p->size_bytes[i] : 0;
    }
    return sum;
}

static int64_t all_bytes(const path *p) {
    int64_t sum = 0;
    for (int32_t i = 0; i < p->n; i++) {
        sum += p->size_bytes[i];
    }
    return sum;
}

static void check_choice(path p, const char *wanted) {
    char picture[MAX_VALUES] = {0};
    choose(&p);
    for (int32_t i = 0; i < p.n; i++) {
        picture[i] = p.is_kept[i] ? 'K' : '.';
    }
    const bool is_wanted = strcmp(picture, wanted) == 0;
    CHECK(is_wanted);
    if (!is_wanted) {
        printf("    chose %s, wanted %s\n", picture, wanted);
    }
}

static void check_picture(int32_t n, int64_t room_bytes, const char *wanted) {
    check_choice(path_of_equals(n, room_bytes), wanted);
}

/* ---- by hand ----------------------------------------------------------------------------------------------------- */

static void test_putback_draws_its_picture(void) {
    check_picture(16, 6, "...K...K..K..KKK");
    check_picture(16, 16, "KKKKKKKKKKKKKKKK");
    check_picture(16, 15, ".KKKKKKKKKKKKKKK");
    check_picture(16, 2, ".......K.......K");
    check_picture(16, 1, ".......K........");
    check_picture(16, 0, "................");
    check_picture(16, -1, "................");
    check_picture(1, 0, ".");
    check_picture(1, 1, "K");
    check_picture(2, 1, "K.");
    check_picture(0, 5, "");
}

static void test_putback_spreads_by_cost_and_not_by_number(void) {
    path p = path_of_equals(10, 2); /* one at the end, one where half of the cost is behind it */
    p.cost_ns[2] = 100;
    check_choice(p, "..K......K");
}

static void test_putback_lets_a_large_value_wait_for_a_longer_way(void) {
    path p = path_of_equals(16, 600);
    for (int32_t i = 0; i < p.n; i++) {
        p.size_bytes[i] = 100;
    }
    p.size_bytes[4] = 200; /* a usual one would be due here; this one is not, so the next one is */
    check_choice(p, ".....K...K..KKKK");
    p.size_bytes[4] = 100;
    p.size_bytes[5] = 200;
    check_choice(p, "....K....K..KKKK");
}

static void test_putback_keeps_the_end_as_far_as_half_the_room_goes(void) {
    path p = path_of_equals(6, 10);
    p.size_bytes[4] = 4;
    p.size_bytes[2] = 9; /* fits nowhere */
    check_choice(p, "KK.KKK");
    p.size_bytes[4] = 6; /* fits into the room, not into its half */
    check_choice(p, "KK.KKK");
    p.size_bytes[4] = 1;
    p.size_bytes[2] = 1;
    check_choice(p, "KKKKKK");
}

static void test_putback_fills_remnants_from_the_end(void) {
    path p = path_of_equals(3, 3);
    p.size_bytes[0] = 2;
    p.size_bytes[1] = 2;
    p.size_bytes[2] = 9;
    p.cost_ns[2] = 100; /* none of the two is far from the start */
    check_choice(p, ".K.");
}

static void test_putback_takes_what_is_free(void) {
    path p = path_of_equals(5, 0);
    p.size_bytes[1] = 0;
    p.size_bytes[4] = 0;
    check_choice(p, ".K..K");
    p = path_of_equals(5, 3);
    memset(p.cost_ns, 0, sizeof p.cost_ns); /* nothing costs anything: only the room counts */
    check_choice(p, "KK..K");
}

/* ---- arguments --------------------------------------------------------------------------------------------------- */

static void check_refused(const path *p, const char *words) {
    uint8_t is_kept[MAX_VALUES];
    tfg_error err = {{0}};
    memset(is_kept, 0xee, sizeof is_kept);
    CHECK_EQ(tfg_putback_choose(p->size_bytes, p->cost_ns, p->n, p->room_bytes, is_kept, &err), TFG_ERR_ARGUMENT);
    CHECK_EQ(tfg_putback_choose(p->size_bytes, p->cost_ns, p->n, p->room_bytes, is_kept, NULL), TFG_ERR_ARGUMENT);
    CHECK(strstr(err.text, words) != NULL);
    CHECK_EQ(is_kept[0], 0xee);
}

static void test_putback_refuses_bad_numbers(void) {
    path p = path_of_equals(4, 2);
    uint8_t is_kept[4];
    CHECK_EQ(tfg_putback_choose(NULL, p.cost_ns, 4, 2, is_kept, NULL), TFG_ERR_ARGUMENT);
    CHECK_EQ(tfg_putback_choose(p.size_bytes, NULL, 4, 2, is_kept, NULL), TFG_ERR_ARGUMENT);
    CHECK_EQ(tfg_putback_choose(p.size_bytes, p.cost_ns, 4, 2, NULL, NULL), TFG_ERR_ARGUMENT);
    CHECK_EQ(tfg_putback_choose(p.size_bytes, p.cost_ns, -1, 2, is_kept, NULL), TFG_ERR_ARGUMENT);
    CHECK_EQ(tfg_putback_choose(NULL, NULL, 0, 2, NULL, NULL), TFG_OK);
    p.size_bytes[2] = -1;
    check_refused(&p, "size_bytes[2]");
    p = path_of_equals(4, 2);
    p.cost_ns[3] = -5;
    check_refused(&p, "cost_ns[3]");
    p = path_of_equals(4, INT64_MAX);
    p.size_bytes[3] = INT64_MAX - 2; /* 1 more than there is */
    check_refused(&p, "size_bytes[3]");
    p.size_bytes[3] = INT64_MAX - 3;
    p.cost_ns[0] = INT64_MAX - 2;
    check_refused(&p, "cost_ns[3]");
    p.cost_ns[0] = INT64_MAX - 3;
    choose(&p);
    CHECK_EQ(kept_bytes(&p), INT64_MAX);
    p.room_bytes = INT64_MAX - 1; /* the largest products */
    choose(&p);
    CHECK(kept_bytes(&p) < INT64_MAX);
}

/* ---- the laws of the header, on random paths --------------------------------------------------------------------- */

static void check_room(const path *p) {
    const int64_t room_bytes = p->room_bytes < 0 ? 0 : p->room_bytes;
    const int64_t left_bytes = room_bytes - kept_bytes(p);
    CHECK(left_bytes >= 0);
    for (int32_t i = 0; i < p->n; i++) {
        CHECK(p->is_kept[i] <= 1);
        CHECK(p->is_kept[i] == 1 || p->size_bytes[i] > left_bytes);
    }
}

/* Where the end begins, by its law. */
static int32_t end_of(const path *p) {
    int64_t end_bytes = 0;
    int32_t begin = p->n;
    while (begin > 0 && end_bytes + p->size_bytes[begin - 1] <= p->room_bytes / 2) {
        end_bytes += p->size_bytes[--begin];
    }
    return begin;
}

static void check_end(const path *p) {
    for (int32_t i = end_of(p); p->room_bytes >= 0 && i < p->n; i++) {
        CHECK_EQ(p->is_kept[i], 1);
    }
}

/* Values of one size: no stretch is longer than an equal part and one value. */
static void check_evenness(const path *p) {
    const int32_t begin = end_of(p);
    const int64_t n_spread = p->room_bytes / p->size_bytes[0] - (p->n - begin);
    int64_t way_ns = 0;
    int64_t largest_ns = 0;
    int64_t stretch_ns = 0;
    for (int32_t i = 0; i <= begin && i < p->n; i++) {
        way_ns += p->cost_ns[i];
        largest_ns = p->cost_ns[i] > largest_ns ? p->cost_ns[i] : largest_ns;
    }
    for (int32_t i = 0; i <= begin && i < p->n; i++) {
        stretch_ns += p->cost_ns[i];
        CHECK(stretch_ns <= way_ns / (n_spread + 1) + 1 + largest_ns);
        stretch_ns = p->is_kept[i] ? 0 : stretch_ns;
    }
}

static path random_path(bool has_one_size) {
    path p = {.n = random_below(&source, random_one_in(&source, 2) ? 12 : 200)};
    const int32_t max_size = 1 + random_below(&source, 40);
    const int32_t max_cost = 1 + random_below(&source, 100);
    const int32_t one_size = 1 + random_below(&source, max_size);
    for (int32_t i = 0; i < p.n; i++) {
        p.size_bytes[i] = has_one_size ? one_size : random_below(&source, max_size);
        p.cost_ns[i] = random_one_in(&source, 10) ? 10 * max_cost : random_below(&source, max_cost);
    }
    const int64_t all = all_bytes(&p);
    p.room_bytes = random_below(&source, 3 + (int32_t)(random_one_in(&source, 3) ? all : all / 8)) - 1;
    return p;
}

static void test_putback_follows_its_laws_on_random_paths(void) {
    int32_t n_cut = 0;
    for (int32_t round = 0; round < 20000; round++) {
        const bool has_one_size = round % 2 == 0;
        path p = random_path(has_one_size);
        choose(&p);
        check_room(&p);
        check_end(&p);
        if (has_one_size && p.n > 0 && p.room_bytes >= 0) {
            check_evenness(&p);
        }
        n_cut += kept_bytes(&p) > 0 && kept_bytes(&p) < all_bytes(&p);
    }
    CHECK(n_cut > 5000);
}

/* ---- a whole backward -------------------------------------------------------------------------------------------- */

/* Operator i makes value i from value i - 1; the first is made from a root. Backward asks for each, last first. */
typedef struct chain {
    path all; /* is_kept: is live now */
    int64_t replayed_ns;
    int64_t n_replayed;
} chain;

/* Replays from the nearest live value to the asked one; those passed over stay as they are chosen to, in the room that
 * is free then. Backward uses the asked value and lets go of it. */
static void replay(chain *c, int32_t asked) {
    path p = {.n = 0, .room_bytes = c->all.room_bytes - kept_bytes(&c->all)};
    int32_t first = asked;
    while (first > 0 && !c->all.is_kept[first - 1]) {
        first--;
    }
    for (int32_t i = first; i <= asked; i++) {
        c->replayed_ns += c->all.cost_ns[i];
        c->n_replayed++;
    }
    p.n = asked - first;
    memcpy(p.size_bytes, &c->all.size_bytes[first], (size_t)p.n * sizeof(int64_t));
    memcpy(p.cost_ns, &c->all.cost_ns[first], (size_t)p.n * sizeof(int64_t));
    choose(&p);
    memcpy(&c->all.is_kept[first], p.is_kept, (size_t)p.n);
    CHECK(kept_bytes(&c->all) <= c->all.room_bytes);
}

static chain backward(const path *all) {
    chain c = {.all = *all};
    memset(c.all.is_kept, 0, sizeof c.all.is_kept);
    for (int32_t asked = all->n - 1; asked >= 0; asked--) {
        if (!c.all.is_kept[asked]) {
            replay(&c, asked);
        }
        c.all.is_kept[asked] = 0;
    }
    return c;
}

static int64_t binomial(int64_t n, int64_t k) {
    int64_t product = 1;
    for (int64_t i = 1; i <= k; i++) {
        product = product * (n - k + i) / i;
    }
    return product;
}

/* The best there is: t(l, c) of Griewank and Walther for l blocks and c slots. A chain of n values before it has
 * n + 1 blocks' inputs, and the root takes one slot more than the room. */
static int64_t best_for_equals(int32_t n_values, int32_t room) {
    const int64_t l = n_values + 1;
    const int64_t c = room + 1;
    int64_t r = 0;
    while (binomial(c + r, c) < l) {
        r++;
    }
    return r == 0 ? 0 : r * l - binomial(c + r, r - 1);
}

static void test_putback_keeps_replay_far_from_quadratic(void) {
    enum { N = 256 };
    const int64_t quadratic = N * (N + 1) / 2;
    int64_t before = quadratic + 1;
    for (int32_t room = 0; room <= MAX_ROOM; room++) {
        const path p = path_of_equals(N, room);
        const int64_t n_replayed = backward(&p).n_replayed;
        const int64_t best = best_for_equals(N, room);
        if ((room & (room - 1)) == 0) {
            printf("    %d equal operators, room for %2d: %5lld replayed; best %5lld, nothing kept %lld\n", N, room,
                   (long long)n_replayed, (long long)best, (long long)quadratic);
        }
        CHECK(n_replayed >= best);
        CHECK(n_replayed <= before);
        CHECK(room < 1 || n_replayed * 2 <= best * 7);
        CHECK(room < 4 || n_replayed * 2 <= best * 3);
        CHECK(room < 8 || n_replayed * 100 <= best * 115);
        before = n_replayed;
    }
    CHECK_EQ(best_for_equals(N, 0), quadratic);
    CHECK_EQ(best_for_equals(N, 8), 742);
    const path p = path_of_equals(N, N - 1);
    CHECK_EQ(backward(&p).n_replayed, N);
}

/* The least replay time for values of one size and any cost: best[k][a][b] has value a - 1 live (a = 0: the root), k
 * more may be, and a .. b - 1 are asked for, last first. Either none is kept on the way to the last, or the first kept
 * is j. */
enum { SHORT = 40, SHORT_ROOM = 12 };
static int64_t best[SHORT_ROOM + 1][SHORT + 1][SHORT + 1];

static void find_best(const path *p) {
    memset(best, 0, sizeof best);
    for (int32_t k = 0; k <= SHORT_ROOM; k++) {
        for (int32_t a = SHORT - 1; a >= 0; a--) {
            int64_t way_ns = 0; /* from a - 1 to b - 1 */
            for (int32_t b = a + 1; b <= SHORT; b++) {
                way_ns += p->cost_ns[b - 1];
                int64_t least_ns = way_ns + best[k][a][b - 1];
                int64_t part_ns = 0; /* from a - 1 to j */
                for (int32_t j = a; k > 0 && j < b - 1; j++) {
                    part_ns += p->cost_ns[j];
                    const int64_t ns = part_ns + best[k - 1][j + 1][b] + best[k][a][j];
                    least_ns = ns < least_ns ? ns : least_ns;
                }
                best[k][a][b] = least_ns;
            }
        }
    }
}

static void test_putback_is_near_the_best_for_unequal_costs(void) {
    int64_t sum_ns = 0;
    int64_t best_ns = 0;
    for (int32_t round = 0; round < 60; round++) {
        path p = path_of_equals(SHORT, 0);
        for (int32_t i = 0; round > 0 && i < SHORT; i++) {
            p.cost_ns[i] = random_one_in(&source, 5) ? 20 + random_below(&source, 100) : random_below(&source, 10);
        }
        find_best(&p);
        for (int32_t room = 0; room <= SHORT_ROOM; room++) {
            p.room_bytes = room;
            const int64_t ns = backward(&p).replayed_ns;
            CHECK(round > 0 || best[room][0][SHORT] == best_for_equals(SHORT, room));
            CHECK(ns >= best[room][0][SHORT]);
            CHECK(ns <= 3 * best[room][0][SHORT]);
            sum_ns += room >= 4 ? ns : 0;
            best_ns += room >= 4 ? best[room][0][SHORT] : 0;
        }
    }
    printf("    %d operators of random cost, room for 4 to %d: %.3f times the best\n", SHORT, SHORT_ROOM,
           (double)sum_ns / (double)best_ns);
    CHECK(sum_ns * 100 <= best_ns * 125);
}

static void test_putback_copes_with_unequal_sizes(void) {
    int64_t n_replayed = 0;
    int64_t n_ops = 0;
    for (int32_t round = 0; round < 40; round++) {
        path p = path_of_equals(256, 0);
        for (int32_t i = 0; i < p.n; i++) {
            const bool is_large = random_one_in(&source, 4);
            p.size_bytes[i] = is_large ? 40 + random_below(&source, 40) : 1 + random_below(&source, 10);
            p.cost_ns[i] = 1 + random_below(&source, 20);
        }
        p.room_bytes = all_bytes(&p) / 32; /* as much as eight usual ones take */
        n_replayed += backward(&p).n_replayed;
        n_ops += p.n;
    }
    printf("    256 operators of random size and cost, room for a 32nd: each replayed %.2f times\n",
           (double)n_replayed / (double)n_ops);
    CHECK(n_replayed <= 4 * n_ops);
}

int main(int argc, char **argv) {
    source.state = random_seed(argc, argv);
    RUN(test_putback_draws_its_picture);
    RUN(test_putback_spreads_by_cost_and_not_by_number);
    RUN(test_putback_lets_a_large_value_wait_for_a_longer_way);
    RUN(test_putback_fills_remnants_from_the_end);
    RUN(test_putback_keeps_the_end_as_far_as_half_the_room_goes);
    RUN(test_putback_takes_what_is_free);
    RUN(test_putback_refuses_bad_numbers);
    RUN(test_putback_follows_its_laws_on_random_paths);
    RUN(test_putback_keeps_replay_far_from_quadratic);
    RUN(test_putback_is_near_the_best_for_unequal_costs);
    RUN(test_putback_copes_with_unequal_sizes);
    return check_finish();
}
