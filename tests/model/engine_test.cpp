// crumb inside llama.cpp on real weights: the control recipe against llama.cpp's own cache, sequences, chunk invariance,
// saved states.
#include "fixture.h"

namespace crumb::llama {
namespace {

struct Perplexity {
    double value;
    double same_top;
};

// Perplexity of both contexts over the same tokens, and the share of equal top tokens.
std::pair<Perplexity, Perplexity> perplexities(llama_context* a, llama_context* b, std::span<const llama_token> tokens, int n_ubatch) {
    double sum_a = 0, sum_b = 0;
    int same = 0, n = 0;
    for (size_t at = 0; at < tokens.size(); at += n_ubatch) {
        const auto part = tokens.subspan(at, std::min<size_t>(n_ubatch, tokens.size() - at));
        decode(a, part, int(at), false);
        decode(b, part, int(at), false);
        for (size_t i = 0; i < part.size() && at + i + 1 < tokens.size(); ++i, ++n) {
            const auto la = logits(a, int(i)), lb = logits(b, int(i));
            sum_a += nll(la, tokens[at + i + 1]);
            sum_b += nll(lb, tokens[at + i + 1]);
            same += top(la) == top(lb);
        }
    }
    const double share = double(same) / n;
    return {{std::exp(sum_a / n), share}, {std::exp(sum_b / n), share}};
}

class Control : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Models, Control, testing::Values(kSmolLM2, kGemma3),
                         [](const auto& info) { return info.param == kSmolLM2 ? "SmolLM2" : "Gemma3"; });

// Against llama.cpp's F16 cache, which rounds K and V less than BF16 does: 0.01 % of perplexity covers that rounding and
// another order of sums. Text against its BF16 cache, which rounds K and V alike (and queries and probabilities as well,
// which alone moves perplexity by 0.0135 % on SmolLM2).
TEST_P(Control, Bf16PagesEqualStockLlamaCpp) {
    quiet_log();
    const auto model = load_model(f32_copy(GetParam()));
    const int n = 4224, n_greedy = 200, n_ubatch = 512;
    const auto tokens = text_tokens(model.get(), "prose", n);
    ContextOptions shape{.n_ctx = n + n_greedy, .n_ubatch = n_ubatch};
    const auto ours = new_context(model.get(), shape, kv("bf16"));
    {
        const auto stock = new_context(model.get(), shape, std::nullopt);
        const auto [a, b] = perplexities(stock.get(), ours.get(), tokens, n_ubatch);
        EXPECT_NEAR(b.value / a.value, 1.0, 1e-4) << "stock " << a.value << ", crumb " << b.value;
        EXPECT_GT(b.same_top, 0.99);
    }
    shape.stock_type = GGML_TYPE_BF16;
    const auto stock = new_context(model.get(), shape, std::nullopt);
    for (int at = 0; at < n; at += n_ubatch) {
        decode(stock.get(), std::span(tokens).subspan(at, std::min(n_ubatch, n - at)), at, true);
    }
    EXPECT_EQ(greedy(ours.get(), n, n_greedy), greedy(stock.get(), n, n_greedy));
}

TEST(Sequences, FourOfDifferentLengthsEqualSingleRuns) {
    quiet_log();
    const auto model = load_model(f32_copy(kSmolLM2));
    const auto tokens = text_tokens(model.get(), "docs", 4000);
    const int lengths[4] = {900, 37, 1, 450};
    use_kv(kv("quarot:paper"));
    const ContextPtr all(llama_init_from_model(model.get(), several_sequences(4096, 128, 4)));
    ASSERT_TRUE(all);
    llama_batch batch = llama_batch_init(2048, 0, 1);
    for (int j = 0; j < 900; ++j) {
        for (int s = 0; s < 4; ++s) {
            if (j >= lengths[s]) { continue; }
            const int i = batch.n_tokens++;
            batch.token[i] = tokens[1000 * s + j];
            batch.pos[i] = j;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = s;
            batch.logits[i] = j + 1 == lengths[s];
        }
    }
    ASSERT_EQ(llama_decode(all.get(), batch), 0);
    std::vector<std::vector<float>> together(4);
    for (int i = 0; i < batch.n_tokens; ++i) {
        if (batch.logits[i]) { together[batch.seq_id[i][0]] = logits(all.get(), i); }
    }
    llama_batch_free(batch);
    for (int s = 0; s < 4; ++s) {
        const auto alone = new_context(model.get(), {.n_ctx = 1024, .n_ubatch = 128}, kv("quarot:paper"));
        for (int at = 0; at < lengths[s]; at += 128) {
            decode(alone.get(), std::span(tokens).subspan(1000 * s + at, std::min(128, lengths[s] - at)), at, true);
        }
        const auto expected = logits(alone.get(), -1);
        float worst = 0, scale = 0;
        for (size_t i = 0; i < expected.size(); ++i) {
            worst = std::max(worst, std::abs(expected[i] - together[s][i]));
            scale = std::max(scale, std::abs(expected[i]));
        }
        EXPECT_LT(worst, 2e-3f * scale) << "sequence " << s;
    }
}

// Codes and text do not depend on how the prompt was cut. The Q4_1 file: llama.cpp computes its products row by row, so
// they do not depend on the batch either, and every layer's state must be the same, bit for bit.
TEST(ChunkInvariance, StatesAndTextAreTheSameForEveryUbatch) {
    quiet_log();
    const auto model = load_model(model_path(kSmolLM2));
    const int n = 777;
    const auto tokens = text_tokens(model.get(), "docs", n);
    std::vector<uint8_t> state;
    std::vector<llama_token> text;
    for (const int ubatch : {512, 64, 7, 1}) {
        const auto context = new_context(model.get(), {.n_ctx = 1024, .n_ubatch = ubatch}, kv("quarot:paper"));
        for (int at = 0; at < n; at += ubatch) {
            decode(context.get(), std::span(tokens).subspan(at, std::min(ubatch, n - at)), at, true);
        }
        const auto now = state_of(context.get(), 0);
        const auto answer = greedy(context.get(), n, 24);
        if (state.empty()) {
            state = now;
            text = answer;
        }
        EXPECT_EQ(now == state, true) << "ubatch " << ubatch;
        EXPECT_EQ(answer, text) << "ubatch " << ubatch;
    }
}

TEST(ChunkInvariance, AForkContinuesAsItsOriginal) {
    quiet_log();
    const auto model = load_model(model_path(kSmolLM2));
    const int n = 700;
    const auto tokens = text_tokens(model.get(), "prose", n + 100);
    use_kv(kv("quarot:paper"));
    const ContextPtr context(llama_init_from_model(model.get(), several_sequences(2048, 128, 2)));
    ASSERT_TRUE(context);
    for (int at = 0; at < n; at += 100) { decode(context.get(), std::span(tokens).subspan(at, 100), at, true); }
    llama_memory_seq_cp(llama_get_memory(context.get()), 0, 1, -1, -1);
    EXPECT_EQ(cached(context.get(), 0) == cached(context.get(), 1), true);
    llama_batch batch = llama_batch_init(2, 0, 1);
    for (int i = 0; i < 100; ++i) {
        batch.n_tokens = 2;
        for (int s = 0; s < 2; ++s) {
            batch.token[s] = tokens[n + i];
            batch.pos[s] = n + i;
            batch.n_seq_id[s] = 1;
            batch.seq_id[s][0] = s;
            batch.logits[s] = true;
        }
        ASSERT_EQ(llama_decode(context.get(), batch), 0);
        ASSERT_EQ(logits(context.get(), 0) == logits(context.get(), 1), true) << "token " << i;
    }
    llama_batch_free(batch);
    EXPECT_EQ(cached(context.get(), 0) == cached(context.get(), 1), true);
}

TEST(State, RestoredSequenceContinuesBitForBit) {
    quiet_log();
    for (const auto& [name, form] : {std::pair{kSmolLM2, SlidingForm::bf16}, {kGemma3, SlidingForm::bf16}, {kGemma3, SlidingForm::q8}, {kGemma3, SlidingForm::pages}}) {
        const auto model = load_model(model_path(name));
        const auto tokens = text_tokens(model.get(), "prose", 800);
        KvOptions options = kv("quarot:paper");
        options.sliding = form;
        const auto a = new_context(model.get(), {.n_ctx = 1024, .n_ubatch = 256}, options);
        const auto b = new_context(model.get(), {.n_ctx = 1024, .n_ubatch = 256}, options);
        for (int at = 0; at < 750; at += 250) { decode(a.get(), std::span(tokens).subspan(at, 250), at, true); }
        auto state = state_of(a.get(), 0);
        ASSERT_EQ(llama_state_seq_set_data(b.get(), state.data(), state.size(), 0), state.size());
        for (auto* context : {a.get(), b.get()}) { decode(context, std::span(tokens).subspan(750, 1), 750, true); }
        EXPECT_EQ(logits(a.get(), 0) == logits(b.get(), 0), true);
        EXPECT_EQ(greedy(a.get(), 751, 16), greedy(b.get(), 751, 16));

        const auto before = state_of(b.get(), 0);
        state[state.size() / 2] ^= 1;
        EXPECT_EQ(llama_state_seq_set_data(b.get(), state.data(), state.size(), 0), 0u);
        EXPECT_EQ(state_of(b.get(), 0) == before, true) << "a damaged state must leave what was there";
    }
}

// Everything that a window reads is coded, by kernels and by pages turned into numbers: 8 bits cost little, and the
// kernels no more. The window of 512 has its edge inside of blocks.
TEST(SlidingWindows, OfEightBits) {
    // Nats a token. Measured 0.009 and 0.0085 with these weights, whose activations llama.cpp rounds; 0.0020 with F32 weights.
    constexpr double kEightBits = 0.015, kKernels = 0.015;
    quiet_log();
    const auto model = load_model(model_path(kGemma3));
    const int n = 640, step = 64;
    const auto tokens = text_tokens(model.get(), "prose", n);
    const auto outputs = [&](SlidingForm form, const std::string& attention) {
        KvOptions options = kv("bf16");
        options.sliding = form;
        options.attention = attention;
        const auto context = new_context(model.get(), {.n_ctx = n, .n_ubatch = step}, options);
        std::vector<std::vector<float>> rows;
        for (int at = 0; at < n; at += step) {
            const bool counts = at >= n - 2 * step;
            decode(context.get(), std::span(tokens).subspan(at, step), at, !counts);
            for (int i = 0; counts && i < step; ++i) { rows.push_back(logits(context.get(), i)); }
        }
        return rows;
    };
    const auto exact = outputs(SlidingForm::bf16, "auto"), coded = outputs(SlidingForm::q8, "auto"),
               decoded = outputs(SlidingForm::q8, "decoded");
    EXPECT_LT(mean_divergence(exact, coded), kEightBits) << "decoded " << mean_divergence(exact, decoded);
    EXPECT_LT(mean_divergence(decoded, coded), kKernels);
}

TEST(SlidingWindows, TakeTheFormThatIsAskedFor) {
    quiet_log();
    const auto model = load_model(model_path(kGemma3));
    KvOptions options = kv("had2");
    for (const auto& [form, n_ctx, taken, words] :
         {std::tuple{std::optional(SlidingForm::q8), 2048, SlidingForm::q8, "in 8 bits"},
          {std::optional(SlidingForm::pages), 2048, SlidingForm::pages, "in pages of had2"},
          {std::optional(SlidingForm::bf16), 2048, SlidingForm::bf16, "stay BF16"},
          {std::optional<SlidingForm>(), 2048, SlidingForm::q8, "in 8 bits"}}) {
        options.sliding = form;
        const CacheConfig config = cache_geometry(*model, options, {.n_ctx = n_ctx, .n_ubatch = 64});
        EXPECT_EQ(sliding_form(config), taken);
        EXPECT_THAT(describe(config, form_costs(*model, config, 1)), testing::HasSubstr(fmt::format("15 sliding-window layers (512 tokens) {}", words)));
        const auto context = new_context(model.get(), {.n_ctx = n_ctx, .n_ubatch = 64}, options);
        EXPECT_THAT(kv_properties(), testing::HasSubstr(fmt::format(R"("sliding_windows":{{"form":"{}","bytes":{{"bf16":)", name(taken))));
    }
    // Rows of 8 bits need more working memory a thread: with many threads it is more than they save.
    options.sliding = std::nullopt;
    const auto taken = [&](int n_threads) { return sliding_form(cache_geometry(*model, options, {.n_ctx = 768, .n_threads = n_threads})); };
    EXPECT_EQ(taken(1), SlidingForm::q8);
    EXPECT_EQ(taken(32), SlidingForm::bf16);
}

// What inspect says of a server, whose requests share a context and which keeps windows of prefixes.
TEST(Bytes, PrintedEqualsAllocatedForEveryFormOfWindows) {
    quiet_log();
    const auto model = load_model(model_path(kGemma3));
    for (const std::optional<SlidingForm> form : {std::optional(SlidingForm::bf16), {SlidingForm::q8}, {SlidingForm::pages}, {std::nullopt}}) {
        for (const int n_sequences : {1, 4}) {
            KvOptions options = kv("had2");
            options.sliding = form;
            options.kept_windows = kServedWindows;
            const auto context = new_context(model.get(), {.n_ctx = 700, .n_ubatch = 128, .n_threads = 2, .n_sequences = n_sequences}, options);
            const CacheConfig config = cache_geometry(*model, options, {.n_ctx = 700, .n_sequences = n_sequences, .unified = n_sequences > 1,
                                                                        .n_batch = 128, .n_ubatch = 128, .n_threads = 2});
            const CacheBytes planned = cache_bytes(config), real = kv_status()->bytes;
            EXPECT_EQ(planned.coded, real.coded);
            EXPECT_EQ(planned.exact, real.exact);
            EXPECT_EQ(planned.window, real.window);
            EXPECT_EQ(planned.tokens, real.tokens);
        }
    }
}

TEST(Bytes, PrintedEqualsAllocated) {
    quiet_log();
    const auto model = load_model(model_path(kSmolLM2));
    const auto context = new_context(model.get(), {.n_ctx = 8192, .n_ubatch = 512}, kv("quarot:paper"));
    const auto config = cache_geometry(*model, kv("quarot:paper"), {.n_ctx = 8192});
    const auto planned = cache_bytes(config), real = kv_status()->bytes;
    EXPECT_EQ(planned.total(), real.total());
    EXPECT_EQ(planned.coded, real.coded);
    EXPECT_DOUBLE_EQ(planned.effective_bits, real.effective_bits);
}

// What is said covers chunks of all sizes at all contexts; these are some of them.
TEST(Bytes, WorkingMemoryIsWithinWhatWasSaid) {
    quiet_log();
    const auto model = load_model(model_path(kSmolLM2));
    const int n = 1024, n_ubatch = 512, n_threads = 2;
    const auto planned = working_bytes(*model, cache_geometry(*model, kv("quarot:paper"), {.n_ctx = n, .n_ubatch = n_ubatch}), n_threads);
    const auto context = new_context(model.get(), {.n_ctx = n, .n_ubatch = n_ubatch, .n_threads = n_threads}, kv("quarot:paper"));
    const auto tokens = text_tokens(model.get(), "docs", n);
    int at = 0;
    for (const int chunk : {512, 495, 16, 1}) {
        decode(context.get(), std::span(tokens).subspan(at, chunk), at, true);
        at += chunk;
    }
    const auto real = kv_status()->working;
    EXPECT_LE(real.attention, planned.attention);
    EXPECT_GE(real.attention, planned.attention / 2);
    EXPECT_EQ(real.maps, planned.maps);
}

}  // namespace
}  // namespace crumb::llama
