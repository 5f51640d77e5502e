/* SPDX-License-Identifier: BSD-3-Clause
 *
 * ledger: the order in which kept storages leave a device.
 *
 * Words
 *   entry    one kept storage, as a small number. The torch room holds the reference at the same index.
 *   queue    the entries that may leave, cheapest first.
 *   aside    held but not in the queue: pinned by a running replay, or refused when it was to be dropped. Its bytes are
 *            still on the device, so they are still counted.
 *   price    nanoseconds of replay per byte that leaving frees. Infinite: leaves when nothing else is left.
 *   sequence where in the forward the storage was saved. (Not a time: backward asks in the opposite order, so the
 *            smallest sequence is asked for last, and its room stays free longest.)
 *
 * Picture
 *
 *      add ---> queue ---- first ---> (the caller drops the reference) ---> remove
 *                |  ^
 *      set_aside v  | set_back
 *               aside ------------------------------------------------------> remove
 *
 * Laws (tfg_ledger_check proves them)
 *   - each id below the highest one given out is in the queue, aside or free, and only one of these;
 *   - first is the entry before all others of the queue by (price, sequence, larger size, id): a total order, so the
 *     same calls give the same answers everywhere;
 *   - kept counts the queue and what is aside; aside counts what is aside.
 *
 * Cost: add, remove, set_aside, set_back and reprice O(log n), check O(n), the rest O(1). Only create and add ask for
 * memory, and add not once warm: remove and reset keep what was grown.
 * Threads: not thread-safe (the torch room has one leaf lock per device); distinct ledgers are independent.
 */
#ifndef TFG_CORE_LEDGER_H
#define TFG_CORE_LEDGER_H

#include <stdbool.h>
#include <stdint.h>

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { TFG_LEDGER_NONE = -1 };

typedef struct tfg_ledger tfg_ledger;

typedef struct tfg_ledger_totals {
    int64_t kept_bytes;  /* all entries */
    int64_t aside_bytes; /* of which aside */
    int32_t n_kept;
    int32_t n_aside;
} tfg_ledger_totals;

/* The allocator is copied; its ctx must outlive the ledger. *out is NULL on failure. TFG_ERR_MEMORY. */
TFG_CHECKED tfg_status tfg_ledger_create(const tfg_allocator *allocator, tfg_ledger **out);
void tfg_ledger_destroy(tfg_ledger *ledger); /* NULL is fine */

/* A storage is kept from now on, and may leave. size_bytes >= 0, and all entries together fit into 63 bits; the price
 * is a number or infinite. Ids of removed entries are given out again, the last one removed first.
 * TFG_ERR_ARGUMENT, TFG_ERR_MEMORY, TFG_ERR_FULL; *out_entry is then TFG_LEDGER_NONE and the ledger as before. */
TFG_CHECKED tfg_status tfg_ledger_add(tfg_ledger *ledger, int64_t size_bytes, double price_ns_per_byte,
                                      int64_t sequence, int32_t *out_entry);

/* The entry is no longer kept, in the queue or aside. Here and below an entry that the ledger does not hold is
 * ignored. */
void tfg_ledger_remove(tfg_ledger *ledger, int32_t entry);

/* The entry that would leave next, or TFG_LEDGER_NONE: the queue is empty. It stays where it is. */
int32_t tfg_ledger_first(const tfg_ledger *ledger);

/* Out of the queue, and in again at its place. Twice is as once. Neither asks for memory. */
void tfg_ledger_set_aside(tfg_ledger *ledger, int32_t entry);
void tfg_ledger_set_back(tfg_ledger *ledger, int32_t entry);

/* A new price; of an entry that is aside, for when it is set back. Not a number: infinite, any doubt means keep. */
void tfg_ledger_reprice(tfg_ledger *ledger, int32_t entry, double price_ns_per_byte);

bool tfg_ledger_holds(const tfg_ledger *ledger, int32_t entry);
int64_t tfg_ledger_size_bytes(const tfg_ledger *ledger, int32_t entry); /* 0 if not held */
void tfg_ledger_count(const tfg_ledger *ledger, tfg_ledger_totals *out);

/* Forgets everything and keeps the memory. */
void tfg_ledger_reset(tfg_ledger *ledger);

/* Proves the laws above. O(size). TFG_ERR_BROKEN with the law in err. */
TFG_CHECKED tfg_status tfg_ledger_check(const tfg_ledger *ledger, tfg_error *err);

#ifdef __cplusplus
}
#endif
#endif
