/* SPDX-License-Identifier: BSD-3-Clause */
#include "check.h"
#include "staging_loops.h"
#include "strided.h"

static random_source source;

/* Every byte of the tensor is in the buffer, none other moves; and it comes back where it was. */
static void check_round_trip(const strided *tensor) {
    tfg_staging_view view;
    int64_t buffer_bytes;
    int64_t n_chunks;
    CHECK_EQ(strided_describe(tensor, &view), TFG_OK);
    CHECK_EQ(view.n_elems * view.elem_bytes, strided_elems(tensor) * tensor->elem_bytes);
    tfg_staging_lay(&view, 1, &buffer_bytes, &n_chunks);
    CHECK(buffer_bytes >= view.n_elems * view.elem_bytes && buffer_bytes % 16 == 0);
    unsigned char *buffer = malloc((size_t)buffer_bytes + 1);
    unsigned char *before = malloc((size_t)tensor->block_bytes);
    unsigned char *map = malloc((size_t)tensor->block_bytes);
    memcpy(before, tensor->block, (size_t)tensor->block_bytes);
    strided_mark(tensor, map);
    tfg_cpu_staging_gather(&view, 1, buffer);
    for (int64_t i = 0; i < tensor->block_bytes; i++) {
        CHECK(tensor->block[i] == before[i]);
        tensor->block[i] = (unsigned char)~tensor->block[i];
    }
    tfg_cpu_staging_scatter(&view, 1, buffer);
    for (int64_t i = 0; i < tensor->block_bytes; i++) {
        CHECK(tensor->block[i] == (map[i] ? before[i] : (unsigned char)~before[i]));
    }
    free(buffer);
    free(before);
    free(map);
}

static void test_gather_then_scatter_changes_nothing(void) {
    for (int trial = 0; trial < 600; trial++) {
        const strided tensor = strided_random(&source, 6);
        check_round_trip(&tensor);
        free(tensor.block);
    }
}

static void test_a_dense_tensor_is_one_row_of_wide_elements_in_any_order(void) {
    _Alignas(16) unsigned char block[6 * 8 * 4];
    const int64_t sizes[] = {6, 1, 8};
    const int64_t strides[] = {1, 999, 6};
    tfg_staging_view view;
    CHECK_EQ(tfg_staging_describe(block, 4, 3, sizes, strides, &view, NULL), TFG_OK);
    CHECK_EQ(view.n_dims, 1);
    CHECK_EQ(view.elem_bytes, 16);
    CHECK_EQ(view.n_elems, 12);
    CHECK_EQ(tfg_staging_describe(block + 4, 4, 3, sizes, strides, &view, NULL), TFG_OK);
    CHECK_EQ(view.elem_bytes, 4);
}

static void test_what_can_not_be_staged_is_refused(void) {
    char block[1];
    tfg_staging_view view;
    tfg_error err;
    const int64_t sizes[] = {3, 2, 3, 2, 3, 2, 3};
    const int64_t apart[] = {100000, 40000, 10000, 4000, 1000, 400, 100};
    const int64_t expanded[] = {1, 0};
    const int64_t overlapping[] = {2, 2}; /* of 3 x 2: 0 2 2 4 4 6 */
    const int64_t negative[] = {-1, 1};
    CHECK_EQ(tfg_staging_describe(block, 4, 7, sizes, apart, &view, &err), TFG_ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "7 dimensions") != NULL);
    CHECK_EQ(tfg_staging_describe(block, 4, 6, sizes, apart, &view, NULL), TFG_OK);
    CHECK_EQ(tfg_staging_describe(block, 4, 2, sizes, expanded, &view, &err), TFG_ERR_UNSUPPORTED);
    CHECK_EQ(tfg_staging_describe(block, 4, 2, sizes, overlapping, &view, &err), TFG_ERR_UNSUPPORTED);
    CHECK_EQ(tfg_staging_describe(block, 4, 2, sizes, negative, &view, &err), TFG_ERR_ARGUMENT);
    CHECK_EQ(tfg_staging_describe(block, 4, 2, negative, sizes, &view, &err), TFG_ERR_ARGUMENT);
    CHECK_EQ(tfg_staging_describe(block, 3, 2, sizes, apart, &view, &err), TFG_ERR_ARGUMENT);
    CHECK_EQ(tfg_staging_describe(block, 4, 65, sizes, apart, &view, &err), TFG_ERR_UNSUPPORTED);
}

static void test_views_lie_side_by_side(void) {
    char block[8];
    tfg_staging_view views[4];
    int64_t buffer_bytes;
    int64_t n_chunks;
    const int64_t sizes[] = {3, 4096, 0, 4097};
    const int64_t stride = 2;
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(tfg_staging_describe(block, 1, 1, &sizes[i], &stride, &views[i], NULL), TFG_OK);
    }
    tfg_staging_lay(views, 4, &buffer_bytes, &n_chunks);
    CHECK_EQ(views[1].first_byte, 16);
    CHECK_EQ(views[3].first_byte, 16 + 4096);
    CHECK_EQ(buffer_bytes, 16 + 4096 + 4112);
    CHECK_EQ(n_chunks, 4);
    const int64_t expected[] = {0, 1, 3, 3};
    for (int64_t chunk = 0; chunk < n_chunks; chunk++) {
        CHECK_EQ(tfg_staging_find(views, 4, chunk), expected[chunk]);
    }
    tfg_staging_lay(views, 0, &buffer_bytes, &n_chunks);
    CHECK_EQ(buffer_bytes + n_chunks, 0);
}

int main(int argc, char **argv) {
    source.state = random_seed(argc, argv);
    RUN(test_gather_then_scatter_changes_nothing);
    RUN(test_a_dense_tensor_is_one_row_of_wide_elements_in_any_order);
    RUN(test_what_can_not_be_staged_is_refused);
    RUN(test_views_lie_side_by_side);
    return check_finish();
}
