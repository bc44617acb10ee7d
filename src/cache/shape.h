// The pools that a configuration asks for. The constructor allocates exactly this and cache_bytes() adds it up, so the
// bytes that `inspect` prints are the bytes that the cache takes.
#pragma once

#include <crumb/cache.h>

#include "cache/pool.h"

namespace crumb {

struct CacheShape {
    PoolShape coded, exact, window;
};

// Throws Error for settings that contradict each other and head sizes without a page format.
CacheShape shape_of(const CacheConfig& config);

// Tokens of all sequences together for which so many coded blocks have room.
int64_t capacity_of(const CacheConfig& config, int64_t coded_blocks);

// Of SlidingForm::q8. Keys are not centred: artefacts have no means of sliding-window layers.
const Recipe& sliding_recipe();
// What encodes the tokens of a layer with codes.
const Recipe& recipe_of(const CacheConfig& config, const CacheLayer& layer);

}  // namespace crumb
