// What the cache promises, one promise a test. Random traces of everything together: cache_model_test.cpp.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>

#include "cache/extent.h"
#include "cache_model.h"

using namespace crumb;
using namespace crumb::test;

namespace {

// Codes of a sequence in all coded layers, from block `first` on.
std::vector<Bytes> codes_of(const Cache& cache, uint32_t sequence, int first, int end) {
    std::vector<Bytes> blocks;
    for (size_t layer = 0; layer < cache.config().layers.size(); layer++) {
        if (!cache.config().layers[layer].stores || cache.config().layers[layer].window > 0) {
            continue;
        }
        const BlockTable& table = cache.views(int(layer))[sequence].coded;
        for (int b = first; b < end; b++) {
            blocks.emplace_back(table.block(b), table.block(b) + table.stride);
        }
    }
    return blocks;
}

// What attention of a layer computes for every row of the step, from queries that depend on the tokens alone.
std::vector<std::vector<float>> attention_of(const Cache& cache, int layer, const std::vector<StepToken>& tokens) {
    const CacheLayer& l = cache.config().layers[layer];
    const int n_head = 2 * l.n_head_kv;
    AttentionLayer attention;
    attention.n_head = n_head;
    attention.n_head_kv = l.n_head_kv;
    attention.scale = 0.2f;
    attention.format =
        l.window > 0 ? bf16_format(l.dim_k, l.dim_v) : cache.config().formats[layer];
    attention.tables = cache.config().tables[layer];
    const AttentionMaps maps = attention_maps(attention.tables);
    attention.maps = &maps;
    std::vector<float> q;
    for (const StepToken& t : tokens) {
        for (int head = 0; head < n_head; head++) {
            const auto x = row(t.token + 1000000, layer, Side::k, head, l.dim_k);
            q.insert(q.end(), x.begin(), x.end());
        }
    }
    const size_t width = size_t(n_head) * l.dim_v;
    std::vector<float> out(tokens.size() * width);
    AttentionWork work;
    work.prepare(cache.plan(layer), n_head, l.n_head_kv, attention.format, 1);
    const AttentionIo io{q.data(), size_t(n_head) * l.dim_k, size_t(l.dim_k), out.data(), width};
    attend(Isa::portable, attention, cache.plan(layer), cache.views(layer), io, work, 0, 1);
    std::vector<std::vector<float>> rows;
    for (size_t i = 0; i < tokens.size(); i++) {
        rows.emplace_back(out.begin() + i * width, out.begin() + (i + 1) * width);
    }
    return rows;
}

}  // namespace

TEST(PositionRule, EdgeMovesByBlocks) {
    EXPECT_EQ(coded_edge(-1, 0), 0);
    EXPECT_EQ(coded_edge(62, 0), 0);
    EXPECT_EQ(coded_edge(63, 0), 64);  // the block that this token completes
    EXPECT_EQ(coded_edge(63, 1), 0);
    EXPECT_EQ(coded_edge(64, 1), 64);
    EXPECT_EQ(coded_edge(318, 256), 0);
    EXPECT_EQ(coded_edge(319, 256), 64);
    EXPECT_EQ(coded_edge(383, 256), 128);
}

// Chunk size, and so batching and cache hits, change neither codes nor what a query reads, nor what attention computes.
TEST(PositionRule, ChunksChangeNothing) {
    constexpr int kTokens = 580;
    for (const int sink : {0, 4, 64, 100}) {
        for (const int recent : {0, 1, 63, 64, 256}) {
            std::vector<Bytes> codes;
            std::vector<QueryRow> rows;
            std::vector<std::vector<float>> outputs;
            for (const int chunk : {512, 64, 7, 1}) {
                SCOPED_TRACE(fmt::format("sink {} recent {} chunk {}", sink, recent, chunk));
                Cache cache(
                    config_of({.sink = sink, .recent = recent, .n_sequences = 1, .tokens = kTokens, .step = 512}));
                std::vector<QueryRow> these_rows;
                std::vector<std::vector<float>> these_outputs;
                for (int at = 0; at < kTokens; at += chunk) {
                    const auto tokens = run_of(0, Token(at), std::min(chunk, kTokens - at));
                    ASSERT_TRUE(step(cache, tokens));
                    these_rows.insert(these_rows.end(), cache.plan(0).rows().begin(), cache.plan(0).rows().end());
                    if (sink != 4 || recent != 64) {
                        continue;
                    }
                    for (auto& output : attention_of(cache, 0, tokens)) {
                        these_outputs.push_back(std::move(output));
                    }
                }
                const auto these = codes_of(cache, 0, sink / 64, coded_edge(kTokens - 1, recent) / 64);
                ASSERT_EQ(these_rows.size(), size_t(kTokens));
                if (chunk == 512) {
                    codes = these, rows = these_rows, outputs = these_outputs;
                }
                EXPECT_EQ(these, codes);
                EXPECT_EQ(these_outputs, outputs);
                for (int t = 0; t < kTokens; t++) {
                    ASSERT_EQ(these_rows[t].position, t);
                    ASSERT_EQ(these_rows[t].coded_end, coded_edge(t, recent));
                    ASSERT_EQ(these_rows[t].end, t + 1);
                }
            }
        }
    }
}

// Pages of 128 tokens are encoded as a whole when their first half is due; queries see what they always see.
TEST(PositionRule, ChunksChangeNothingInLargePages) {
    constexpr int kTokens = 580;
    for (const std::string recipe : {"kivi128", "ott", "kvarn:paper", "omni:layer:paper"}) {
        const int page = find_recipe(recipe).page_tokens;
        for (const int sink : {0, 64, 100}) {
            for (const int recent : {64, 100, 256}) {
                std::vector<Bytes> codes;
                for (const int chunk : {512, 64, 7}) {
                    SCOPED_TRACE(fmt::format("{}, sink {} recent {} chunk {}", recipe, sink, recent, chunk));
                    Cache cache(config_of({.recipe = recipe,
                                           .sink = sink,
                                           .recent = recent,
                                           .n_sequences = 1,
                                           .tokens = kTokens,
                                           .step = 512}));
                    for (int at = 0; at < kTokens; at += chunk) {
                        ASSERT_TRUE(step(cache, run_of(0, Token(at), std::min(chunk, kTokens - at)), 2));
                        for (const QueryRow& row : cache.plan(0).rows()) {
                            ASSERT_EQ(row.coded_end, coded_edge(row.position, recent));
                        }
                    }
                    const int edge = coded_edge(kTokens - 1, recent);
                    const auto these = codes_of(cache, 0, sink / page, (edge + page - 1) / page);
                    ASSERT_FALSE(these.empty());
                    codes = chunk == 512 ? these : codes;
                    EXPECT_EQ(these, codes);
                }
            }
        }
    }
}

TEST(PositionRule, ThePapersRuleCountsFromTheChunk) {
    Cache cache(config_of({.recent = 64, .prefill = PrefillRule::exact, .step = 300}));
    ASSERT_TRUE(step(cache, run_of(0, 0, 200)));
    for (const QueryRow& row : cache.plan(0).rows()) {
        EXPECT_EQ(row.coded_end, 0);
    }
    ASSERT_TRUE(step(cache, run_of(0, 200, 300)));
    for (const QueryRow& row : cache.plan(0).rows()) {
        EXPECT_EQ(row.coded_end, coded_edge(200, 64));
    }
    ASSERT_TRUE(step(cache, run_of(0, 500, 1)));
    EXPECT_EQ(cache.plan(0).rows()[0].coded_end, coded_edge(500, 64));
}

TEST(Step, RowsOfAStepThatIsNotCausalSeeAllOfIt) {
    Cache cache(config_of({.recent = 0, .window = 16}));
    ASSERT_TRUE(cache.begin(appends_of(run_of(0, 0, 100)), false));
    for (const int layer : {0, 1}) {
        for (const QueryRow& row : cache.plan(layer).rows()) {
            EXPECT_EQ(row.end, 100);
        }
    }
    EXPECT_EQ(cache.plan(1).rows()[99].begin, 84);
}

TEST(Step, SharedTokensAreStoredEverywhereAndAttendOnce) {
    Cache cache(config_of({.n_sequences = 2}));
    const std::vector<Append> appends{{1, 0}, {0, 0, false}, {1, 1}, {0, 1, false}, {0, 2}};
    ASSERT_TRUE(cache.begin(appends));
    const auto rows = cache.plan(0).rows();
    ASSERT_EQ(rows.size(), 3u);
    EXPECT_EQ(rows[0].sequence, 0u);
    EXPECT_EQ(rows[0].token, 2u);
    EXPECT_EQ(rows[0].position, 2);
    EXPECT_EQ(rows[1].sequence, 1u);
    EXPECT_EQ(cache.length(0), 3);
    EXPECT_EQ(cache.length(1), 2);
    const auto tokens = run_of(0, 50, 3);
    for (const int layer : {0, 2}) {
        store_layer(cache, layer, tokens);
    }
    const PageFormat exact = bf16_format(32, 32);
    for (const uint32_t sequence : {0u, 1u}) {
        const std::byte* page = cache.views(0)[sequence].exact.block(0);
        EXPECT_EQ(key_at(exact, page, 1, 5).bits, to_bf16(element(51, 0, Side::k, 0, 5)).bits);
    }
}

TEST(Step, ThreadsShareTheWork) {
    const Scenario scenario{.recent = 0, .window = 100, .tokens = 1024, .step = 512};
    Cache one(config_of(scenario)), many(config_of(scenario));
    for (int at = 0; at < 1024; at += 512) {
        const auto tokens = run_of(0, Token(at), 512);
        ASSERT_TRUE(step(one, tokens));
        ASSERT_TRUE(many.begin(appends_of(tokens)));
        for (const int layer : {0, 1, 3}) {
            std::vector<std::thread> threads;
            for (int t = 0; t < 4; t++) {
                threads.emplace_back([&, t] { store_part(many, layer, tokens, t, 4); });
            }
            for (std::thread& thread : threads) {
                thread.join();
            }
        }
    }
    EXPECT_EQ(save(one, 0), save(many, 0));
    EXPECT_EQ(one.counters().encoded.rows, many.counters().encoded.rows);
    EXPECT_EQ(one.counters().demoted_blocks, 15u);
}

TEST(Step, ValuesThatAreNotFiniteArePassedOnAndCounted) {
    Cache cache(config_of({.recipe = "quarot:paper", .sink = 0, .recent = 0, .n_sequences = 1}));
    ASSERT_TRUE(cache.begin(appends_of(run_of(0, 0, 70))));
    std::vector<float> x(70 * 64, 0.5f);
    x[66 * 64 + 3] = std::numeric_limits<float>::quiet_NaN();
    x[67 * 64 + 3] = std::numeric_limits<float>::infinity();
    x[1 * 64 + 3] = std::numeric_limits<float>::quiet_NaN();
    cache.store(0, {x.data(), 64, 32}, {x.data(), 64, 32}, 0, 1);
    const std::byte* page = cache.views(0)[0].exact.block(1);
    EXPECT_TRUE(std::isnan(to_float(key_at(bf16_format(32, 32), page, 2, 3))));
    EXPECT_TRUE(std::isinf(to_float(value_at(bf16_format(32, 32), page, 3, 3))));
    EXPECT_EQ(cache.counters().encoded.nonfinite, 2u);  // the NaN of the encoded block, in K and in V
}

// The proof above most_blocks(), by trying: no step from any length takes more, and some take as much.
TEST(Room, MostBlocksAreEnoughAndNotTooMany) {
    for (const int sink : {0, 4, 64, 100}) {
        for (const int recent : {0, 1, 63, 64, 256}) {
            for (const int window : {1, 16, 64, 100}) {
                const Rules rules(config_of({.sink = sink, .recent = recent, .window = window, .tokens = 2000}));
                int64_t exact = 0, windows = 0;
                for (int32_t length = 0; length < 1000; length++) {
                    const Extent now =
                        rules.trimmed({length, rules.edge(length - 1), 0, 0});  // encoded as late as can be
                    for (int32_t tokens = 1; tokens <= 200; tokens++) {
                        const Extent then = rules.appended(now, tokens);
                        exact =
                            std::max<int64_t>(exact, rules.sinks(then).size() + rules.exact(then).size() - tokens / 64);
                        windows = std::max<int64_t>(windows, rules.windows(then).size() - tokens / 64);
                    }
                }
                EXPECT_EQ(exact, most_blocks(rules).exact) << sink << " " << recent;
                EXPECT_EQ(windows, most_blocks(rules).window) << window;
            }
        }
    }
}

TEST(Room, IsThereForABlockThatIsEncodedAgain) {
    Cache cache(config_of({.sink = 0, .recent = 0, .n_sequences = 2, .tokens = 640, .step = 640}));
    for (const uint32_t sequence : {0u, 1u}) {
        ASSERT_TRUE(step(cache, run_of(sequence, 0, 639)));
        ASSERT_TRUE(step(cache, run_of(sequence, 639, 1)));
    }
    ASSERT_TRUE(step(cache, {}));  // the last exact blocks go
    for (int round = 0; round < 3; round++) {
        for (const uint32_t sequence : {0u, 1u}) {
            ASSERT_TRUE(cache.crop(sequence, 610));
        }
        for (const uint32_t sequence : {0u, 1u}) {
            ASSERT_TRUE(step(cache, run_of(sequence, 5000, 30)));
        }
    }
    EXPECT_EQ(cache.counters().blocks_in_use, 21u);  // one waits for the next step
}

TEST(Room, AppendsAreAllOrNothing) {
    Cache cache(config_of({.n_sequences = 2, .tokens = 200, .step = 500}));
    auto tokens = run_of(0, 0, 150);
    for (const StepToken& t : run_of(1, 0, 201)) {
        tokens.push_back(t);
    }
    EXPECT_FALSE(cache.fits(appends_of(tokens)));
    EXPECT_FALSE(cache.begin(appends_of(tokens)));
    EXPECT_EQ(cache.length(0), 0);
    EXPECT_EQ(cache.counters().exact_blocks_in_use, 0u);
    tokens.pop_back();
    EXPECT_TRUE(step(cache, tokens));
    EXPECT_TRUE(cache.fits({}));
}

// Sequences that share a pool may be longer together than it has room for, as long as they share blocks.
TEST(Room, SharedBlocksCountOnce) {
    Cache cache(config_of({.sink = 0, .recent = 0, .n_sequences = 4, .tokens = 640, .tokens_total = 640, .step = 640}));
    ASSERT_TRUE(step(cache, run_of(0, 0, 600)));
    const uint64_t used = cache.counters().blocks_in_use;
    for (const uint32_t to : {1u, 2u, 3u}) {
        ASSERT_TRUE(cache.fork(0, to, 600));
    }
    EXPECT_EQ(cache.counters().blocks_in_use, used);
    EXPECT_EQ(cache.counters().shared_blocks, used);
    ASSERT_TRUE(cache.crop(1, 0));
    EXPECT_FALSE(cache.fits(appends_of(run_of(1, 0, 640))));
    for (const uint32_t sequence : {0u, 2u, 3u}) {
        ASSERT_TRUE(cache.crop(sequence, 64));
    }
    EXPECT_TRUE(cache.fits(appends_of(run_of(1, 0, 640))));
}

TEST(Fork, WritersGetTheirOwnCopy) {
    Cache cache(config_of({.sink = 4, .recent = 64, .n_sequences = 2}));
    Model model(cache.config());
    const auto grow = [&](uint32_t sequence, Token first, int count) {
        ASSERT_TRUE(step(cache, run_of(sequence, first, count)));
        model.begin();
        for (int i = 0; i < count; i++) {
            model.append(sequence, first + Token(i));
        }
        model.encode_due();
    };
    const auto agree = [&] {
        for (const uint32_t i : {0u, 1u}) {
            const int length = cache.length(i);
            EXPECT_EQ(difference(cache, model, {i, length, length - 1, length}), "");
        }
    };
    grow(0, 0, 100);
    ASSERT_TRUE(cache.fork(0, 1, 90));
    model.fork(0, 1, 90);
    agree();
    grow(1, 1000, 90);  // the copy writes first, over rows that the other still has
    agree();
    grow(0, 2000, 90);
    agree();
    EXPECT_TRUE(cache.crop(0, 0));
    EXPECT_EQ(difference(cache, model, {1, 180, 179, 180}), "");
}

TEST(Crop, ByAFewTokensLosesNothing) {
    Cache cache(config_of({.sink = 0, .recent = 64, .n_sequences = 1}));
    for (int length = 0; length < 600; length += 3) {  // five drafted, two rejected
        ASSERT_TRUE(step(cache, run_of(0, Token(length), 5)));
        ASSERT_TRUE(cache.crop(0, length + 3));
        for (const QueryRow& row : cache.plan(0).rows()) {
            ASSERT_EQ(row.coded_end, coded_edge(row.position, 64));
        }
    }
    EXPECT_EQ(cache.counters().aged_early_tokens, 0u);
}

TEST(Crop, DeepLeavesTokensAgedEarly) {
    Cache cache(config_of({.sink = 0, .recent = 64, .n_sequences = 1, .step = 512}));
    ASSERT_TRUE(step(cache, run_of(0, 0, 512)));
    ASSERT_TRUE(step(cache, run_of(0, 512, 10)));
    const auto before = codes_of(cache, 0, 0, 4);

    ASSERT_TRUE(cache.crop(0, 200));  // inside block 3; the window of token 200 begins at 128
    EXPECT_EQ(cache.counters().aged_early_tokens, 72u);
    ASSERT_TRUE(step(cache, run_of(0, 1000, 1)));
    EXPECT_EQ(cache.plan(0).rows()[0].coded_end, 200);  // by the rule 128
    ASSERT_TRUE(step(cache, run_of(0, 1001, 150)));
    EXPECT_EQ(cache.plan(0).rows().front().coded_end, 200);
    EXPECT_EQ(cache.plan(0).rows().back().coded_end, coded_edge(350, 64));

    // Block 3 has been encoded again: its first 8 rows keep their codes, whatever they were, blocks below are as
    // before.
    const auto after = codes_of(cache, 0, 0, 4);
    const int last = 3;
    for (int b = 0; b < last; b++) {
        EXPECT_EQ(after[b], before[b]);
    }
    EXPECT_NE(after[last], before[last]);
    EXPECT_EQ(first_rows(cache.config(), 0, 0, 8, after[last].data()),
              first_rows(cache.config(), 0, 0, 8, before[last].data()));
    EXPECT_NE(first_rows(cache.config(), 0, 0, 9, after[last].data()),
              first_rows(cache.config(), 0, 0, 9, before[last].data()));
}

// The engine stopped in the middle of a step: what it had made due was never encoded.
TEST(Crop, UndoesAnAbandonedStep) {
    const Scenario scenario{.sink = 0, .recent = 64, .n_sequences = 1, .step = 512};
    Cache cache(config_of(scenario)), straight(config_of(scenario));
    for (Cache* c : {&cache, &straight}) {
        ASSERT_TRUE(step(*c, run_of(0, 0, 512)));
        ASSERT_TRUE(step(*c, run_of(0, 512, 1)));
        ASSERT_TRUE(c->crop(0, 200));  // now one block is to be encoded in part
        ASSERT_TRUE(step(*c, run_of(0, 200, 1)));
    }
    ASSERT_TRUE(cache.begin(appends_of(run_of(0, 7000, 300))));
    store_layer(cache, 0, run_of(0, 7000, 300));
    ASSERT_TRUE(cache.crop(0, 201));
    for (Cache* c : {&cache, &straight}) {
        ASSERT_TRUE(step(*c, run_of(0, 201, 300)));
    }
    EXPECT_EQ(save(cache, 0), save(straight, 0));
}

TEST(Windows, CropsAreRefusedWhereAWindowIsGone) {
    Cache cache(config_of({.window = 100, .n_sequences = 2, .step = 512}));
    EXPECT_EQ(cache.lowest_crop(0), 0);
    ASSERT_TRUE(step(cache, run_of(0, 0, 512)));
    EXPECT_EQ(cache.lowest_crop(0), 0);  // nothing is freed before the next step
    ASSERT_TRUE(step(cache, run_of(0, 512, 1)));
    const int lowest = cache.lowest_crop(0);
    EXPECT_EQ(lowest, 320 + 100 - 1);  // 513 - 100 - 64 lies in the block that begins at 320
    EXPECT_FALSE(cache.crop(0, lowest - 1));
    EXPECT_FALSE(cache.fork(0, 1, lowest - 1));
    EXPECT_EQ(cache.length(0), 513);
    EXPECT_TRUE(cache.fork(0, 1, lowest));
    EXPECT_TRUE(cache.crop(0, lowest));
    ASSERT_TRUE(step(cache, run_of(0, 5000, 1)));
    const QueryRow row = cache.plan(1).rows()[0];
    EXPECT_EQ(row.begin, 320);
    EXPECT_EQ(row.coded_end, 0);
    EXPECT_NE(cache.views(1)[0].exact.ids[320 / 64], kNoBlock);
    EXPECT_TRUE(cache.crop(0, 0));
}

TEST(Windows, TakeWhatTheirFormIsSaidToTake) {
    struct Case {
        int window, context;
        SlidingForm least;
        std::string recipe = "had2";
    };
    using enum SlidingForm;
    for (const Case& c : {Case{512, 8192, q8}, {1024, 2048, q8}, {4096, 8192, pages}, {4096, 65536, q8}, {100000, 8192, pages},
                          {100000, 128, q8}, {4096, 8192, q8, "bf16"}, {4096, 8192, q8, "planes"}}) {
        CacheConfig config;
        config.recipe = find_recipe(c.recipe);
        config.layers = {{.n_head_kv = 1, .dim_k = 64, .dim_v = 64}, {.n_head_kv = 2, .dim_k = 128, .dim_v = 64, .window = c.window}};
        config.n_sequences = 2;
        config.tokens_per_sequence = c.context;
        config.tokens_total = 2 * c.context;
        const SlidingForm least = *std::ranges::min_element(kSlidingForms, {}, [&](SlidingForm form) { return sliding_bytes(config, form).value_or(SIZE_MAX); });
        EXPECT_EQ(least, c.least) << c.window << " of " << c.context << ", " << c.recipe;
        const bool planes = c.recipe == "planes", has_pages = c.recipe == "had2";
        config.recipe = find_recipe(planes ? "bf16" : c.recipe);  // windows take what they take, whatever the others are
        for (const SlidingForm form : kSlidingForms) {
            if (form == pages && !has_pages) {
                EXPECT_EQ(sliding_bytes(config, form), std::nullopt);
                EXPECT_THROW(set_sliding_form(config, form), Error);
                continue;
            }
            set_sliding_form(config, form);
            EXPECT_EQ(sliding_form(config), form);
            const auto formats = config.formats;
            set_formats(config, nullptr);
            EXPECT_EQ(formats[1], config.formats[1]);
            EXPECT_EQ(layer_bytes(config)[1], sliding_bytes(config, form));
            EXPECT_GE(layer_bytes(config)[1], sliding_bytes(config, c.least));
        }
    }
}

// A token is coded as it comes, so steps do not matter, nor what a block held before.
TEST(Windows, OfEightBitsAreRowsOfTheirTokens) {
    const Scenario scenario{.window = 100, .form = SlidingForm::q8, .n_sequences = 2, .step = 512};
    Cache whole(config_of(scenario)), pieces(config_of(scenario));
    ASSERT_TRUE(step(pieces, run_of(0, 9000, 500)));
    ASSERT_TRUE(pieces.crop(0, 0));
    ASSERT_TRUE(step(whole, run_of(0, 0, 400)));
    for (int at = 0, n = 1; at < 400; at += n, n = std::min(2 * n, 400 - at)) {
        ASSERT_TRUE(step(pieces, run_of(0, at, n)));
    }
    ASSERT_TRUE(pieces.fork(0, 1, 400));
    ASSERT_TRUE(step(pieces, run_of(1, 7000, 3)));  // the last block is a copy
    for (Cache* c : {&whole, &pieces}) {
        ASSERT_TRUE(step(*c, run_of(0, 400, 7)));
    }
    EXPECT_EQ(save(whole, 0), save(pieces, 0));
    const QueryRow row = whole.plan(1).rows()[0];
    EXPECT_EQ(row.begin, 301);
    EXPECT_EQ(row.coded_end, 401);
    EXPECT_EQ(whole.plan(1).sink(), 0);
}

TEST(Windows, OfSeveralWidthsShareBlocks) {
    CacheConfig config = config_of({.window = 100});
    config.layers[3] = {.n_head_kv = 1, .dim_k = 64, .dim_v = 32, .window = 16};
    config.tables[3].clear();
    config.formats[3] = {};
    Cache cache(std::move(config));
    ASSERT_TRUE(step(cache, run_of(0, 0, 140)));
    EXPECT_EQ(cache.plan(1).rows()[139].begin, 40);
    EXPECT_EQ(cache.plan(3).rows()[139].begin, 124);
    EXPECT_EQ(cache.plan(0).rows()[139].begin, 0);
}

TEST(Bytes, AreWhatIsAllocated) {
    for (const std::string recipe : {"bf16", "had2", "quarot:paper", "planes:3"}) {
        for (const int window : {0, 100}) {
            const CacheConfig config = config_of({.recipe = recipe, .window = window, .tokens = 5000});
            const CacheBytes planned = cache_bytes(config), taken = Cache(config).bytes();
            EXPECT_EQ(planned.coded, taken.coded);
            EXPECT_EQ(planned.exact, taken.exact);
            EXPECT_EQ(planned.window, taken.window);
            EXPECT_EQ(planned.total(), taken.total());
            EXPECT_EQ(planned.window > 0, window > 0);
            EXPECT_EQ(planned.bf16_equivalent, 2u * 3 * (5000 * (2 * 64 + 96) + window * 80));
        }
    }
}

// Llama 3.1 8B at 128k tokens: what a user would multiply on paper.
TEST(Bytes, OfALargeModel) {
    CacheConfig config;
    config.recipe = find_recipe("quarot:paper");
    config.layers.assign(32, {.n_head_kv = 8, .dim_k = 128, .dim_v = 128});
    set_formats(config, nullptr);
    config.tokens_per_sequence = config.tokens_total = 131072;
    const CacheBytes bytes = cache_bytes(config);
    EXPECT_EQ(bytes.bf16_equivalent, size_t(16) << 30);
    EXPECT_DOUBLE_EQ(bytes.bits_per_element, 2.25);
    EXPECT_EQ(bytes.coded, size_t(32 * 8 * 4608) * (2048 - 4 - 1 + 1));  // without the window and the sink, one spare
    EXPECT_EQ(bytes.exact, size_t(32 * 8 * 32768) * (1 + 5 + 1 + 8));    // sink, window, what a step begins, a step
    EXPECT_NEAR(bytes.effective_bits, 2.37, 0.01);
}

TEST(Settings, ThatCannotBeAreRefused) {
    const auto refusal = [](auto change) {
        CacheConfig config = config_of({});
        change(config);
        return message_of([&] { Cache cache(config); });
    };
    EXPECT_TRUE(contains(refusal([](CacheConfig& c) { c.sink = -1; }), "--kv-sink"));
    EXPECT_TRUE(contains(refusal([](CacheConfig& c) { c.recent = -5; }), "-5"));
    EXPECT_TRUE(contains(refusal([](CacheConfig& c) {
                             c = config_of({.recipe = "kivi128"});
                             c.recent = 63;
                         }),
                         "at least 64 recent tokens"));
    EXPECT_TRUE(contains(refusal([](CacheConfig& c) { c.tokens_per_sequence = 0; }), "-c"));
    EXPECT_TRUE(contains(refusal([](CacheConfig& c) { c.tokens_total = 699; }), "raise -c"));
    EXPECT_TRUE(contains(refusal([](CacheConfig& c) { c.layers[2].n_head_kv = 0; }), "layer 2"));
    EXPECT_NE(refusal([](CacheConfig& c) { c.layers[0].dim_k = 1000; }), "");
#ifndef __SANITIZE_ADDRESS__
    EXPECT_TRUE(contains(refusal([](CacheConfig& c) {
                             c.recipe = find_recipe("bf16");
                             set_formats(c, nullptr);
                             c.layers[0].n_head_kv = c.layers[2].n_head_kv = 1 << 20;
                             c.tokens_per_sequence = c.tokens_total = 1 << 30;
                         }),
                         "smaller context (-c)"));
#endif
}
