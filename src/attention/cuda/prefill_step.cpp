#include "attention/cuda/prefill_step.h"

#include <crumb/half.h>

#include <algorithm>

#include "attention/cuda/prefill.h"

namespace crumb::cuda {

namespace {

size_t pair_bytes(int dim) { return size_t(4) * kTileColumns * size_t(dim); }

}  // namespace

size_t prefill_shared_bytes(int dim) {
    return dim == 64 ? Prefill<64, false>::kShared : dim == 128 ? Prefill<128, false>::kShared : 0;
}

int PrefillShape::slice_entries() const {
    const size_t all = std::max<size_t>(most_entries, 1);
    const size_t fitting = tile_bytes / (pair_bytes(dim) * size_t(n_head_kv) * size_t(std::max(n_chunks, 1))) * 2;
    const size_t entries = std::min(all, std::max<size_t>(fitting, 2));
    const size_t slices = (all + entries - 1) / entries;  // of equal size
    return int((all + 2 * slices - 1) / (2 * slices) * 2);
}

int PrefillShape::slices() const { return int((most_entries + size_t(slice_entries()) - 1) / size_t(slice_entries())); }

PrefillWorkspace prefill_workspace(const PrefillShape& shape) {
    PrefillWorkspace w;
    const auto take = [&](size_t& at, size_t bytes) {
        at = w.bytes;
        w.bytes += (bytes + 255) / 256 * 256;
    };
    const size_t chunks = size_t(shape.n_chunks);
    take(w.chunks, chunks * sizeof(ChunkWork));
    take(w.tiles, chunks * size_t(shape.tiles_per_chunk()) * sizeof(PrefillTile));
    take(w.state, shape.slices() > 1 ? chunks * size_t(shape.rows_per_chunk) * size_t(shape.n_head) * 2 * sizeof(float) : 0);
    take(w.pairs, chunks * size_t(shape.n_head_kv) * size_t(shape.slice_entries() / 2) * pair_bytes(shape.dim));
    return w;
}

std::vector<u32> unmap_table(const SideTables& side, bool halves) {
    const size_t dim = size_t(side.format.dim), planes = size_t(side.format.planes);
    std::vector<u32> table(dim * planes / 2);
    for (size_t d = 0; d < dim; d++) {
        for (size_t p = 0; p < planes; p++) {
            const float x = side.decode[p * dim + d];
            table[(d * planes + p) / 2] |= u32(halves ? to_fp16(x).bits : to_bf16(x).bits) << (16 * (p % 2));
        }
    }
    return table;
}

void plan_prefill(const PrefillLaunches& launches, const PrefillShape& shape, const StepTables& tables, std::byte* memory, Stream stream) {
    const PrefillWorkspace w = prefill_workspace(shape);
    launches.plan({.rows = tables.rows,
                   .n_chunks = shape.n_chunks,
                   .rows_per_chunk = shape.rows_per_chunk,
                   .rows_per_tile = shape.rows_per_tile(),
                   .sink = tables.sink,
                   .chunks = reinterpret_cast<ChunkWork*>(memory + w.chunks),
                   .tiles = reinterpret_cast<PrefillTile*>(memory + w.tiles)},
                  stream);
}

void unpack_slice(const Kernels& kernels, int i, const PrefillShape& shape, const StepTables& tables, const LayerData& layer,
                  std::byte* memory, Stream stream) {
    const PrefillWorkspace w = prefill_workspace(shape);
    const int entries = shape.slice_entries(), groups = shape.n_chunks * shape.n_head_kv;
    const int parts = std::clamp(kUnpackBlocks * shape.blocks / groups, 1, entries);
    kernels.unpack({.coded = reinterpret_cast<const u8*>(layer.coded),
                    .coded_stride = layer.coded_stride,
                    .exact = reinterpret_cast<const u8*>(layer.exact),
                    .exact_stride = layer.exact_stride,
                    .coded_ids = tables.coded_ids,
                    .exact_ids = tables.exact_ids,
                    .ids_stride = tables.ids_stride,
                    .chunks = reinterpret_cast<const ChunkWork*>(memory + w.chunks),
                    .n_head_kv = shape.n_head_kv,
                    .parts = parts,
                    .from = i * entries,
                    .slice_entries = entries,
                    .heads = layer.heads,
                    .constants = layer.constants,
                    .tiles = reinterpret_cast<u8*>(memory + w.pairs),
                    .planes = kernels.planes},
                   groups * parts, stream);
}

void attend_slice(const PrefillLaunches& launches, int i, const PrefillShape& shape, const StepTables& tables, const LayerData& layer,
                  std::byte* memory, Stream stream) {
    const PrefillWorkspace w = prefill_workspace(shape);
    launches.attend({.rows = tables.rows,
                     .n_chunks = shape.n_chunks,
                     .rows_per_chunk = shape.rows_per_chunk,
                     .rows_per_tile = shape.rows_per_tile(),
                     .tiles_per_chunk = shape.tiles_per_chunk(),
                     .n_head_kv = shape.n_head_kv,
                     .group = shape.group(),
                     .sink = tables.sink,
                     .chunks = reinterpret_cast<const ChunkWork*>(memory + w.chunks),
                     .tiles = reinterpret_cast<const PrefillTile*>(memory + w.tiles),
                     .from = i * shape.slice_entries(),
                     .slice_entries = shape.slice_entries(),
                     .first_slice = i == 0,
                     .last_slice = i == shape.slices() - 1,
                     .pairs = reinterpret_cast<const u8*>(memory + w.pairs),
                     .scale = layer.scale,
                     .softcap = layer.softcap * kLog2e,
                     .q = layer.q,
                     .q_token_stride = layer.q_token_stride,
                     .q_head_stride = layer.q_head_stride,
                     .heads = layer.heads,
                     .sinks = layer.sinks,
                     .out = layer.out,
                     .out_stride = layer.out_stride,
                     .state = reinterpret_cast<float*>(memory + w.state)},
                    shape.dim, shape.blocks, stream);
}

void attend_prefill(const Kernels& kernels, const PrefillLaunches& launches, const PrefillShape& shape, const StepTables& tables,
                    const LayerData& layer, std::byte* memory, Stream stream) {
    for (int i = 0; i < shape.slices(); i++) {
        unpack_slice(kernels, i, shape, tables, layer, memory, stream);
        attend_slice(launches, i, shape, tables, layer, memory, stream);
    }
}

}  // namespace crumb::cuda
