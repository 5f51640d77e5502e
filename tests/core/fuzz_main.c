/* SPDX-License-Identifier: BSD-3-Clause
 *
 * fuzz_main: runs the fuzz target without a fuzzer: fuzz_tape CORPUS_DIRECTORY [N_RANDOM [SEED]]
 *
 * Every file of the directory, then N_RANDOM pseudo-random inputs. An input that fails aborts; its number and the seed
 * were printed, or the file's name.
 */
#define _POSIX_C_SOURCE 200809L
#include <dirent.h>

#include "random_tape.h"

enum { MAX_INPUT_BYTES = 4096, MAX_RANDOM_BYTES = 400 };

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size_bytes);

static void run_file(const char *directory, const char *name) {
    char path[1024];
    uint8_t bytes[MAX_INPUT_BYTES];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL);
    if (file != NULL) {
        const size_t size_bytes = fread(bytes, 1, sizeof bytes, file);
        fclose(file);
        fprintf(stderr, "%s (%zu bytes)\n", path, size_bytes);
        CHECK_EQ(LLVMFuzzerTestOneInput(bytes, size_bytes), 0);
    }
}

static int run_directory(const char *directory) {
    int n_files = 0;
    DIR *entries = opendir(directory);
    if (entries == NULL) {
        return 0;
    }
    for (struct dirent *entry = readdir(entries); entry != NULL; entry = readdir(entries)) {
        if (entry->d_name[0] != '.') {
            run_file(directory, entry->d_name);
            n_files++;
        }
    }
    closedir(entries);
    return n_files;
}

/* Each input has a seed of its own, so that one can be had again without the ones before it. */
static void run_random(uint64_t seed, long n_random) {
    for (long i = 0; i < n_random; i++) {
        uint8_t bytes[MAX_RANDOM_BYTES];
        random_source source = {seed + (uint64_t)i};
        const int32_t n_bytes = random_below(&source, MAX_RANDOM_BYTES + 1);
        for (int32_t b = 0; b < n_bytes; b++) {
            bytes[b] = (uint8_t)random_below(&source, 256);
        }
        CHECK_EQ(LLVMFuzzerTestOneInput(bytes, (size_t)n_bytes), 0);
    }
}

int main(int argc, char **argv) {
    const long n_random = argc > 2 ? strtol(argv[2], NULL, 10) : 0;
    const uint64_t seed = argc > 3 ? strtoull(argv[3], NULL, 0) : 20240229;
    CHECK(argc > 1 && run_directory(argv[1]) > 0);
    fprintf(stderr, "%s: %ld random inputs, seeds %llu and up\n", argv[0], n_random, (unsigned long long)seed);
    run_random(seed, n_random);
    return check_finish();
}
