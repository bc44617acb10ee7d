// A side of a page by direction: the codes of its planes put together, and what they read as where parameters belong to
// groups (page.h, family C).
#pragma once

#include <crumb/recipe.h>

namespace crumb {

// K or V of a page.
struct PageSide {
    const SideTables& tables;
    int tokens;
    size_t codes, info;  // offsets in the page
    decltype(&pack_keys) pack;
    decltype(&unpack_keys) unpack;

    size_t dim() const { return size_t(tables.format.dim); }
};
PageSide key_side(const PageFormat& format, const SideTables& tables);
PageSide value_side(const PageFormat& format, const SideTables& tables);

// codes: [tokens][D]. The high digits of boosted directions are part of the info, not of these.
void write_codes(const PageSide& side, std::span<const uint8_t> codes, std::byte* page);
void read_codes(const PageSide& side, const std::byte* page, std::span<uint8_t> codes);

// y [tokens][D] of a format that is not planar.
void read_directions(const PageSide& side, const std::byte* page, std::span<float> y);

// Arrays in the info of a page.
template <class T>
T load_at(const std::byte* at, size_t index) {
    T value;
    __builtin_memcpy(&value, at + index * sizeof(T), sizeof(T));
    return value;
}
template <class T>
void store_at(std::byte* at, size_t index, T value) {
    __builtin_memcpy(at + index * sizeof(T), &value, sizeof(T));
}
inline float half_at(const std::byte* at, size_t index) { return to_float(load_at<fp16>(at, index)); }

}  // namespace crumb
