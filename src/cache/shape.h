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

inline bool is_coded(const CacheLayer& layer) { return layer.stores && layer.window == 0; }
inline bool is_window(const CacheLayer& layer) { return layer.stores && layer.window > 0; }

}  // namespace crumb
