// Attention over pages: one descriptor for the layer, one plan a step (shared by all layers of a kind), one run.
//
// What a query sees depends on positions alone (docs/design/position-rule.md). A row at position t sees tokens
// begin <= j < end; of these, j < sink and j >= coded_end are read as BF16, the others through their codes.
//
// A row's result is the same, bit for bit, whatever other rows are in the plan and however many threads run it: tokens
// are summed page by page within ranges whose borders depend on `end` alone, and ranges are merged in ascending order.
#pragma once

#include <crumb/page.h>
#include <crumb/recipe.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace crumb {

// Blocks hold the pages of all KV heads of one layer, for the tokens of a page; block i of a sequence is
// `base + ids[i] * stride`.
struct BlockTable {
    const std::byte* base = nullptr;
    size_t stride = 0;  // bytes of a block: n_head_kv pages
    std::span<const uint32_t> ids;  // by block index (position / tokens of a page); kNoBlock where there is none

    const std::byte* block(int index) const { return base + size_t(ids[index]) * stride; }
};

inline constexpr uint32_t kNoBlock = 0xffffffff;

// One sequence in one layer.
struct SequenceView {
    BlockTable coded;
    BlockTable exact;  // BF16 records
};

// The maps of a layer's heads as the kernels read them, packed once when a model is loaded. BF16: the tables are read once
// a step, and are as much memory as some hundred tokens of codes.
struct AttentionMaps {
    struct Head {
        std::vector<bf16> k;  // [dim_k][planes_k]: q' = q K; empty: plane d dim + c is digit d of channel c
        std::vector<bf16> v;  // [planes_v][dim_v]: o = o' V; empty: the same
        std::vector<int> parts;  // where the parts of a query's planes end, at multiples of 64 and at the end
    };
    std::vector<Head> heads;
    int query_bits = 8;
};

// Queries meet codes in 8 bits of the largest element of a part of their planes: groups of 64 with low digits alone, those with
// second digits among them, those with third ones, which count 4 and 16 times as much. Directions of 8 bits, whose codes are as
// fine, and heads of 256 channels whose keys keep their mean take 15 bits of the largest element of all, and K costs twice as much
// (docs/design/attention-cpu.md has what that does to quality).
inline constexpr int kMostQueryParts = 3;
AttentionMaps attention_maps(std::span<const HeadTables> tables);

// Bytes of the maps of one head.
size_t attention_map_bytes(const PageFormat& format);

// What stays the same for a layer.
struct AttentionLayer {
    int n_head = 0;
    int n_head_kv = 0;
    PageFormat format;  // of the coded blocks; exact blocks are bf16_format(dim_k, dim_v)
    std::span<const HeadTables> tables;  // [n_head_kv], empty for the BF16 format
    const AttentionMaps* maps = nullptr; // of `tables`; attend_reference() needs none
    float scale = 1.0f;           // of the logits
    float softcap = 0.0f;         // cap * tanh(logit / cap), 0: none
    float alibi_max_bias = 0.0f;  // 0: none
    const float* sinks = nullptr; // [n_head], one more logit without a value, or null
    bool decode_pages = false;    // coded pages become numbers first, whatever the format: slow, and free of the kernels' roundings
};

// One query token.
struct QueryRow {
    uint32_t sequence = 0;   // index into the views of the step
    uint32_t token = 0;      // row of q and of the output
    int32_t position = 0;
    int32_t begin = 0;       // first token that it sees (sliding windows), 0 otherwise
    int32_t coded_end = 0;   // tokens sink <= j < coded_end are read through their codes
    int32_t end = 0;         // one past the last token that it sees
};

// Rows of one sequence that read the same blocks together: adjacent rows of the step, at most kTileRows. They read
// blocks [first_block, end_block), in n_ranges >= 1 ranges with borders at multiples of range_blocks.
struct AttentionTile {
    uint32_t first_row = 0;
    uint32_t n_rows = 0;
    uint32_t first_block = 0;
    uint32_t end_block = 0;
    uint32_t range_blocks = 0;   // the same for all of its rows
    uint32_t n_ranges = 0;
    uint32_t first_task = 0;     // ranges of all tiles before this one
    uint32_t first_partial = 0;  // rows x ranges of all tiles before this one
};

inline constexpr int kTileRows = 16;
inline constexpr int kMaxRanges = 64;  // of a row

// Blocks a range for a row that ends at `end`: 16, doubled until there are at most kMaxRanges ranges.
int range_blocks(int32_t end);

// The step's work list. Rows of one sequence should be adjacent and ascending in position: they share tiles.
class AttentionPlan {
public:
    AttentionPlan() = default;
    AttentionPlan(std::vector<QueryRow> rows, int sink);

    std::span<const QueryRow> rows() const { return rows_; }
    std::span<const AttentionTile> tiles() const { return tiles_; }
    int sink() const { return sink_; }
    uint32_t n_tasks() const { return n_tasks_; }             // ranges of all tiles
    uint32_t n_partials() const { return n_partials_; }       // rows x ranges of all tiles
    double largest_share() const { return largest_share_; }   // of the step's work, in one tile

private:
    std::vector<QueryRow> rows_;
    std::vector<AttentionTile> tiles_;
    int sink_ = 0;
    uint32_t n_tasks_ = 0;
    uint32_t n_partials_ = 0;
    double largest_share_ = 0;
};

// q: row `token` of head h is at q + token * token_stride + h * head_stride floats, dim_k of them.
// out: row `token` is at out + token * out_stride floats: [n_head][dim_v].
struct AttentionIo {
    const float* q = nullptr;
    size_t token_stride = 0;
    size_t head_stride = 0;
    float* out = nullptr;
    size_t out_stride = 0;
};

// In double precision, token by token, from decode_keys() and decode_values(): the definition of right.
void attend_reference(const AttentionLayer& layer, const AttentionPlan& plan, std::span<const SequenceView> sequences,
                      const AttentionIo& io);

// The CPU kernels: integer dot products with codes in place. Instruction sets are chosen at run time; every one can be
// forced for tests. Results differ between them by roundings only, within the budget of docs/design/attention-cpu.md.
enum class Isa : uint8_t {
    portable,
    avx2,
    avx_vnni,  // AVX2 and AVX-VNNI
    avx512,    // AVX-512 F, BW, VL, DQ and VNNI
    amx,       // AVX-512 as above and BF16, AMX-INT8 and AMX-BF16
    neon,      // Armv8.2 with dot product
};
// Slowest first.
inline constexpr Isa kIsas[] = {Isa::portable, Isa::neon, Isa::avx2, Isa::avx_vnni, Isa::avx512, Isa::amx};
const char* name(Isa isa);
bool supported(Isa isa);
bool tiles_refused();  // the CPU has what Isa::amx needs, and the operating system does not give it to this process
Isa best_isa();

// Shared by the threads that run one layer of one step: who does what next, and partial results of split ranges. Its
// size depends on the plan's rows and heads, never on the context.
//
// One object serves all layers of a step, one layer after the other: the last thread to leave attend() makes it ready for
// the next layer, so between two layers there must be a barrier (an engine has one between two nodes) and nothing else.
class AttentionWork {
public:
    AttentionWork();
    ~AttentionWork();

    // Makes room: called once a step for every kind of layer in it (plan, heads, format), by one thread, while nobody is
    // inside attend(). Memory grows to the largest kind and is kept for the next step.
    void prepare(const AttentionPlan& plan, int n_head, int n_head_kv, const PageFormat& format, int max_threads);

    size_t bytes() const;  // held now, of all threads

    struct State;
    State& state() { return *state_; }

private:
    std::unique_ptr<State> state_;
};

// Formats that are not planar(), and layers with decode_pages, take a slow path, the same at every level: their pages become
// numbers first.
// Called by each of n_threads threads, at most as many as prepare() was told of; returns when this thread finds no more
// work. All output is written when all have returned.
void attend(Isa isa, const AttentionLayer& layer, const AttentionPlan& plan, std::span<const SequenceView> sequences,
            const AttentionIo& io, AttentionWork& work, int thread, int n_threads);

}  // namespace crumb
