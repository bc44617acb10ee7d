// States of sequences: they come back as they were, elsewhere too; what is damaged, foreign or hostile is refused, and
// then nothing has changed.
#include <gtest/gtest.h>
#include <xxhash.h>

#include "cache_model.h"

using namespace crumb;
using namespace crumb::test;

namespace {

// Coded, exact and window blocks of one small head each.
CacheConfig small(int tokens = 256) {
    CacheConfig config;
    config.recipe = find_recipe("had2");
    config.layers = {{.n_head_kv = 1, .dim_k = 32, .dim_v = 32},
                     {.n_head_kv = 1, .dim_k = 32, .dim_v = 32, .window = 16}};
    set_formats(config, nullptr);
    set_tables(config, nullptr);
    config.sink = config.recent = 0;
    config.n_sequences = 2;
    config.tokens_per_sequence = tokens;
    config.tokens_total = 2 * tokens;
    return config;
}

constexpr size_t kExtent = 16, kChecksum = 8;

// Where the extent of a state of `small` lies: the rest is one coded and `bf16_blocks` BF16 records with checksums.
size_t extent_at(const Bytes& state, int bf16_blocks, int n_tokens) {
    const size_t coded = page_format(find_recipe("had2"), 32, 32).bytes(), exact = bf16_format(32, 32).bytes();
    const size_t tokens = size_t(1 + n_tokens) * sizeof(int32_t);
    return state.size() - (coded + kChecksum) - bf16_blocks * (exact + kChecksum) - (tokens + kChecksum) - kChecksum - kExtent;
}

Bytes with_extent(Bytes state, size_t at, const int32_t (&extent)[4]) {
    std::memcpy(state.data() + at, extent, kExtent);
    const uint64_t checksum = XXH3_64bits(state.data(), at + kExtent);
    std::memcpy(state.data() + at + kExtent, &checksum, kChecksum);
    return state;
}

bool refuses(Cache& cache, uint32_t sequence, const Bytes& state) {
    try {
        restore(cache, sequence, state);
    } catch (const std::runtime_error&) {
        return true;
    }
    return false;
}

}  // namespace

TEST(Save, ComesBackInAnotherCacheAndGoesOnAsBefore) {
    for (const std::string recipe : {"had2", "quarot:paper", "bf16", "planes:3"}) {
        const Scenario scenario{.recipe = recipe, .sink = 4, .recent = 64, .window = 100, .step = 400};
        Cache here(config_of(scenario)), there(config_of(scenario));
        ASSERT_TRUE(step(here, run_of(1, 0, 400)));
        ASSERT_TRUE(step(there, run_of(0, 5000, 300)));
        restore(there, 0, save(here, 1));
        EXPECT_EQ(there.length(0), 400);
        ASSERT_TRUE(step(here, run_of(1, 400, 200)));
        ASSERT_TRUE(step(there, run_of(0, 400, 200)));
        EXPECT_EQ(save(there, 0), save(here, 1));
    }
}

TEST(Save, SaysWhichTokensWithoutReadingBlocks) {
    Cache cache(config_of({.step = 400}));
    std::vector<int32_t> ids;
    for (const StepToken& t : run_of(1, 0, 400)) {
        ids.push_back(int32_t(t.token));
    }
    ASSERT_TRUE(step(cache, run_of(1, 0, 400)));
    const Bytes state = save(cache, 1);
    size_t at = 0;
    const auto read = [&](void* data, size_t size) {
        std::memcpy(data, state.data() + std::exchange(at, at + size), size);
    };
    EXPECT_EQ(cache.saved_ids(read), ids);
    EXPECT_LT(at, state.size() / 10);
    Bytes damaged = state;
    damaged[at - 12] ^= std::byte{1};
    at = 0;
    EXPECT_ANY_THROW(cache.saved_ids([&](void* data, size_t size) {
        std::memcpy(data, damaged.data() + std::exchange(at, at + size), size);
    }));
}

TEST(Save, KeepsWhatIsAgedEarly) {
    const Scenario scenario{.sink = 0, .recent = 64, .step = 512};
    Cache here(config_of(scenario)), there(config_of(scenario));
    ASSERT_TRUE(step(here, run_of(0, 0, 512)));
    ASSERT_TRUE(step(here, run_of(0, 512, 1)));
    ASSERT_TRUE(here.crop(0, 200));
    restore(there, 2, save(here, 0));
    for (auto [cache, sequence] : {std::pair{&here, 0u}, std::pair{&there, 2u}}) {
        ASSERT_TRUE(step(*cache, run_of(sequence, 1000, 10)));
        EXPECT_EQ(cache->plan(0).rows()[0].coded_end, 200);
        ASSERT_TRUE(step(*cache, run_of(sequence, 1010, 150)));
    }
    EXPECT_EQ(save(there, 2), save(here, 0));
}

TEST(Save, NamesTheRateThatDiffers) {
    const Scenario scenario{.recipe = "planes:3", .sink = 4, .recent = 64};
    Scenario other = scenario;
    other.recipe = "planes:3.5";
    Cache here(config_of(scenario)), there(config_of(other));
    EXPECT_NE(here.config().formats[0], here.config().formats[2]);
    ASSERT_TRUE(step(here, run_of(0, 0, 150)));
    EXPECT_TRUE(contains(message_of([&] { restore(there, 0, save(here, 0)); }), "recipe 'planes:3', here it is 'planes:3.5'"));
}

// The same tokens give the same bytes, whoever had the blocks before.
TEST(Save, ShowsNothingOfOtherTokens) {
    for (const std::string recipe : {"had2", "bf16", "planes:3"}) {
        const Scenario scenario{
            .recipe = recipe, .sink = 4, .recent = 64, .window = 100, .n_sequences = 2, .step = 512};
        Cache used(config_of(scenario)), fresh(config_of(scenario));
        ASSERT_TRUE(step(used, run_of(0, 9000, 512)));
        ASSERT_TRUE(step(used, run_of(1, 9000, 512)));
        ASSERT_TRUE(used.crop(0, 0) && used.crop(1, 0));
        for (Cache* cache : {&used, &fresh}) {
            ASSERT_TRUE(step(*cache, run_of(0, 0, 333)));
        }
        ASSERT_TRUE(step(used, run_of(0, 333, 20)));
        ASSERT_TRUE(used.fork(0, 1, 333));
        EXPECT_EQ(save(used, 1), save(fresh, 0));
    }
    const Scenario scenario{.sink = 4, .recent = 64, .n_sequences = 1, .step = 512};
    Cache used(config_of(scenario)), fresh(config_of(scenario));
    for (auto [cache, tail] : {std::pair{&used, 9000}, std::pair{&fresh, 200}}) {
        ASSERT_TRUE(step(*cache, run_of(0, 0, 200)));
        ASSERT_TRUE(step(*cache, run_of(0, Token(tail), 200)));
        ASSERT_TRUE(step(*cache, run_of(0, 0, 1)));
        ASSERT_TRUE(cache->crop(0, 200));  // its last block is known by its codes only
    }
    EXPECT_EQ(save(used, 0), save(fresh, 0));
}

TEST(Save, AFullPoolTakesTheStateOfItsOwnSequence) {
    Scenario scenario{.sink = 0, .recent = 0, .window = 50, .n_sequences = 1, .tokens = 640, .step = 640};
    Cache here(config_of(scenario)), there(config_of(scenario));
    ASSERT_TRUE(step(here, run_of(0, 0, 640)));
    ASSERT_TRUE(step(there, run_of(0, 5000, 640)));
    restore(there, 0, save(here, 0));
    EXPECT_EQ(save(there, 0), save(here, 0));
}

TEST(Save, AFullPoolRefusesTheStateOfAnother) {
    const Scenario scenario{.sink = 0, .recent = 0, .n_sequences = 2, .tokens = 640, .tokens_total = 640, .step = 640};
    Cache cache(config_of(scenario));
    ASSERT_TRUE(step(cache, run_of(0, 0, 640)));
    const Bytes full = save(cache, 0);
    ASSERT_TRUE(cache.crop(0, 320));
    ASSERT_TRUE(step(cache, run_of(1, 5000, 320)));
    const Bytes before = save(cache, 1);
    EXPECT_TRUE(contains(message_of([&] { restore(cache, 1, full); }), "drop other sequences"));
    EXPECT_EQ(save(cache, 1), before);

    ASSERT_TRUE(cache.crop(1, 0));
    ASSERT_TRUE(step(cache, run_of(0, 6000, 192)));
    ASSERT_TRUE(cache.fork(0, 1, 512));  // what it shares does not become free
    EXPECT_TRUE(contains(message_of([&] { restore(cache, 1, full); }), "drop other sequences"));
    EXPECT_EQ(cache.length(1), 512);
}

TEST(Save, WindowsAloneCompleteACroppedSequence) {
    const Scenario scenario{.recipe = "had2", .sink = 0, .recent = 0, .window = 100, .n_sequences = 2, .step = 512};
    Cache cache(config_of(scenario)), straight(config_of(scenario));
    for (Cache* c : {&cache, &straight}) {
        ASSERT_TRUE(step(*c, run_of(0, 0, 192)));
    }
    const Bytes checkpoint = save(cache, 0, true);
    EXPECT_LT(checkpoint.size(), save(cache, 0).size());
    ASSERT_TRUE(step(cache, run_of(0, 5000, 400)));
    ASSERT_TRUE(step(cache, run_of(0, 6000, 1)));
    ASSERT_FALSE(cache.crop(0, 192));
    restore(cache, 0, checkpoint, true);
    EXPECT_EQ(cache.length(0), 192);
    EXPECT_EQ(save(cache, 0), save(straight, 0));

    EXPECT_TRUE(contains(message_of([&] { restore(cache, 1, checkpoint, true); }), "has only 0"));
    EXPECT_TRUE(contains(message_of([&] { restore(cache, 0, checkpoint); }), "sliding windows"));
}

TEST(Save, SaysWhatDiffers) {
    Cache cache(config_of({.window = 100}));
    ASSERT_TRUE(step(cache, run_of(0, 0, 150)));
    const Bytes state = save(cache, 0);
    const auto refusal = [&](const Scenario& scenario, auto change) {
        CacheConfig config = config_of(scenario);
        change(config);
        Cache other(config);
        return message_of([&] { restore(other, 0, state); });
    };
    const auto as_it_is = [](CacheConfig&) {};
    EXPECT_EQ(refusal({.window = 100, .n_sequences = 1, .tokens = 200}, as_it_is), "");
    EXPECT_TRUE(contains(refusal({.recipe = "bf16", .window = 100}, as_it_is), "recipe 'had2', here it is 'bf16'"));
    EXPECT_TRUE(contains(refusal({.sink = 4, .window = 100}, as_it_is), "--kv-sink '64', here it is '4'"));
    EXPECT_TRUE(contains(refusal({.recent = 1, .window = 100}, as_it_is), "--kv-recent '256'"));
    EXPECT_TRUE(contains(refusal({.window = 100, .prefill = PrefillRule::exact}, as_it_is), "--kv-prefill"));
    EXPECT_TRUE(contains(refusal({.window = 101}, as_it_is), "layer 1 '1 heads of 32 + 48, window 100'"));
    EXPECT_TRUE(contains(refusal({}, as_it_is), "number of layers '4', here it is '3'"));
    EXPECT_TRUE(
        contains(refusal({.window = 100}, [](CacheConfig& c) { c.model_hash = "feed"; }), "model '0123456789abcdef'"));
    EXPECT_TRUE(contains(refusal({.window = 100}, [](CacheConfig& c) { c.artefact_hash = "beef"; }), "artefact"));
    EXPECT_TRUE(contains(refusal({.window = 100, .tokens = 149}, as_it_is), "150 tokens, a sequence here at most 149"));
}

TEST(Save, DamageIsRefusedAndChangesNothing) {
    Cache cache(small());
    ASSERT_TRUE(step(cache, run_of(0, 0, 70)));
    ASSERT_TRUE(step(cache, run_of(1, 5000, 130)));
    const Bytes state = save(cache, 0), old = save(cache, 1);
    const CacheCounters counters = cache.counters();
    const auto unchanged = [&](size_t at) {
        ASSERT_EQ(cache.counters().blocks_in_use, counters.blocks_in_use) << at;
        ASSERT_EQ(cache.counters().exact_blocks_in_use, counters.exact_blocks_in_use) << at;
        ASSERT_EQ(cache.counters().window_blocks_in_use, counters.window_blocks_in_use) << at;
        ASSERT_TRUE(save(cache, 1) == old) << at;
    };
    for (size_t i = 0; i < state.size(); i++) {
        Bytes damaged = state;
        damaged[i] ^= std::byte(1 << i % 8);
        ASSERT_TRUE(refuses(cache, 1, damaged)) << i;
        if (i % 97 == 0) {
            unchanged(i);
        }
    }
    for (size_t size = 0; size < state.size(); size++) {
        ASSERT_TRUE(refuses(cache, 1, Bytes(state.begin(), state.begin() + size))) << size;
        if (size % 97 == 0) {
            unchanged(size);
        }
    }
    unchanged(state.size());
    restore(cache, 1, state);
    EXPECT_EQ(save(cache, 1), state);
}

// A flipped bit is no other setting: whatever text of the header it hits, it is called damage.
TEST(Save, DamageOfTheHeaderIsCalledDamage) {
    const Scenario scenario{.recipe = "planes:3", .sink = 4, .recent = 64, .window = 100};
    Cache here(config_of(scenario)), there(config_of(scenario));
    ASSERT_TRUE(step(here, run_of(0, 0, 150)));
    const Bytes state = save(here, 0);
    size_t header = 0;
    here.saved_ids([&](void* data, size_t size) { std::memcpy(data, state.data() + std::exchange(header, header + size), size); });
    header -= (1 + 150) * sizeof(int32_t) + kChecksum;  // the tokens, which follow it
    ASSERT_GT(header, 300u);
    for (size_t i = 0; i < header; i++) {
        for (const int bit : {0, 3, 7}) {
            Bytes damaged = state;
            damaged[i] ^= std::byte(1 << bit);
            EXPECT_TRUE(contains(message_of([&] { restore(there, 0, damaged); }), "damaged")) << i << ", bit " << bit;
        }
    }
}

// Checksums keep accidents out, not enemies. Whatever positions a state claims, nothing beyond the configuration is
// allocated or touched.
TEST(Save, HostilePositionsAreRefused) {
    Cache cache(small());
    ASSERT_TRUE(step(cache, run_of(0, 0, 70)));
    const Bytes state = save(cache, 0);
    const size_t at = extent_at(state, 3, 70);
    ASSERT_EQ(with_extent(state, at, {70, 64, 64, 0}), state);
    const int32_t values[] = {-1,  0,   1,   32,  63,  64,      65,        70,       100,
                              127, 128, 192, 256, 257, 1 << 20, INT32_MAX, INT32_MIN};
    for (const int32_t length : values) {
        for (const int32_t coded_end : values) {
            for (const int32_t exact_begin : values) {
                for (const int32_t window_begin : values) {
                    const int32_t extent[] = {length, coded_end, exact_begin, window_begin};
                    const Bytes hostile = with_extent(state, at, extent);
                    ASSERT_TRUE(hostile == state || refuses(cache, 1, hostile));
                }
            }
        }
    }
    EXPECT_EQ(cache.length(1), 0);
    EXPECT_EQ(save(cache, 0), state);
    EXPECT_TRUE(step(cache, run_of(1, 0, 256)));
}
