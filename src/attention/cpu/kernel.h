// The part of attention that is compiled once per instruction set, as three functions over plain pointers. Everything
// else (who works on what, where memory comes from) is attend.cpp, compiled once.
//
// An item is a tile of rows and one KV head. Its query vectors are the rows times the query heads of the group, row by
// row: n = row * n_heads + head. The translation units of the instruction sets call no inline function of other
// headers, because the linker keeps only one copy of those, and it might be the one that an older CPU cannot run.
#pragma once

#include <crumb/attention.h>

namespace crumb::cpu {

inline constexpr int kMaxDim = 256;

// K or V of the pages of one KV head.
struct Side {
    int dim = 0;
    int planes = 0;  // 0: BF16 rows
    SideInfo info = SideInfo::none;
    bool page_mean = false;
    size_t codes = 0;  // offsets in the page
    size_t scales = 0;
    size_t mean_codes = 0;
    const float* decode = nullptr;     // [planes][dim]
    const float* ones = nullptr;       // [dim] or null
    const float* mean = nullptr;       // [dim] or null
    const float* mean_step = nullptr;  // [dim] or null
    const float* gains = nullptr;      // [256], gain8 codes as numbers
    float gain_reference = 1.0f;
    const uint16_t* unpack_at = nullptr;  // UnpackMap
    const uint8_t* swapped = nullptr;
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

// Sums of one query vector over the tokens of a range: floats [planes_v] in code space, [dim_v], then these.
enum PartialScalar { kTop, kSum, kCodedSum, kZeroSum, kPartialScalars = 16 };

// Memory of one thread.
struct Scratch {
    float* q = nullptr;        // [n][dim_k], times the scale
    float* q_codes = nullptr;  // [n][planes_k]
    float* q_mean = nullptr;   // [n], q . mean of the keys
    float* q_ones = nullptr;   // [n], q . ones of the keys
    float* weights = nullptr;  // [n][64], logits first
    float* page = nullptr;   // a page's keys [planes or dim][64], then its values [64][planes or dim]: 32 KB stay in L1
    float* total = nullptr;  // partials [n]
    float* range = nullptr;  // partials [n]
};

struct Item {
    const QueryRow* rows = nullptr;
    int n_rows = 0;
    int n_heads = 0;  // query heads of the KV head
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
};

struct Kernel {
    // q, q_codes, q_mean, q_ones of the item.
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
extern const Kernel avx512_kernel;
#endif

const Kernel& kernel_of(Isa isa);

}  // namespace crumb::cpu
