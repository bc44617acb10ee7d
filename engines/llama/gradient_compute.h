// ggml on a CPU, for graphs that are built, run once and thrown away.
#pragma once

#include <functional>
#include <vector>

#include "ggml-cpp.h"

namespace crumb::llama {

// A context for the descriptions of up to n tensors and one graph of as many nodes; their data lie elsewhere.
ggml_context_ptr new_descriptions(size_t n);

// Tensors whose data outlive the graphs that read and write them.
class Kept {
  public:
    // Allocates all tensors of `context` that have no data yet and are no views.
    explicit Kept(ggml_context* context) : Kept(context, {}) {}
    // ... and of the others only these, which may belong to a graph.
    Kept(ggml_context* context, const std::vector<ggml_tensor*>& tensors);

    size_t bytes() const { return bytes_; }

  private:
    void allocate(ggml_tensor* tensor);

    std::vector<ggml_backend_buffer_ptr> buffers_;
    size_t bytes_ = 0;
};

class Compute {
  public:
    explicit Compute(int n_threads);

    // Runs the graph that leads to `results`, what leads to each of `order` first; read() is called while the data of
    // the results are there. Afterwards only Kept tensors have data, so that the same nodes can be part of another
    // graph. Throws Error when there is no memory.
    void run(const std::vector<ggml_tensor*>& results, const std::function<void()>& read = {},
             const std::vector<ggml_tensor*>& order = {});

    size_t scratch_bytes() const;  // the largest graph so far

  private:
    ggml_backend_ptr cpu_;
    ggml_gallocr_ptr scratch_;
};

// A tensor that is cut off from what computes it, for as long as this lives: its Kept data are then an input.
class Cut {
  public:
    explicit Cut(ggml_tensor* tensor);
    ~Cut();
    Cut(const Cut&) = delete;
    Cut& operator=(const Cut&) = delete;

  private:
    ggml_tensor* tensor_;
    ggml_tensor saved_;
};

// The nodes that lead to `result`, in the order of their computation.
std::vector<ggml_tensor*> nodes_of(ggml_tensor* result);

}  // namespace crumb::llama
