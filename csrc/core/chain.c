/* SPDX-License-Identifier: BSD-3-Clause */
#include "chain.h"

#include <stdbool.h>
#include <string.h>

__extension__ typedef unsigned __int128 uint128;

static const int64_t MAX_BYTES = (int64_t)1 << 60;
static const int64_t NEVER_NS = (int64_t)1 << 61; /* three of them can be added */
enum { LEAST_BINS = 2 };                          /* one for an input, one for its block */

static int64_t larger(int64_t left, int64_t right) {
    return left > right ? left : right;
}

static const tfg_chain_option *last_option(const tfg_chain_block *block) {
    return &block->options[block->n_options - 1];
}

static int64_t transient_bytes(const tfg_chain_block *block) {
    return larger(block->forward_bytes, block->backward_bytes);
}

/* The step from *left to the option after it has a lower price than that from *right. */
static bool is_cheaper(const tfg_chain_option *left, const tfg_chain_option *right) {
    const uint128 left_bytes = (uint128)(left[0].kept_bytes - left[1].kept_bytes);
    const uint128 right_bytes = (uint128)(right[0].kept_bytes - right[1].kept_bytes);
    return (uint128)(left[1].ns - left[0].ns) * right_bytes < (uint128)(right[1].ns - right[0].ns) * left_bytes;
}

/* ---- arguments --------------------------------------------------------------------------------------------------- */

/* *it is option k; those before it are. */
static bool is_on_hull(const tfg_chain_option *it, int32_t k) {
    return it->ns >= (k < 1 ? 0 : it[-1].ns) && (k < 1 || it->kept_bytes < it[-1].kept_bytes) &&
           (k < 2 || !is_cheaper(it - 1, it - 2));
}

/* False when the number is negative or more than is left. */
static bool take(int64_t *left, int64_t number) {
    const bool is_fine = number >= 0 && number <= *left;
    *left -= is_fine ? number : 0;
    return is_fine;
}

static tfg_status check_block(const tfg_chain *chain, int32_t i, tfg_chain_option *left, tfg_error *err) {
    const tfg_chain_block *block = &chain->blocks[i];
    const int64_t output_bytes = i + 1 < chain->n_blocks ? larger(block[1].input_bytes, 0) : 0;
    if (block->n_options < 1 || block->options == NULL) {
        return tfg_fail(TFG_ERR_ARGUMENT, err, "block %d: %d options, or their array is missing", i, block->n_options);
    }
    for (int32_t k = 0; k < block->n_options; k++) {
        const tfg_chain_option *it = &block->options[k];
        if (it->kept_bytes < output_bytes || !is_on_hull(it, k)) {
            return tfg_fail(TFG_ERR_ARGUMENT, err, "block %d, option %d: wanted the output's %lld bytes at least, but "
                            "fewer bytes, no fewer ns and no lower price than before; got %lld bytes, %lld ns", i, k,
                            (long long)output_bytes, (long long)it->kept_bytes, (long long)it->ns);
        }
    }
    if (!take(&left->kept_bytes, block->options[0].kept_bytes) || !take(&left->kept_bytes, block->input_bytes) ||
        !take(&left->kept_bytes, block->forward_bytes) || !take(&left->kept_bytes, block->backward_bytes) ||
        !take(&left->ns, last_option(block)->ns) || !take(&left->ns, block->pass_ns)) {
        return tfg_fail(TFG_ERR_ARGUMENT, err, "block %d: a number is negative, or all add up to too much", i);
    }
    return TFG_OK;
}

static tfg_status check_chain(const tfg_chain *chain, int32_t n_bins, tfg_error *err) {
    if (chain->n_blocks < 0 || (chain->n_blocks > 0 && chain->blocks == NULL) || n_bins < LEAST_BINS) {
        return tfg_fail(TFG_ERR_ARGUMENT, err, "%d blocks, or their array is missing; or %d bins, wanted %d at least",
                        chain->n_blocks, n_bins, LEAST_BINS);
    }
    tfg_chain_option left = {MAX_BYTES, NEVER_NS / ((int64_t)chain->n_blocks + 1)};
    for (int32_t i = 0; i < chain->n_blocks; i++) {
        TFG_TRY(check_block(chain, i, &left, err));
    }
    return TFG_OK;
}

static tfg_status fail_budget(int64_t least_bytes, int64_t got_bytes, tfg_error *err) {
    return tfg_fail(TFG_ERR_ARGUMENT, err, "budget: wanted at least %lld bytes, got %lld", (long long)least_bytes,
                    (long long)got_bytes);
}

/* ---- bins -------------------------------------------------------------------------------------------------------- */

/* A row has the least ns for each of 0 to n_bins free bins. */
typedef struct bin_table {
    int64_t *ns;
    size_t host_bytes;
    int64_t n_bins;
    int64_t bin_bytes;
} bin_table;

/* One way to fill a row: it costs ns; the free bins but its own go to `rest`, and all of them then to `back`. */
typedef struct bin_offer {
    int64_t ns;
    int64_t n_bins;
    const int64_t *rest;
    const int64_t *back;
} bin_offer;

static int64_t round_up(int64_t size_bytes, int64_t bin_bytes) {
    return size_bytes / bin_bytes + (size_bytes % bin_bytes != 0);
}

/* n_bins whenever there are bytes for them: so more bytes are never too few where less were enough. */
static bin_table divide(int64_t budget_bytes, int32_t n_bins) {
    return (bin_table){.n_bins = budget_bytes < n_bins ? budget_bytes : n_bins,
                       .bin_bytes = larger(budget_bytes / n_bins, 1)};
}

static tfg_status table_make(bin_table *table, const tfg_allocator *allocator, int64_t n_rows) {
    if (n_rows > INT32_MAX / (table->n_bins + 1)) {
        return TFG_ERR_FULL;
    }
    table->host_bytes = (size_t)(n_rows * (table->n_bins + 1)) * sizeof(int64_t);
    table->ns = allocator->resize(allocator->ctx, NULL, 0, table->host_bytes);
    return table->ns == NULL ? TFG_ERR_MEMORY : TFG_OK;
}

static int64_t *table_row(const bin_table *table, int64_t row) {
    return table->ns + row * (table->n_bins + 1);
}

static void row_fill(const bin_table *table, int64_t *row, int64_t ns) {
    for (int64_t m = 0; m <= table->n_bins; m++) {
        row[m] = ns;
    }
}

/* Where first_bins are free at least, and the offer's own. */
static void row_improve(const bin_table *table, int64_t *row, const bin_offer *offer, int64_t first_bins) {
    for (int64_t m = larger(first_bins, offer->n_bins); m <= table->n_bins; m++) {
        const int64_t ns = offer->ns + offer->rest[m - offer->n_bins] + offer->back[m];
        row[m] = ns < row[m] ? ns : row[m];
    }
}

/* ---- inputs always kept ------------------------------------------------------------------------------------------ */

/* What the budget leaves above the last options. */
static tfg_status find_spare(const tfg_chain *chain, int64_t budget_bytes, int64_t *out_bytes, tfg_error *err) {
    int64_t least_bytes = 0;
    for (int32_t i = 0; i < chain->n_blocks; i++) {
        least_bytes += last_option(&chain->blocks[i])->kept_bytes;
    }
    *out_bytes = larger(budget_bytes, least_bytes) - least_bytes;
    return budget_bytes < least_bytes ? fail_budget(least_bytes, budget_bytes, err) : TFG_OK;
}

static tfg_chain_option add_up(const tfg_chain *chain, const int32_t *option) {
    tfg_chain_option total = {0, 0};
    for (int32_t i = 0; i < chain->n_blocks; i++) {
        total.kept_bytes += chain->blocks[i].options[option[i]].kept_bytes;
        total.ns += chain->blocks[i].options[option[i]].ns;
    }
    return total;
}

/* The block whose next step has the lowest price. Some block has one: else the bytes fit. */
static int32_t find_step(const tfg_chain *chain, const int32_t *option) {
    const tfg_chain_option *cheapest = NULL;
    int32_t found = 0;
    for (int32_t i = 0; i < chain->n_blocks; i++) {
        const tfg_chain_option *step = &chain->blocks[i].options[option[i]];
        if (option[i] + 1 < chain->blocks[i].n_options && (cheapest == NULL || is_cheaper(step, cheapest))) {
            cheapest = step;
            found = i;
        }
    }
    return found;
}

static tfg_chain_option walk(const tfg_chain *chain, int64_t budget_bytes, int32_t *out_option) {
    for (int32_t i = 0; i < chain->n_blocks; i++) {
        out_option[i] = 0;
    }
    while (add_up(chain, out_option).kept_bytes > budget_bytes) {
        out_option[find_step(chain, out_option)]++;
    }
    return add_up(chain, out_option);
}

tfg_status tfg_chain_greedy(const tfg_chain *chain, int64_t budget_bytes, int32_t *out_option,
                            tfg_chain_option *out_total, tfg_error *err) {
    int64_t spare_bytes;
    TFG_TRY(check_chain(chain, LEAST_BINS, err));
    TFG_TRY(find_spare(chain, budget_bytes, &spare_bytes, err));
    *out_total = walk(chain, budget_bytes, out_option);
    return TFG_OK;
}

/* How option k of block i takes what it keeps above the last option, and leaves the rest to the blocks after it. */
static bin_offer exact_offer(const bin_table *table, const tfg_chain *chain, int32_t i, int32_t k) {
    const tfg_chain_block *block = &chain->blocks[i];
    const int64_t more_bytes = block->options[k].kept_bytes - last_option(block)->kept_bytes;
    return (bin_offer){block->options[k].ns, round_up(more_bytes, table->bin_bytes), table_row(table, i + 1),
                       table_row(table, chain->n_blocks)};
}

/* Row i: the blocks from i on. The row after the last is zero. */
static void exact_fill(const bin_table *table, const tfg_chain *chain) {
    row_fill(table, table_row(table, chain->n_blocks), 0);
    for (int32_t i = chain->n_blocks - 1; i >= 0; i--) {
        row_fill(table, table_row(table, i), NEVER_NS);
        for (int32_t k = 0; k < chain->blocks[i].n_options; k++) {
            const bin_offer offer = exact_offer(table, chain, i, k);
            row_improve(table, table_row(table, i), &offer, 0);
        }
    }
}

/* Finds the offers that the first row's last number is made of. */
static void exact_read(const bin_table *table, const tfg_chain *chain, int32_t *out_option) {
    int64_t m = table->n_bins;
    for (int32_t i = 0; i < chain->n_blocks; i++) {
        int32_t k = 0;
        bin_offer offer = exact_offer(table, chain, i, k);
        while (offer.n_bins > m || offer.ns + offer.rest[m - offer.n_bins] != table_row(table, i)[m]) {
            offer = exact_offer(table, chain, i, ++k);
        }
        m -= offer.n_bins;
        out_option[i] = k;
    }
}

tfg_status tfg_chain_exact(const tfg_allocator *allocator, const tfg_chain *chain, int64_t budget_bytes,
                           int32_t n_bins, int32_t *out_option, tfg_chain_option *out_total, tfg_error *err) {
    int64_t spare_bytes;
    TFG_TRY(check_chain(chain, n_bins, err));
    TFG_TRY(find_spare(chain, budget_bytes, &spare_bytes, err));
    bin_table table = divide(spare_bytes, n_bins);
    TFG_TRY(table_make(&table, allocator, (int64_t)chain->n_blocks + 1));
    exact_fill(&table, chain);
    *out_total = walk(chain, budget_bytes, out_option); /* rounding may cost more than greed does */
    if (table_row(&table, 0)[table.n_bins] < out_total->ns) {
        exact_read(&table, chain, out_option);
        *out_total = add_up(chain, out_option);
    }
    (void)allocator->resize(allocator->ctx, table.ns, table.host_bytes, 0);
    return TFG_OK;
}

/* ---- inputs may be dropped --------------------------------------------------------------------------------------- */

/* A row for each run of blocks. Where all blocks are equal, only its length matters. Row 0 has no block. */
typedef struct rotor {
    const tfg_chain *chain;
    bin_table table;
    bool is_uniform;
} rotor;

static int64_t *rotor_row(const rotor *self, int32_t first, int32_t n) {
    const int64_t end = (int64_t)first + n;
    return table_row(&self->table, self->is_uniform || n == 0 ? n : 1 + end * (end - 1) / 2 + first);
}

static void rotor_fill(const rotor *self, int32_t first, int32_t n) {
    const tfg_chain_block *block = &self->chain->blocks[first];
    const bin_table *table = &self->table;
    const int64_t first_bins = round_up(transient_bytes(block), table->bin_bytes);
    int64_t *row = rotor_row(self, first, n);
    row_fill(table, row, NEVER_NS);
    for (int32_t k = 0; k < block->n_options; k++) {
        const bin_offer keep = {block->options[k].ns, round_up(block->options[k].kept_bytes, table->bin_bytes),
                                rotor_row(self, first + 1, n - 1), rotor_row(self, first, 0)};
        row_improve(table, row, &keep, first_bins);
    }
    int64_t pass_ns = 0;
    for (int32_t j = 1; j < n; j++) {
        pass_ns += block[j - 1].pass_ns;
        const bin_offer drop = {pass_ns, round_up(block[j].input_bytes, table->bin_bytes),
                                rotor_row(self, first + j, n - j), rotor_row(self, first, j)};
        row_improve(table, row, &drop, 0); /* what this block takes is in the last of its rows */
    }
}

static bool is_equal(const tfg_chain_block *left, const tfg_chain_block *right) {
    return left->input_bytes == right->input_bytes && left->pass_ns == right->pass_ns &&
           transient_bytes(left) == transient_bytes(right) && left->n_options == right->n_options &&
           memcmp(left->options, right->options, (size_t)left->n_options * sizeof *left->options) == 0;
}

static bool is_uniform(const tfg_chain *chain) {
    int32_t i = 1;
    while (i < chain->n_blocks && is_equal(&chain->blocks[0], &chain->blocks[i])) {
        i++;
    }
    return i >= chain->n_blocks;
}

/* With fewer, some block cannot run even when all else is dropped: its input, and what it takes itself. */
static int64_t least_bins(const tfg_chain *chain, int64_t bin_bytes) {
    int64_t least = 0;
    for (int32_t i = 0; i < chain->n_blocks; i++) {
        const tfg_chain_block *block = &chain->blocks[i];
        const int64_t own_bytes = larger(last_option(block)->kept_bytes, transient_bytes(block));
        least = larger(least, round_up(own_bytes, bin_bytes) + (i > 0 ? round_up(block->input_bytes, bin_bytes) : 0));
    }
    return least;
}

/* The least that divide() makes enough bins of. Nothing takes more bins when they are larger, so halving finds it. */
static int64_t least_budget(const tfg_chain *chain, int32_t n_bins) {
    int64_t enough = MAX_BYTES;
    int64_t too_small = 0;
    while (enough - too_small > 1) {
        const int64_t middle = too_small + (enough - too_small) / 2;
        *(least_bins(chain, middle) <= n_bins ? &enough : &too_small) = middle;
    }
    return enough == 1 ? least_bins(chain, 1) : enough * n_bins;
}

tfg_status tfg_chain_rotor(const tfg_allocator *allocator, const tfg_chain *chain, int64_t budget_bytes,
                           int32_t n_bins, int64_t *out_ns, tfg_error *err) {
    TFG_TRY(check_chain(chain, n_bins, err));
    rotor self = {chain, divide(larger(budget_bytes, 0), n_bins), is_uniform(chain)};
    if (budget_bytes < 0 || least_bins(chain, self.table.bin_bytes) > self.table.n_bins) {
        return fail_budget(least_budget(chain, n_bins), budget_bytes, err);
    }
    const int64_t n_blocks = chain->n_blocks;
    TFG_TRY(table_make(&self.table, allocator, 1 + (self.is_uniform ? n_blocks : n_blocks * (n_blocks + 1) / 2)));
    row_fill(&self.table, rotor_row(&self, 0, 0), 0);
    for (int32_t n = 1; n <= n_blocks; n++) {
        for (int32_t first = 0; first <= (self.is_uniform ? 0 : n_blocks - n); first++) {
            rotor_fill(&self, first, n);
        }
    }
    *out_ns = rotor_row(&self, 0, chain->n_blocks)[self.table.n_bins];
    (void)allocator->resize(allocator->ctx, self.table.ns, self.table.host_bytes, 0);
    return TFG_OK;
}

/* The formula as a sum: with each r, the blocks beyond the first C(c + r - 1, c) are passed once more. No product
 * reaches 2^63: one factor is below 2^31, the other below 2^32. */
int64_t tfg_chain_revolve(int32_t n_blocks, int32_t n_slots) {
    if (n_blocks > 1 && n_slots <= 1) {
        return n_slots < 1 ? INT64_MAX : (int64_t)n_blocks * (n_blocks - 1) / 2;
    }
    int64_t n_again = 0;
    int64_t n_reached = 1;
    for (int64_t r = 1; n_reached < n_blocks; r++) {
        n_again += n_blocks - n_reached;
        n_reached = n_reached * (n_slots + r) / r;
    }
    return n_again;
}
