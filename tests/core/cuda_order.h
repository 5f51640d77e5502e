/* SPDX-License-Identifier: BSD-3-Clause
 *
 * cuda_order: runs a test of kernels once for each order in which cuda_on_host can run a block's threads.
 */
#ifndef TFG_TEST_CUDA_ORDER_H
#define TFG_TEST_CUDA_ORDER_H

#ifdef __cplusplus
extern "C" {
#endif

enum { N_CUDA_ORDERS = 3 };
void cuda_set_order(int order);
/* Since the last call: launches, and readings of the runtime's last error. */
long long cuda_launches(void);
long long cuda_error_reads(void);
void cuda_fail_next(void); /* the runtime has an error waiting */

#define RUN_IN_EVERY_ORDER(test)                           \
    for (int order = 0; order < N_CUDA_ORDERS; order++) {  \
        cuda_set_order(order);                             \
        RUN(test);                                         \
    }

#ifdef __cplusplus
}
#endif
#endif
