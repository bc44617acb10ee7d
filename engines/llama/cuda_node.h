// A layer's node of a graph: what it needs, and its launches. Nothing waits and nothing is allocated at a launch, and what a
// launch reads of a step lies in the step's words, so that it can be recorded once and replayed.
#pragma once

#include <crumb/cache.h>

#include <memory>
#include <vector>

#include "capi/cuda.h"
#include "cuda_device.h"
#include "ggml-backend.h"

namespace crumb::llama {

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

// Sources of a node: q, words, then k and v if it stores, then the sinks if there are any.
inline constexpr int kWords = 1, kFirstRow = 2;

const capi::Backend& kernels();

// Without pointers: what decides about sizes. No tiles or chunks: n_tiles is 0.
crumb_step tiles_of(const StepLayout& layout, const Device& device);
crumb_step chunks_of(const StepLayout& layout, const Device& device);

// Pages of a layer that a step makes due; words null: none are named yet.
crumb_encode_batch batch_of(const Layer& layer, const StepLayout& layout, const uint32_t* words, std::byte* coded, const std::byte* exact);

void launch_node(const Node& node, ggml_tensor* tensor, void* stream);

}  // namespace crumb::llama
