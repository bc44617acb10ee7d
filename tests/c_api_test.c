/* The C API from C: rows are stored, encoded and attended to on the CPU; wrong calls say what was wrong. */
#include <crumb/crumb.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kHeads = 4, kHeadsKv = 2, kDim = 64, kTokens = 192, kBlocks = kTokens / 64 };

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, crumb_error());    \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static uint32_t state = 7;
static float uniform(void) { /* [-1, 1) */
    state = state * 1664525u + 1013904223u;
    return (float)(int32_t)state / 2147483648.0f;
}
static uint16_t to_bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return (uint16_t)(u >> 16);
}
static float from_bf16(uint16_t x) {
    uint32_t u = (uint32_t)x << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static uint16_t k[kTokens][kHeadsKv][kDim], v[kTokens][kHeadsKv][kDim];
static float q[kHeads][kDim], out[kHeads][kDim];

/* Attention of head h over all tokens, straight from the rows. */
static void expected(int h, double* result) {
    const int kv = h / (kHeads / kHeadsKv);
    double sum = 0;
    for (int c = 0; c < kDim; c++) result[c] = 0;
    for (int t = 0; t < kTokens; t++) {
        double logit = 0;
        for (int c = 0; c < kDim; c++) logit += (double)q[h][c] * from_bf16(k[t][kv][c]);
        const double weight = exp(logit / 8);
        sum += weight;
        for (int c = 0; c < kDim; c++) result[c] += weight * from_bf16(v[t][kv][c]);
    }
    for (int c = 0; c < kDim; c++) result[c] /= sum;
}

static double error_of_output(void) {
    double error = 0, norm = 0, want[kDim];
    for (int h = 0; h < kHeads; h++) {
        expected(h, want);
        for (int c = 0; c < kDim; c++) {
            error += pow(out[h][c] - want[c], 2);
            norm += pow(want[c], 2);
        }
    }
    return sqrt(error / norm);
}

/* A pool that is no pool: any order will do. */
static int calls = 0;
static void backwards(void* context, int n, void (*body)(void* work, int i), void* work) {
    for (int i = n - 1; i >= 0; i--) body(work, i), ++*(int*)context;
}

int main(void) {
    EXPECT(strlen(crumb_version()) > 0);
    EXPECT(crumb_has_backend(CRUMB_CPU) == 1);

    crumb_layer_shape shape = {0, kHeads, kHeadsKv, kDim, kDim, 0.125f, 0.0f};
    crumb_layer* layer = NULL;
    EXPECT(crumb_layers_create("int3", NULL, &shape, 1, &layer) == CRUMB_ERROR_ARGUMENT);
    EXPECT(strstr(crumb_error(), "int3") && strstr(crumb_error(), "had2") && layer == NULL);
    EXPECT(crumb_layers_create("oscar", NULL, &shape, 1, &layer) == CRUMB_ERROR_ARGUMENT); /* needs a calibration */
    EXPECT(crumb_layers_create("kivi32", NULL, &shape, 1, &layer) == CRUMB_ERROR_UNSUPPORTED && strstr(crumb_error(), "had2"));
    shape.n_head = 3;
    EXPECT(crumb_layers_create("had2", NULL, &shape, 1, &layer) == CRUMB_ERROR_ARGUMENT);
    shape.n_head = kHeads;
    EXPECT(crumb_layers_create("had2", NULL, &shape, 1, &layer) == CRUMB_OK);
    const size_t coded_bytes = crumb_block_bytes(layer), exact_bytes = crumb_exact_block_bytes(layer);
    EXPECT(coded_bytes == kHeadsKv * (2 * 16 * kDim + 2 * 64));
    EXPECT(exact_bytes == kHeadsKv * 64 * 2 * kDim * 2);
    EXPECT(fabs(crumb_bits_per_element(layer) - 2.125) < 1e-9);

    uint32_t blocks[kTokens], slots[kTokens], ids[kBlocks];
    for (int t = 0; t < kTokens; t++) {
        blocks[t] = (uint32_t)(kBlocks - 1 - t / 64), slots[t] = (uint32_t)t;
        for (int h = 0; h < kHeadsKv; h++) {
            for (int c = 0; c < kDim; c++) k[t][h][c] = to_bf16(2 * uniform()), v[t][h][c] = to_bf16(uniform());
        }
    }
    for (int h = 0; h < kHeads; h++) {
        for (int c = 0; c < kDim; c++) q[h][c] = 3 * uniform();
    }
    void* exact = aligned_alloc(64, kBlocks * exact_bytes);
    void* coded = aligned_alloc(64, kBlocks * coded_bytes);
    const crumb_rows rows = {CRUMB_CPU, kTokens, &k[0][0][0], &v[0][0][0], blocks, slots, exact, exact_bytes};
    EXPECT(crumb_store(layer, &rows, NULL) == CRUMB_OK);

    crumb_encode_job jobs[kBlocks];
    crumb_encode_counts counts = {0, 0};
    for (uint32_t b = 0; b < kBlocks; b++) jobs[b] = (crumb_encode_job){b, b, 0, 0}, ids[b] = kBlocks - 1 - b;
    crumb_encode_batch batch = {CRUMB_CPU, kBlocks, jobs, exact, exact_bytes, coded, coded_bytes, NULL, &counts,
                                      NULL};
    EXPECT(crumb_encode(layer, &batch, NULL) == CRUMB_OK);
    EXPECT(counts.nonfinite == 0 && counts.saturated == 0);

    crumb_row row = {0, 0, kTokens - 1, 0, 0, kTokens};
    crumb_step step = {CRUMB_CPU, 1, 1, &row, ids, ids, 1, kBlocks, 0, 1, NULL, 0, NULL, 0};
    const crumb_io io = {coded, coded_bytes, exact, exact_bytes, NULL, NULL, &q[0][0], kHeads * kDim, kDim, &out[0][0],
                         kHeads * kDim};
    size_t workspace = 1;
    EXPECT(crumb_workspace_bytes(layer, &step, &workspace) == CRUMB_OK && workspace == 0);
    EXPECT(crumb_plan(layer, &step, NULL) == CRUMB_OK);
    EXPECT(crumb_attend(layer, &step, &io, NULL) == CRUMB_OK);
    EXPECT(error_of_output() < 1e-4); /* everything exact */

    row.coded_end = 128;
    EXPECT(crumb_attend(layer, &step, &io, NULL) == CRUMB_OK);
    EXPECT(error_of_output() > 1e-3 && error_of_output() < 0.6); /* most of it in 2 bits */
    const crumb_threads pool = {3, backwards, &calls};
    step.threads = &pool;
    float once[kHeads][kDim];
    memcpy(once, out, sizeof out);
    EXPECT(crumb_attend(layer, &step, &io, NULL) == CRUMB_OK && memcmp(once, out, sizeof out) == 0);
    EXPECT(calls == 3);
    batch.threads = &pool;
    memset(coded, 0, kBlocks * coded_bytes);
    EXPECT(crumb_encode(layer, &batch, NULL) == CRUMB_OK && calls == 3 + kBlocks * kHeadsKv);
    EXPECT(crumb_attend(layer, &step, &io, NULL) == CRUMB_OK && memcmp(once, out, sizeof out) == 0);

    /* Blocks are bytes: a copy of them reads the same. */
    void* moved = aligned_alloc(64, kBlocks * coded_bytes);
    const uint32_t from[kBlocks] = {0, 1, 2}, to[kBlocks] = {2, 1, 0};
    EXPECT(crumb_copy(CRUMB_CPU, coded_bytes, moved, coded_bytes, to, coded, coded_bytes, from, kBlocks, NULL) == CRUMB_OK);
    EXPECT(memcmp(moved, (char*)coded + 2 * coded_bytes, coded_bytes) == 0);

    step.rows_per_tile = 0;
    EXPECT(crumb_attend(layer, &step, &io, NULL) == CRUMB_ERROR_ARGUMENT && strstr(crumb_error(), "0 rows"));
    step.rows_per_tile = 1;
    step.rows = NULL;
    EXPECT(crumb_plan(layer, &step, NULL) == CRUMB_ERROR_ARGUMENT && strstr(crumb_error(), "rows"));
    step.rows = &row;

    /* Counts and rows that cannot be are refused before anything is read. */
    const crumb_row good = row;
    uint32_t holes[kBlocks];
    memcpy(holes, ids, sizeof ids);
    step.exact_ids = holes;
    const struct { int32_t begin, coded_end, end; int32_t hole; const char* why; } bad_rows[] = {
        {-1, 0, 64, -1, "tokens -1 to 64"}, {0, 0, -1, -1, "tokens 0 to -1"}, {0, 0, kTokens + 1, -1, "tokens 0 to 193 of 3 blocks"},
        {0, 128, kTokens, 2, "tokens 128 to 192 in exact block 2"}, {0, 127, kTokens, 1, "tokens 64 to 128 in exact block 1"}};
    for (size_t i = 0; i < sizeof bad_rows / sizeof *bad_rows; i++) {
        row.begin = bad_rows[i].begin, row.coded_end = bad_rows[i].coded_end, row.end = bad_rows[i].end;
        if (bad_rows[i].hole >= 0) holes[bad_rows[i].hole] = CRUMB_NO_BLOCK;
        EXPECT(crumb_attend(layer, &step, &io, NULL) == CRUMB_ERROR_ARGUMENT && strstr(crumb_error(), bad_rows[i].why));
        memcpy(holes, ids, sizeof ids);
    }
    row = good;
    holes[0] = holes[1] = CRUMB_NO_BLOCK; /* all of their tokens are read through codes */
    EXPECT(crumb_attend(layer, &step, &io, NULL) == CRUMB_OK && memcmp(once, out, sizeof out) == 0);
    step.exact_ids = ids, step.coded_ids = holes;
    EXPECT(crumb_attend(layer, &step, &io, NULL) == CRUMB_ERROR_ARGUMENT && strstr(crumb_error(), "tokens 0 to 64 in coded block 0"));
    step.coded_ids = ids, step.sink = -1;
    EXPECT(crumb_attend(layer, &step, &io, NULL) == CRUMB_ERROR_ARGUMENT && strstr(crumb_error(), "sink of -1"));
    step.sink = 0;
    crumb_rows no_rows = rows;
    no_rows.n_tokens = -1;
    EXPECT(crumb_store(layer, &no_rows, NULL) == CRUMB_ERROR_ARGUMENT && strstr(crumb_error(), "-1 tokens"));
    batch.n_jobs = -1;
    EXPECT(crumb_encode(layer, &batch, NULL) == CRUMB_ERROR_ARGUMENT && strstr(crumb_error(), "-1 jobs"));
    crumb_layer* none = NULL;
    shape.dim_v = -kDim;
    EXPECT(crumb_layers_create("had2", NULL, &shape, 1, &none) == CRUMB_ERROR_ARGUMENT && strstr(crumb_error(), "-64 of V") && !none);

    crumb_calibration* calibration = NULL;
    const int32_t token = 0;
    const double square = 1;
    const float* rows_of = &q[0][0];
    EXPECT(crumb_calibration_create(0, 1, &calibration) == CRUMB_OK);
    EXPECT(crumb_calibration_begin(calibration, 0, &token, -1) == CRUMB_ERROR_ARGUMENT && strstr(crumb_error(), "-1 tokens"));
    EXPECT(crumb_calibration_begin(calibration, 0, &token, 1) == CRUMB_OK);
    EXPECT(crumb_calibration_metric(calibration, &shape, 0, 1, &square, &square) == CRUMB_ERROR_ARGUMENT && strstr(crumb_error(), "-64 of V"));
    EXPECT(crumb_calibration_observe(calibration, &shape, 1, rows_of, rows_of, rows_of, rows_of) == CRUMB_ERROR_ARGUMENT);
    shape.dim_v = kDim, shape.n_head_kv = 0;
    EXPECT(crumb_calibration_metric(calibration, &shape, 0, 1, &square, &square) == CRUMB_ERROR_ARGUMENT);
    EXPECT(crumb_calibration_observe(calibration, &shape, 1, rows_of, rows_of, rows_of, rows_of) == CRUMB_ERROR_ARGUMENT &&
           strstr(crumb_error(), "over 0 KV heads"));
    shape.n_head_kv = kHeadsKv;
    EXPECT(crumb_calibration_observe(calibration, &shape, -1, rows_of, rows_of, rows_of, rows_of) == CRUMB_ERROR_ARGUMENT &&
           strstr(crumb_error(), "-1 tokens of layer 0"));
    const crumb_model_identity model = {"m", "a", "h", 1, kHeads, kHeadsKv, kDim, kDim};
    const int zero = 0;
    EXPECT(crumb_calibration_write(calibration, &model, "t", "none", &zero, -1, "nowhere") == CRUMB_ERROR_ARGUMENT &&
           strstr(crumb_error(), "-1 layers"));
    crumb_calibration_destroy(calibration);

    uint8_t digits[kHeadsKv][kDim];
    EXPECT(crumb_layer_digits(layer, 1, &digits[0][0]) == CRUMB_OK && digits[0][0] == 1 && digits[kHeadsKv - 1][kDim - 1] == 1);
    EXPECT(crumb_layer_digits(layer, 0, NULL) == CRUMB_ERROR_ARGUMENT && strstr(crumb_error(), "digits"));
    const crumb_basis basis = {0};
    EXPECT(crumb_artefact_with_bases("nowhere", &basis, 1, "", NULL, 0, 0, "nowhere") == CRUMB_ERROR_ARGUMENT &&
           strstr(crumb_error(), "nowhere"));
    EXPECT(crumb_artefact_with_bases("nowhere", &basis, -1, "", NULL, 0, 0, "nowhere") == CRUMB_ERROR_ARGUMENT &&
           strstr(crumb_error(), "-1 bases"));
    EXPECT(crumb_artefact_with_bases("nowhere", &basis, 1, "", NULL, 2, -5, "nowhere") == CRUMB_ERROR_ARGUMENT &&
           strstr(crumb_error(), "2 sequences of -5 tokens"));
    EXPECT(crumb_plan(NULL, NULL, NULL) == CRUMB_ERROR_ARGUMENT);
    step.rows = &row;
    step.backend = CRUMB_CUDA;
    if (!crumb_has_backend(CRUMB_CUDA)) {
        EXPECT(crumb_plan(layer, &step, NULL) == CRUMB_ERROR_UNSUPPORTED && strstr(crumb_error(), "CRUMB_CUDA=ON"));
    }
    crumb_layer_destroy(layer);
    free(exact), free(coded), free(moved);
    puts("C API: all right");
    return 0;
}
