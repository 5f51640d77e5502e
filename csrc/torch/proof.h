// SPDX-License-Identifier: BSD-3-Clause
//
// proof: the evidence, gathered once per call site and operator, that replaying it gives the same bits.
//
// At first sight the results are fingerprinted after the operator and again where the region ends; a difference means an
// unseen writer. The first replay is compared with the fingerprint before autograd sees it; a match is remembered here, a
// mismatch raises and the operator's results are kept from then on.
//
// A batch that fits replays nothing, so nothing would ever be proven and every step would pay for fingerprints. A region that keeps is
// *calm* once its key has been seen three times without an eviction on the device in between: nothing is fingerprinted where it
// ends but operators that were never met. Should something of it leave after all, it is fingerprinted as it leaves
// (device_ledger.h), and its replay compared with that. Then nothing is calm any more.
//
//      regions of a key:   1  2  3  4  5  6   eviction   7  8  9  10
//      fingerprints:       x  x  x  -  -  -   of what    x  x  x  -
//                                             leaves
#pragma once

#include <cstdint>

namespace tfg {

enum class Belief : uint8_t { UNMET, UNKNOWN, PROVEN, DISTRUSTED };
constexpr int32_t calm_after_regions = 3;

uint64_t proof_site(int64_t key, int32_t ordinal, uint64_t op_id);
Belief belief_in(uint64_t site);
Belief believe(uint64_t site, Belief belief); // what was believed until now; once DISTRUSTED it stays so

// Stress modes (TFG_STRESS): let go after every operator; compare fingerprints at every replay.
struct Stress {
    bool drop = false, verify = false;
};
Stress &stress();

} // namespace tfg
