// What attention sees while a model runs, for calibration: an evaluation callback of llama.cpp (cb_eval).
//
// Tensor names of projections (Kcur, Kcur_normed, Kcur_rope, ...) differ by architecture, and so does which of them
// goes into the cache. So K and V are taken where they are stored, Q and the output where attention computes them:
//
//   llama.cpp's cache   SET_ROWS into cache_k_lN, cache_v_lN; the Q of FLASH_ATTN_EXT behind kqv_out-N, or of MUL_MAT
//   kq-N crumb's cache       node kv_stored-N (K, V); the Q of the custom node behind kqv_out-N
//
// A node's sources are intact when the node has just run, whatever memory later nodes reuse.
#pragma once

#include <crumb/calibrate.h>
#include <crumb/local_metric.h>

#include <array>
#include <cstddef>
#include <exception>
#include <map>
#include <string_view>
#include <vector>

struct ggml_tensor;
struct llama_model;

namespace crumb::llama {

class Observer {
  public:
    explicit Observer(Moments& moments) : moments_(moments) {}

    // From now on `local` is measured along with the moments, in the layers that it measures; needs llama.cpp's cache.
    void also_measure(LocalMetric& local) { local_ = &local; }

    // For cb_eval, with the observer as user data.
    static bool callback(ggml_tensor* node, bool ask, void* observer);

    // An error inside the callback stops the observation: no exception passes through ggml. Throws it, if there was
    // one.
    void rethrow() const;

    // Throws Error that names the layers and the architecture unless every layer of `model` with a KV cache of its own
    // was seen, all with the same number of tokens.
    void require_all(const llama_model& model) const;

  private:
    // A copy of a tensor's bytes with its strides, in elements.
    struct Copy {
        std::vector<float> data;
        std::array<int64_t, 4> shape{}, stride{};
    };
    // What is known of a layer before its attention has run.
    struct Pending {
        Copy k, v, q;
        int dim_k = 0, n_head_kv = 0;  // 0: not known from k alone, which is stored as [n_head_kv * dim_k, tokens]
    };

    static Copy copy(const ggml_tensor* tensor);
    static bool wanted(const ggml_tensor* node);
    void take(const ggml_tensor* node);
    void take_output(int layer, const ggml_tensor* node);

    Moments& moments_;
    LocalMetric* local_ = nullptr;
    std::map<int, Pending> pending_;
    std::exception_ptr error_;
};

}  // namespace crumb::llama
