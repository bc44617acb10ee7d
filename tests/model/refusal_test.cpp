// What is not supported is an error that says what, why and what to type, and leaves everything as it was.
#include "fixture.h"

namespace crumb::llama {
namespace {

std::string refusal(llama_model* model, const KvOptions& options) {
    try {
        new_context(model, {.n_ctx = 512}, options);
    } catch (const Error& e) {
        return e.what();
    }
    return "";
}

TEST(Refusal, NamesTheRemedy) {
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    const auto model = load_model(model_path(kSmolLM2));
    EXPECT_THAT(refusal(model.get(), kv("no-such")), testing::HasSubstr("oscar"));
    auto missing = kv("oscar");
    missing.artefact = "/nonexistent/artefact.safetensors";
    EXPECT_THAT(refusal(model.get(), missing), testing::HasSubstr("crumb calibrate -m "));
    auto needless = kv("quarot:paper");
    needless.artefact = "/nonexistent/artefact.safetensors";
    EXPECT_THAT(refusal(model.get(), needless), testing::HasSubstr("needs no artefact"));
    for (const KvOptions& options : {missing, needless}) {  // and what only asks for sizes, as crumb inspect does
        EXPECT_THAT([&] { cache_geometry(*model, options, {.n_ctx = 512}); }, testing::ThrowsMessage<Error>(refusal(model.get(), options)));
    }
    auto damaged = kv("oscar");
    damaged.artefact = std::filesystem::path(CRUMB_SCRATCH) / "damaged.safetensors";
    std::ofstream(damaged.artefact) << "no artefact";
    EXPECT_THAT([&] { cache_geometry(*model, damaged, {.n_ctx = 512}); }, testing::ThrowsMessage<Error>(testing::HasSubstr("not a usable artefact")));
    auto slow = kv("kivi32");
    EXPECT_THAT(refusal(model.get(), slow), testing::HasSubstr("--kv-allow-slow"));
    slow.allow_slow = true;
    EXPECT_EQ(refusal(model.get(), slow), "");
    auto narrow = kv("kivi128");
    narrow.allow_slow = true;
    narrow.recent = 10;
    EXPECT_THAT(refusal(model.get(), narrow), testing::HasSubstr("--kv-recent"));
    auto moved = kv("had2");
    moved.host_memory = 1 << 20;
    EXPECT_THAT(refusal(model.get(), moved), testing::HasSubstr("no layer has its cache on a GPU"));
    use_kv(kv("quarot:paper"));
    auto params = llama_context_default_params();
    params.type_k = GGML_TYPE_Q8_0;
    EXPECT_EQ(llama_init_from_model(model.get(), params), nullptr);
    EXPECT_THAT(last_refusal(), testing::AllOf(testing::HasSubstr("q8_0"), testing::HasSubstr("leave out -ctk")));
}

TEST(Refusal, MoreThanTheMachineHas) {
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    const auto model = load_model(model_path(kSmolLM2));
    try {
        new_context(model.get(), {.n_ctx = 200'000'000}, kv("quarot:paper"));
        ADD_FAILURE() << "accepted";
    } catch (const Error& e) {
        EXPECT_THAT(e.what(), testing::AllOf(testing::HasSubstr("MiB of memory"), testing::HasSubstr("lower -c")));
    }
}

// A recipe without an artefact has no other name for the weights that a state belongs to.
TEST(Refusal, StatesOfOtherWeights) {
    quiet_log();
    const auto model = load_model(model_path(kSmolLM2)), other = load_model(f32_copy(kSmolLM2));
    const auto context = new_context(model.get(), {.n_ctx = 512}, kv("quarot:paper"));
    const auto tokens = text_tokens(model.get(), "docs", 400);
    decode(context.get(), tokens, 0, true);
    const auto state = state_of(context.get(), 0);
    const auto foreign = new_context(other.get(), {.n_ctx = 512}, kv("quarot:paper"));
    EXPECT_EQ(llama_state_seq_set_data(foreign.get(), state.data(), state.size(), 0), 0u);
    EXPECT_EQ(llama_memory_seq_pos_max(llama_get_memory(foreign.get()), 0), -1);
    const auto same = new_context(model.get(), {.n_ctx = 512}, kv("quarot:paper"));
    EXPECT_EQ(llama_state_seq_set_data(same.get(), state.data(), state.size(), 0), state.size());
}

TEST(Refusal, MiddleOfASequenceStays) {
    quiet_log();
    const auto model = load_model(model_path(kSmolLM2));
    const auto context = new_context(model.get(), {.n_ctx = 1024, .n_ubatch = 512}, kv("quarot:paper"));
    const auto tokens = text_tokens(model.get(), "docs", 600);
    decode(context.get(), std::span(tokens).first(500), 0, true);
    decode(context.get(), std::span(tokens).subspan(500, 50), 500, true);  // frees 16-bit rows that no query can want
    auto* memory = llama_get_memory(context.get());
    const auto before = state_of(context.get(), 0);
    EXPECT_FALSE(llama_memory_seq_rm(memory, 0, 100, 200));
    EXPECT_FALSE(llama_memory_can_shift(memory));
    EXPECT_THROW(llama_memory_seq_add(memory, 0, 100, -1, -50), Error);
    EXPECT_THROW(llama_memory_seq_div(memory, 0, 0, -1, 2), Error);
    EXPECT_EQ(state_of(context.get(), 0) == before, true);
    EXPECT_TRUE(llama_memory_seq_rm(memory, 0, 130, -1));
    EXPECT_EQ(llama_memory_seq_pos_max(memory, 0), 129);
    decode(context.get(), std::span(tokens).subspan(130, 200), 130, true);
    EXPECT_GT(kv_status()->counters.aged_early_tokens, 0u);
}

TEST(Refusal, AFullCacheIsReportedAndKeepsWhatItHolds) {
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    const auto model = load_model(model_path(kSmolLM2));
    const auto context = new_context(model.get(), {.n_ctx = 512, .n_ubatch = 256}, kv("quarot:paper"));
    const auto tokens = text_tokens(model.get(), "docs", 600);
    decode(context.get(), std::span(tokens).first(256), 0, true);
    decode(context.get(), std::span(tokens).subspan(256, 256), 256, true);
    EXPECT_THROW(decode(context.get(), std::span(tokens).subspan(512, 1), 512, true), Error);
    EXPECT_EQ(llama_memory_seq_pos_max(llama_get_memory(context.get()), 0), 511);
}

}  // namespace
}  // namespace crumb::llama
