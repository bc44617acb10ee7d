// Where the digits of a block of codes go. A block is 64 bytes, 16 lanes of 4 bytes with 4 fields each (page.h).
// Shifting all lanes down by 2 i brings up one digit of 16 neighbours: 16 tokens of a plane of K, 16 planes of a token
// of V. The map says which, so that unpacking is a load, a shift and a store whatever the byte map is, and page.h stays
// the only place that knows it.
#pragma once

#include <cstdint>
#include <vector>

namespace crumb::cpu {

inline constexpr int kBlockBytes = 64;
inline constexpr int kBlockLanes = 16;
inline constexpr int kDigitsPerLane = 16;

struct UnpackMap {
    std::vector<uint16_t> at;      // [block][i]: where digit i of lane 0 goes, in the unpacked K [P][64] or V [64][P]
    std::vector<uint8_t> swapped;  // [block]: lanes 8.. come first
};

UnpackMap key_unpack_map(int planes);
UnpackMap value_unpack_map(int planes);

}  // namespace crumb::cpu
