// What sequences share that run through the same tokens, and what room they find. Random traces of everything together:
// cache_model_test.cpp.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <numeric>

#include "cache_model.h"
#include "fake_device.h"

using namespace crumb;
using namespace crumb::test;

namespace {

std::vector<int32_t> ids_of(const std::vector<StepToken>& tokens) {
    std::vector<int32_t> ids;
    for (const StepToken& t : tokens) {
        ids.push_back(int32_t(t.token));
    }
    return ids;
}

// `count` tokens that begin as Token(0), Token(1), .. and go on from `other` at `part`.
std::vector<StepToken> text(uint32_t sequence, int count, int part, Token other) {
    std::vector<StepToken> tokens;
    for (int i = 0; i < count; i++) {
        tokens.push_back({sequence, i < part ? Token(i) : other + Token(i)});
    }
    return tokens;
}

// What a server does with a prompt: asks for its start and computes the rest in chunks. Returns what it began with.
int prompt(Cache& cache, const std::vector<StepToken>& tokens, int chunk = 100, uint64_t salt = 0) {
    const uint32_t sequence = tokens[0].sequence;
    const int begin = cache.reuse(sequence, ids_of(tokens), cache.length(sequence), salt);
    for (int at = begin; at < int(tokens.size()); at += chunk) {
        const auto end = std::min(at + chunk, int(tokens.size()));
        EXPECT_TRUE(step(cache, {tokens.begin() + at, tokens.begin() + end}));
    }
    return begin;
}

Bytes cold(const Scenario& scenario, const std::vector<StepToken>& tokens) {
    Cache cache(config_of(scenario));
    prompt(cache, tokens);
    return save(cache, tokens[0].sequence);
}

size_t bf16_bytes(const CacheConfig& config, int tokens) {
    size_t bytes = 0;
    for (const CacheLayer& l : config.layers) {
        bytes += l.stores ? size_t(2 * tokens * l.n_head_kv * (l.dim_k + l.dim_v)) : 0;
    }
    return bytes;
}

const Scenario kServer{.recent = 128, .n_sequences = 4, .tokens = 2600, .spare_windows = 4};

}  // namespace

TEST(Share, AHitIsWhatAColdSequenceIs) {
    for (const int window : {0, 100}) {
        for (const int sink : {0, 4, 64, 100}) {
            Scenario scenario = kServer;
            scenario.window = window, scenario.sink = sink;
            Cache cache(config_of(scenario));
            const auto first = text(0, 1000, 1000, 0), again = text(1, 1000, 1000, 0);
            EXPECT_EQ(prompt(cache, first), 0);
            EXPECT_EQ(prompt(cache, again), 960);
            EXPECT_EQ(save(cache, 1), cold(scenario, again));
            const uint64_t shared = cache.counters().shared_blocks;
            EXPECT_GE(shared, uint64_t((960 - 128) / 64 - sink / 64 - 1));

            // Generation goes on in one of them, and the other sees nothing of it.
            ASSERT_TRUE(step(cache, run_of(0, 70000, 150)));
            EXPECT_EQ(save(cache, 1), cold(scenario, again));
            // After its sequence is gone.
            ASSERT_TRUE(cache.crop(0, 0) && cache.crop(1, 0));
            EXPECT_EQ(cache.counters().blocks_in_use, 0u);
            EXPECT_GT(cache.counters().kept_blocks, 0u);
            EXPECT_EQ(prompt(cache, text(2, 1000, 1000, 0)), 960);
            EXPECT_EQ(save(cache, 2), cold(scenario, text(2, 1000, 1000, 0)));
        }
    }
}

// A row of the matrix (MATRIX.md): a prompt in chunks of this many tokens, cold and behind a hit that ends at a page or 5 tokens later.
class MatrixChunk : public testing::TestWithParam<int> {};

TEST_P(MatrixChunk, ColdAndBehindAHit) {
    Scenario scenario = kServer;
    scenario.step = 900, scenario.n_sequences = 7;
    Cache cache(config_of(scenario));
    prompt(cache, text(0, 900, 900, 0), GetParam());
    EXPECT_EQ(save(cache, 0), cold(scenario, text(0, 900, 900, 0)));
    for (const auto& [sequence, part] : {std::pair{1u, 640}, {2u, 645}, {6u, 64}, {3u, 69}}) {
        const auto other = text(sequence, 900, part, 50000 * Token(sequence));
        prompt(cache, other, GetParam());
        EXPECT_EQ(save(cache, sequence), cold(scenario, other)) << part;
    }
}

INSTANTIATE_TEST_SUITE_P(Tokens, MatrixChunk, testing::Values(1, 2, 7, 32, 127, 512, 900), testing::PrintToStringParamName());

// A row of the matrix: so many sequences of different lengths in the same steps; the first is forked, then gone, and one is cut.
class MatrixSequences : public testing::TestWithParam<int> {};

TEST_P(MatrixSequences, EachIsThatOfOneAlone) {
    const auto n = uint32_t(GetParam());
    Scenario scenario = kServer;
    scenario.n_sequences = int(n) + 1;
    Cache cache(config_of(scenario));
    const auto length = [](uint32_t s) { return 700 - 90 * int(s); };
    const auto alone = [&](uint32_t s, int tokens, uint32_t as) {
        Cache other(config_of(scenario));
        for (int at = 0; at < tokens; at++) { EXPECT_TRUE(step(other, run_of(as, Token(at) + 10000 * s, 1))); }
        return save(other, as);
    };
    for (int at = 0; at < 700; at++) {
        std::vector<StepToken> tokens;
        for (uint32_t s = 0; s < n; s++) {
            if (at < length(s)) { tokens.push_back({s, Token(at) + 10000 * s}); }
        }
        ASSERT_TRUE(step(cache, tokens));
    }
    for (uint32_t s = 0; s < n; s++) { EXPECT_EQ(save(cache, s), alone(s, length(s), s)) << s; }
    ASSERT_TRUE(cache.fork(0, n, 700) && cache.crop(0, 0));
    EXPECT_EQ(save(cache, n), alone(0, 700, n));
    ASSERT_TRUE(cache.crop(n - 1, n == 1 ? 0 : length(n - 1) - 3));
    for (uint32_t s = 1; s + 1 < n; s++) { EXPECT_EQ(save(cache, s), alone(s, length(s), s)) << s; }
}

INSTANTIATE_TEST_SUITE_P(Together, MatrixSequences, testing::Values(1, 2, 3, 7), testing::PrintToStringParamName());

// The second text that parts from the first finds no window there, and leaves one for the third.
TEST(Share, WhereTextsPartAWindowIsKept) {
    Cache cache(config_of(kServer));
    prompt(cache, text(0, 1800, 1800, 0));
    EXPECT_EQ(prompt(cache, text(1, 1500, 1000, 50000)), 64);
    EXPECT_EQ(prompt(cache, text(2, 1500, 1000, 60000)), 960);
    EXPECT_EQ(save(cache, 2), cold(kServer, text(2, 1500, 1000, 60000)));
}

// All arrive together: who is first keeps the window that the others will want, so their common start is computed once.
TEST(Share, WhatIsAnnouncedIsKept) {
    Cache cache(config_of(kServer));
    const auto first = text(0, 1800, 1000, 40000), second = text(1, 1500, 1000, 50000), third = text(2, 1500, 1000, 60000);
    cache.announce(0, ids_of(first));
    cache.announce(1, ids_of(second));
    EXPECT_EQ(cache.reuse(0, ids_of(first), 0), 0);
    ASSERT_TRUE(step(cache, {first.begin(), first.begin() + 100}));
    cache.announce(2, ids_of(third));
    for (int at = 100; at < 1800; at += 100) {
        ASSERT_TRUE(step(cache, {first.begin() + at, first.begin() + at + 100}));
    }
    EXPECT_EQ(prompt(cache, second), 960);
    EXPECT_EQ(prompt(cache, third), 960);
    EXPECT_EQ(save(cache, 2), cold(kServer, third));
}

// The second text with the same system prompt finds it, if the first one was told where it ends.
TEST(Share, WhatIsCommonIsKept) {
    Cache cache(config_of(kServer));
    const auto first = text(0, 1800, 1000, 40000), second = text(1, 1500, 1000, 50000);
    EXPECT_EQ(cache.reuse(0, ids_of(first), 0, 0, 1000), 0);
    for (int at = 0; at < 1800; at += 100) {
        ASSERT_TRUE(step(cache, {first.begin() + at, first.begin() + at + 100}));
    }
    EXPECT_EQ(prompt(cache, second), 960);
    EXPECT_EQ(save(cache, 1), cold(kServer, second));
}

TEST(Share, WhatASequenceCanKeepIsWhatAColdOneHas) {
    for (const ReuseRule rule : {ReuseRule::exact, ReuseRule::codes}) {
        Scenario scenario = kServer;
        scenario.reuse = rule;
        Cache cache(config_of(scenario));
        prompt(cache, text(0, 1000, 1000, 0));
        EXPECT_EQ(cache.keep(0, 1000, 1100), 1000);
        EXPECT_EQ(cache.keep(0, 980, 1100), 980);
        EXPECT_EQ(cache.keep(0, 500, 1100), rule == ReuseRule::exact ? 0 : 500);
        EXPECT_EQ(cache.keep(0, 500, 550), rule == ReuseRule::exact ? 0 : 550 - 128);
        EXPECT_EQ(cache.length(0), 1000);
    }
}

TEST(Share, StatusSaysWhatIsHeld) {
    Cache cache(config_of(kServer));
    prompt(cache, text(0, 1000, 1000, 0));
    prompt(cache, text(1, 1100, 1000, 50000));
    const SequenceStatus alone = cache.status(2), first = cache.status(0), second = cache.status(1);
    EXPECT_EQ(alone.length + alone.coded + alone.recent + alone.sinks, 0);
    EXPECT_EQ(first.length, 1000);
    EXPECT_EQ(first.shared, 12);  // edge(1000 - 1) = 832, and the first page is a sink
    EXPECT_EQ(second.shared, first.shared);
    EXPECT_GT(second.coded, second.shared);
    EXPECT_EQ(first.bytes_at_16_bit, bf16_bytes(cache.config(), 1000));
    EXPECT_LT(first.bytes, first.bytes_at_16_bit);
    EXPECT_LT(cache.counters().bytes_in_use, first.bytes + second.bytes);
}

TEST(Share, LongTextsHaveWindowsOnTheWay) {
    Cache cache(config_of(kServer));
    prompt(cache, text(0, 2500, 2500, 0));
    EXPECT_EQ(prompt(cache, text(1, 2500, 2300, 50000)), 2048);
    EXPECT_EQ(save(cache, 1), cold(kServer, text(1, 2500, 2300, 50000)));
}

// The other slot is busy with the same text and further on.
TEST(Share, AnotherSequenceIsCaughtUpWith) {
    Cache cache(config_of(kServer));
    const auto first = text(0, 1000, 1000, 0), second = text(1, 1000, 1000, 0);
    EXPECT_EQ(cache.reuse(0, ids_of(first), 0), 0);
    EXPECT_EQ(cache.reuse(1, ids_of(second), 0), 0);
    ASSERT_TRUE(step(cache, {first.begin(), first.begin() + 140}));
    ASSERT_TRUE(step(cache, {second.begin(), second.begin() + 10}));
    for (int at = 140; at < 840; at += 140) {
        ASSERT_TRUE(step(cache, {first.begin() + at, first.begin() + at + 140}));
    }
    EXPECT_EQ(cache.reuse(1, ids_of(second), 10), 832);
    ASSERT_TRUE(step(cache, {second.begin() + 832, second.begin() + 932}));
    ASSERT_TRUE(step(cache, {second.begin() + 932, second.end()}));
    EXPECT_EQ(save(cache, 1), cold(kServer, second));
}

// Two prompts in the same batches: nobody was first, but the blocks are the same in the end.
TEST(Share, SequencesThatMeetAgainHaveTheirBlocksOnce) {
    Cache cache(config_of(kServer));
    const auto a = text(0, 700, 700, 0), b = text(1, 700, 700, 0);
    cache.reuse(0, ids_of(a), 0);
    cache.reuse(1, ids_of(b), 0);
    for (int at = 0; at < 700; at += 70) {
        std::vector<StepToken> both(a.begin() + at, a.begin() + at + 70);
        both.insert(both.end(), b.begin() + at, b.begin() + at + 70);
        ASSERT_TRUE(step(cache, both));
    }
    ASSERT_TRUE(step(cache, {}));
    const CacheCounters counters = cache.counters();
    EXPECT_EQ(counters.blocks_in_use, uint64_t(coded_edge(699, 128) / 64 - 1));
    EXPECT_EQ(counters.shared_blocks, counters.blocks_in_use);
}

TEST(Share, SaltsAndUnknownTokensShareNothing) {
    Cache cache(config_of(kServer));
    EXPECT_EQ(prompt(cache, text(0, 500, 500, 0), 100, 7), 0);
    EXPECT_EQ(prompt(cache, text(1, 500, 500, 0), 100, 8), 0);
    EXPECT_EQ(prompt(cache, text(2, 500, 500, 0), 100, 7), 448);
    ASSERT_TRUE(cache.crop(3, 0));
    std::vector<Append> unknown = appends_of(text(3, 100, 100, 0));
    unknown[3].id = -1;
    cache.reuse(3, std::vector<int32_t>{9, 9}, 0, 5);
    ASSERT_TRUE(cache.begin(unknown));
    for (const int layer : {0, 2}) {
        store_layer(cache, layer, text(3, 100, 100, 0));
    }
    ASSERT_TRUE(cache.crop(0, 0));
    EXPECT_EQ(prompt(cache, text(0, 500, 500, 0), 100, 5), 0);
}

// Nobody asked for them: sequences of other programs stay their own.
TEST(Share, OnlyByThoseThatAsk) {
    Cache cache(config_of(kServer));
    ASSERT_TRUE(step(cache, run_of(0, 0, 150)));
    EXPECT_EQ(cache.reuse(1, ids_of(text(1, 150, 150, 0)), 0), 0);
    ASSERT_TRUE(cache.crop(0, 0));
    EXPECT_EQ(cache.counters().kept_blocks, 0u);
}

// The window that a deep crop left behind is not what the rule says, nor is what is computed from it.
TEST(Share, WhatWasAgedEarlyIsNotFound) {
    for (const ReuseRule rule : {ReuseRule::exact, ReuseRule::codes}) {
        Scenario scenario = kServer;
        scenario.reuse = rule;
        Cache cache(config_of(scenario));
        prompt(cache, text(0, 1000, 1000, 0));
        ASSERT_TRUE(cache.crop(0, 600));
        const auto rest = text(0, 1400, 600, 50000);
        for (int at = 600; at < 1400; at += 100) {
            ASSERT_TRUE(step(cache, {rest.begin() + at, rest.begin() + at + 100}));
        }
        const int begin = cache.reuse(1, ids_of(text(1, 1400, 600, 50000)), 0);
        EXPECT_EQ(begin, rule == ReuseRule::exact ? 64 : 576);  // sinks are always there
        EXPECT_EQ(cache.counters().aged_early_tokens, rule == ReuseRule::exact ? 152u : 152u + 128u);
    }
}

TEST(Share, CodesAloneLeaveAWindowToCompute) {
    Scenario scenario = kServer;
    scenario.reuse = ReuseRule::codes, scenario.spare_windows = 0;
    Cache cache(config_of(scenario));
    prompt(cache, text(0, 1800, 1800, 0));
    EXPECT_EQ(prompt(cache, text(1, 1010, 1000, 50000)), (1010 - 128) / 64 * 64);
    EXPECT_EQ(prompt(cache, text(2, 1500, 1000, 60000)), 960);
}

// What is kept goes when its place is needed, the end of a text before its beginning, and never what is in use.
TEST(Share, EvictionTakesWhatNobodyHas) {
    Scenario scenario = kServer;
    scenario.tokens = scenario.tokens_total = 1000;
    Cache cache(config_of(scenario));
    prompt(cache, text(0, 900, 900, 0));
    ASSERT_TRUE(cache.crop(0, 0));
    prompt(cache, text(1, 900, 0, 10000));
    const Bytes in_use = save(cache, 1);
    prompt(cache, text(2, 500, 0, 20000));
    EXPECT_GT(cache.counters().evicted_blocks, 0u);
    EXPECT_EQ(save(cache, 1), in_use);
    ASSERT_TRUE(cache.crop(2, 0));
    EXPECT_LT(prompt(cache, text(0, 500, 500, 0)), 448);
    EXPECT_EQ(prompt(cache, text(3, 900, 0, 10000)), 896);
    EXPECT_EQ(save(cache, 3), cold(kServer, text(3, 900, 0, 10000)));
}

TEST(Share, RestoredSequencesAreFoundIfTheyAreClean) {
    Cache cache(config_of(kServer)), other(config_of(kServer));
    prompt(cache, text(0, 1000, 1000, 0));
    restore(other, 2, save(cache, 0));
    EXPECT_EQ(prompt(other, text(1, 1000, 1000, 0)), 960);
    EXPECT_EQ(save(other, 1), cold(kServer, text(1, 1000, 1000, 0)));

    prompt(cache, text(1, 1000, 0, 30000), 100, 77);  // with an adapter that a state does not name
    restore(other, 3, save(cache, 1));
    EXPECT_EQ(prompt(other, text(0, 1000, 0, 30000)), 0);
}

TEST(Memory, IsWhatWasGiven) {
    CacheConfig config = config_of({.n_sequences = 3, .tokens = 20000});
    config.memory = 3 << 20;
    const CacheBytes bytes = cache_bytes(config);
    EXPECT_LE(bytes.total(), size_t(3) << 20);
    EXPECT_GT(bytes.total(), (size_t(3) << 20) - 20000);
    Cache cache(config);
    EXPECT_EQ(cache.bytes().total(), bytes.total());
    EXPECT_EQ(cache.capacity(), bytes.tokens);
    EXPECT_LT(bytes.tokens, 60000);
    config.memory = 600 << 10;
    EXPECT_TRUE(contains(message_of([&] { Cache c(config); }), "--kv-memory 0.6M is too little"));
}

TEST(Memory, PromisesAreForTheWholeLength) {
    CacheConfig config = config_of({.recent = 64, .n_sequences = 3, .tokens = 4000});
    config.memory = 550 << 10;
    Cache cache(std::move(config));
    const int64_t all = cache.room(0);
    EXPECT_LT(all, 4000);
    EXPECT_FALSE(cache.promise(0, all + 1));
    EXPECT_TRUE(cache.promise(0, all / 2));
    EXPECT_LT(cache.room(1), all);
    EXPECT_FALSE(cache.promise(1, all));
    cache.end_promise(0);
    EXPECT_TRUE(cache.promise(1, all));
    EXPECT_FALSE(cache.has_room(0, 500));
    EXPECT_TRUE(cache.has_room(0, 100));  // sink and window need no coded blocks
}

// Sequences come, grow and go; who was promised a length reaches it.
TEST(Memory, PromisesAreKept) {
    const bool ok = rc::check("no step fails that promises or has_room() allow", [] {
        constexpr int kLongest = 1500;
        CacheConfig config = config_of({.recent = 64, .n_sequences = 3, .tokens = kLongest, .step = 200});
        config.memory = 640 << 10;
        Cache cache(std::move(config));
        std::vector<int64_t> promised(3);
        Token next = 0;
        std::vector<std::vector<int32_t>> texts(3);
        const auto ops = *rc::gen::container<std::vector<std::tuple<int, uint32_t, int>>>(
            rc::gen::tuple(rc::gen::inRange(0, 6), rc::gen::inRange(0u, 3u), rc::gen::inRange(1, 200)));
        for (const auto& [kind, sequence, amount] : ops) {
            const int length = cache.length(sequence);
            if (kind == 0) {
                const int wanted = length + 5 * amount;  // promised as far as a sequence goes
                promised[sequence] = cache.promise(sequence, wanted) ? std::min(wanted, kLongest) : 0;
            } else if (kind == 1) {
                cache.crop(sequence, 0);
                cache.end_promise(sequence);
                promised[sequence] = 0;
            } else if (kind == 2) {
                std::vector<int32_t> ids = texts[size_t(amount) % 3];
                ids.push_back(-1 - int32_t(next));
                if (int64_t(ids.size()) <= std::max(promised[sequence], cache.room(sequence))) {
                    cache.reuse(sequence, ids, length);
                }
            } else if (length + amount <= promised[sequence] || cache.has_room(sequence, amount)) {
                const auto tokens = run_of(sequence, next, amount);
                next += Token(amount);
                RC_ASSERT(step(cache, tokens));
                auto& ids = texts[sequence];
                ids.resize(size_t(length));
                for (const StepToken& t : tokens) {
                    ids.push_back(int32_t(t.token));
                }
            }
        }
    });
    EXPECT_TRUE(ok);
}

// Pages of nobody make room for those in use, and come back when they are wanted.
TEST(Share, KeptPagesOfADeviceMoveToMainMemoryAndBack) {
    Scenario scenario = kServer;
    FakeDevice device;
    CacheConfig config = config_of(scenario);
    config.devices.assign(config.layers.size(), &device);
    const size_t all = cache_bytes(config).coded;
    const auto blocks = [&](int tokens) { return size_t(tokens / 64) * all / size_t(Cache(config).counters().blocks_total); };
    config.host_memory = all - blocks(1536);  // the device itself has room for one of the texts
    const std::vector<size_t> moved = host_bytes(config);
    device.host_bytes = 0;
    Cache cache(config);
    EXPECT_EQ(device.host_bytes, std::accumulate(moved.begin(), moved.end(), size_t(0)));
    EXPECT_LE(device.host_bytes, config.host_memory);
    EXPECT_GT(device.host_bytes + blocks(64), config.host_memory);

    const auto first = text(0, 1500, 1500, 0), second = text(1, 1500, 0, 5000);
    prompt(cache, first);
    EXPECT_EQ(cache.counters().host_blocks_in_use, 0u);
    prompt(cache, second);
    EXPECT_EQ(cache.counters().host_blocks_in_use, cache.counters().blocks_in_use - 1536 / 64);
    for (int round = 0; round < 3; round++) {
        for (const auto& [mine, other] : {std::pair(first, second), {second, first}}) {
            ASSERT_TRUE(cache.crop(0, 0) && cache.crop(1, 0));
            EXPECT_GE(prompt(cache, mine), 1344);  // by which windows are still there
            EXPECT_EQ(cache.counters().host_blocks_in_use, 0u);
            EXPECT_EQ(save(cache, mine[0].sequence), cold(kServer, mine));
        }
    }
    EXPECT_EQ(cache.counters().evicted_blocks, 0u);
}
