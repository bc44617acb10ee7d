#include "attention/cpu/unpack_map.h"

#include <crumb/error.h>
#include <crumb/page.h>

namespace crumb::cpu {

namespace {

struct Place {
    uint32_t block, lane, digit;
};

Place place(CodeAt at) { return {at.byte / kBlockBytes, at.byte % kBlockBytes / 4, (at.byte % 4 * 8 + at.shift) / 2}; }

// `locate(i)` says where neighbour i of the 16 lies that go to `to`.
template <class Locate>
void add(UnpackMap& map, uint32_t to, Locate locate) {
    const Place first = place(locate(0));
    CRUMB_ASSERT(first.lane == 0 || first.lane == 8);
    for (uint32_t i = 0; i < kBlockLanes; i++) {
        const Place p = place(locate(int(i)));
        CRUMB_ASSERT(p.block == first.block && p.digit == first.digit && p.lane == (i ^ first.lane));
    }
    CRUMB_ASSERT(to <= UINT16_MAX);
    map.at[first.block * kDigitsPerLane + first.digit] = uint16_t(to);
    map.swapped[first.block] = first.lane != 0;
}

UnpackMap sized(int planes) {
    const size_t blocks = size_t(planes) * kPageTokens / (kBlockLanes * kDigitsPerLane);
    return {std::vector<uint16_t>(blocks * kDigitsPerLane), std::vector<uint8_t>(blocks)};
}

}  // namespace

UnpackMap key_unpack_map(int planes) {
    UnpackMap map = sized(planes);
    for (int plane = 0; plane < planes; plane++) {
        for (int token = 0; token < kPageTokens; token += kBlockLanes) {
            add(map, plane * kPageTokens + token, [&](int i) { return key_code_at(planes, token + i, plane); });
        }
    }
    return map;
}

UnpackMap value_unpack_map(int planes) {
    UnpackMap map = sized(planes);
    for (int token = 0; token < kPageTokens; token++) {
        for (int plane = 0; plane < planes; plane += kBlockLanes) {
            add(map, token * planes + plane, [&](int i) { return value_code_at(planes, token, plane + i); });
        }
    }
    return map;
}

}  // namespace crumb::cpu
