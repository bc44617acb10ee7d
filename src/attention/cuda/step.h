// The host's side of CUDA attention: what kernels there are for a format, how much memory a step takes, and the launches of
// a step. No CUDA header: the launches are function pointers, which the .cu files of instances/ fill in, and the tests with
// the emulator.
//
//   once a step:   plan()                     who works on what, from rows and tables that lie on the device
//   once a layer:  attend()                   map the queries, read the pages, map the sums: three launches
//
// All memory is the caller's, nothing is allocated, nothing waits for the device, all arguments are fixed by the shape of
// the step: rows, tables and pages may change between two replays of a CUDA graph.
#pragma once

#include <crumb/recipe.h>

#include <vector>

#include "attention/cuda/decode_format.h"
#include "attention/cuda/maps.h"
#include "attention/cuda/plan.h"

namespace crumb::cuda {

struct DecodeArgs;
struct HeadConstants;
struct UnpackArgs;

using Stream = void*;  // cudaStream_t

// Kernels of one format and one number of columns.
struct Kernels {
    KernelFormat compiled = PageFormat();
    PageFormat format;   // one that these take
    PagePlanes planes = {};
    int columns = 0;  // query rows x heads that a warp takes together
    int warps = 0;    // of a block
    int query_bits = 0;  // of the query's largest element: 15, or 10
    u32 coded_units = 0, exact_units = 0;
    u32 query_words = 0, entry_floats = 0;
    // few: there are fewer segments than multiprocessors, so that waiting is all that counts.
    void (*map_query)(const MapArgs& args, int blocks, bool few, Stream stream) = nullptr;
    void (*decode)(const DecodeArgs& args, int blocks, Stream stream) = nullptr;
    void (*map_output)(const MapArgs& args, int blocks, bool few, Stream stream) = nullptr;  // few: a block a column
    void (*unpack)(const UnpackArgs& args, int blocks, Stream stream) = nullptr;  // of chunks: prefill_step.h
};

// For a format that compiled.takes().
Kernels fitted(Kernels kernels, const PageFormat& format);

template <KernelFormat F, int NT>
Kernels kernels_of() {
    using D = DecodeFormat<F, NT>;
    Kernels k;
    k.compiled = F, k.columns = D::kColumns, k.warps = D::kWarps, k.query_bits = D::kFineQuery ? 15 : 10;
    k.exact_units = D::kExactUnits;
    k.query_words = D::kQueryWords, k.entry_floats = D::kEntryFloats;
    return fitted(k, {.k = F.k, .v = F.v, .tokens = F.tokens});
}

// Tables of maps as these kernels read them (HeadArrays): B transposed [D][widest], and B [widest][D].
std::vector<float> key_map(const SideTables& side, int widest);
std::vector<float> value_map(const SideTables& side, int widest);

// The shape of a step: it may be larger than what a replay needs (rows with kNoToken).
struct StepShape {
    int n_tiles = 0, rows_per_tile = 1;
    int n_head = 0, n_head_kv = 0;
    int blocks = 0;  // of the decode kernel: one a multiprocessor

    int group() const { return n_head / n_head_kv; }
    int column_blocks(int columns) const { return (rows_per_tile * group() + columns - 1) / columns; }
    int segments(int columns) const { return n_tiles * n_head_kv * column_blocks(columns); }
};

// The kernels among those of a format that suit `rows * group` columns: the fewest passes over the pages, then the fewest
// columns that are not there.
const Kernels* choose(std::span<const Kernels> of_format, const StepShape& shape);

// Byte offsets of a step's arrays in one piece of device memory, 256-byte aligned. Nothing has to be cleared.
struct Workspace {
    size_t tiles = 0, records = 0, queries = 0, merged = 0, partials = 0, scratch = 0, parts = 0;
    size_t bytes = 0;
};
Workspace workspace(const Kernels& kernels, const StepShape& shape);

// What a step reads that no layer changes. Device pointers.
struct StepTables {
    const QueryRow* rows = nullptr;    // [n_tiles][rows_per_tile]
    const u32* coded_ids = nullptr;    // [sequence][ids_stride], by block index
    const u32* exact_ids = nullptr;
    size_t ids_stride = 0;
    int sink = 0;
};

// What a layer adds. Device pointers.
struct LayerData {
    const std::byte* coded = nullptr;  // block i at coded + i * coded_stride
    size_t coded_stride = 0;
    const std::byte* exact = nullptr;
    size_t exact_stride = 0;
    const HeadArrays* heads = nullptr;        // [n_head_kv]
    const HeadConstants* constants = nullptr; // [n_head_kv]
    const float* sinks = nullptr;             // [n_head] or null
    float scale = 1.0f;
    float softcap = 0.0f;
    RowArgs rows = {};  // to be stored first, few_rows() of them
    const float* q = nullptr;
    size_t q_token_stride = 0, q_head_stride = 0;  // floats
    float* out = nullptr;
    size_t out_stride = 0;
};

using PlanLaunch = void (*)(const PlanArgs& args, Stream stream);

void plan(const Kernels& kernels, PlanLaunch launch, const StepShape& shape, const StepTables& tables, std::byte* memory,
          Stream stream);
void attend(const Kernels& kernels, const StepShape& shape, const StepTables& tables, const LayerData& layer,
            std::byte* memory, Stream stream);

// What attend() launches, one by one: benchmarks time them apart. read_pages() starts its first copies while its predecessor
// on the stream still runs, so that must be neither plan() nor anything else that writes pages or block numbers.
void map_queries(const Kernels& kernels, const StepShape& shape, const StepTables& tables, const LayerData& layer,
                 std::byte* memory, Stream stream);
void read_pages(const Kernels& kernels, const StepShape& shape, const StepTables& tables, const LayerData& layer,
                std::byte* memory, Stream stream);
void map_outputs(const Kernels& kernels, const StepShape& shape, const StepTables& tables, const LayerData& layer,
                 std::byte* memory, Stream stream);

}  // namespace crumb::cuda
