// The C API on CUDA.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/cuda/decode.h"
#include "attention/cuda/registry.h"
#include "capi/cuda.h"

namespace crumb::capi {

namespace {

using namespace cuda;

static_assert(sizeof(crumb_encode_job) == sizeof(EncodeJob) && sizeof(crumb_encode_counts) == sizeof(EncodeCountsDevice));

void require(cudaError_t status, const char* what) {
    if (status != cudaSuccess) throw DeviceError(fmt::format("{}: {}", what, cudaGetErrorString(status)));
}

}  // namespace

std::vector<Kernels> kernels_of(const crumb_layer& layer) {
    std::vector<Kernels> kernels = kernels_for(layer.format);
    if (kernels.empty()) {
        throw Unsupported(fmt::format(
            "recipe '{}' with heads of {} and {} channels ({} and {} planes) has no CUDA kernel: add a file to "
            "src/attention/cuda/instances, or take CRUMB_CPU",
            layer.recipe.name, layer.format.k.dim, layer.format.v.dim, layer.format.k.planes, layer.format.v.planes));
    }
    return kernels;
}

namespace {

// Where the arrays of pointers lie: the number of heads says it.
struct Offsets {
    size_t heads, constants, k, v, bytes;
    explicit Offsets(const crumb_layer& layer) {
        size_t end = 0;
        const auto take = [&](size_t size) {
            const size_t start = end;
            end = (end + size_t(layer.n_head_kv) * size + 255) / 256 * 256;
            return start;
        };
        heads = take(sizeof(HeadArrays)), constants = take(sizeof(HeadConstants));
        k = take(sizeof(EncodeTables)), v = take(sizeof(EncodeTables));
        bytes = end;
    }
};

// What crumb_tables_write() puts into the caller's memory: arrays of pointers at fixed places, then what they point to.
class Image {
  public:
    Image(const crumb_layer& layer, std::byte* base) : base_(base) {
        const Offsets at(layer);
        const KernelFormat compiled = kernels_of(layer)[0].compiled;
        reserve(at.bytes);
        for (size_t h = 0; h < size_t(layer.n_head_kv); h++) {
            const SideTables& key = layer.tables[h].k;
            const SideTables& value = layer.tables[h].v;
            const EncodeTables encode_k = encode_tables(key), encode_v = encode_tables(value);
            write(at.heads, h, HeadArrays{put(key_map(key, compiled.k.planes)), put(key.ones), encode_k.mean, encode_k.mean_step, put(value_map(value, compiled.v.planes)),
                                       put(value.ones), encode_v.mean, put(unmap_table(key, compiled.grouped())), put(unmap_table(value, compiled.grouped()))});
            write(at.constants, h, HeadConstants{std::log2(key.gain_reference), std::log2(value.gain_reference), encode_v.mean_step});
            write(at.k, h, encode_k);
            write(at.v, h, encode_v);
        }
    }

    std::vector<std::byte> bytes;

  private:
    size_t reserve(size_t n) {
        const size_t at = bytes.size();
        bytes.resize((at + n + 255) / 256 * 256);
        return at;
    }

    template <class T>
    const T* put(const std::vector<T>& values) {
        if (values.empty()) return nullptr;
        const size_t at = reserve(values.size() * sizeof(T));
        std::memcpy(&bytes[at], values.data(), values.size() * sizeof(T));
        return reinterpret_cast<const T*>(base_ + at);
    }

    template <class T>
    void write(size_t at, size_t index, const T& value) {
        std::memcpy(&bytes[at + index * sizeof(T)], &value, sizeof(T));
    }

    EncodeTables encode_tables(const SideTables& t) {
        return {put(t.mean), put(t.encode), put(t.sigma), put(t.step), put(t.mean_step), put(t.digits), put(t.direction),
                put(t.digit), t.gain_reference};
    }

    std::byte* base_;
};

template <class T>
const T* at(const void* tables, size_t offset) {
    return reinterpret_cast<const T*>(static_cast<const std::byte*>(tables) + offset);
}

StepShape shape_of(const crumb_layer& layer, const crumb_step& step) {
    return {step.n_tiles, step.rows_per_tile, layer.n_head, layer.n_head_kv, step.multiprocessors};
}

Kernels kernels_of_step(const crumb_layer& layer, const crumb_step& step) {
    const std::vector<Kernels> kernels = kernels_of(layer);
    const int group = layer.n_head / layer.n_head_kv;
    if (group > 16) throw Unsupported(fmt::format("{} query heads a KV head: the CUDA kernels take up to 16", group));
    return *choose(kernels, shape_of(layer, step));
}

constexpr int kDecodeRows = 8;  // of a tile; more are a chunk

PrefillShape chunks_of(const crumb_layer& layer, const crumb_step& step) {
    const size_t most_entries = step.chunk_blocks > 0 ? step.chunk_blocks : 2 * step.ids_stride;
    PrefillShape shape = {step.n_tiles, step.rows_per_tile, layer.n_head, layer.n_head_kv, step.multiprocessors, most_entries, layer.format.k.dim};
    const size_t shared = prefill_shared_bytes(shape.dim);
    if (shared == 0 || layer.format.k.dim != layer.format.v.dim) {
        throw Unsupported(fmt::format("tiles of {} rows with heads of {} and {} channels: chunks have kernels for 64 and 128 channels, take tiles of up to {} rows",
                                      step.rows_per_tile, layer.format.k.dim, layer.format.v.dim, kDecodeRows));
    }
    int device = 0, most = 0;
    require(cudaGetDevice(&device), "device");
    require(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "device");
    if (size_t(most) < shared) {
        throw Unsupported(fmt::format("tiles of {} rows take {} bytes of shared memory, this GPU has {}: take tiles of up to {} rows",
                                      step.rows_per_tile, shared, most, kDecodeRows));
    }
    return shape;
}

std::byte* memory_of(const crumb_step& step, size_t bytes) {
    std::byte* memory = &need(static_cast<std::byte*>(step.workspace), "workspace");
    if (step.workspace_bytes < bytes) fail("the workspace has {} bytes, the step needs {}", step.workspace_bytes, bytes);
    return memory;
}

StepTables tables_of(const crumb_step& step) {
    return {reinterpret_cast<const QueryRow*>(step.rows), step.coded_ids, step.exact_ids, step.ids_stride, step.sink};
}

void plan_step(const crumb_layer& layer, const crumb_step& step, void* stream) {
    const Kernels kernels = kernels_of_step(layer, step);
    if (step.rows_per_tile > kDecodeRows) {
        const PrefillShape chunks = chunks_of(layer, step);
        plan_prefill(prefill_launches(), chunks, tables_of(step), memory_of(step, prefill_workspace(chunks).bytes), stream);
        return require(cudaGetLastError(), "plan");
    }
    const StepShape shape = shape_of(layer, step);
    if (step.n_tiles > 32768) throw Unsupported(fmt::format("{} tiles in a step: the plan takes up to 32768", step.n_tiles));
    plan(kernels, launch_plan, shape, tables_of(step), memory_of(step, workspace(kernels, shape).bytes), stream);
    require(cudaGetLastError(), "plan");
}

void attend_step(const crumb_layer& layer, const crumb_step& step, const crumb_io& io, const RowArgs& rows, void* stream) {
    const Kernels kernels = kernels_of_step(layer, step);
    const StepShape shape = shape_of(layer, step);
    const Offsets offsets(layer);
    if (!io.tables) fail("tables is NULL");
    const LayerData data = {.coded = static_cast<const std::byte*>(io.coded),
                            .coded_stride = io.coded_stride,
                            .exact = static_cast<const std::byte*>(io.exact),
                            .exact_stride = io.exact_stride,
                            .heads = at<HeadArrays>(io.tables, offsets.heads),
                            .constants = at<HeadConstants>(io.tables, offsets.constants),
                            .sinks = io.sinks,
                            .scale = layer.scale,
                            .softcap = layer.softcap,
                            .rows = rows,
                            .q = io.q,
                            .q_token_stride = io.q_token_stride,
                            .q_head_stride = io.q_head_stride,
                            .out = io.out,
                            .out_stride = io.out_stride};
    if (step.rows_per_tile > kDecodeRows) {
        CRUMB_ASSERT(rows.n_stores == 0);
        const PrefillShape chunks = chunks_of(layer, step);
        attend_prefill(kernels, prefill_launches(), chunks, tables_of(step), data, memory_of(step, prefill_workspace(chunks).bytes), stream);
        return require(cudaGetLastError(), "attention");
    }
    attend(kernels, shape, tables_of(step), data, memory_of(step, workspace(kernels, shape).bytes), stream);
    require(cudaGetLastError(), "attention");
}

void store(const crumb_layer& layer, const crumb_rows& rows, void* stream) {
    launch_store({rows.k, rows.v, rows.blocks, rows.slots, static_cast<u8*>(rows.exact), rows.exact_stride,
                  layer.format.k.dim, layer.format.v.dim, layer.n_head_kv},
                 rows.n_tokens, stream);
    require(cudaGetLastError(), "store");
}

// Whether the device's encoder has the stages of a side.
bool has_stages(const SideRecipe& side, const SideTables& tables) {
    const bool range = side.quantiser == Quantiser::minmax && side.shrink == 1.0f && !side.channel_gain &&
                       (side.clip == 1.0f || (side.group == 0 && !side.integer_zero));
    const bool channels = side.quantiser == Quantiser::channels && side.shrink == 1.0f && side.boosted == 0 && side.outliers == 0 &&
                          kPageTokens % side.group == 0 && side.group % 8 == 0 && (side.token_gain == TokenGain::none || side.token_gain == TokenGain::norm);
    return (range || channels || side.quantiser == Quantiser::gain) && side.outliers == 0 &&
           std::ranges::find(tables.digit, kSharedDigit) == tables.digit.end();
}

void encode(const crumb_layer& layer, const crumb_encode_batch& batch, void* stream) {
    launch_encode(encode_args(layer, batch), reinterpret_cast<const EncodeJob*>(batch.jobs), batch.n_jobs, stream);
    require(cudaGetLastError(), "encode");
}

void copy(size_t bytes, std::byte* to, size_t to_stride, const uint32_t* to_ids, const std::byte* from, size_t from_stride,
          const uint32_t* from_ids, size_t n, void* stream) {
    for (size_t i = 0; i < n; i++) {
        require(cudaMemcpyAsync(to + to_ids[i] * to_stride, from + from_ids[i] * from_stride, bytes, cudaMemcpyDefault,
                                cudaStream_t(stream)),
                "copy");
    }
}

}  // namespace

void attend_storing(const crumb_layer& layer, const crumb_step& step, const crumb_io& io, const RowArgs& rows, void* stream) {
    attend_step(layer, step, io, rows, stream);
}

EncodeArgs encode_args(const crumb_layer& layer, const crumb_encode_batch& batch) {
    if (!has_stages(layer.recipe.k, layer.tables[0].k) || !has_stages(layer.recipe.v, layer.tables[0].v)) {
        throw Unsupported(fmt::format("recipe '{}' has a stage that the CUDA encoder lacks: encode its pages with CRUMB_CPU", layer.recipe.name));
    }
    const Offsets offsets(layer);
    if (!batch.tables) fail("tables is NULL");
    EncodeArgs args = {};
    args.k = encode_side(layer.recipe.k, layer.format, true, at<EncodeTables>(batch.tables, offsets.k));
    args.v = encode_side(layer.recipe.v, layer.format, false, at<EncodeTables>(batch.tables, offsets.v));
    args.n_head_kv = layer.n_head_kv;
    args.exact = static_cast<const u8*>(batch.exact);
    args.exact_stride = batch.exact_stride;
    args.exact_bytes = bf16_format(layer.format.k.dim, layer.format.v.dim).bytes();
    args.coded = static_cast<u8*>(batch.coded);
    args.coded_stride = batch.coded_stride;
    args.coded_bytes = layer.format.bytes();
    args.counts = reinterpret_cast<EncodeCountsDevice*>(batch.counts);
    return args;
}

size_t tables_bytes(const crumb_layer& layer) { return Image(layer, nullptr).bytes.size(); }

void tables_write(const crumb_layer& layer, void* tables, size_t bytes) {
    const Image image(layer, static_cast<std::byte*>(tables));
    if (bytes < image.bytes.size()) fail("{} bytes for tables of {}", bytes, image.bytes.size());
    require(cudaMemcpy(tables, image.bytes.data(), image.bytes.size(), cudaMemcpyHostToDevice), "tables");
}

const Backend* cuda_backend() {
    static const Backend backend = {
        .workspace_bytes =
            [](const crumb_layer& layer, const crumb_step& step, size_t& bytes) {
                bytes = step.rows_per_tile > kDecodeRows ? prefill_workspace(chunks_of(layer, step)).bytes
                                                         : workspace(kernels_of_step(layer, step), shape_of(layer, step)).bytes;
            },
        .plan = plan_step,
        .attend = [](const crumb_layer& layer, const crumb_step& step, const crumb_io& io, void* stream) { attend_step(layer, step, io, {}, stream); },
        .store = store,
        .encode = encode,
        .copy = copy,
    };
    return &backend;
}

}  // namespace crumb::capi
