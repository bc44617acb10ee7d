// torch.ops.crumb: the C API on tensors. Shapes, types and places are checked here, the work is the C API's. Nothing of
// libtorch's C++ interface is used, only its stable C shim.
//
// Operators write into tensors of the caller and return nothing. `layer` is Layer.handle of crumb_kv, a pointer. In all of
// them, with n blocks of a pool:
//   exact       uint8 [n, exact_block_bytes]       coded   uint8 [n, block_bytes]       rows may lie apart
//   coded_ids, exact_ids   int32 [sequences, blocks of a sequence], -1: none
//   rows        int32 [tiles, 1 to 8, 6]: sequence, token (-1: pads its tile), position, begin, coded_end, end
//   tables      uint8, what crumb_tables_write() wrote; on CUDA alone
#include <crumb/crumb.h>
#include <fmt/format.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string_view>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tables = std::optional<Tensor>;

template <class... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> text, Args&&... args) {
    throw std::runtime_error(fmt::format(text, std::forward<Args>(args)...));
}

void require(crumb_status status) {
    if (status != CRUMB_OK) refuse("crumb: {}", crumb_error());
}

const crumb_layer* layer_of(int64_t handle) {
    if (handle == 0) refuse("crumb: layer 0 is none: pass Layer.handle of a layer of crumb_kv.make_layers()");
    return reinterpret_cast<const crumb_layer*>(handle);
}

const char* name_of(ScalarType type) {
    switch (type) {
        case ScalarType::Byte: return "uint8";
        case ScalarType::Int: return "int32";
        case ScalarType::Long: return "int64";
        case ScalarType::BFloat16: return "bfloat16";
        case ScalarType::Half: return "float16";
        case ScalarType::Float: return "float32";
        case ScalarType::Double: return "float64";
        default: return "another type";
    }
}

// Where an operator works: the device of its first tensor, on which all others must lie.
class Place {
  public:
    explicit Place(const Tensor& first) : cuda_(first.is_cuda()), index_(first.get_device()) {
        if (!cuda_ && !first.is_cpu()) refuse("crumb: tensors must lie on the CPU or on a CUDA device: move them with .to('cpu')");
#ifdef USE_CUDA
        if (cuda_) {
            guard_.emplace(index_);
            if (aoti_torch_get_current_cuda_stream(index_, &stream_) != 0) refuse("crumb: there is no CUDA stream");
        }
#else
        if (cuda_) {
            refuse("crumb: this crumb_kv was built for CPUs alone. Type: pip install --no-build-isolation "
                   "--config-settings=cmake.define.CRUMB_CUDA=ON ./python, or move the tensors with .to('cpu')");
        }
#endif
    }

    crumb_backend backend() const { return cuda_ ? CRUMB_CUDA : CRUMB_CPU; }
    void* stream() const { return stream_; }

    // `shape` has -1 where any size will do; the last `packed` dimensions must be contiguous.
    void check(const Tensor& t, std::string_view what, ScalarType type, std::initializer_list<int64_t> shape,
               int packed) const {
        if (t.scalar_type() != type) {
            refuse("crumb: {} is {}: it must be {} (.to(torch.{}))", what, name_of(t.scalar_type()), name_of(type), name_of(type));
        }
        if (t.is_cuda() != cuda_ || (cuda_ && t.get_device() != index_)) {
            refuse("crumb: {} does not lie where the first tensor does: move it with .to(other.device)", what);
        }
        bool right = t.dim() == int64_t(shape.size());
        for (int64_t i = 0; right && i < t.dim(); i++) right = shape.begin()[i] < 0 || shape.begin()[i] == t.size(i);
        if (!right) refuse("crumb: {} has shape [{}]: it must be [{}]", what, sizes(t), fmt::join(shape, ", "));
        int64_t stride = 1;
        for (int64_t i = t.dim() - 1; i >= t.dim() - packed; i--) {
            if (t.size(i) > 1 && t.stride(i) != stride) refuse("crumb: {} is not contiguous: pass it .contiguous()", what);
            stride *= t.size(i);
        }
    }

    void check_pool(const Tensor& t, std::string_view what, size_t block_bytes) const {
        check(t, what, ScalarType::Byte, {-1, int64_t(block_bytes)}, 1);
        if (t.stride(0) % 16 != 0 || reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 != 0) {
            refuse("crumb: blocks of {} are not aligned to 16 bytes", what);
        }
    }

    // Numbers of blocks; what lies on a device cannot be looked at without waiting for it.
    void check_ids(const Tensor& ids, std::string_view what, const Tensor& pool, int32_t least) const {
        if (cuda_) return;
        const int32_t* id = ids.const_data_ptr<int32_t>();
        for (int64_t i = 0; i < ids.numel(); i++) {
            if (id[i] < least || id[i] >= pool.size(0)) {
                refuse("crumb: {} name block {} of a pool of {}", what, id[i], pool.size(0));
            }
        }
    }

  private:
    static std::string sizes(const Tensor& t) {
        std::string text;
        for (int64_t i = 0; i < t.dim(); i++) text += (i ? ", " : "") + std::to_string(t.size(i));
        return text;
    }

    bool cuda_;
    int32_t index_;
    void* stream_ = nullptr;
#ifdef USE_CUDA
    std::optional<torch::stable::accelerator::DeviceGuard> guard_;
#endif
};

// torch's own threads, so that no second pool stands beside them.
const crumb_threads* threads() {
    thread_local crumb_threads pool;
    pool = {int(torch::stable::get_num_threads()),
            [](void*, int n, void (*body)(void*, int), void* work) {
                torch::stable::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) {
                    for (int64_t i = begin; i < end; i++) body(work, int(i));
                });
            },
            nullptr};
    return &pool;
}

const uint32_t* unsigned_data(const Tensor& t) { return reinterpret_cast<const uint32_t*>(t.const_data_ptr<int32_t>()); }

const void* tables_of(const Place& place, const Tables& tables) {
    if (place.backend() == CRUMB_CPU) return nullptr;
    if (!tables) refuse("crumb: on CUDA a layer needs its tables: pass Layer.tables(device)");
    place.check(*tables, "tables", ScalarType::Byte, {-1}, 1);
    return tables->const_data_ptr();
}

crumb_step step_of(const Place& place, const Tensor& rows, const Tensor& coded_ids, const Tensor& exact_ids, int64_t sink,
                   int64_t multiprocessors, Tensor& workspace) {
    place.check(rows, "rows", ScalarType::Int, {-1, -1, 6}, 3);
    place.check(coded_ids, "coded_ids", ScalarType::Int, {-1, -1}, 2);
    place.check(exact_ids, "exact_ids", ScalarType::Int, {coded_ids.size(0), coded_ids.size(1)}, 2);
    place.check(workspace, "workspace", ScalarType::Byte, {-1}, 1);
    if (sink < 0 || sink > INT32_MAX) refuse("crumb: sink is {}: it must be a number of tokens", sink);
    return {place.backend(),
            int(rows.size(0)),
            int(rows.size(1)),
            reinterpret_cast<const crumb_row*>(rows.const_data_ptr<int32_t>()),
            unsigned_data(coded_ids),
            unsigned_data(exact_ids),
            size_t(coded_ids.size(0)),
            size_t(coded_ids.size(1)),
            int(sink),
            int(multiprocessors),
            workspace.mutable_data_ptr(),
            size_t(workspace.numel()),
            threads(),
            0};
}

// That rows are of tokens of q; what they read of the tables the C API looks at.
void check_rows(const crumb_step& step, int64_t n_tokens) {
    for (int64_t i = 0; step.backend == CRUMB_CPU && i < int64_t(step.n_tiles) * step.rows_per_tile; i++) {
        const crumb_row& row = step.rows[i];
        if (row.token == CRUMB_NO_TOKEN) continue;
        if (row.token >= n_tokens) refuse("crumb: row {} is of token {} of {}", i, row.token, n_tokens);
    }
}

// k, v: bfloat16 [tokens, n_head_kv, dim], token i goes to slot slots[i] % 64 of exact block blocks[i].
void store(int64_t layer, const Tensor& k, const Tensor& v, const Tensor& blocks, const Tensor& slots, Tensor& exact) {
    const Place place(k);
    const int64_t n = k.size(0);
    const crumb_layer_shape shape = crumb_shape(layer_of(layer));
    place.check(k, "k", ScalarType::BFloat16, {n, shape.n_head_kv, shape.dim_k}, 3);
    place.check(v, "v", ScalarType::BFloat16, {n, shape.n_head_kv, shape.dim_v}, 3);
    place.check(blocks, "blocks", ScalarType::Int, {n}, 1);
    place.check(slots, "slots", ScalarType::Int, {n}, 1);
    place.check_pool(exact, "exact", crumb_exact_block_bytes(layer_of(layer)));
    place.check_ids(blocks, "blocks", exact, 0);
    const crumb_rows rows = {place.backend(),
                             int(n),
                             static_cast<const uint16_t*>(k.const_data_ptr()),
                             static_cast<const uint16_t*>(v.const_data_ptr()),
                             unsigned_data(blocks),
                             unsigned_data(slots),
                             exact.mutable_data_ptr(),
                             size_t(exact.stride(0))};
    if (n > 0) require(crumb_store(layer_of(layer), &rows, place.stream()));
}

// jobs: int32 [n, 4], source (exact block), target (coded block), keep, kept: crumb_encode_job. counts: int32 [2], added to.
void encode(int64_t layer, const Tensor& jobs, const Tensor& exact, Tensor& coded, Tensor& counts, const Tables& tables) {
    const Place place(jobs);
    place.check(jobs, "jobs", ScalarType::Int, {-1, 4}, 2);
    place.check(counts, "counts", ScalarType::Int, {2}, 1);
    place.check_pool(exact, "exact", crumb_exact_block_bytes(layer_of(layer)));
    place.check_pool(coded, "coded", crumb_block_bytes(layer_of(layer)));
    if (jobs.size(0) == 0) return;
    const auto* job = reinterpret_cast<const crumb_encode_job*>(jobs.const_data_ptr<int32_t>());
    for (int64_t i = 0; place.backend() == CRUMB_CPU && i < jobs.size(0); i++) {
        if (job[i].source >= exact.size(0) || job[i].target >= coded.size(0) || (job[i].keep > 0 && job[i].kept >= coded.size(0))) {
            refuse("crumb: job {} names blocks {}, {} and {} of pools of {} and {}", i, job[i].source, job[i].target, job[i].kept,
                   exact.size(0), coded.size(0));
        }
    }
    const crumb_encode_batch batch = {place.backend(),
                                      int(jobs.size(0)),
                                      job,
                                      exact.const_data_ptr(),
                                      size_t(exact.stride(0)),
                                      coded.mutable_data_ptr(),
                                      size_t(coded.stride(0)),
                                      tables_of(place, tables),
                                      reinterpret_cast<crumb_encode_counts*>(counts.mutable_data_ptr()),
                                      threads()};
    require(crumb_encode(layer_of(layer), &batch, place.stream()));
}

// Before attend() of a step, once for layers that follow each other and have blocks of one format. `workspace` has
// Layer.workspace_bytes() bytes and is theirs until the last of them.
void plan(int64_t layer, const Tensor& rows, const Tensor& coded_ids, const Tensor& exact_ids, int64_t sink,
          int64_t multiprocessors, Tensor& workspace) {
    const Place place(rows);
    const crumb_step step = step_of(place, rows, coded_ids, exact_ids, sink, multiprocessors, workspace);
    require(crumb_plan(layer_of(layer), &step, place.stream()));
}

// q: float32 [tokens, n_head, dim_k]. out: float32 [tokens, n_head, dim_v], written for the tokens that have a row.
// sinks: float32 [n_head], one more logit a head, without a value.
void attend(int64_t layer, const Tensor& q, const Tensor& rows, const Tensor& coded_ids, const Tensor& exact_ids, int64_t sink,
            int64_t multiprocessors, const Tensor& coded, const Tensor& exact, const Tables& tables, const Tables& sinks,
            Tensor& workspace, Tensor& out) {
    const Place place(q);
    const crumb_layer_shape shape = crumb_shape(layer_of(layer));
    place.check(q, "q", ScalarType::Float, {-1, shape.n_head, shape.dim_k}, 1);
    place.check(out, "out", ScalarType::Float, {q.size(0), shape.n_head, shape.dim_v}, 2);
    place.check_pool(exact, "exact", crumb_exact_block_bytes(layer_of(layer)));
    place.check_pool(coded, "coded", crumb_block_bytes(layer_of(layer)));
    if (sinks) place.check(*sinks, "sinks", ScalarType::Float, {shape.n_head}, 1);
    const crumb_step step = step_of(place, rows, coded_ids, exact_ids, sink, multiprocessors, workspace);
    place.check_ids(coded_ids, "coded_ids", coded, -1);
    place.check_ids(exact_ids, "exact_ids", exact, -1);
    check_rows(step, q.size(0));
    const crumb_io io = {coded.const_data_ptr(),
                         size_t(coded.stride(0)),
                         exact.const_data_ptr(),
                         size_t(exact.stride(0)),
                         tables_of(place, tables),
                         sinks ? sinks->const_data_ptr<float>() : nullptr,
                         q.const_data_ptr<float>(),
                         size_t(q.stride(0)),
                         size_t(q.stride(1)),
                         out.mutable_data_ptr<float>(),
                         size_t(out.stride(0))};
    require(crumb_attend(layer_of(layer), &step, &io, place.stream()));
}

// Block to_ids[i] of the pool becomes a copy of block from_ids[i], one after the other. ids: int32 [n] on the CPU.
void copy_blocks(Tensor& pool, const Tensor& from_ids, const Tensor& to_ids) {
    const Place place(pool), host(from_ids);
    place.check_pool(pool, "pool", pool.dim() == 2 ? size_t(pool.size(1)) : 0);
    if (host.backend() != CRUMB_CPU) refuse("crumb: from_ids must lie on the CPU: pass it .cpu()");
    host.check(from_ids, "from_ids", ScalarType::Int, {-1}, 1);
    host.check(to_ids, "to_ids", ScalarType::Int, {from_ids.size(0)}, 1);
    host.check_ids(from_ids, "from_ids", pool, 0);
    host.check_ids(to_ids, "to_ids", pool, 0);
    void* data = pool.mutable_data_ptr();
    const size_t stride = size_t(pool.stride(0));
    require(crumb_copy(place.backend(), size_t(pool.size(1)), data, stride, unsigned_data(to_ids), data, stride,
                       unsigned_data(from_ids), size_t(from_ids.size(0)), place.stream()));
}

}  // namespace

STABLE_TORCH_LIBRARY(crumb, m) {
    m.def("store(int layer, Tensor k, Tensor v, Tensor blocks, Tensor slots, Tensor(a!) exact) -> ()");
    m.def("encode(int layer, Tensor jobs, Tensor exact, Tensor(a!) coded, Tensor(b!) counts, Tensor? tables=None) -> ()");
    m.def("plan(int layer, Tensor rows, Tensor coded_ids, Tensor exact_ids, int sink, int multiprocessors, "
          "Tensor(a!) workspace) -> ()");
    m.def("attend(int layer, Tensor q, Tensor rows, Tensor coded_ids, Tensor exact_ids, int sink, int multiprocessors, "
          "Tensor coded, Tensor exact, Tensor? tables, Tensor? sinks, Tensor(a!) workspace, Tensor(b!) out) -> ()");
    m.def("copy_blocks(Tensor(a!) pool, Tensor from_ids, Tensor to_ids) -> ()");
}

static void implement(torch::stable::detail::StableLibrary& m) {
    m.impl("store", TORCH_BOX(&store));
    m.impl("encode", TORCH_BOX(&encode));
    m.impl("plan", TORCH_BOX(&plan));
    m.impl("attend", TORCH_BOX(&attend));
    m.impl("copy_blocks", TORCH_BOX(&copy_blocks));
}

STABLE_TORCH_LIBRARY_IMPL(crumb, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(crumb, CUDA, m) { implement(m); }  // without CUDA they say what to install
