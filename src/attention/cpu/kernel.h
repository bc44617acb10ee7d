// The part of attention that is compiled once per instruction set, as a few functions over plain pointers. Everything
// else (who works on what, where memory comes from) is attend.cpp, compiled once.
//
// An item is a tile of rows and one KV head. Its query vectors are the rows times the query heads of the group, row by
// row: n = row * n_heads + head. The translation units of the instruction sets call no inline function of other
// headers, because the linker keeps only one copy of those, and it might be the one that an older CPU cannot run.
#pragma once

#include <crumb/attention.h>

namespace crumb::cpu {

inline constexpr int kMaxDim = 256;
inline constexpr int kMaxPlanes = 4 * kMaxDim;
inline constexpr int kMeanBlocks = 8;  // page means of V are added up 8 blocks at a time, borders at multiples of 8

// K or V of the pages of one KV head.
struct Side {
    int dim = 0;
    int planes = 0;  // 0: BF16 rows
    SideInfo info = SideInfo::none;
    bool page_mean = false;
    size_t codes = 0;  // offsets in the page
    size_t scales = 0;
    size_t mean_codes = 0;
    const uint16_t* map = nullptr;     // BF16: K [dim][planes], V [planes][dim]; null: plane d dim + c is digit d of channel c
    const float* ones = nullptr;       // [dim] or null
    const float* mean = nullptr;       // [dim] or null
    const float* mean_step = nullptr;  // [dim] or null
    const float* gains = nullptr;      // [256], gain8 codes as numbers
    float gain_reference = 1.0f;
};

// Pages of one KV head of one sequence.
struct Pages {
    const std::byte* base = nullptr;  // of this head's page in block 0
    size_t stride = 0;                // of blocks
    size_t bytes = 0;                 // of a page
    const uint32_t* ids = nullptr;
    size_t n_ids = 0;
    Side k, v;
};

// Sums of one query vector over the tokens of a range. A partial is floats [planes_v] (weights times raw digits), then
// [dim_v] (exact values and page means), then vectors of 16, of which lanes add up: the sum of the weights of coded and
// of exact tokens, of the weights times zeros, of the weights as rounded for the digits; then the top: logits minus top
// are the exponents.
enum PartialVector { kCodedSum, kExactSum, kZeroSum, kDigitSum, kTop, kPartialVectors };
inline constexpr int kPartialScalars = 16 * kPartialVectors;

// Memory of one thread.
struct Scratch {
    float* q = nullptr;           // [n][dim_k], times the scale and log2(e): logits are powers of two
    float* q_codes = nullptr;     // [n][planes_k]
    int8_t* q_bytes = nullptr;    // [n][q_rows][planes_k] in the order of codes.h; amx reads up to 15 rows more
    float* q_unit = nullptr;      // [n][q_rows][n_parts], what one unit of q_bytes is
    float* q_offset = nullptr;    // [n], 1.5 sum of q_bytes times their units
    float* q_mean = nullptr;      // [n], q . mean of the keys
    float* q_ones = nullptr;      // [n], q . ones of the keys
    float* weights = nullptr;     // [n][64] of a BF16 page, logits first
    float* page = nullptr;        // a BF16 page's keys [dim][64], then its values [64][dim], as numbers or pairs; or digits of K, V
    float* page_sums = nullptr;   // [n][kMeanBlocks], weights of whole pages, until their means are added
    float* page_means = nullptr;  // [kMeanBlocks][dim_v]
    float* total = nullptr;       // partials [n]
    float* range = nullptr;       // partials [n]
};

// Memory that will be read soon.
struct Span {
    const void* data = nullptr;
    size_t bytes = 0;
};

struct Item {
    const QueryRow* rows = nullptr;
    int n_rows = 0;
    int n_heads = 0;  // query heads of the KV head
    int q_rows = 1;   // int8 rows a query: 2 hold 15 bits, of one part
    int n_parts = 1;  // of the planes of a query
    int part_ends[kMostQueryParts] = {};
    int sink = 0;
    float scale = 1.0f;
    float softcap = 0.0f;
    const float* slopes = nullptr;  // [n_heads] or null
    const float* sinks = nullptr;   // [n_heads] or null
    const float* q = nullptr;       // of the group's first head
    size_t token_stride = 0;
    size_t head_stride = 0;
    float* out = nullptr;  // of the group's first head
    size_t out_stride = 0;
    Pages coded, exact;
    int n = 0;                  // query vectors
    size_t partial_stride = 0;  // floats of a partial
    Span ahead[2] = {};         // to be fetched while the last range is read: the maps that come next
};

struct Kernel {
    // What the scratch holds of the item's queries.
    void (*queries)(const Item&, const Scratch&);
    // Partials of blocks [first, last).
    void (*range)(const Item&, const Scratch&, int first, int last, float* partials);
    // partials += more, where `more` are those of the next range. Cleared partials are the neutral element.
    void (*merge)(const Item&, float* partials, const float* more);
    void (*clear)(const Item&, float* partials);
    // Output rows from the partials of all ranges, which are used up.
    void (*finish)(const Item&, float* partials);
};

extern const Kernel portable_kernel;
#if defined(__x86_64__)
extern const Kernel avx2_kernel;
extern const Kernel avx_vnni_kernel;
extern const Kernel avx512_kernel;
extern const Kernel amx_kernel;
#elif defined(__aarch64__)
extern const Kernel neon_kernel;
#endif

const Kernel& kernel_of(Isa isa);

}  // namespace crumb::cpu
