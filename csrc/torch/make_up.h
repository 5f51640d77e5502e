// SPDX-License-Identifier: BSD-3-Clause
//
// make_up: what the device's memory is made of, in words, for the message that says why nothing more can be let go of.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace tfg {

// Whose parameters the message counts: held weakly, asked for their gradients when the message is made.
void count_parameters_of(const std::vector<at::Tensor> &parameters);

struct MakeUp {
    int64_t parameter_bytes = 0, gradient_bytes = 0;
    int64_t may_leave_bytes = 0; // on the ledger
    int64_t other_bytes = 0;     // optimizer state, inputs, what autograd keeps by itself, temporaries
};
MakeUp make_up();
std::string make_up_words(); // largest first

} // namespace tfg
