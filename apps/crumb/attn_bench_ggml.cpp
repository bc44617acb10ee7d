// ggml's attention as candidates: flash attention over F16, Q8_0 and Q4_0, and the three operators without it.
#include "attn_bench.h"

#include <crumb/error.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ggml-cpu.h"
#include "ggml.h"

namespace crumb::app::attn {

namespace {

struct Kind {
    const char* name;
    ggml_type type;
    bool flash, packed;
};

constexpr Kind kKinds[] = {
    {"f16 FA", GGML_TYPE_F16, true, false},          {"f16 FA packed", GGML_TYPE_F16, true, true},
    {"f16 no FA", GGML_TYPE_F16, false, false},      {"q8_0 FA", GGML_TYPE_Q8_0, true, false},
    {"q8_0 FA packed", GGML_TYPE_Q8_0, true, true},  {"q4_0 FA", GGML_TYPE_Q4_0, true, false},
    {"q4_0 FA packed", GGML_TYPE_Q4_0, true, true},
};

struct FreeContext {
    void operator()(ggml_context* context) const { ggml_free(context); }
};
struct FreePool {
    void operator()(ggml_threadpool* pool) const { ggml_threadpool_free(pool); }
};

class Ggml : public Candidate {
  public:
    Ggml(const Task& task, const Kind& kind) : task_(task), kind_(kind) {
        name = kind.name;
        const Shape& s = task.rows->shape;
        side_ = ggml_row_size(kind.type, s.dim) * s.n_head_kv * task.tokens;
        const int layers = int(std::clamp<size_t>(task.bytes / (2 * side_), 1, 256));
        memory_.resize(ggml_tensor_overhead() * (8 * layers + 16) + ggml_graph_overhead_custom(8 * layers + 16, false) + 65536);
        context_.reset(ggml_init({memory_.size(), memory_.data(), true}));
        graph_ = ggml_new_graph_custom(context_.get(), 8 * layers + 16, false);
        fill(layers);
        build(layers);
    }

    double run(int n_threads) override {
        if (!pool_ || n_threads != n_threads_) {
            ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
            pool_.reset();
            pool_.reset(ggml_threadpool_new(&params));
            n_threads_ = n_threads;
        }
        ggml_cplan plan = ggml_graph_plan(graph_, n_threads, pool_.get());
        work_.resize(plan.work_size + 64);
        plan.work_data = work_.data();
        const double start = seconds(n_threads);
        if (ggml_graph_compute(graph_, &plan) != GGML_STATUS_SUCCESS) { fail("ggml could not compute {}", name); }
        const double end = seconds(n_threads);
        if (n_threads > 1) { pool_.reset(); }  // its threads would spin beside the next candidate
        return (end - start) / double(kv_.size() / 2);
    }

    size_t bytes() const override { return 2 * side_; }

  private:
    // Row of a token and head of K, or of V; without flash attention V is stored by channel.
    void fill(int layers) {
        const Rows& rows = *task_.rows;
        const Shape& s = rows.shape;
        const size_t row = ggml_row_size(kind_.type, s.dim);
        for (const std::vector<float>* side : {&rows.k, &rows.v}) {
            LargeVector<char> bytes(side_);
            if (side == &rows.v && !kind_.flash) {
                auto* to = reinterpret_cast<ggml_fp16_t*>(bytes.data());
                for (int t = 0; t < task_.tokens; ++t) {
                    for (int c = 0; c < s.n_head_kv * s.dim; ++c) {
                        to[size_t(c) * task_.tokens + t] = ggml_fp32_to_fp16((*side)[size_t(t) * s.n_head_kv * s.dim + c]);
                    }
                }
            } else {
                for (int t = 0; t < task_.tokens; ++t) {
                    for (int h = 0; h < s.n_head_kv; ++h) {
                        const size_t at = kind_.packed ? size_t(h) * task_.tokens + t : size_t(t) * s.n_head_kv + h;
                        ggml_quantize_chunk(kind_.type, &(*side)[(size_t(t) * s.n_head_kv + h) * s.dim], &bytes[at * row], 0, 1, s.dim, nullptr);
                    }
                }
            }
            kv_.push_back(std::move(bytes));
        }
        for (int l = 1; l < layers; ++l) {
            for (int side = 0; side < 2; ++side) { kv_.push_back(LargeVector<char>(kv_[side])); }
        }
        q_.resize(size_t(s.n_head) * task_.n_rows * s.dim);
        mask_.resize(size_t(task_.tokens) * ((task_.n_rows + 63) / 64 * 64));
        for (int r = 0; r < task_.n_rows; ++r) {
            const int token = task_.tokens - task_.n_rows + r;
            for (int h = 0; h < s.n_head; ++h) {
                std::memcpy(&q_[(size_t(h) * task_.n_rows + r) * s.dim], &rows.q[(size_t(token) * s.n_head + h) * s.dim], s.dim * sizeof(float));
            }
            for (int t = token + 1; t < task_.tokens; ++t) { mask_[size_t(r) * task_.tokens + t] = ggml_fp32_to_fp16(-INFINITY); }
        }
        out_.resize(q_.size());
    }

    ggml_tensor* tensor(ggml_type type, int64_t a, int64_t b, int64_t c, void* data) {
        ggml_tensor* t = ggml_new_tensor_3d(context_.get(), type, a, b, c);
        t->data = data;
        return t;
    }

    void build(int layers) {
        const Shape& s = task_.rows->shape;
        const int64_t n = task_.tokens;
        const size_t row = ggml_row_size(kind_.type, s.dim);
        const float scale = 1.0f / std::sqrt(float(s.dim));
        ggml_context* c = context_.get();
        ggml_tensor* q = tensor(GGML_TYPE_F32, s.dim, task_.n_rows, s.n_head, q_.data());
        ggml_tensor* mask = tensor(GGML_TYPE_F16, n, task_.n_rows, 1, mask_.data());
        for (int l = 0; l < layers; ++l) {
            ggml_tensor* kv[2];
            for (int side = 0; side < 2; ++side) {
                kv[side] = tensor(kind_.type, s.dim, n, s.n_head_kv, kv_[2 * l + side].data());
                if (!kind_.packed) {  // the heads of a token are neighbours
                    kv[side]->nb[1] = row * s.n_head_kv;
                    kv[side]->nb[2] = row;
                    kv[side]->nb[3] = side_;
                }
            }
            ggml_tensor* result;
            if (kind_.flash) {
                result = ggml_flash_attn_ext(c, q, kv[0], kv[1], mask, scale, 0.0f, 0.0f);
            } else {
                scores_.resize(size_t(n) * task_.n_rows * s.n_head);
                weights_.resize(scores_.size());
                ggml_tensor* scores = ggml_mul_mat(c, kv[0], q);
                scores->data = scores_.data();
                ggml_tensor* weights = ggml_soft_max_ext(c, scores, mask, scale, 0.0f);
                weights->data = weights_.data();
                result = ggml_mul_mat(c, tensor(kind_.type, n, s.dim, s.n_head_kv, kv_[2 * l + 1].data()), weights);
            }
            result->data = out_.data();
            ggml_build_forward_expand(graph_, result);
        }
    }

    Task task_;
    Kind kind_;
    size_t side_ = 0;
    std::vector<char> memory_;
    std::vector<uint8_t> work_;
    std::vector<LargeVector<char>> kv_;  // K and V of each layer
    std::vector<float> q_, out_, scores_, weights_;
    std::vector<ggml_fp16_t> mask_;
    std::unique_ptr<ggml_context, FreeContext> context_;
    std::unique_ptr<ggml_threadpool, FreePool> pool_;
    ggml_cgraph* graph_ = nullptr;
    int n_threads_ = 0;
};

}  // namespace

std::vector<std::string> ggml_names() {
    std::vector<std::string> names;
    for (const Kind& kind : kKinds) { names.push_back(kind.name); }
    return names;
}

std::unique_ptr<Candidate> ggml_candidate(const Task& task, const std::string& name) {
    const auto found = std::ranges::find(kKinds, name, &Kind::name);
    if (found == std::end(kKinds)) { fail("ggml has no attention '{}' here: {}", name, fmt::join(ggml_names(), ", ")); }
    return std::make_unique<Ggml>(task, *found);
}

}  // namespace crumb::app::attn
