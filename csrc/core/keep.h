/* SPDX-License-Identifier: BSD-3-Clause
 *
 * keep: what may be let go of, decided over a span of the tape.
 *
 * Fixed-interval mode lets go of everything droppable where a region ends. Droppable means: every value of the
 * storage that a handle asks for can be made again from roots. One pass in tape order decides it:
 *
 *      an operator that is not pinned and reads only roots and derivable values   -> its writes to what is not external
 *                                                                                    are DERIVABLE
 *      otherwise, a write that a handle asks for                                  -> ROOT  (kept, and may be relied on)
 *                 the last write to an external that is not opaque                -> ROOT  (the tape holds it)
 *                 any other write                                                 -> LOST
 *
 * A storage is kept, whatever its values say, when it is opaque, or when a handle asks for a value that has been
 * overwritten since: autograd's own save would serve the storage as it is, so that is what must be served.
 * A value whose storage is opaque is never relied on, nor is a root that has been overwritten: its bytes are nowhere.
 *
 * Law: after settling, each handle's value is a root, derivable, or sits on a storage that is kept.
 * Cost: O(operators and references of the span).
 * Threads: as the tape.
 */
#ifndef TFG_CORE_KEEP_H
#define TFG_CORE_KEEP_H

#include "tape.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Settles the values written by operators [first_op, n_ops), the current end. first_op <= n_ops. May be called again on
 * the same span: a value once ROOT or DERIVABLE stays so. TFG_ERR_ARGUMENT. */
TFG_CHECKED tfg_status tfg_keep_settle(tfg_tape *tape, int32_t first_op);

/* May this storage's strong reference be released now (it has been settled)? */
bool tfg_keep_is_droppable(const tfg_tape *tape, int32_t storage);

/* Marks `is_needed` on every derivable value with a handle and on every value that replaying one could read, down to the
 * roots, which are marked and not followed. (What else a replayed operator writes is made and let go of.)
 * What is not marked, and has no handle, the tape need not hold; an operator that writes no marked value but roots never
 * runs again. O(size). */
void tfg_keep_prune(tfg_tape *tape);

#ifdef __cplusplus
}
#endif
#endif
