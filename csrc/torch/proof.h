// SPDX-License-Identifier: BSD-3-Clause
//
// proof: the evidence, gathered once per call site and operator, that replaying it gives the same bits.
//
// At first sight the results are fingerprinted after the operator and again where the region ends; a difference means an
// unseen writer. The first replay is compared with the fingerprint before autograd sees it; a match is remembered here, a
// mismatch raises and the operator's results are kept from then on.
#pragma once

#include <cstdint>

namespace tfg {

enum class Belief : uint8_t { UNKNOWN, PROVEN, DISTRUSTED };

uint64_t proof_site(int64_t key, int32_t ordinal, uint64_t op_id);
Belief belief_in(uint64_t site);
bool meet(uint64_t site);                  // an unknown one that was never met before
bool believe(uint64_t site, Belief belief); // whether it was unknown until now

// Stress modes (TFG_STRESS): let go after every operator; compare fingerprints at every replay.
struct Stress {
    bool drop = false, verify = false;
};
Stress &stress();

} // namespace tfg
