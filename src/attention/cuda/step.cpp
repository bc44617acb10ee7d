#include "attention/cuda/step.h"

#include <algorithm>

#include "attention/cuda/decode.h"

namespace crumb::cuda {

Kernels fitted(Kernels kernels, const PageFormat& format) {
    kernels.format = format;
    kernels.planes = planes_of(format);
    // Of any planes: that of pages of 2 bits, so that layers which differ in their counts share a plan.
    PageFormat counted = format;
    if (kernels.compiled.any_planes) {
        counted = {.k = kernels.compiled.k, .v = kernels.compiled.v};
        counted.k.planes = format.k.dim;
        counted.v.planes = format.v.dim;
    }
    kernels.coded_units = u32((counted.bytes() + 127) / 128);
    return kernels;
}

std::vector<float> key_map(const SideTables& side, int widest) {
    const size_t dim = size_t(side.format.dim);
    std::vector<float> map(dim * size_t(widest));
    for (int p = 0; p < side.format.planes; p++) {
        const size_t at = size_t(place_of_plane(p, side.format.planes, widest));
        for (size_t d = 0; d < dim; d++) { map[d * size_t(widest) + at] = side.decode[size_t(p) * dim + d]; }
    }
    return map;
}

std::vector<float> value_map(const SideTables& side, int widest) {
    const size_t dim = size_t(side.format.dim);
    std::vector<float> map(dim * size_t(widest));
    for (int p = 0; p < side.format.planes; p++) {
        const size_t at = size_t(place_of_plane(p, side.format.planes, widest));
        std::copy_n(&side.decode[size_t(p) * dim], dim, &map[at * dim]);
    }
    return map;
}

const Kernels* choose(std::span<const Kernels> of_format, const StepShape& shape) {
    const Kernels* best = nullptr;
    int least_columns = 0;
    for (const Kernels& kernels : of_format) {
        const int columns = shape.column_blocks(kernels.columns) * kernels.columns;
        const int passes = shape.column_blocks(kernels.columns);
        const int best_passes = best ? shape.column_blocks(best->columns) : 0;
        if (!best || passes < best_passes || (passes == best_passes && columns < least_columns)) {
            best = &kernels;
            least_columns = columns;
        }
    }
    return best;
}

Workspace workspace(const Kernels& kernels, const StepShape& shape) {
    Workspace w;
    const auto take = [&](size_t& at, size_t bytes) {
        at = w.bytes;
        w.bytes += (bytes + 255) / 256 * 256;
    };
    const size_t segments = size_t(shape.segments(kernels.columns)), entry = kernels.entry_floats * sizeof(float);
    const size_t blocks = size_t(shape.blocks), warps = blocks * size_t(kernels.warps);
    take(w.tiles, size_t(shape.n_tiles) * sizeof(TileWork));
    take(w.records, (warps + segments) * sizeof(WorkRecord));
    take(w.parts, segments * sizeof(SegmentParts));
    take(w.queries, segments * kernels.query_words * sizeof(u32));
    take(w.merged, segments * entry);
    take(w.partials, 2 * blocks * entry);
    take(w.scratch, warps * entry);
    return w;
}

void plan(const Kernels& kernels, PlanLaunch launch, const StepShape& shape, const StepTables& tables, std::byte* memory,
          Stream stream) {
    const Workspace w = workspace(kernels, shape);
    launch({.rows = tables.rows,
            .n_tiles = shape.n_tiles,
            .rows_per_tile = shape.rows_per_tile,
            .sink = tables.sink,
            .segments_per_tile = shape.n_head_kv * shape.column_blocks(kernels.columns),
            .grid = shape.blocks,
            .warps = kernels.warps,
            .coded_units = kernels.coded_units,
            .exact_units = kernels.exact_units,
            .page_tokens = kernels.format.tokens,
            .coded_ids = tables.coded_ids,
            .exact_ids = tables.exact_ids,
            .ids_stride = tables.ids_stride,
            .tiles = reinterpret_cast<TileWork*>(memory + w.tiles),
            .records = reinterpret_cast<WorkRecord*>(memory + w.records),
            .parts = reinterpret_cast<SegmentParts*>(memory + w.parts)},
           stream);
}

namespace {

MapArgs map_args(const Kernels& kernels, const StepShape& shape, const StepTables& tables, const LayerData& layer,
                 std::byte* memory) {
    const Workspace w = workspace(kernels, shape);
    return {.rows = tables.rows,
            .n_tiles = shape.n_tiles,
            .rows_per_tile = shape.rows_per_tile,
            .n_head_kv = shape.n_head_kv,
            .group = shape.group(),
            .column_blocks = shape.column_blocks(kernels.columns),
            .sink = tables.sink,
            .scale = layer.scale,
            .q = layer.q,
            .q_token_stride = layer.q_token_stride,
            .q_head_stride = layer.q_head_stride,
            .heads = layer.heads,
            .queries = reinterpret_cast<u32*>(memory + w.queries),
            .tiles = reinterpret_cast<const TileWork*>(memory + w.tiles),
            .parts = reinterpret_cast<const SegmentParts*>(memory + w.parts),
            .merged = reinterpret_cast<const float*>(memory + w.merged),
            .partials = reinterpret_cast<const float*>(memory + w.partials),
            .sinks = layer.sinks,
            .out = layer.out,
            .out_stride = layer.out_stride,
            .planes = kernels.planes,
            .stores = {},
            .store_blocks = 0};
}

// Blocks that work on `lanes` things side by side: up to four a multiprocessor, each of them on some tiles.
int map_blocks(const StepShape& shape, int lanes) { return lanes * std::clamp(4 * shape.blocks / lanes, 1, std::max(1, shape.n_tiles)); }

}  // namespace

void map_queries(const Kernels& kernels, const StepShape& shape, const StepTables& tables, const LayerData& layer,
                 std::byte* memory, Stream stream) {
    const int lanes = shape.n_head_kv * shape.column_blocks(kernels.columns);
    const bool few = shape.segments(kernels.columns) <= shape.blocks / 2;
    MapArgs args = map_args(kernels, shape, tables, layer, memory);
    args.stores = layer.rows;
    args.store_blocks = row_blocks(layer.rows);
    kernels.map_query(args, map_blocks(shape, lanes) + args.store_blocks, few, stream);
}

void read_pages(const Kernels& kernels, const StepShape& shape, const StepTables& tables, const LayerData& layer,
                std::byte* memory, Stream stream) {
    const Workspace w = workspace(kernels, shape);
    kernels.decode({.coded = reinterpret_cast<const u8*>(layer.coded),
                    .coded_stride = layer.coded_stride,
                    .exact = reinterpret_cast<const u8*>(layer.exact),
                    .exact_stride = layer.exact_stride,
                    .coded_ids = tables.coded_ids,
                    .exact_ids = tables.exact_ids,
                    .ids_stride = tables.ids_stride,
                    .tiles = reinterpret_cast<const TileWork*>(memory + w.tiles),
                    .records = reinterpret_cast<const WorkRecord*>(memory + w.records),
                    .queries = reinterpret_cast<const u32*>(memory + w.queries),
                    .heads = layer.constants,
                    .merged = reinterpret_cast<float*>(memory + w.merged),
                    .partials = reinterpret_cast<float*>(memory + w.partials),
                    .scratch = reinterpret_cast<float*>(memory + w.scratch),
                    .n_head_kv = shape.n_head_kv,
                    .column_blocks = shape.column_blocks(kernels.columns),
                    .sink = tables.sink,
                    .softcap = {layer.softcap * kLog2e, layer.softcap > 0 ? 1 / (layer.softcap * kLog2e) : 0},
                    .planes = kernels.planes},
                   shape.blocks, stream);
}

void map_outputs(const Kernels& kernels, const StepShape& shape, const StepTables& tables, const LayerData& layer,
                 std::byte* memory, Stream stream) {
    const bool few = shape.segments(kernels.columns) * kernels.columns <= shape.blocks;
    const int lanes = shape.n_head_kv * shape.column_blocks(kernels.columns) * (few ? kernels.columns : 1);
    kernels.map_output(map_args(kernels, shape, tables, layer, memory), map_blocks(shape, lanes), few, stream);
}

void attend(const Kernels& kernels, const StepShape& shape, const StepTables& tables, const LayerData& layer,
            std::byte* memory, Stream stream) {
    map_queries(kernels, shape, tables, layer, memory, stream);
    read_pages(kernels, shape, tables, layer, memory, stream);
    map_outputs(kernels, shape, tables, layer, memory, stream);
}

}  // namespace crumb::cuda
