#include "cuda_layers.h"

#include "llama-impl.h"

#include <crumb/error.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <set>
#include <utility>

#include "cuda_node.h"
#include "ggml-cuda.h"

namespace crumb::llama {

namespace {

// Rows of a sequence in a step that make it a chunk. On an H200 a layer's chunk costs much the same from 64 rows (0.55 ms behind
// 32k tokens) to 512 (0.72 ms), tiles of 8 rows cost in proportion to their number.
constexpr int kChunkRows = 128;

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
        config_.devices = memories();
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
        const std::vector<size_t> all = layer_bytes(config_), on_host = host_bytes(config_);
        std::map<ggml_backend_buffer_type_t, size_t> result;
        for (size_t il = 0; il < layers_.size(); ++il) {
            if (layers_[il].device) { result[ggml_backend_dev_buffer_type(layers_[il].device->handle)] += all[il] - on_host[il]; }
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
        const std::vector<size_t> on_host = host_bytes(config_);
        const size_t bytes = std::accumulate(on_host.begin(), on_host.end(), size_t(0));
        if (bytes > 0) { text += fmt::format(", whose last {:.1f} MiB of pages lie in main memory", double(bytes) / 1048576.0); }
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
            device.encoders.shape = widest(device.encoders.shape, encode_shape(all.back()));
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
