// SPDX-License-Identifier: BSD-3-Clause
//
// peak: where the device's memory was highest, and how it rose and fell through the last steps. For the report; decides nothing.
//
// Words
//   doing    what this thread is at: an operator of a region's forward, one that is replayed, a node of backward, or something outside
//   sample   live and kept bytes at one moment: a region begins or ends, backward asks for a saved tensor, the peak rises
//
//      live   │      ╭╮  ╭─╮
//             │   ╭──╯╰──╯ ╰──╮          samples: a ring, the oldest are overwritten
//             │ ──╯           ╰───
//               forward │ backward
//
// Threads: doing is the thread's own; the peak and the ring have one leaf mutex, under which nothing is allocated or released.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tfg {

enum class Phase : uint8_t { OUTSIDE, FORWARD, REPLAY, BACKWARD, STEP_BEGINS };
const char *phase_word(Phase phase); // "forward"

// What this thread is at, while alive. `what` outlives the process's use of it (an operator's schema name).
class NowDoing {
  public:
    NowDoing(Phase phase, const char *what, int64_t key);
    ~NowDoing();
    NowDoing(const NowDoing &) = delete;

  private:
    Phase phase_;
    const char *what_;
    int64_t key_;
};

void note_unpack(int64_t key); // backward asks for a tensor that this region saved; takes a sample
void note_peak(int64_t live_bytes);
void note_moment(Phase phase, int64_t key); // takes a sample

struct Peak {
    int64_t live_bytes = 0, kept_bytes = 0; // of which on the ledger
    Phase phase = Phase::OUTSIDE;
    std::string what; // operator or backward node; "" outside
    int64_t key = -1; // whose block, -1: none
};
Peak last_peak();
void forget_peak();

struct Sample {
    int64_t at_ns, live_bytes, kept_bytes, key;
    Phase phase;
};
std::vector<Sample> samples(); // oldest first

} // namespace tfg
