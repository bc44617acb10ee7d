// Calibration on real weights: what the observer takes is what attention gets, on either cache; the same inputs give
// the same artefact; rotations travel inside a GGUF file.
#include "calibration.h"

#include "fixture.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "gguf_rotation.h"
#include "model_identity.h"
#include "observer.h"

namespace crumb::llama {
namespace {

constexpr int kTokens = 384, kSkip = 64, kLayer = 3;

// Key sums from the node that is named for it in these architectures, read apart from the observer.
struct KeySums {
    Observer& observer;
    std::vector<double> sums;
    int position = 0;

    static bool callback(ggml_tensor* node, bool ask, void* self) {
        auto& s = *static_cast<KeySums*>(self);
        const bool key = node->op == GGML_OP_ROPE && std::string(node->name) == fmt::format("Kcur-{}", kLayer);
        if (!ask && key) {
            s.add(node);
        }
        const bool wanted = Observer::callback(node, ask, &s.observer);
        return wanted || key;
    }

    void add(const ggml_tensor* k) {
        const int64_t width = k->ne[0] * k->ne[1];
        std::vector<float> row(static_cast<size_t>(width));
        sums.resize(row.size());
        for (int64_t t = 0; t < k->ne[2]; ++t, ++position) {
            ggml_backend_tensor_get(k, row.data(), size_t(t) * k->nb[2], row.size() * sizeof(float));
            for (size_t i = 0; i < row.size() && position >= kSkip; ++i) {
                sums[i] += row[i];
            }
        }
    }
};

enum class Engine { stock, stock_without_flash_attention, crumb };

void run(const llama_model* model, Engine engine, ggml_backend_sched_eval_callback callback, void* data) {
    use_kv(engine == Engine::crumb ? std::optional(kv("bf16")) : std::nullopt);
    auto params = llama_context_default_params();
    params.n_ctx = kTokens;
    params.n_batch = params.n_ubatch = 256;
    params.flash_attn_type =
        engine == Engine::stock_without_flash_attention ? LLAMA_FLASH_ATTN_TYPE_DISABLED : LLAMA_FLASH_ATTN_TYPE_AUTO;
    params.n_threads = params.n_threads_batch = 1;
    params.cb_eval = callback;
    params.cb_eval_user_data = data;
    const ContextPtr context(llama_init_from_model(const_cast<llama_model*>(model), params));
    ASSERT_TRUE(context);
    const std::string text = read_text(kCache / "text" / "evaluation" / "docs.txt").substr(0, 16 * kTokens);
    const auto tokens = tokenize(model, text, true, false);
    ASSERT_GE(tokens.size(), size_t(kTokens));
    for (int at = 0; at < kTokens; at += 256) {
        decode(context.get(), std::span(tokens).subspan(at, std::min(256, kTokens - at)), at, true);
    }
}

double relative_distance(const std::vector<double>& x, const std::vector<double>& y) {
    double difference = 0, size = 0;
    for (size_t i = 0; i < x.size(); ++i) {
        difference += (x[i] - y[i]) * (x[i] - y[i]);
        size += y[i] * y[i];
    }
    return std::sqrt(difference / size);
}

class Observed : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Models, Observed, testing::Values(kSmolLM2, kGemma3),
                         [](const auto& info) { return info.param == kSmolLM2 ? "SmolLM2" : "Gemma3"; });

TEST_P(Observed, KeysAreThoseThatAttentionGets) {
    quiet_log();
    const auto model = load_model(model_path(GetParam()));
    Moments moments(kSkip);
    Observer observer(moments);
    KeySums named{observer, {}};
    run(model.get(), Engine::stock, KeySums::callback, &named);
    observer.require_all(*model);
    const LayerShape& shape = moments.shape(kLayer);
    EXPECT_EQ(moments.tokens(kLayer), uint64_t(kTokens - kSkip));
    ASSERT_EQ(named.sums.size(), size_t(shape.n_head_kv * shape.dim_k));
    for (int h = 0; h < shape.n_head_kv; ++h) {
        std::vector<double> expected(named.sums.begin() + h * shape.dim_k, named.sums.begin() + (h + 1) * shape.dim_k);
        for (double& x : expected) {
            x /= kTokens - kSkip;
        }
        EXPECT_LT(relative_distance(moments.head(kLayer, h).key_mean, expected), 1e-12);
    }
}

// F32 weights: what differs is the rounding of K and V in the cache, and what later layers make of it.
TEST_P(Observed, MomentsAreTheSameOnEveryCache) {
    quiet_log();
    const auto model = load_model(f32_copy(GetParam()));
    std::vector<Moments> runs;
    for (const Engine engine : {Engine::stock, Engine::stock_without_flash_attention, Engine::crumb}) {
        Observer observer(runs.emplace_back(kSkip));
        run(model.get(), engine, Observer::callback, &observer);
        observer.require_all(*model);
    }
    for (const int layer : runs[0].layers()) {
        for (int h = 0; h < runs[0].shape(layer).n_head_kv; ++h) {
            const HeadMoments stock = runs[0].head(layer, h);
            for (const Moments* other : {&runs[1], &runs[2]}) {
                ASSERT_EQ(other->shape(layer), runs[0].shape(layer));
                const HeadMoments m = other->head(layer, h);
                EXPECT_LT(relative_distance(m.key_mean, stock.key_mean), 2e-2);
                EXPECT_LT(relative_distance(m.qq, stock.qq), 2e-2);
                EXPECT_LT(relative_distance(m.kk, stock.kk), 2e-2);
                EXPECT_LT(relative_distance(m.vv, stock.vv), 2e-2);
                EXPECT_LT(relative_distance(m.sst, stock.sst), 2e-2);
                EXPECT_LT(relative_distance(m.sst_true, stock.sst_true), 2e-2);
            }
        }
    }
}

CalibrationOptions options(const char* artefact) {
    CalibrationOptions o;
    o.model = model_path(kSmolLM2);
    o.texts = {kCache / "text" / "calibration" / "docs.txt", kCache / "text" / "calibration" / "code.txt"};
    o.output = std::filesystem::path(CRUMB_SCRATCH) / artefact;
    o.metric = "none";
    o.tokens = 2202;
    o.window = 1100;
    return o;
}

TEST(Calibration, SameInputsGiveTheSameArtefact) {
    quiet_log();
    CalibrationOptions o = options("calibration.safetensors");
    const Artefact two = calibrate(o);
    EXPECT_EQ(read_artefact(o.output), two);
    EXPECT_EQ(two.layers.size(), 30u);
    EXPECT_EQ(two.provenance.texts, "docs.txt, code.txt, chats");
    EXPECT_EQ(two.provenance.tokens, 2202u - 3 * 64);
    EXPECT_EQ(two.provenance.model, identify(*load_model(o.model, Load::mapped), o.model));
    EXPECT_EQ(two.provenance.model.n_head_kv, 3);
    EXPECT_EQ(two.provenance.model.dim_k, 64);
    o.n_threads = 1;
    EXPECT_EQ(calibrate(o).hash(), two.hash());

    // what the metric is, tests of its own say; here it reaches the artefact
    o.metric = "local";
    const Artefact local = calibrate(o);
    EXPECT_THAT(local.provenance.method, testing::HasSubstr("metric local"));
    for (const auto& [index, layer] : two.layers) {
        EXPECT_EQ(local.layers.at(index).k_rotation, layer.k_rotation) << index;
        EXPECT_NE(local.layers.at(index).k_planes, layer.k_planes) << index;
        EXPECT_NE(local.layers.at(index).v_planes, layer.v_planes) << index;
    }
    o.metric = "global";
    EXPECT_THAT([&] { calibrate(o); },
                testing::ThrowsMessage<Error>(testing::HasSubstr("type --metric none, local or gradient")));
}

TEST(Calibration, ReadsBeginningsOfTextsInWholeCharacters) {
    const auto file = std::filesystem::path(CRUMB_SCRATCH) / "characters.txt";
    const auto beginning = [&](const std::string& text, size_t n_tokens) {
        std::ofstream(file, std::ios::binary) << text;
        return read_beginning(file, n_tokens);
    };
    std::string cjk;
    for (int i = 0; i < 20; ++i) { cjk += "\u4f60"; }  // 3 bytes each
    EXPECT_EQ(beginning(cjk, 2), cjk.substr(0, 15)) << "8 bytes a token, and no part of a character";
    EXPECT_EQ(beginning(cjk, 3), cjk.substr(0, 24));
    EXPECT_EQ(beginning(cjk, 100), cjk);
    EXPECT_EQ(beginning("abcdefgh\u0434", 1), "abcdefgh");
    EXPECT_EQ(beginning("abcdefghi", 1), "abcdefgh");
    EXPECT_EQ(beginning("abcdefgh", 1), "abcdefgh");
    std::filesystem::remove(file);
    EXPECT_THAT([&] { read_beginning(file, 1); }, testing::ThrowsMessage<Error>(testing::HasSubstr("cannot read the text file")));
}

TEST(Calibration, RefusesTooLittleText) {
    quiet_log();
    CalibrationOptions o = options("refused.safetensors");
    o.chat = false;
    for (const int tokens : {2100, 2101}) {  // the texts are longer: where a last window has one token, that is not read
        o.tokens = tokens;
        EXPECT_THAT([&] { calibrate(o); },
                    testing::ThrowsMessage<Error>(testing::HasSubstr(
                        "needs at least 2000 tokens that count and has 1972, of 2100 that are read (the first 64 of each window do "
                        "not count): give a larger --tokens")));
    }
    o.texts.clear();
    EXPECT_THAT([&] { calibrate(o); }, testing::ThrowsMessage<Error>(testing::HasSubstr("give one or more files")));
    EXPECT_FALSE(std::filesystem::exists(o.output));
}

TEST(GgufRotations, TravelWithTheWeights) {
    quiet_log();
    const auto model = model_path(kSmolLM2);
    const auto scratch = std::filesystem::path(CRUMB_SCRATCH);
    Artefact a;
    a.provenance.model = identify(*load_model(model, Load::mapped), model);
    a.provenance.method = "by hand";
    a.provenance.tokens = 7;
    for (const int index : {0, 29}) {
        // a cyclic shift of the channels, another one for each head: not symmetric
        const auto shifts = [&](int heads) {
            Matrices m{.heads = heads, .dim = 64, .data = std::vector<float>(size_t(heads) * 64 * 64)};
            for (int h = 0; h < heads; ++h) {
                for (int i = 0; i < 64; ++i) {
                    m.data[(size_t(h) * 64 + i) * 64 + (i + h + 1 + index) % 64] = 1;
                }
            }
            return m;
        };
        a.layers[index].k_rotation = shifts(1);
        a.layers[index].v_rotation = shifts(3);
        a.layers[index].k_mean = {3, 64, std::vector<float>(3 * 64, 0.5f)};
    }
    // A shift and its inverse, the shift the other way: not symmetric either.
    for (PlanesSide* side : {&a.layers[29].k_planes, &a.layers[29].v_planes}) {
        side->encode = side->decode = {3, 64, std::vector<float>(3 * 64 * 64)};
        for (size_t row = 0; row < 3 * 64; ++row) {
            side->encode.data[row * 64 + (row + 1) % 64] = side->decode.data[row * 64 + (row + 63) % 64] = 1;
        }
        side->spectrum = {3, 64, std::vector<float>(3 * 64, 0.75f)};
        side->step = {3, 64, std::vector<float>(3 * 3 * 64, 0.25f)};
    }
    a.layers[29].k_planes.page_step = {3, 64, std::vector<float>(3 * 64, 0.125f)};
    write_gguf_rotations(a, model, scratch / "rotations.gguf");
    EXPECT_EQ(read_gguf_rotations(scratch / "rotations.gguf"), a);
    EXPECT_EQ(weights_hash(scratch / "rotations.gguf"), a.provenance.model.hash);

    // a second time they are replaced, not added
    write_gguf_rotations(a, scratch / "rotations.gguf", scratch / "again.gguf");
    EXPECT_EQ(std::filesystem::file_size(scratch / "again.gguf"),
              std::filesystem::file_size(scratch / "rotations.gguf"));
    EXPECT_EQ(read_gguf_rotations(scratch / "again.gguf"), a);

    Artefact foreign = a;
    foreign.provenance.model.hash = "0123";
    EXPECT_THAT([&] { write_gguf_rotations(foreign, model, scratch / "foreign.gguf"); },
                testing::ThrowsMessage<Error>(testing::HasSubstr("was made for the weights 0123")));
    EXPECT_THAT([&] { read_gguf_rotations(scratch / "rotations.gguf", foreign.provenance.model); },
                testing::ThrowsMessage<Error>(testing::HasSubstr("made for another model")));
    EXPECT_THAT([&] { read_gguf_rotations(model); },
                testing::ThrowsMessage<Error>(testing::HasSubstr("carries no rotations")));
    EXPECT_THAT([&] { weights_hash(scratch / "none.gguf"); },
                testing::ThrowsMessage<Error>(testing::HasSubstr("cannot open")));
    // A copy of the same model is replaced; a model is nobody's to replace, this one least of all.
    write_gguf_rotations(a, model, scratch / "again.gguf");
    std::filesystem::remove(scratch / "other.gguf");
    std::filesystem::copy_file(model_path(kGemma3), scratch / "other.gguf");
    EXPECT_THAT([&] { write_gguf_rotations(a, model, scratch / "other.gguf"); },
                testing::ThrowsMessage<Error>(testing::HasSubstr("no copy of this model")));
    std::filesystem::remove(scratch / "other.gguf");
    std::filesystem::remove(scratch / "again.gguf");
    std::filesystem::remove(scratch / "rotations.gguf");
}

}  // namespace
}  // namespace crumb::llama
