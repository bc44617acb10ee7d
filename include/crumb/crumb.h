/* crumb in C: quantised KV pages, the encoder that fills them, attention that reads them, on the CPU and on CUDA.
 *
 * A layer object holds what is static for one layer of a model: recipe, tables, shape. Everything that grows is the
 * caller's memory: blocks of pages, tables of block numbers, query rows, workspaces. No call keeps a pointer after it
 * returns, and none allocates or waits for the device (the CPU backend allocates within a call).
 *
 * With CRUMB_CUDA pointers marked D are device pointers of the current device and `stream` is a cudaStream_t; work is queued
 * and calls may be captured into a CUDA graph: rows, tables, pages and queries may change between replays, shapes may not.
 * With CRUMB_CPU they are ordinary pointers, `stream` is ignored and calls return when the work is done.
 *
 * A block is 64 tokens of all KV heads of a layer: crumb_block_bytes() of codes, or crumb_exact_block_bytes() of BF16
 * (per head K [D_k][64], then V [64][D_v]). Blocks are plain bytes, the same on the CPU and on the GPU (page.h,
 * docs/design/page-format.md), 16-byte aligned.
 *
 * Calls return a status; crumb_error() is the text of the calling thread's last error. No exception crosses. */
#ifndef CRUMB_H
#define CRUMB_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum crumb_status {
    CRUMB_OK = 0,
    CRUMB_ERROR_ARGUMENT = 1,    /* what was asked for cannot be: the text says why and what to do */
    CRUMB_ERROR_UNSUPPORTED = 2, /* this build or this backend does not do it */
    CRUMB_ERROR_MEMORY = 3,      /* out of host memory */
    CRUMB_ERROR_DEVICE = 4,      /* CUDA said no */
    CRUMB_ERROR_INTERNAL = 5
} crumb_status;

typedef enum crumb_backend { CRUMB_CPU = 0, CRUMB_CUDA = 1 } crumb_backend;

const char* crumb_version(void);
const char* crumb_error(void);

/* Whether this build has the backend, whatever the machine has. */
int crumb_has_backend(crumb_backend backend);

typedef struct crumb_layer crumb_layer;

/* A layer of a model whose K and V are coded. */
typedef struct crumb_layer_shape {
    int layer;            /* the model's own number, which is the artefact's */
    int n_head, n_head_kv, dim_k, dim_v;
    float scale;          /* of the logits, usually 1 / sqrt(dim_k) */
    float softcap;        /* cap * tanh(logit / cap), 0: none */
} crumb_layer_shape;

/* All coded layers of a model at once, or none: the artefact (a file of a calibration, or NULL) is read once, and a recipe
 * with a budget ("planes") spends it over all of them, so that their blocks differ in size. `recipe` is what --kv takes. */
crumb_status crumb_layers_create(const char* recipe, const char* artefact, const crumb_layer_shape* shapes, int n_layers,
                                 crumb_layer** layers /* [n_layers] */);
void crumb_layer_destroy(crumb_layer* layer);

/* A layer of its own that is KV heads first_head_kv .. first_head_kv + n_head_kv of `layer`, each with n_group query heads:
 * what one of several machines holds of a layer that they share. Its format, and so its codes, are those of the whole. */
crumb_status crumb_layer_slice(const crumb_layer* layer, int first_head_kv, int n_head_kv, int n_group, crumb_layer** slice);

crumb_layer_shape crumb_shape(const crumb_layer* layer);
size_t crumb_block_bytes(const crumb_layer* layer);
size_t crumb_exact_block_bytes(const crumb_layer* layer);
double crumb_bits_per_element(const crumb_layer* layer);

/* CPU: who does the work. run() calls body(work, i) once for each i < n, in any order, on as many threads as there are, and
 * returns when all have returned: a pool that the caller has. Without one (NULL) the calling thread works alone. */
typedef struct crumb_threads {
    int n; /* threads, at least 1 */
    void (*run)(void* context, int n, void (*body)(void* work, int i), void* work);
    void* context;
} crumb_threads;

/* Static tables of the layer for the device, written once into the caller's memory (256-byte aligned), which stays as long
 * as the layer is used. Returns when they are there. CRUMB_CUDA only: the CPU backend takes NULL. */
crumb_status crumb_tables_bytes(const crumb_layer* layer, size_t* bytes);
crumb_status crumb_tables_write(const crumb_layer* layer, void* tables /* D */, size_t bytes);

/* One query token. Token j is visible if begin <= j < end, and read through its codes if sink <= j < coded_end, exactly
 * otherwise (docs/design/position-rule.md). */
#define CRUMB_NO_TOKEN 0xffffffffu
#define CRUMB_NO_BLOCK 0xffffffffu
typedef struct crumb_row {
    uint32_t sequence; /* row of the block tables */
    uint32_t token;    /* row of q and of the output; CRUMB_NO_TOKEN: the row only pads its tile */
    int32_t position, begin, coded_end, end;
} crumb_row;

/* A step for a backend: tiles of rows_per_tile rows of one sequence each. CUDA reads the pages once a tile of up to 8 rows; more
 * rows are a chunk of a prompt, whose blocks become BF16 in the workspace first (heads of 64 and 128 channels, sm_90). */
typedef struct crumb_step {
    crumb_backend backend;
    int n_tiles, rows_per_tile;
    const crumb_row* rows;     /* D [n_tiles][rows_per_tile] */
    const uint32_t* coded_ids; /* D [n_sequences][ids_stride], by block of the sequence */
    const uint32_t* exact_ids; /* D, same */
    size_t n_sequences, ids_stride;
    int sink;
    int multiprocessors;       /* CUDA: of the device */
    void* workspace;           /* D, crumb_workspace_bytes(), 256-byte aligned */
    size_t workspace_bytes;
    const crumb_threads* threads; /* CPU, or NULL */
    size_t chunk_blocks;       /* CUDA: that a chunk reads at most, exactly and through codes; 0: 2 ids_stride */
} crumb_step;

typedef struct crumb_io {
    const void* coded;   /* D: block i at coded + i * coded_stride bytes */
    size_t coded_stride;
    const void* exact;   /* D: same, BF16 */
    size_t exact_stride;
    const void* tables;  /* D: crumb_tables_write() */
    const float* sinks;  /* D [n_head]: one more logit without a value, or NULL */
    const float* q;      /* D: row `token`, head h at q + token * q_token_stride + h * q_head_stride floats */
    size_t q_token_stride, q_head_stride;
    float* out;          /* D: row `token` at out + token * out_stride floats, [n_head][dim_v] */
    size_t out_stride;
} crumb_io;

/* Bytes of workspace of a step of this shape (pointers are not looked at). */
crumb_status crumb_workspace_bytes(const crumb_layer* layer, const crumb_step* step, size_t* bytes);

/* Once a step, for all layers of one format and shape that share its tables. */
crumb_status crumb_plan(const crumb_layer* layer, const crumb_step* step, void* stream);

/* Once a layer, after crumb_plan() of the step on the same stream. Layers that follow each other share a workspace. */
crumb_status crumb_attend(const crumb_layer* layer, const crumb_step* step, const crumb_io* io, void* stream);

/* Rows of K and V in BF16, [n_tokens][n_head_kv][dim], 16-byte aligned, into slots of exact blocks: token i goes to slot slots[i] % 64 of
 * block blocks[i]. */
typedef struct crumb_rows {
    crumb_backend backend;
    int n_tokens;
    const uint16_t* k;      /* D */
    const uint16_t* v;      /* D */
    const uint32_t* blocks; /* D [n_tokens] */
    const uint32_t* slots;  /* D [n_tokens], positions will do */
    void* exact;            /* D */
    size_t exact_stride;
} crumb_rows;
crumb_status crumb_store(const crumb_layer* layer, const crumb_rows* rows, void* stream);

/* Blocks of 64 exact tokens become blocks of codes, the same bytes on every backend. Tokens below `keep` are taken over
 * from coded block `kept`, which may be the target. */
typedef struct crumb_encode_job {
    uint32_t source, target;
    int32_t keep;
    uint32_t kept;
} crumb_encode_job;

typedef struct crumb_encode_counts {
    uint32_t nonfinite; /* elements that were NaN (coded as 0) or infinite (coded as the largest value) */
    uint32_t saturated; /* rows with a value beyond FP16 or a gain outside its range */
} crumb_encode_counts;

typedef struct crumb_encode_batch {
    crumb_backend backend;
    int n_jobs;
    const crumb_encode_job* jobs; /* D */
    const void* exact;            /* D */
    size_t exact_stride;
    void* coded;                  /* D */
    size_t coded_stride;
    const void* tables;           /* D: crumb_tables_write() */
    crumb_encode_counts* counts;  /* D: added to */
    const crumb_threads* threads; /* CPU, or NULL */
} crumb_encode_batch;
crumb_status crumb_encode(const crumb_layer* layer, const crumb_encode_batch* batch, void* stream);

/* Copies n blocks, to_ids[i] <- from_ids[i] (host arrays), within one memory or between host and device. */
crumb_status crumb_copy(crumb_backend backend, size_t block_bytes, void* to, size_t to_stride, const uint32_t* to_ids,
                        const void* from, size_t from_stride, const uint32_t* from_ids, size_t n, void* stream);

/* Calibration: what attention sees while a model reads texts becomes an artefact (docs/design/artefact.md). Ordinary
 * memory, rows packed. */
typedef struct crumb_calibration crumb_calibration;

/* The first `skip` tokens of each sequence are left out of all sums. */
crumb_status crumb_calibration_create(int skip, int n_threads, crumb_calibration** calibration);
void crumb_calibration_destroy(crumb_calibration* calibration);

/* What is observed next belongs to these tokens, a new sequence, in part `fold` (0 or 1) of the text: what is fitted on one
 * part is tried on the other. */
crumb_status crumb_calibration_begin(crumb_calibration* calibration, int fold, const int32_t* tokens, int n_tokens);

/* The next tokens of the sequence in one layer: Q and K after norms and RoPE and before the scale of the logits, V as it is
 * cached, the output of attention before W_O. */
crumb_status crumb_calibration_observe(crumb_calibration* calibration, const crumb_layer_shape* shape, int n_tokens,
                                       const float* q /* [n_tokens][n_head][dim_k] */, const float* k /* [n_tokens][n_head_kv][dim_k] */,
                                       const float* v /* [n_tokens][n_head_kv][dim_v] */, const float* output /* [n_tokens][n_head][dim_v] */);

/* What noise on the rows of a layer costs (metric.h), from part `fold` of the text: means over n_rows rows. */
crumb_status crumb_calibration_metric(crumb_calibration* calibration, const crumb_layer_shape* shape, int fold, uint64_t n_rows,
                                      const double* k /* [n_head_kv][dim_k][dim_k] */, const double* v /* [n_head_kv][dim_v][dim_v] */);

typedef struct crumb_model_identity {
    const char *name, *architecture, *hash; /* hash: what an artefact recognises its model by */
    int n_layer, n_head, n_head_kv, dim_k, dim_v;
} crumb_model_identity;

/* Key means, rotations and the bases of `planes` of these layers, to `file`. texts, metric: what provenance says of them. */
crumb_status crumb_calibration_write(const crumb_calibration* calibration, const crumb_model_identity* model, const char* texts,
                                     const char* metric, const int* layers, int n_layers, const char* file);

/* Base-4 digits that a recipe gives the directions of K, or of V, of a layer: what trains its bases wants to know. */
crumb_status crumb_layer_digits(const crumb_layer* layer, int of_values, uint8_t* digits /* [n_head_kv][dim] */);

/* A basis of `planes` as the artefact has it (artefact.h). */
typedef struct crumb_basis {
    int layer, of_values;
    const float *encode, *decode; /* [n_head_kv][dim][dim], inverse to each other */
    const float* step;            /* [n_head_kv][3][dim] */
} crumb_basis;

/* The artefact `from` with these bases in place of its own, to `file`. how: what provenance says of them; tokens: n sequences
 * of n_tokens that they were trained on, which crumb eval then knows. */
crumb_status crumb_artefact_with_bases(const char* from, const crumb_basis* bases, int n_bases, const char* how,
                                       const int32_t* tokens, int n, int n_tokens, const char* file);

#ifdef __cplusplus
}
#endif

#endif
