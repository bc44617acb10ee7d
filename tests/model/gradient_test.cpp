// The gradient metric against central differences of the real loss, on tiny models of each graph family: the loss comes
// from a forward pass of its own, with dense attention that noise is really added in.
#include "gradient.h"

#include "calibrate/fingerprint.h"
#include "fixture.h"
#include "ggml.h"
#include "gradient_rules.h"
#include "tiny_models.h"

#include <random>

namespace crumb::llama {
namespace {

constexpr FarRule kRule{.sink = 20, .recent = 40};
constexpr int kTokens = 600;  // three blocks of queries, the last one ragged
constexpr uint64_t kSeed = 7;

std::vector<llama_token> random_tokens(int n, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<llama_token> tokens(n);
    for (auto& token : tokens) { token = llama_token(random() % 48); }
    return tokens;
}

std::filesystem::path scratch(const std::string& name) { return std::filesystem::path(CRUMB_SCRATCH) / name; }

ModelPtr tiny(const TinyFamily& family, const TinyShape& shape = {}) {
    quiet_log();
    const auto path = scratch(std::string("gradient-") + family.architecture + ".gguf");
    tiny_model(family, path, shape);
    return load_model(path, Load::mapped);
}

// The whole model in one graph. Noise on K is [D, n, KV heads], on V [n, D, KV heads].
class NoisyModel {
  public:
    NoisyModel(llama_context* context, int n)
        : n_(n),
          context_(new_descriptions(64)),
          graph_(context, n, [this](ggml_context* c, const AttentionCall& call) { return attend(c, call); }) {
        kept_ = std::make_unique<Kept>(context_.get());
        const auto fill = [&](ggml_tensor* t, auto value) {
            for (int q = 0; q < n_; ++q) {
                for (int j = 0; j < n_; ++j) { static_cast<float*>(t->data)[q * n_ + j] = value(q, j); }
            }
        };
        for (const auto& [window, mask] : masks_) {
            fill(mask, [w = window](int q, int j) { return j > q || (w > 0 && j <= q - w) ? -INFINITY : 0.0f; });
        }
        fill(far_, [](int q, int j) { return j >= kRule.sink && j <= q - kRule.recent ? 1.0f : 0.0f; });
        for (const auto& [layer, noise] : noise_) {
            for (ggml_tensor* t : {noise.first, noise.second}) { std::memset(t->data, 0, ggml_nbytes(t)); }
        }
    }

    // Sum of -log p over the scored positions; labels are drawn at the first call, as Head draws them.
    double loss(const std::vector<llama_token>& tokens) {
        graph_.set_tokens(tokens);
        double sum = 0;
        compute_.run({graph_.logits()}, [&] {
            const int n_vocab = int(graph_.logits()->ne[0]);
            const auto* x = static_cast<const float*>(graph_.logits()->data);
            for (int t = kRule.sink + kRule.recent; t < n_; ++t) {
                std::vector<float> row(x + t * n_vocab, x + (t + 1) * n_vocab);
                if (int(labels_.size()) <= t - kRule.sink - kRule.recent) {
                    auto gradient = row;
                    draw(gradient.data(), n_vocab, mixed(kSeed, uint64_t(t)));
                    labels_.push_back(llama_token(std::min_element(gradient.begin(), gradient.end()) - gradient.begin()));
                }
                sum += nll(row, labels_[t - kRule.sink - kRule.recent]);
            }
        });
        return sum;
    }

    // Direction u as rows [KV heads][n][D], times `step`.
    void set_noise(int layer, bool v, const std::vector<double>& u, double step) {
        ggml_tensor* t = v ? noise_.at(layer).second : noise_.at(layer).first;
        const int dim = int(v ? t->ne[1] : t->ne[0]), heads = int(t->ne[2]);
        auto* data = static_cast<float*>(t->data);
        for (int h = 0; h < heads; ++h) {
            for (int j = 0; j < n_; ++j) {
                for (int i = 0; i < dim; ++i) {
                    const size_t to = v ? (size_t(h) * dim + i) * n_ + j : (size_t(h) * n_ + j) * dim + i;
                    data[to] = float(step * u[(size_t(h) * n_ + j) * dim + i]);
                }
            }
        }
    }

  private:
    ggml_tensor* attend(ggml_context* c, const AttentionCall& call) {
        ggml_context* own = context_.get();
        if (!far_) { far_ = ggml_new_tensor_2d(own, GGML_TYPE_F32, n_, n_); }
        ggml_tensor*& mask = masks_[call.window];
        if (!mask) { mask = ggml_new_tensor_2d(own, GGML_TYPE_F32, n_, n_); }
        auto& [dk, dv] = noise_[call.layer];
        dk = ggml_new_tensor_3d(own, GGML_TYPE_F32, call.k->ne[0], n_, call.k->ne[1]);
        dv = ggml_new_tensor_3d(own, GGML_TYPE_F32, n_, call.v->ne[0], call.v->ne[1]);
        ggml_tensor* q = ggml_cont(c, ggml_permute(c, call.q, 0, 2, 1, 3));
        ggml_tensor* k = ggml_cont(c, ggml_permute(c, call.k, 0, 2, 1, 3));
        ggml_tensor* v = ggml_cont(c, ggml_permute(c, call.v, 1, 2, 0, 3));
        ggml_tensor* s = ggml_add(c, ggml_mul_mat(c, k, q), ggml_mul(c, ggml_mul_mat(c, dk, q), far_));
        ggml_tensor* p = ggml_soft_max_ext(c, s, mask, call.scale, 0);
        ggml_tensor* o = ggml_add(c, ggml_mul_mat(c, v, p), ggml_mul_mat(c, dv, ggml_mul(c, p, far_)));
        return ggml_reshape_2d(c, ggml_cont(c, ggml_permute(c, o, 0, 2, 1, 3)), o->ne[0] * o->ne[2], n_);
    }

    const int n_;
    ggml_context_ptr context_;
    ggml_tensor* far_ = nullptr;
    std::map<int, ggml_tensor*> masks_;
    std::map<int, std::pair<ggml_tensor*, ggml_tensor*>> noise_;
    WindowGraph graph_;
    std::unique_ptr<Kept> kept_;
    Compute compute_{1};
    std::vector<llama_token> labels_;
};

struct Gradients {
    std::map<int, std::pair<std::vector<float>, std::vector<float>>> layers;  // K, V
    double loss = 0;
};

Gradients gradients(llama_context* context, const std::vector<llama_token>& tokens, int n_threads = 1) {
    WindowGradient window(context, int(tokens.size()), kRule, n_threads);
    window.require_rules();
    Compute compute(n_threads);
    Gradients result;
    double work = 0;
    result.loss = window.run(
        compute, tokens, kSeed,
        [&](const RowGradients& g) {
            const size_t rows = size_t(g.n_head_kv) * g.n_tokens;
            result.layers[g.layer] = {{g.k, g.k + rows * g.dim_k}, {g.v, g.v + rows * g.dim_v}};
        },
        [&](double more) { work += more; });
    EXPECT_NEAR(work, window.work(), 1e-9 * work);
    return result;
}

struct Case {
    TinyFamily family;
    double step, tolerance;  // relative to the gradient's length
};

class Family : public testing::TestWithParam<Case> {};

// Rounding of the loss to F32 and the third derivative limit these differences to some 1e-3. GELU of ggml is a table of
// 16-bit floats, a staircase, so a step must be larger there.
INSTANTIATE_TEST_SUITE_P(All, Family,
                         testing::Values(Case{kTinyLlama, 0.05, 4e-3}, Case{kTinyQwen2, 0.05, 4e-3},
                                         Case{kTinyPhi3, 0.05, 4e-3}, Case{kTinyGemma3, 0.3, 4e-2},
                                         Case{kTinyStarcoder2, 0.3, 4e-2}),
                         [](const auto& info) { return std::string(info.param.family.architecture); });

TEST_P(Family, GradientIsTheSlopeOfTheLoss) {
    const ModelPtr model = tiny(GetParam().family);
    const ContextPtr context = plain_context(model.get());
    const auto tokens = random_tokens(kTokens, 3);
    const Gradients g = gradients(context.get(), tokens);
    NoisyModel noisy(context.get(), kTokens);
    EXPECT_NEAR(noisy.loss(tokens), g.loss, 1e-5 * g.loss);
    EXPECT_EQ(g.layers.size(), GetParam().family.gemma ? 1u : 3u) << "layers with a sliding window stay exact";

    std::mt19937 random(5);
    std::normal_distribution<double> normal;
    for (const auto& [layer, sides] : g.layers) {
        for (const bool v : {false, true}) {
            const auto& gradient = v ? sides.second : sides.first;
            double length = 0, r_length = 0;
            std::vector<double> u(gradient.size()), r(gradient.size());
            for (size_t i = 0; i < u.size(); ++i) {
                length += double(gradient[i]) * gradient[i];
                r[i] = normal(random);
                r_length += r[i] * r[i];
            }
            length = std::sqrt(length);
            ASSERT_GT(length, 0);
            for (const bool along : {true, false}) {  // along the gradient, and half across it
                double expected = 0;
                for (size_t i = 0; i < u.size(); ++i) {
                    u[i] = gradient[i] / length * (along ? 1 : 0.5) + (along ? 0 : r[i] / std::sqrt(r_length) * 0.9);
                    expected += u[i] * gradient[i];
                }
                const double step = GetParam().step;
                noisy.set_noise(layer, v, u, step);
                const double up = noisy.loss(tokens);
                noisy.set_noise(layer, v, u, -step);
                const double down = noisy.loss(tokens);
                noisy.set_noise(layer, v, u, 0);
                EXPECT_NEAR((up - down) / (2 * step), expected, GetParam().tolerance * length)
                    << "layer " << layer << (v ? " V" : " K") << (along ? " along" : " across") << ", length " << length;
            }
        }
    }
}

TEST(Gradient, BitsDoNotDependOnThreads) {
    const ModelPtr model = tiny(kTinyLlama);
    const ContextPtr context = plain_context(model.get());
    const auto tokens = random_tokens(300, 3);
    const Gradients one = gradients(context.get(), tokens, 1), two = gradients(context.get(), tokens, 2);
    EXPECT_EQ(two.loss, one.loss);
    EXPECT_EQ(two.layers, one.layers);
}

// --- the run over windows

GradientOptions options(const std::filesystem::path& checkpoint) {
    GradientOptions o;
    o.rule = kRule;
    o.seed = kSeed;
    o.checkpoint = checkpoint;
    o.model_hash = "0123";
    o.clip = 0;
    return o;
}

// Windows belong to two parts of the text in turn.
std::vector<Metric> metrics(const ModelPtr& model, const std::vector<std::vector<llama_token>>& windows, const GradientOptions& o) {
    std::vector<int> folds;
    for (size_t w = 0; w < windows.size(); ++w) { folds.push_back(int(w % 2)); }
    return gradient_metrics(model.get(), windows, folds, o);
}

TEST(Gradient, MetricIsTheMeanOuterProductOfRows) {
    const ModelPtr model = tiny(kTinyLlama);
    std::vector<std::vector<llama_token>> windows{random_tokens(300, 1), random_tokens(kRule.sink + kRule.recent, 2),
                                                  random_tokens(200, 3)};
    const auto parts = metrics(model, windows, options(""));
    ASSERT_EQ(parts.size(), 1u) << "the second window has no far rows: not counted";
    const Metric& metric = parts[0];
    const ContextPtr context = plain_context(model.get());
    ASSERT_EQ(metric.size(), 3u);
    const uint64_t rows = 300 + 200 - 2 * (kRule.sink + kRule.recent);
    EXPECT_EQ(metric.at(1).tokens, rows);
    std::vector<double> expected(16 * 16);
    for (const auto& [w, index] : {std::pair{0, 0}, {2, 1}}) {
        WindowGradient window(context.get(), int(windows[w].size()), kRule, 1);
        Compute compute(1);
        window.run(
            compute, windows[w], mixed(kSeed, uint64_t(index)),
            [&](const RowGradients& g) {
                for (int j = 0; j < g.n_tokens && g.layer == 1; ++j) {
                    const float* row = g.v + (size_t(1) * g.n_tokens + j) * g.dim_v;
                    for (int a = 0; a < 16; ++a) {
                        for (int b = 0; b < 16; ++b) { expected[a * 16 + b] += double(row[a]) * row[b] / double(rows); }
                    }
                }
            },
            [](double) {});
    }
    const auto& found = metric.at(1).heads.at(1).v;
    for (size_t i = 0; i < expected.size(); ++i) { EXPECT_NEAR(found[i], expected[i], 1e-12 + 1e-9 * std::abs(expected[i])); }
}

TEST(Gradient, GoesOnFromItsCheckpointBitForBit) {
    const ModelPtr model = tiny(kTinyLlama);
    const std::vector<std::vector<llama_token>> windows{random_tokens(200, 1), random_tokens(250, 2), random_tokens(200, 3)};
    const auto file = scratch("gradient.checkpoint");
    std::filesystem::remove(file);
    const auto whole = metrics(model, windows, options(""));
    EXPECT_FALSE(std::filesystem::exists(file));
    EXPECT_EQ(metrics(model, windows, options(file)), whole);
    EXPECT_EQ(metrics(model, windows, options(file)), whole) << "nothing is left to do";

    // as if it had been killed after the first window, or after the second: the sums are of one size
    const GradientOptions o = options(file);
    const auto identity_in = [](const std::filesystem::path& checkpoint) {
        Identity identity;
        std::ifstream in(checkpoint, std::ios::binary);
        std::string line;
        std::getline(in, line);
        for (int i = 0; i < 6; ++i) {
            std::getline(in, line);
            identity.emplace_back(line.substr(0, line.find(' ')), line.substr(line.find(' ') + 1));
        }
        return identity;
    };
    const Identity identity = identity_in(file);
    EXPECT_EQ(read_checkpoint(file, identity).windows, 3u);
    const auto size = std::filesystem::file_size(file);
    for (const size_t n : {1u, 2u}) {
        const auto part = scratch("gradient.part");
        std::filesystem::remove(part);
        metrics(model, {windows.begin(), windows.begin() + n}, options(part));
        const GradientSums done = read_checkpoint(part, identity_in(part));
        EXPECT_EQ(done.windows, n);
        write_checkpoint(file, identity, done);
        EXPECT_TRUE(n == 1 || std::filesystem::file_size(file) == size);
        EXPECT_EQ(metrics(model, windows, o), whole);
        EXPECT_EQ(std::filesystem::file_size(file), size);
    }

    const auto refused = [&](auto change, const char* text) {
        GradientOptions other = o;
        auto texts = windows;
        change(other, texts);
        EXPECT_THAT([&] { metrics(model, texts, other); },
                    testing::ThrowsMessage<Error>(testing::AllOf(testing::HasSubstr(text), testing::HasSubstr("delete this one"))));
    };
    refused([](auto& other, auto&) { other.seed = 8; }, "its seed is 7, and this run's is 8");
    refused([](auto& other, auto&) { other.model_hash = "4567"; }, "its model is 0123, and this run's is 4567");
    refused([](auto& other, auto&) { other.clip = 3; }, "its clip is 0, and this run's is 3");
    refused([](auto& other, auto&) { other.rule.recent = 41; }, "its recent is 40, and this run's is 41");
    refused([](auto&, auto& texts) { texts[2][5] ^= 1; }, "its text is ");

    std::filesystem::resize_file(file, std::filesystem::file_size(file) - 1);
    EXPECT_THAT([&] { metrics(model, windows, o); },
                testing::ThrowsMessage<Error>(testing::HasSubstr("is damaged")));
    const auto with_digits = [](std::string text) {
        Fingerprint f;
        f.add(std::as_bytes(std::span(text)));
        return text + f.hex();
    };
    std::ofstream(file, std::ios::binary) << with_digits("crumb gradient 1\nmodel 0123\n");
    EXPECT_THAT([&] { metrics(model, windows, o); },
                testing::ThrowsMessage<Error>(testing::HasSubstr("is a checkpoint of format 1, and this program goes on from format 2: delete it")));
    std::ofstream(file, std::ios::binary) << "weights";
    EXPECT_THAT([&] { metrics(model, windows, o); }, testing::ThrowsMessage<Error>(testing::HasSubstr("exists and is not a checkpoint")));
    std::filesystem::remove(file);
}

TEST(Gradient, SaysBeforeTheWorkThatItsCheckpointCannotBeWritten) {
    const ModelPtr model = tiny(kTinyLlama);
    testing::internal::CaptureStderr();
    EXPECT_THAT([&] { metrics(model, {random_tokens(200, 1)}, options(scratch("no/such.folder"))); },
                testing::ThrowsMessage<Error>(testing::HasSubstr("cannot write")));
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(Gradient, ClippingChangesShapesAndNotTraces) {
    const ModelPtr model = tiny(kTinyLlama);
    const std::vector<std::vector<llama_token>> windows{random_tokens(300, 1)};
    GradientOptions o = options("");
    const auto all = metrics(model, windows, o);
    o.clip = 1e9;
    EXPECT_EQ(metrics(model, windows, o), all);
    o.clip = 1;
    const auto clipped = metrics(model, windows, o);
    const auto trace = [](const std::vector<double>& m) {
        double sum = 0;
        for (int i = 0; i < 16; ++i) { sum += m[i * 17]; }
        return sum;
    };
    const auto &head = all[0].at(0).heads[0].k, &other = clipped[0].at(0).heads[0].k;
    EXPECT_NEAR(trace(other), trace(head), 1e-9 * trace(head));
    EXPECT_GT(disagreement(clipped[0], all[0]).k, 0.01);
    EXPECT_LT(disagreement(clipped[0], all[0]).k, 1);
}

// --- refusals

TEST(Gradient, RefusesByNameWhatItDoesNotSupport) {
    quiet_log();
    const std::vector<std::vector<llama_token>> windows{random_tokens(200, 1)};
    const auto refused = [&](const char* name, auto fill, const char* text) {
        const auto path = scratch(std::string("refused-") + name + ".gguf");
        TinyGguf gguf(name);
        fill(gguf);
        gguf.write(path);
        const ModelPtr model = load_model(path, Load::mapped);
        EXPECT_THAT([&] { metrics(model, windows, options("")); },
                    testing::ThrowsMessage<Error>(testing::AllOf(
                        testing::HasSubstr(fmt::format("architecture '{}'", name)), testing::HasSubstr(text),
                        testing::HasSubstr("Type --metric local"), testing::HasSubstr("--metric none"))));
        std::filesystem::remove(path);
    };
    const auto common = [](TinyGguf& g, const char* epsilon) {
        for (const auto& [key, value] : {std::pair{"vocab_size", 48}, {"context_length", 256}, {"embedding_length", 64},
                                         {"block_count", 1}, {"feed_forward_length", 64}, {"attention.head_count", 4},
                                         {"attention.head_count_kv", 4}}) {
            g.set(key, uint32_t(value));
        }
        g.set(epsilon, 1e-5f);
        g.tensor("token_embd.weight", {64, 48});
        g.tensor("output_norm.weight", {64});
    };
    const auto attention = [](TinyGguf& g) {
        for (const char* w : {"attn_q", "attn_k", "attn_v", "attn_output"}) {
            g.tensor(std::string("blk.0.") + w + ".weight", {64, 64});
        }
        g.tensor("blk.0.attn_norm.weight", {64});
        g.tensor("blk.0.ffn_norm.weight", {64});
    };
    refused("llama", [&](TinyGguf& g) {
        common(g, "attention.layer_norm_rms_epsilon");
        attention(g);
        g.set("expert_count", uint32_t(4));
        g.set("expert_used_count", uint32_t(2));
        g.tensor("blk.0.ffn_gate_inp.weight", {64, 4});
        g.tensor("blk.0.ffn_gate_exps.weight", {64, 64, 4});
        g.tensor("blk.0.ffn_up_exps.weight", {64, 64, 4});
        g.tensor("blk.0.ffn_down_exps.weight", {64, 64, 4});
    }, "a mixture of experts");
    refused("gemma2", [&](TinyGguf& g) {
        common(g, "attention.layer_norm_rms_epsilon");
        attention(g);
        g.set("attention.key_length", uint32_t(16));
        g.set("attention.value_length", uint32_t(16));
        g.tensor("blk.0.post_attention_norm.weight", {64});
        g.tensor("blk.0.post_ffw_norm.weight", {64});
        for (const char* w : {"ffn_gate", "ffn_up", "ffn_down"}) { g.tensor(std::string("blk.0.") + w + ".weight", {64, 64}); }
    }, "soft caps");
    refused("mamba", [&](TinyGguf& g) {
        common(g, "attention.layer_norm_rms_epsilon");
        g.set("ssm.conv_kernel", uint32_t(4));
        g.set("ssm.inner_size", uint32_t(128));
        g.set("ssm.state_size", uint32_t(16));
        g.set("ssm.time_step_rank", uint32_t(4));
        g.tensor("blk.0.attn_norm.weight", {64});
        g.tensor("blk.0.ssm_in.weight", {64, 256});
        g.tensor("blk.0.ssm_conv1d.weight", {4, 128});
        g.tensor("blk.0.ssm_conv1d.bias", {128});
        g.tensor("blk.0.ssm_x.weight", {128, 36});
        g.tensor("blk.0.ssm_dt.weight", {4, 128});
        g.tensor("blk.0.ssm_dt.bias", {128});
        g.tensor("blk.0.ssm_a", {16, 128});
        g.tensor("blk.0.ssm_d", {128});
        g.tensor("blk.0.ssm_out.weight", {128, 64});
    }, "recurrent");
}

TEST(Gradient, RefusesWindowsWithoutFarRows) {
    const ModelPtr model = tiny(kTinyLlama);
    const std::vector<std::vector<llama_token>> windows{random_tokens(60, 1)};
    EXPECT_THAT([&] { metrics(model, windows, options("")); },
                testing::ThrowsMessage<Error>(testing::HasSubstr("longer than the 20 + 40 tokens")));
}

TEST(Reverse, NamesTheOperationThatHasNoRule) {
    const ggml_context_ptr c = new_descriptions(16);
    ggml_tensor* x = ggml_new_tensor_2d(c.get(), GGML_TYPE_F32, 8, 4);
    Reverse reverse(c.get());
    reverse.want(x);
    ggml_tensor* y = ggml_set_name(ggml_sin(c.get(), x), "wave");
    EXPECT_THAT([&] { reverse.run({y}, y, x); },
                testing::ThrowsMessage<Error>(testing::HasSubstr("has the operation SIN ('wave')")));
}

}  // namespace
}  // namespace crumb::llama
