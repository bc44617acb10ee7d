// A target of the fuzzers: saved states of sequences. Bytes that begin with 'S' are a state as it is; other bytes behind
// the first are a state whose checksums are put right on the way in, because no mutation would ever get past one.
#pragma once

#include <crumb/cache.h>
#include <crumb/error.h>
#include <xxhash.h>

#include <cstring>
#include <span>
#include <vector>

namespace crumb::fuzz {

using Bytes = std::vector<std::byte>;

// A coded layer and one with a window, small heads, two sequences of four blocks.
inline CacheConfig state_config() {
    CacheConfig config;
    config.recipe = find_recipe("had2");
    config.layers = {{.n_head_kv = 1, .dim_k = 32, .dim_v = 32}, {.n_head_kv = 1, .dim_k = 32, .dim_v = 32, .window = 16}};
    set_formats(config, nullptr);
    set_tables(config, nullptr);
    config.sink = 64;
    config.recent = 64;
    config.n_sequences = 2;
    config.tokens_per_sequence = 320;
    config.tokens_total = 640;
    return config;
}

inline Bytes save(const Cache& cache, uint32_t sequence) {
    Bytes state;
    cache.save(sequence, [&](const void* data, size_t size) {
        state.insert(state.end(), static_cast<const std::byte*>(data), static_cast<const std::byte*>(data) + size);
    });
    return state;
}

// Appends `n` tokens whose K and V say which they are.
inline void grow(Cache& cache, uint32_t sequence, int n) {
    const int dim = cache.config().layers[0].dim_k;
    std::vector<Append> appends;
    std::vector<float> rows(size_t(n * dim));
    for (int i = 0; i < n; i++) {
        const int32_t id = cache.length(sequence) + i;
        appends.push_back({.sequence = sequence, .token = uint32_t(i), .id = id});
        for (int c = 0; c < dim; c++) {
            rows[size_t(i * dim + c)] = float(id * 7 % 5 - 2) * float(c % 3 - 1) + float(c) / 8.0f;
        }
    }
    CRUMB_ASSERT(cache.begin(appends));
    const RowSource source{rows.data(), size_t(dim), size_t(dim)};
    for (int layer = 0; layer < int(cache.config().layers.size()); layer++) {
        cache.store(layer, source, source, 0, 1);
    }
}

inline void restore(Cache& cache, uint32_t sequence, std::span<const std::byte> state, bool checksums_put_right) {
    size_t at = 0;
    Bytes given;
    cache.restore(sequence, [&](void* data, size_t size) {
        if (size > state.size() - at) {
            fail("the state is cut off");
        }
        std::memcpy(data, state.data() + at, size);
        if (checksums_put_right && at > 0 && size == sizeof(uint64_t)) {
            const uint64_t right = XXH3_64bits(given.data(), given.size());
            std::memcpy(data, &right, sizeof right);
        }
        at += size;
        given.insert(given.end(), static_cast<std::byte*>(data), static_cast<std::byte*>(data) + size);
    });
}

// Any bytes are a state or an Error. An Error changes nothing. A state can be saved again, restored as the same bytes,
// go on, and be dropped, and then nothing of it is held.
inline void state(std::span<const std::byte> bytes) {
    if (bytes.empty()) {
        return;
    }
    static Cache cache(state_config());
    static const Bytes before = [] {
        grow(cache, 0, 250);
        return save(cache, 0);
    }();
    restore(cache, 0, before, false);
    bool restored = true;
    try {
        restore(cache, 0, bytes.subspan(1), bytes[0] != std::byte('S'));
    } catch (const Error&) {
        restored = false;
    }
    const Bytes saved = save(cache, 0);
    CRUMB_ASSERT(restored || saved == before);
    restore(cache, 1, saved, false);
    CRUMB_ASSERT(save(cache, 1) == saved);
    if (cache.length(1) < cache.config().tokens_per_sequence) {
        grow(cache, 1, 1);
    }
    CRUMB_ASSERT(cache.crop(0, 0) && cache.crop(1, 0));
    CRUMB_ASSERT(cache.counters().bytes_in_use == 0);
}

}  // namespace crumb::fuzz
