// SPDX-License-Identifier: BSD-3-Clause
#include "cuda_order.h"

#include <utility>

void cuda_set_order(int order) { cuda_order = static_cast<CudaOrder>(order); }
long long cuda_launches() { return std::exchange(cuda_n_launches, 0); }
long long cuda_error_reads() { return std::exchange(cuda_n_error_reads, 0); }
void cuda_fail_next() { cuda_last_error = cudaErrorInvalidConfiguration; }
