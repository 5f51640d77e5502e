/* SPDX-License-Identifier: BSD-3-Clause
 *
 * putback: which of the wanted values that a replay passes over stay, when there is no room for all.
 *
 * Backward asks for the last value of a long chain that was dropped. The replay makes every value before it again, and
 * backward will ask for those too, last first. What stays now is not replayed then; what stays in the middle makes
 * later replays start there and not at the beginning.
 *
 * Words
 *   path   the wanted values that the replay makes again, in tape order, without the asked one.
 *   end    the last values of the path. They are asked for next, and leave their room to the replays after.
 *   rest   what stands before the end.
 *
 * Picture: 16 values, room for 6; a is asked for
 *
 *      live  . . . K . . . K . . K . .  K K K  a
 *           |      rest, evenly       |  end  |
 *
 * Laws
 *   - if all fit, all stay; what stays never takes more than the room;
 *   - the end is the longest run of last values that fits into half the room, and stays;
 *   - the rest of the room is spread over the rest of the path, even in cost. For values of one size, m of them: no
 *     stretch between two that stay costs more than the path's (m + 1)-th part and one value;
 *   - nothing that goes would have fitted into what is left.
 *
 * With n equal values and room for a few, all of backward then replays little more than the best schedule there is (a
 * chain of 256, room for 8: 1.1 times; for 1: three times). Keeping only the end would be quadratic.
 *
 * Cost: O(n), no memory.
 * Threads: nothing here has state.
 */
#ifndef TFG_CORE_PUTBACK_H
#define TFG_CORE_PUTBACK_H

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* size_bytes[i] is what keeping value i takes; cost_ns[i] what it takes to make it from value i - 1, or from where the
 * replay starts. Neither is negative, and each array adds up to 63 bits at most. A negative room is none (values of no
 * bytes fit even there). out_is_kept[i] becomes 1 for what stays, else 0; it is not touched on failure.
 * TFG_ERR_ARGUMENT, with the value in err. */
TFG_CHECKED tfg_status tfg_putback_choose(const int64_t *size_bytes, const int64_t *cost_ns, int32_t n,
                                          int64_t room_bytes, uint8_t *out_is_kept, tfg_error *err);

#ifdef __cplusplus
}
#endif
#endif
