/* SPDX-License-Identifier: BSD-3-Clause
 *
 * cut: at which price each kept value of a region leaves, chains that share a prefix counted once.
 *
 * Words
 *   node    a value of the region. wanted: backward reads it, so it is kept or replayed. A root is simply there: an
 *           input, a parameter, what a pinned operator returned; so is a node that no operator makes.
 *           Neither wanted nor root: the forward freed it, so it is replayed whenever a replay reads it.
 *   price   ns of replay per byte freed. At price p, what leaves is the choice of least p * (bytes kept) + ns replayed;
 *           a node's leave price is the least p at which it leaves.
 *
 * Picture: costs below the operators, wanted nodes with their bytes; h is not kept
 *
 *      x ──op──> h ──op──> a 100      a and b leave together at (10 + 1 + 1) / 200 = 0.06, not each at 11 / 100
 *          10    │    1
 *                └──op──> b 100
 *                     1
 *
 * Why it is a cut. What replays is a set of operators; one that reads a node which is neither kept nor root brings that
 * node's producer. So it is the closure of greatest (p * bytes freed - ns), a minimum cut. The closures grow with p,
 * and each is found inside the last: a set whose best part is not itself is parted in two, else all of it has one price.
 *
 * Laws
 *   - for every p, the nodes priced at or below p are a best choice: every operator replays at most once per region;
 *   - a node that leaves leans only on nodes that are kept, roots, or priced at or below it or replayed anyway;
 *   - the same graph gets the same prices everywhere.
 *
 * Source: maximum closure by minimum cut (Picard 1976), parted as in the decomposition of ratio problems (Dinkelbach);
 * the cut itself by Dinic's algorithm.
 *
 * Cost: at most one cut per distinct price and one more; a cut is near linear in practice. Memory: the scratch grows to
 * the largest graph seen and stays.
 * Threads: not thread-safe; distinct scratches are independent.
 */
#ifndef TFG_CORE_CUT_H
#define TFG_CORE_CUT_H

#include <stdbool.h>
#include <stdint.h>

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tfg_cut tfg_cut; /* the scratch of the search */

/* One operator, in the order in which they ran: refs[first_ref] and on are the nodes it reads, then those it makes. */
typedef struct tfg_cut_op {
    int64_t cost_ns;
    int32_t first_ref;
    int32_t n_reads;
    int32_t n_writes;
} tfg_cut_op;

typedef struct tfg_cut_node {
    int64_t size_bytes;
    bool is_wanted;
    bool is_root;
} tfg_cut_node;

/* Borrowed for one call. */
typedef struct tfg_cut_graph {
    const tfg_cut_op *ops;
    const tfg_cut_node *nodes;
    const int32_t *refs;
    int32_t n_ops;
    int32_t n_nodes;
    int32_t n_refs;
} tfg_cut_graph;

/* The allocator is copied; its ctx must outlive the scratch. *out is NULL on failure. TFG_ERR_MEMORY. */
TFG_CHECKED tfg_status tfg_cut_create(const tfg_allocator *allocator, tfg_cut **out);
void tfg_cut_destroy(tfg_cut *cut); /* NULL is fine */

/* out_price[n_nodes], ns per byte: the leave price of every wanted node; of others, that of the operator that makes
 * them. Infinite for roots, and where leaving frees nothing. Costs and sizes are not negative and add up to 62 bits at
 * most; a node is made by one operator at most, before any that reads it. TFG_ERR_ARGUMENT, with what is wrong in err;
 * TFG_ERR_MEMORY. out_price is not touched on failure. */
TFG_CHECKED tfg_status tfg_cut_prices(tfg_cut *cut, const tfg_cut_graph *graph, double *out_price, tfg_error *err);

#ifdef __cplusplus
}
#endif
#endif
