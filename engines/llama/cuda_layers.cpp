#include "cuda_layers.h"

#include "llama-impl.h"

#include <crumb/error.h>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "capi/cuda.h"
#include "ggml-cuda.h"

namespace crumb::llama {

namespace {

static_assert(sizeof(EncodeBlock) == sizeof(crumb_encode_job) && sizeof(EncodeBlock) == sizeof(cuda::EncodeJob) &&
              sizeof(QueryRow) == sizeof(crumb_row));

// Of a step: from here on the kernel for chunks is faster than tiles of 8 rows, behind short contexts and long ones.
constexpr int kChunkRows = 128;

constexpr const char* kRemedy = "keep the KV cache on the CPU with --no-kv-offload";

void require(cudaError_t status, const char* what) {
    if (status != cudaSuccess) { fail("CUDA: {}: {}", what, cudaGetErrorString(status)); }
}

// The device that calls are for, until the end of the scope.
class OnDevice {
public:
    explicit OnDevice(int ordinal) {
        require(cudaGetDevice(&before_), "device");
        require(cudaSetDevice(ordinal), "device");
    }
    ~OnDevice() { cudaSetDevice(before_); }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

private:
    int before_ = 0;
};

class CudaMemory : public DeviceMemory {
public:
    explicit CudaMemory(int ordinal) : ordinal_(ordinal) {}

    std::byte* allocate(size_t bytes) override {
        const OnDevice on(ordinal_);
        void* memory = nullptr;
        if (cudaMalloc(&memory, bytes) != cudaSuccess) {
            cudaGetLastError();
            size_t free = 0, total = 0;
            cudaMemGetInfo(&free, &total);
            fail("no memory for the KV cache on CUDA{}: {:.1f} MiB more are needed and {:.1f} of {:.1f} MiB are free; use a smaller "
                 "context (-c) or fewer sequences (-np), or {}",
                 ordinal_, double(bytes) / 1048576.0, double(free) / 1048576.0, double(total) / 1048576.0, kRemedy);
        }
        require(cudaMemset(memory, 0, bytes), "memory");
        require(cudaDeviceSynchronize(), "memory");
        return static_cast<std::byte*>(memory);
    }
    void free(std::byte* memory) override {
        const OnDevice on(ordinal_);
        cudaDeviceSynchronize();
        cudaFree(memory);
    }
    void copy(std::byte* to, const std::byte* from, size_t bytes) override { move(to, from, bytes); }
    void clear(std::byte* to, size_t bytes) override {
        const OnDevice on(ordinal_);
        require(cudaDeviceSynchronize(), "wait");
        require(cudaMemset(to, 0, bytes), "clear");
        require(cudaDeviceSynchronize(), "clear");
    }
    void read(void* to, const std::byte* from, size_t bytes) override { move(to, from, bytes); }
    void write(std::byte* to, const void* from, size_t bytes) override { move(to, from, bytes); }

private:
    // The backend's streams do not wait for others.
    void move(void* to, const void* from, size_t bytes) {
        const OnDevice on(ordinal_);
        require(cudaDeviceSynchronize(), "wait");
        require(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "copy");
        require(cudaDeviceSynchronize(), "copy");
    }
    int ordinal_;
};

// ggml's parameters of a custom node.
struct NodeParams {
    ggml_custom_op_t function;
    int n_tasks;
    void* userdata;
};
static_assert(sizeof(NodeParams) <= GGML_MAX_OP_PARAMS);

NodeParams params_of(const ggml_tensor* node) {
    NodeParams params;
    std::memcpy(&params, node->op_params, sizeof params);
    return params;
}

// The function of all nodes here, by which they are known. The scheduler has no reason to run one.
void on_device_only(ggml_tensor*, int, int, void*) { GGML_ABORT("crumb: a node of a CUDA device came to the CPU"); }

// Layers that share a plan: same kernels, heads and window.
struct Kind {
    cuda::KernelFormat kernels;
    int n_head, n_head_kv, window;
    bool operator==(const Kind&) const = default;
};

// Working memory of a kind, or of all chunks, on a device, as large as the largest step so far.
struct Workspace {
    std::byte* memory = nullptr;
    size_t bytes = 0;
    bool operator==(const Workspace&) const = default;
};

struct Device {
    ggml_backend_dev_t handle = nullptr;
    int ordinal = 0;
    int multiprocessors = 1;
    std::unique_ptr<CudaMemory> memory;
    std::vector<Kind> kinds;
    std::vector<Workspace> workspaces;  // by kind
    Workspace chunks;
    crumb_encode_counts* counts = nullptr;
    cuda::EncodeLayers encoders;  // of all coded layers, once the cache is there
    std::vector<std::byte*> owned;

    ~Device() {
        if (!memory) { return; }
        for (const auto& workspace : workspaces) { if (workspace.memory) { memory->free(workspace.memory); } }
        if (chunks.memory) { memory->free(chunks.memory); }
        for (std::byte* piece : owned) { memory->free(piece); }
    }
};

struct Layer {
    Device* device = nullptr;  // null: not here
    int owner = -1;
    size_t kind = 0;
    bool windowed = false;
    crumb_layer shape;
    std::byte* tables = nullptr;
    size_t coded_stride = 0, exact_stride = 0;
};

// What a node needs. Graphs and CUDA graphs outlive the step that built them and are told apart by these, so a node is
// never changed, and lives as long as the context.
struct Node {
    const Layer* layer;
    std::shared_ptr<const StepLayout> layout;
    Workspace workspace, chunks;
    bool stores;   // it has K and V
    bool begins;   // the first of its device: it encodes for all layers, if that can be done so early
    bool plans;    // the first of its kind
    int sink;
    size_t plan;  // index of its rows
    std::byte *coded, *exact;
    bool operator==(const Node&) const = default;
};

const capi::Backend& kernels() {
    const capi::Backend* backend = capi::cuda_backend();
    CRUMB_ASSERT(backend);
    return *backend;
}

crumb_encode_batch batch_of(const Layer& layer, const StepLayout& layout, const uint32_t* words, std::byte* coded, const std::byte* exact) {
    return {.backend = CRUMB_CUDA, .n_jobs = layout.n_jobs,
            .jobs = words ? reinterpret_cast<const crumb_encode_job*>(words + layout.jobs) : nullptr, .exact = exact,
            .exact_stride = layer.exact_stride, .coded = coded, .coded_stride = layer.coded_stride,
            .tables = layer.tables, .counts = layer.device->counts, .threads = nullptr};
}

// K and V of the step, sources `first` and `first + 1` of the node.
cuda::RowArgs rows_of(const Node& node, const ggml_tensor* tensor, int first, const uint32_t* words) {
    const Layer& layer = *node.layer;
    const StepLayout& layout = *node.layout;
    const ggml_tensor *k = tensor->src[first], *v = tensor->src[first + 1];
    const auto floats = [](size_t bytes) { return bytes / sizeof(float); };
    return {.k = static_cast<const float*>(k->data), .v = static_cast<const float*>(v->data),
            .k_token_stride = floats(k->nb[2]), .k_head_stride = floats(k->nb[1]),
            .v_token_stride = floats(v->nb[2]), .v_head_stride = floats(v->nb[1]),
            .stores = reinterpret_cast<const StoreRow*>(words + (layer.windowed ? layout.window_stores : layout.stores)),
            .n_stores = layout.n_stores, .dim_k = layer.shape.format.k.dim, .dim_v = layer.shape.format.v.dim,
            .n_head_kv = layer.shape.n_head_kv, .exact = reinterpret_cast<cuda::u8*>(node.exact),
            .exact_stride = layer.exact_stride};
}

crumb_step tiles_of(const StepLayout& layout, const Device& device) {
    crumb_step step = {};
    step.backend = CRUMB_CUDA;
    step.n_tiles = layout.n_tiles, step.rows_per_tile = layout.rows_per_tile;
    step.multiprocessors = device.multiprocessors;
    return step;
}

crumb_step chunks_of(const StepLayout& layout, const Device& device) {
    crumb_step step = tiles_of(layout, device);
    step.n_tiles = layout.n_chunks, step.rows_per_tile = layout.rows_per_chunk, step.chunk_blocks = size_t(layout.chunk_blocks);
    return step;
}

void point(crumb_step& step, const Node& node, const uint32_t* words, const std::vector<size_t>& rows, const Workspace& workspace) {
    const StepLayout& layout = *node.layout;
    step.rows = reinterpret_cast<const crumb_row*>(words + rows[node.plan]);
    step.coded_ids = words + layout.coded_ids;
    step.exact_ids = words + (node.layer->windowed ? layout.window_ids : layout.exact_ids);
    step.n_sequences = size_t(layout.n_sequences), step.ids_stride = layout.ids_stride;
    step.sink = node.sink;
    step.workspace = workspace.memory, step.workspace_bytes = workspace.bytes;
}

// Sources of a node: q, words, then k and v if it stores, then the sinks if there are any.
constexpr int kWords = 1, kFirstRow = 2;

void launch_node(const Node& node, ggml_tensor* tensor, void* stream) {
    const Layer& layer = *node.layer;
    const StepLayout& layout = *node.layout;
    const uint32_t* words = static_cast<const uint32_t*>(tensor->src[kWords]->data);
    const auto* jobs = reinterpret_cast<const cuda::EncodeJob*>(words + layout.jobs);
    if (node.begins && layout.encodes_first) { cuda::launch_encode_layers(layer.device->encoders, jobs, layout.n_jobs, stream); }

    cuda::RowArgs rows;
    if (node.stores) { rows = rows_of(node, tensor, kFirstRow, words); }
    const bool encodes_now = node.stores && !layer.windowed && !layout.encodes_first;
    if (encodes_now || layout.n_tiles == 0 || !cuda::few_rows(rows.n_stores)) {
        cuda::launch_rows(rows, stream);
        require(cudaGetLastError(), "rows");
        rows.n_stores = 0;
    }
    if (encodes_now) { kernels().encode(layer.shape, batch_of(layer, layout, words, node.coded, node.exact), stream); }

    const ggml_tensor* q = tensor->src[0];
    const ggml_tensor* sinks = tensor->src[kFirstRow + (node.stores ? 2 : 0)];
    const crumb_io io = {.coded = node.coded, .coded_stride = layer.coded_stride, .exact = node.exact,
                         .exact_stride = layer.exact_stride, .tables = layer.tables,
                         .sinks = sinks ? static_cast<const float*>(sinks->data) : nullptr,
                         .q = static_cast<const float*>(q->data), .q_token_stride = q->nb[2] / sizeof(float),
                         .q_head_stride = q->nb[1] / sizeof(float), .out = static_cast<float*>(tensor->data),
                         .out_stride = tensor->nb[1] / sizeof(float)};
    if (layout.n_tiles > 0) {
        crumb_step step = tiles_of(layout, *layer.device);
        point(step, node, words, layout.rows, node.workspace);
        if (node.plans) { kernels().plan(layer.shape, step, stream); }
        capi::attend_storing(layer.shape, step, io, rows, stream);
    }
    if (layout.n_chunks > 0) {  // their memory is that of all kinds: the plan, a small part, is made for each layer
        crumb_step step = chunks_of(layout, *layer.device);
        point(step, node, words, layout.chunk_rows, node.chunks);
        kernels().plan(layer.shape, step, stream);
        kernels().attend(layer.shape, step, io, stream);
    }
}

bool supports(int device, const ggml_tensor* op) {
    const NodeParams params = params_of(op);
    return params.function == on_device_only && static_cast<const Node*>(params.userdata)->layer->device->ordinal == device;
}

// Nothing above catches: whatever a launch could refuse was tried when the layers were made.
void launch(int, ggml_tensor* tensor, void* stream) {
    try {
        launch_node(*static_cast<const Node*>(params_of(tensor).userdata), tensor, stream);
    } catch (const std::exception& e) {
        GGML_ABORT("crumb: %s", e.what());
    }
}

void register_with(ggml_backend_reg_t cuda) {
    using Set = void (*)(ggml_backend_cuda_custom_supports_t, ggml_backend_cuda_custom_launch_t);
    const auto set = reinterpret_cast<Set>(ggml_backend_reg_get_proc_address(cuda, "ggml_backend_cuda_set_custom"));
    if (!set) { fail("this llama.cpp's CUDA backend has no hooks for --kv (engines/llama/build.sh --cuda makes one that has); {}", kRemedy); }
    set(supports, launch);
}

// The step, for the layers of one graph.
class StepInput : public llm_graph_input_i {
public:
    StepInput(ggml_tensor* words, std::shared_ptr<const StepLayout> layout, const Cache* cache)
        : words_(words), layout_(std::move(layout)), cache_(cache) {}

    void set_input(const llama_ubatch*) override {
        if (!words_->buffer) { return; }  // no layer of this graph reads it
        values_.resize(layout_->words);
        cache_->write_step(*layout_, values_);
        ggml_backend_tensor_set(words_, values_.data(), 0, values_.size() * sizeof(uint32_t));
    }
    bool can_reuse(const llm_graph_params&) override { return cache_ && cache_->step_layout() == *layout_; }

private:
    ggml_tensor* words_;
    std::shared_ptr<const StepLayout> layout_;
    const Cache* cache_;
    std::vector<uint32_t> values_;
};

class Cuda : public CudaLayers {
public:
    Cuda(const llama_model& model, const CacheConfig& config, const std::vector<int>& owner, bool allocate)
        : config_(config), allocate_(allocate), layers_(owner.size()) {
        config_.tables.clear();
        config_.chunk_rows = kChunkRows;
        for (size_t il = 0; il < owner.size(); ++il) {
            if (owner[il] < 0) { continue; }
            ggml_backend_dev_t handle = model.dev_layer(int(il));
            if (!is_cuda(handle)) {
                if (handle && ggml_backend_dev_type(handle) != GGML_BACKEND_DEVICE_TYPE_CPU) {
                    fail("layer {} is on {}, and --kv has no attention for it; {}", il, ggml_backend_dev_name(handle), kRemedy);
                }
                continue;
            }
            add_layer(model, config, int(il), owner[il], device_of(handle));
        }
        for (size_t il = 0; il < layers_.size(); ++il) {
            const Layer& layer = layers_[il];
            if (owner[il] >= 0 && layers_[owner[il]].device != layer.device) {
                fail("layer {} reads the K and V of layer {}, which is on another device; {}, or put all layers on one", il, owner[il], kRemedy);
            }
        }
    }

    static bool is_cuda(ggml_backend_dev_t device) {
        return device && ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_GPU &&
               std::string_view(ggml_backend_reg_name(ggml_backend_dev_backend_reg(device))) == "CUDA";
    }

    bool has(int layer) const override { return layers_.at(layer).device; }
    int chunk_rows() const override { return config_.chunk_rows; }

    std::vector<DeviceMemory*> memories() const override {
        std::vector<DeviceMemory*> result;
        for (const Layer& layer : layers_) { result.push_back(layer.device ? layer.device->memory.get() : nullptr); }
        return result;
    }

    std::map<ggml_backend_buffer_type_t, size_t> bytes() const override {
        const std::vector<size_t> all = layer_bytes(config_);
        std::map<ggml_backend_buffer_type_t, size_t> result;
        for (size_t il = 0; il < layers_.size(); ++il) {
            if (layers_[il].device) { result[ggml_backend_dev_buffer_type(layers_[il].device->handle)] += all[il]; }
        }
        return result;
    }

    size_t working_bytes() const override {
        size_t bytes = 0;
        for (const auto& device : devices_) {
            for (const auto& workspace : device->workspaces) { bytes += workspace.bytes; }
            bytes += device->chunks.bytes;
        }
        return bytes;
    }

    std::string describe() const override {
        std::string text;
        for (const auto& device : devices_) {
            const auto n = std::ranges::count_if(layers_, [&](const Layer& layer) { return layer.device == device.get(); });
            text += fmt::format("{}{} layers on {} ({})", text.empty() ? "" : ", ", n, ggml_backend_dev_name(device->handle),
                                ggml_backend_dev_description(device->handle));
        }
        return text;
    }

    void build_input(const llm_graph_context& graph, const Cache* cache, bool largest) override {
        const bool guess = largest || !cache;
        const auto layout = std::make_shared<const StepLayout>(
            guess ? largest_layout(config_, int(graph.n_tokens), std::min(config_.n_sequences, int(graph.n_tokens))) : cache->step_layout());
        const auto known = std::ranges::find_if(layouts_, [&](const auto& other) { return *other == *layout; });
        layout_ = known == layouts_.end() ? layouts_.emplace_back(layout) : *known;
        words_ = ggml_new_tensor_1d(graph.ctx0, GGML_TYPE_I32, int64_t(layout_->words));
        ggml_set_input(words_);
        graph.cb(words_, "kv_step", -1);
        graph.res->add_input(std::make_unique<StepInput>(words_, layout_, guess ? nullptr : cache));
        planned_.clear();
        begun_.clear();
        for (const auto& device : devices_) {
            make_room(*device);
            if (cache && !device->encoders.args) { list_encoders(*device, *cache); }
        }
    }

    ggml_tensor* build_attn(const llm_graph_context& graph, const llama_attn_args& args, const Cache* cache) override {
        Layer& layer = layers_.at(args.il);
        CRUMB_ASSERT(words_ && (layer.shape.scale == 0.0f || layer.shape.scale == args.kq_scale));
        layer.shape.scale = args.kq_scale;
        ggml_tensor* inputs[5] = {args.q, words_};
        int n = kFirstRow;
        const bool stores = args.k && args.v;
        if (stores) { inputs[n++] = args.k, inputs[n++] = args.v; }
        if (args.sinks) { inputs[n++] = args.sinks; }
        const bool plans = planned_.insert({layer.device, layer.kind}).second, begins = begun_.insert(layer.device).second;
        const Node wanted = {.layer = &layer, .layout = layout_, .workspace = layer.device->workspaces[layer.kind],
                             .chunks = layer.device->chunks, .stores = stores, .begins = begins, .plans = plans, .sink = config_.sink,
                             .plan = cache ? cache->plan_index(layer.owner) : 0, .coded = cache ? cache->coded_base(layer.owner) : nullptr,
                             .exact = cache ? cache->exact_base(layer.owner) : nullptr};
        ggml_tensor* out = ggml_custom_4d(graph.ctx0, GGML_TYPE_F32, int64_t(layer.shape.format.v.dim) * layer.shape.n_head,
                                          args.q->ne[2], 1, 1, inputs, n, on_device_only, 1, node(size_t(args.il), wanted));
        place(graph, out, layer);
        return out;
    }

private:
    Device& device_of(ggml_backend_dev_t handle) {
        for (const auto& device : devices_) {
            if (device->handle == handle) { return *device; }
        }
        auto device = std::make_unique<Device>();
        device->handle = handle;
        const ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(handle);
        while (ggml_backend_reg_dev_get(reg, size_t(device->ordinal)) != handle) { ++device->ordinal; }
        register_with(reg);
        device->memory = std::make_unique<CudaMemory>(device->ordinal);
        require(cudaDeviceGetAttribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount, device->ordinal), "multiprocessors");
        if (allocate_) {
            device->counts = reinterpret_cast<crumb_encode_counts*>(device->memory->allocate(sizeof(crumb_encode_counts)));
            device->owned.push_back(reinterpret_cast<std::byte*>(device->counts));
        }
        return *devices_.emplace_back(std::move(device));
    }

    void add_layer(const llama_model& model, const CacheConfig& config, int il, int owner, Device& device) {
        Layer& layer = layers_[il];
        const CacheLayer& shape = config.layers[owner];
        const auto& hparams = model.hparams;
        layer.device = &device;
        layer.owner = owner;
        layer.windowed = shape.window > 0;
        layer.exact_stride = size_t(shape.n_head_kv) * bf16_format(shape.dim_k, shape.dim_v).bytes();
        if (hparams.use_alibi) { fail("layer {}: ALiBi has no CUDA kernel; {}", il, kRemedy); }
        // Windows have no codes: any format of their head size does, and its tables are not looked at.
        CacheConfig plain;
        plain.recipe = layer.windowed ? find_recipe("had2") : config.recipe;
        plain.layers = {{.n_head_kv = shape.n_head_kv, .dim_k = shape.dim_k, .dim_v = shape.dim_v}};
        const auto try_kernels = [&](auto body) {
            try {
                body();
            } catch (const Error& e) {
                fail("layer {} is on {}, and {} has no CUDA kernel for it ({}): {}, or choose another recipe", il,
                     ggml_backend_dev_name(device.handle), layer.windowed ? "a sliding window" : fmt::format("--kv {}", label(config.recipe)), e.what(), kRemedy);
            }
        };
        try_kernels([&] {
            if (!plain.recipe.coded()) { fail("pages of 16 bits are for the CPU"); }
            if (layer.windowed) {
                set_formats(plain, nullptr);
                set_tables(plain, nullptr);
            }
            layer.shape = {.recipe = plain.recipe,
                           .format = layer.windowed ? plain.formats[0] : config.formats[owner],
                           .tables = layer.windowed ? plain.tables[0] : config.tables[owner],
                           .maps = {}, .number = owner, .n_head = int(hparams.n_head(il)), .n_head_kv = shape.n_head_kv,
                           .scale = 0.0f,
                           .softcap = hparams.attn_soft_cap ? hparams.f_attn_logit_softcapping : 0.0f};
            size_t bytes = 0;
            crumb_step one = tiles_of(StepLayout(), device);
            one.n_tiles = 1;
            kernels().workspace_bytes(layer.shape, one, bytes);
            kernels().tables_bytes(layer.shape, bytes);
            if (owner != il && layers_[owner].tables) {
                layer.tables = layers_[owner].tables;
            } else if (allocate_) {
                layer.tables = device.memory->allocate(bytes);
                device.owned.push_back(layer.tables);
                const OnDevice on(device.ordinal);
                kernels().tables_write(layer.shape, layer.tables, bytes);
                // Says so if the recipe has a stage that the encoder lacks; no jobs, so nothing runs.
                if (!layer.windowed) {
                    crumb_encode_batch none = {};
                    none.backend = CRUMB_CUDA;
                    none.tables = layer.tables;
                    kernels().encode(layer.shape, none, nullptr);
                }
            }
        });
        layer.coded_stride = size_t(shape.n_head_kv) * layer.shape.format.bytes();
        const Kind kind{capi::kernels_of(layer.shape)[0].compiled, layer.shape.n_head, layer.shape.n_head_kv, shape.window};
        if (!takes_chunks(layer, device)) { config_.chunk_rows = 0; }
        const auto found = std::ranges::find(device.kinds, kind);
        layer.kind = size_t(found - device.kinds.begin());
        if (found == device.kinds.end()) {
            device.kinds.push_back(kind);
            device.workspaces.emplace_back();
        }
    }

    // Whether the kernels of chunks take the layer.
    static bool takes_chunks(const Layer& layer, const Device& device) {
        const OnDevice on(device.ordinal);
        crumb_step step = tiles_of(StepLayout(), device);
        step.n_tiles = 1, step.rows_per_tile = kChunkRows, step.ids_stride = 1;
        size_t bytes = 0;
        try {
            kernels().workspace_bytes(layer.shape, step, bytes);
        } catch (const capi::Unsupported&) {
            return false;
        }
        return true;
    }

    // Before a graph is built: what grows gets new nodes, and old ones are never recorded again.
    void make_room(Device& device) {
        const auto grow = [&](Workspace& workspace, const Layer& layer, const crumb_step& step) {
            size_t bytes = 0;
            if (step.n_tiles > 0) { kernels().workspace_bytes(layer.shape, step, bytes); }
            if (bytes <= workspace.bytes) { return; }
            if (workspace.memory) { device.memory->free(workspace.memory); }
            workspace = {};
            workspace.memory = allocate_ ? device.memory->allocate(bytes) : nullptr;
            workspace.bytes = bytes;
        };
        const OnDevice on(device.ordinal);
        for (const Layer& layer : layers_) {
            if (layer.device != &device) { continue; }
            grow(device.workspaces[layer.kind], layer, tiles_of(*layout_, device));
            grow(device.chunks, layer, chunks_of(*layout_, device));
        }
    }

    Node* node(size_t il, const Node& wanted) {
        for (const auto& known : nodes_[il]) {
            if (*known == wanted) { return known.get(); }
        }
        return nodes_[il].emplace_back(std::make_unique<Node>(wanted)).get();
    }

    // What encodes the pages of all layers of a device in one launch.
    void list_encoders(Device& device, const Cache& cache) {
        std::vector<cuda::EncodeArgs> all;
        for (size_t il = 0; il < layers_.size(); ++il) {
            const Layer& layer = layers_[il];
            if (layer.device != &device || layer.windowed || layer.owner != int(il)) { continue; }
            all.push_back(capi::encode_args(layer.shape, batch_of(layer, StepLayout(), nullptr, cache.coded_base(int(il)), cache.exact_base(int(il)))));
            device.encoders.most_heads = std::max(device.encoders.most_heads, layer.shape.n_head_kv);
            device.encoders.shared_bytes = std::max(device.encoders.shared_bytes, encode_shared_bytes(all.back()));
        }
        if (all.empty()) { return; }
        std::byte* const memory = device.memory->allocate(all.size() * sizeof(all[0]));
        device.owned.push_back(memory);
        device.memory->write(memory, all.data(), all.size() * sizeof(all[0]));
        device.encoders.args = reinterpret_cast<const cuda::EncodeArgs*>(memory);
        device.encoders.n = int(all.size());
    }

    static void place(const llm_graph_context& graph, ggml_tensor* tensor, const Layer& layer) {
        for (int i = 0; i < ggml_backend_sched_get_n_backends(graph.sched); ++i) {
            ggml_backend_t backend = ggml_backend_sched_get_backend(graph.sched, i);
            if (ggml_backend_get_device(backend) == layer.device->handle) {
                ggml_backend_sched_set_tensor_backend(graph.sched, tensor, backend);
                return;
            }
        }
        fail("layer {} is on {}, which this context does not use; {}", layer.owner, ggml_backend_dev_name(layer.device->handle), kRemedy);
    }

    CacheConfig config_;
    bool allocate_;
    std::vector<std::unique_ptr<Device>> devices_;
    std::vector<Layer> layers_;
    std::map<size_t, std::vector<std::unique_ptr<Node>>> nodes_;  // by layer
    std::vector<std::shared_ptr<const StepLayout>> layouts_;

    // Of the graph that is being built.
    std::shared_ptr<const StepLayout> layout_;
    ggml_tensor* words_ = nullptr;
    std::set<std::pair<const Device*, size_t>> planned_;
    std::set<const Device*> begun_;
};

}  // namespace

std::unique_ptr<CudaLayers> CudaLayers::make(const llama_model& model, const llama_cparams& cparams, const CacheConfig& config,
                                             const std::vector<int>& owner, bool allocate) {
    if (!cparams.offload_kqv) { return nullptr; }
    bool any = false;
    for (size_t il = 0; il < owner.size(); ++il) {
        ggml_backend_dev_t device = owner[il] < 0 ? nullptr : model.dev_layer(int(il));
        any |= device && ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_CPU;
    }
    if (!any) { return nullptr; }
    if (model.split_mode() != LLAMA_SPLIT_MODE_LAYER && model.split_mode() != LLAMA_SPLIT_MODE_NONE) {
        fail("--split-mode {} cuts layers into pieces, and --kv keeps a layer's K and V whole: use --split-mode layer, or {}",
             model.split_mode() == LLAMA_SPLIT_MODE_ROW ? "row" : "tensor", kRemedy);
    }
    return std::make_unique<Cuda>(model, config, owner, allocate);
}

}  // namespace crumb::llama
