/* SPDX-License-Identifier: BSD-3-Clause
 *
 * chain: what planning a chain of blocks could reach. Bounds that a report quotes; nothing here runs a step.
 *
 * Words
 *   block    a stretch of the tape that leans on nothing before it but its input, the output of the block before: a
 *            layer.
 *   option   one way to run a block: the bytes that it keeps for backward, and the time that it takes.
 *   step     from one option of a block to the next: it frees bytes at a price, in ns per byte.
 *   bin      what the programmes count bytes in. Every size is rounded up to whole bins.
 *
 * Picture: the two ways of the rotor programme for blocks a..b; a's input is there, m bytes are free
 *
 *      keep an option    a ══> ├──── a + 1 .. b in m - kept ────┤ then a's backward
 *      keep an input     a ──> ──> ──> ├──── j .. b in m - input of j ────┤ then ├──── a .. j - 1 in m ────┤
 *
 * Laws
 *   - greedy and exact take no more than the budget. Greedy takes no more time than the best there is and the last step
 *     it walked; exact no more than greedy, and no more than the best there is with n_blocks bins and n_bins bytes
 *     fewer. With sizes that are whole bins it is the best there is;
 *   - rotor is the best of all schedules that keep what they kept until its backward has used it. To let go earlier and
 *     make it again can be better where sizes differ, so it is no bound for those;
 *   - equal blocks with room for inputs alone: rotor replays as often as revolve says;
 *   - where one budget is enough, so is every greater one.
 *
 * Source: multiple-choice knapsack (Sinha and Zoltners 1979); rotor (Beaumont et al. 2019); revolve (Griewank and
 * Walther 2000, algorithm 799).
 *
 * Cost: L blocks, K options in all, M bins. greedy O(L K), no memory; exact O(K M) and L M numbers; rotor O(L^3 M) and
 * L^2 M / 2 numbers, for equal blocks O(L^2 M) and L M; revolve O(sqrt L).
 * Threads: nothing here has state.
 */
#ifndef TFG_CORE_CHAIN_H
#define TFG_CORE_CHAIN_H

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tfg_chain_option {
    int64_t kept_bytes; /* until the block's backward; its output included, its input not */
    int64_t ns;         /* forward and backward of the block, replay included */
} tfg_chain_option;

/* Greedy and exact want the options alone: the rest may be 0. */
typedef struct tfg_chain_block {
    const tfg_chain_option *options; /* one at least: a block that must keep all, such as the last one, has just that */
    int32_t n_options;
    int64_t input_bytes;
    int64_t pass_ns;        /* forward, when nothing but the output stays */
    int64_t forward_bytes;  /* the most that forward takes beside the input, a waiting gradient included */
    int64_t backward_bytes; /* the most that backward takes beside the input: kept, replayed, gradients */
} tfg_chain_block;

/* Borrowed for one call. In a block's options kept_bytes falls, ns does not, and no step has a lower price than the one
 * before it; the last still keeps the next block's input. All sizes, with the first options, add up to 2^60 at most;
 * all times, with the last options, to 2^61 / (n_blocks + 1). */
typedef struct tfg_chain {
    const tfg_chain_block *blocks;
    int32_t n_blocks;
} tfg_chain;

/* Failures: TFG_ERR_ARGUMENT with what is wrong in err, a budget that is too small with the least that would do;
 * TFG_ERR_MEMORY; TFG_ERR_FULL when the table would have 2^31 numbers or more. No result is touched then.
 *
 * n_bins, 2 at least: as many bins of one size divide a number of bytes, rounded down. Fewer bytes than n_bins get bins
 * of one byte, one each. */

/* ---- inputs always kept ------------------------------------------------------------------------------------------ */

/* Starts with option 0 everywhere and walks the steps of all blocks by rising price, earlier blocks first, until the
 * bytes fit. out_option[n_blocks]; *out_total is what they keep and take together. */
TFG_CHECKED tfg_status tfg_chain_greedy(const tfg_chain *chain, int64_t budget_bytes, int32_t *out_option,
                                        tfg_chain_option *out_total, tfg_error *err);

/* The same question by dynamic programme. The bins divide what the budget leaves above the last options. */
TFG_CHECKED tfg_status tfg_chain_exact(const tfg_allocator *allocator, const tfg_chain *chain, int64_t budget_bytes,
                                       int32_t n_bins, int32_t *out_option, tfg_chain_option *out_total,
                                       tfg_error *err);

/* ---- inputs may be dropped --------------------------------------------------------------------------------------- */

/* The least time for forward and backward of all blocks with budget_bytes free beside the first block's input. The bins
 * divide the budget. */
TFG_CHECKED tfg_status tfg_chain_rotor(const tfg_allocator *allocator, const tfg_chain *chain, int64_t budget_bytes,
                                       int32_t n_bins, int64_t *out_ns, tfg_error *err);

/* How many forwards are run again at least for l equal blocks when c inputs fit, the chain's own included:
 * r * l - C(c + r, r - 1), with r the least number for which l <= C(c + r, c). INT64_MAX where there is no way: more
 * than one block and no slot. */
int64_t tfg_chain_revolve(int32_t n_blocks, int32_t n_slots);

#ifdef __cplusplus
}
#endif
#endif
