// The byte map of codes (drawings: docs/design/page-format.md). The four bytes of a dword are four neighbouring planes
// of a token in K and four neighbouring tokens of a plane in V, so pack and unpack move dwords.
#include <crumb/error.h>
#include <crumb/page.h>

#include <bit>
#include <cstring>

namespace crumb {

static_assert(std::endian::native == std::endian::little, "pages are little endian");

namespace {

constexpr uint32_t kBlockBytes = 64;
constexpr int kGroupPlanes = 64;
constexpr int kGroupBlocks = 16;  // 64 planes of 64 tokens

CodeAt in_block(int block, int quarter, int dword, int byte, int field) {
    return {kBlockBytes * uint32_t(block) + 16u * uint32_t(quarter) + 4u * uint32_t(dword) + uint32_t(byte),
            2u * uint32_t(field)};
}

constexpr int kLanes = 16;  // of a block

// The same byte and field of another lane than the first: quarters may be swapped.
CodeAt in_lane(CodeAt first, int lane) { return {first.byte ^ 4u * uint32_t(lane), first.shift}; }

uint32_t load(const uint8_t* p) {
    uint32_t word;
    std::memcpy(&word, p, sizeof word);
    return word;
}

void merge(std::byte* at, uint32_t word) {
    uint32_t old;
    std::memcpy(&old, at, sizeof old);
    old |= word;
    std::memcpy(at, &old, sizeof old);
}

uint32_t extract(const std::byte* codes, CodeAt at) {
    uint32_t word;
    std::memcpy(&word, codes + at.byte, sizeof word);
    return word >> at.shift & 0x03030303u;
}

}  // namespace

CodeAt key_code_at(int planes, int token, int plane) {
    const int groups = planes / kGroupPlanes, group = plane / kGroupPlanes;
    const int h = token / 32, s = token / 16 % 2, c = token / 4 % 4, e = token % 4;
    const bool tail = group == groups;
    const int n_q = tail ? 2 : 4;
    const int f = plane % kGroupPlanes / (4 * n_q), q = plane / 4 % n_q, b = plane % 4;
    const int block = tail ? kGroupBlocks * groups + (2 * h + s) * n_q + q : ((h * groups + group) * 2 + s) * n_q + q;
    return in_block(block, c ^ (q & 2), e, b, f);
}

CodeAt value_code_at(int planes, int token, int plane) {
    const int groups = planes / kGroupPlanes, group = plane / kGroupPlanes;
    const int c = plane / 4 % 4, e = plane % 4, b = token % 4;
    const int sixteen = plane % kGroupPlanes / 16;  // which 16 planes of the group
    if (group == groups) {
        const int u = token / 8, parity = token / 4 % 2;
        return in_block(kGroupBlocks * groups + u, c ^ (u & 2), e, b, 2 * parity + sixteen);
    }
    const int u = token / 4;
    return in_block((u / 4 * groups + group) * 4 + u % 4, c ^ (u & 2), e, b, sixteen);
}

void pack_keys(int planes, std::span<const uint8_t> codes, std::byte* page_codes) {
    CRUMB_ASSERT(planes % kPlaneStep == 0 && codes.size() == size_t(kPageTokens) * planes);
    std::memset(page_codes, 0, codes.size() / 4);
    for (int token = 0; token < kPageTokens; ++token) {
        for (int plane = 0; plane < planes; plane += 4) {
            const CodeAt at = key_code_at(planes, token, plane);
            merge(page_codes + at.byte, load(&codes[size_t(token) * planes + plane]) << at.shift);
        }
    }
}

void unpack_keys(int planes, const std::byte* page_codes, std::span<uint8_t> codes) {
    CRUMB_ASSERT(planes % kPlaneStep == 0 && codes.size() == size_t(kPageTokens) * planes);
    for (int plane = 0; plane < planes; plane += 4) {
        for (int token = 0; token < kPageTokens; token += kLanes) {
            const CodeAt first = key_code_at(planes, token, plane);
            for (int lane = 0; lane < kLanes; ++lane) {
                const uint32_t word = extract(page_codes, in_lane(first, lane));
                std::memcpy(&codes[size_t(token + lane) * planes + plane], &word, sizeof word);
            }
        }
    }
}

void pack_values(int planes, std::span<const uint8_t> codes, std::byte* page_codes) {
    CRUMB_ASSERT(planes % kPlaneStep == 0 && codes.size() == size_t(kPageTokens) * planes);
    std::memset(page_codes, 0, codes.size() / 4);
    for (int token = 0; token < kPageTokens; token += 4) {
        const uint8_t* row = &codes[size_t(token) * planes];
        for (int plane = 0; plane < planes; ++plane) {
            const uint32_t word =
                row[plane] | row[planes + plane] << 8 | row[2 * planes + plane] << 16 | row[3 * planes + plane] << 24;
            const CodeAt at = value_code_at(planes, token, plane);
            merge(page_codes + at.byte, word << at.shift);
        }
    }
}

void unpack_values(int planes, const std::byte* page_codes, std::span<uint8_t> codes) {
    CRUMB_ASSERT(planes % kPlaneStep == 0 && codes.size() == size_t(kPageTokens) * planes);
    for (int token = 0; token < kPageTokens; token += 4) {
        for (int plane = 0; plane < planes; plane += kLanes) {
            const CodeAt first = value_code_at(planes, token, plane);
            uint8_t* row = &codes[size_t(token) * planes + plane];
            for (int lane = 0; lane < kLanes; ++lane) {
                const uint32_t word = extract(page_codes, in_lane(first, lane));
                for (int b = 0; b < 4; ++b) {
                    row[b * planes + lane] = uint8_t(word >> (8 * b));
                }
            }
        }
    }
}

}  // namespace crumb
