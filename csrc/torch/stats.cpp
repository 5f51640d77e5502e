// SPDX-License-Identifier: BSD-3-Clause
#include "stats.h"

#include "fork.h"

namespace tfg {

namespace {

struct Book {
    std::mutex mutex;
    std::deque<Stats> by_key; // a deque: a key's statistics never move

    Book() { hold_across_fork(mutex); }
};
Book &book() {
    static auto *instance = new Book;
    return *instance;
}

} // namespace

int64_t new_key(std::string label) {
    std::lock_guard<std::mutex> lock(book().mutex);
    book().by_key.emplace_back().label = std::move(label);
    return static_cast<int64_t>(book().by_key.size()) - 1;
}

Stats &stats_of(int64_t key) {
    std::lock_guard<std::mutex> lock(book().mutex);
    return book().by_key.at(static_cast<size_t>(key));
}

} // namespace tfg
