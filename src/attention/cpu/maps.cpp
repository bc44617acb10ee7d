// Maps as the kernels read them.
#include <crumb/attention.h>
#include <crumb/error.h>

#include <algorithm>

namespace crumb {

namespace {

constexpr int kPartPlanes = 64;  // that integer sums of a part are made of: a group of blocks

// Planes are digit-major, so the highest digits of groups ascend.
std::vector<int> query_parts(const SideTables& k) {
    const int planes = k.format.planes;
    if (k.digit.empty()) {
        return {planes};
    }
    std::vector<int> ends;
    for (int first = 0, highest = -1; first < planes; first += kPartPlanes) {
        const int end = std::min(first + kPartPlanes, planes);
        const int digit = std::min<int>(*std::max_element(k.digit.begin() + first, k.digit.begin() + end), kMostQueryParts - 1);
        if (digit > highest) {
            ends.push_back(end);
            highest = digit;
        }
        ends.back() = end;
    }
    return ends;
}

constexpr int kLongQueryDim = 256;

// With 8 bits heads of 256 channels whose keys keep their mean differ from decoded pages by several per cent of the divergence, in
// either direction (docs/design/attention-cpu.md).
bool wants_long_queries(const SideTables& k) {
    const bool has_mean = !k.mean.empty() || k.format.mean;
    return (k.format.dim >= kLongQueryDim && !has_mean) || std::ranges::any_of(k.digits, [](int n) { return n > kMostQueryParts; });
}

// Whether plane d dim + c is digit d of channel c, and what is left padding: no matrix is needed for that.
bool is_plain(const SideTables& tables) {
    const size_t dim = size_t(tables.format.dim), planes = size_t(tables.format.planes), used = planes / dim * dim;
    for (size_t p = 0; p < planes; p++) {
        const float digit = p < used ? float(1 << 2 * (p / dim)) : 0.0f;
        for (size_t c = 0; c < dim; c++) {
            if (tables.decode[p * dim + c] != (c == p % dim ? digit : 0.0f)) {
                return false;
            }
        }
    }
    return true;
}

size_t map_bytes(const SideFormat& k, const SideFormat& v) {
    return sizeof(bf16) * (size_t(k.dim) * k.planes + size_t(v.planes) * v.dim);
}

}  // namespace

size_t attention_map_bytes(const PageFormat& format) { return map_bytes(format.k, format.v); }

AttentionMaps attention_maps(std::span<const HeadTables> tables) {
    AttentionMaps maps;
    for (const HeadTables& head : tables) {
        const size_t dim = size_t(head.k.format.dim), planes = size_t(head.k.format.planes);
        AttentionMaps::Head packed;
        const bool plain_k = is_plain(head.k), plain_v = is_plain(head.v);
        packed.k.resize(plain_k ? 0 : dim * planes);
        for (size_t p = 0; p < planes && !plain_k; p++) {
            for (size_t c = 0; c < dim; c++) {
                packed.k[c * planes + p] = to_bf16(head.k.decode[p * dim + c]);
            }
        }
        if (!plain_v) {
            std::transform(head.v.decode.begin(), head.v.decode.end(), std::back_inserter(packed.v), to_bf16);
        }
        CRUMB_ASSERT(plain_k || plain_v || (packed.k.size() + packed.v.size()) * sizeof(bf16) == map_bytes(head.k.format, head.v.format));
        packed.parts = query_parts(head.k);
        maps.heads.push_back(std::move(packed));
        if (wants_long_queries(head.k)) {
            maps.query_bits = 15;
        }
    }
    return maps;
}

}  // namespace crumb
