// attend() of attention.h on a device: pages, tables, rows and queries are copied there, one step is planned and run, the
// output comes back. A Machine is where device memory and launches come from: the emulator or a GPU.
#pragma once

#include <crumb/attention.h>

#include <cmath>
#include <cstring>
#include <map>
#include <span>
#include <vector>

#include "attention/cuda/decode.h"
#include "attention/cuda/prefill_step.h"
#include "attention/cuda/step.h"

namespace crumb::cuda {

struct Machine {
    virtual ~Machine() = default;
    virtual void* allocate(size_t bytes) = 0;  // filled with 0xff, freed with the machine
    virtual void upload(void* device, const void* host, size_t bytes) = 0;
    virtual void download(void* host, const void* device, size_t bytes) = 0;  // waits for the device
    virtual void zero(void* device, size_t bytes) = 0;
    virtual PlanLaunch plan_launch() const = 0;
    virtual PrefillLaunches prefill_launches() const = 0;

    template <class T>
    T* put(const std::vector<T>& values) {
        T* device = static_cast<T*>(allocate(std::max<size_t>(values.size(), 1) * sizeof(T)));
        if (!values.empty()) upload(device, values.data(), values.size() * sizeof(T));
        return device;
    }
};

// Tables of a layer on the device.
struct DeviceLayer {
    const HeadArrays* heads;
    const HeadConstants* constants;
};

inline DeviceLayer put_tables(Machine& machine, const Kernels& kernels, std::span<const HeadTables> tables) {
    const auto put = [&](const std::vector<float>& x) -> const float* { return x.empty() ? nullptr : machine.put(x); };
    std::vector<HeadArrays> heads;
    std::vector<HeadConstants> constants;
    for (const HeadTables& head : tables) {
        heads.push_back({put(key_map(head.k, kernels.compiled.k.planes)), put(head.k.ones), put(head.k.mean), put(head.k.mean_step),
                         put(value_map(head.v, kernels.compiled.v.planes)),
                         put(head.v.ones), put(head.v.mean), machine.put(unmap_table(head.k, kernels.compiled.grouped())), machine.put(unmap_table(head.v, kernels.compiled.grouped()))});
        constants.push_back({std::log2(head.k.gain_reference), std::log2(head.v.gain_reference), put(head.v.mean_step)});
    }
    return {machine.put(heads), machine.put(constants)};
}

// Blocks of all sequences in one pool, in another order than they came; what no table names stays 0xff.
struct DevicePool {
    const std::byte* base;
    size_t stride;
    std::vector<std::vector<u32>> ids;
};

inline DevicePool put_blocks(Machine& machine, std::span<const SequenceView> views, bool coded) {
    DevicePool pool = {};
    std::vector<std::pair<const BlockTable*, size_t>> blocks;
    for (const SequenceView& view : views) {
        const BlockTable& table = coded ? view.coded : view.exact;
        pool.stride = table.stride;
        pool.ids.emplace_back(table.ids.size(), kNoBlock);
        for (size_t i = table.ids.size(); i-- > 0;) {
            if (table.ids[i] == kNoBlock) continue;
            pool.ids.back()[i] = u32(blocks.size());
            blocks.push_back({&table, i});
        }
    }
    std::vector<std::byte> bytes(blocks.size() * pool.stride);
    for (size_t b = 0; b < blocks.size(); b++) {
        std::memcpy(&bytes[b * pool.stride], blocks[b].first->block(int(blocks[b].second)), pool.stride);
    }
    pool.base = machine.put(bytes);
    return pool;
}

struct DeviceStep {
    int blocks = 4;  // of the decode kernel
    int rows_per_tile = 1;
    int times = 1;   // how often it is run, in the same memory
    size_t prefill_bytes = 0;  // PrefillShape::tile_bytes, or 0: decode
};

// Rows of a sequence in tiles of rows_per_tile, the last one filled up.
inline std::vector<QueryRow> in_tiles(const std::vector<QueryRow>& rows, int rows_per_tile) {
    std::vector<QueryRow> tiled;
    for (size_t i = 0; i < rows.size();) {
        const u32 sequence = rows[i].sequence;
        int n = 0;
        for (; n < rows_per_tile && i < rows.size() && rows[i].sequence == sequence; n++, i++) tiled.push_back(rows[i]);
        for (; n < rows_per_tile; n++) tiled.push_back({.sequence = sequence, .token = kNoToken});
    }
    return tiled;
}

inline void attend_on(Machine& machine, std::span<const Kernels> kernels_of_format, const DeviceStep& how,
                      const AttentionLayer& layer, const std::vector<QueryRow>& rows, int sink,
                      std::span<const SequenceView> views, const AttentionIo& io, size_t n_tokens) {
    const std::vector<QueryRow> tiled = in_tiles(rows, how.rows_per_tile);
    const int n_tiles = int(tiled.size()) / how.rows_per_tile;

    const DevicePool coded = put_blocks(machine, views, true), exact = put_blocks(machine, views, false);
    size_t ids_stride = 1;
    for (const auto& ids : coded.ids) ids_stride = std::max(ids_stride, ids.size());
    const auto table = [&](const DevicePool& pool) {
        std::vector<u32> flat(views.size() * ids_stride, 1u << 30);  // following one of these would crash
        for (size_t s = 0; s < views.size(); s++) std::copy(pool.ids[s].begin(), pool.ids[s].end(), &flat[s * ids_stride]);
        return machine.put(flat);
    };
    const StepTables tables = {machine.put(tiled), table(coded), table(exact), ids_stride, sink};
    const DeviceLayer heads = put_tables(machine, kernels_of_format[0], layer.tables);

    const size_t q_floats = n_tokens * io.token_stride, out_floats = n_tokens * io.out_stride;
    float* const out = machine.put(std::vector<float>(io.out, io.out + out_floats));
    const LayerData data = {.coded = coded.base,
                            .coded_stride = coded.stride,
                            .exact = exact.base,
                            .exact_stride = exact.stride,
                            .heads = heads.heads,
                            .constants = heads.constants,
                            .sinks = layer.sinks ? machine.put(std::vector<float>(layer.sinks, layer.sinks + layer.n_head)) : nullptr,
                            .scale = layer.scale,
                            .softcap = layer.softcap,
                            .q = machine.put(std::vector<float>(io.q, io.q + q_floats)),
                            .q_token_stride = io.token_stride,
                            .q_head_stride = io.head_stride,
                            .out = out,
                            .out_stride = io.out_stride};
    if (how.prefill_bytes > 0) {
        const PrefillShape shape = {n_tiles, how.rows_per_tile, layer.n_head, layer.n_head_kv, how.blocks, 2 * ids_stride,
                                    layer.format.k.dim, how.prefill_bytes};
        std::byte* const memory = static_cast<std::byte*>(machine.allocate(prefill_workspace(shape).bytes));
        for (int i = 0; i < how.times; i++) {
            plan_prefill(machine.prefill_launches(), shape, tables, memory, nullptr);
            attend_prefill(kernels_of_format[0], machine.prefill_launches(), shape, tables, data, memory, nullptr);
        }
    } else {
        const StepShape shape = {n_tiles, how.rows_per_tile, layer.n_head, layer.n_head_kv, how.blocks};
        const Kernels& kernels = *choose(kernels_of_format, shape);
        std::byte* const memory = static_cast<std::byte*>(machine.allocate(workspace(kernels, shape).bytes));
        for (int i = 0; i < how.times; i++) {
            plan(kernels, machine.plan_launch(), shape, tables, memory, nullptr);
            attend(kernels, shape, tables, data, memory, nullptr);
        }
    }
    machine.download(io.out, out, out_floats * sizeof(float));
}

}  // namespace crumb::cuda
