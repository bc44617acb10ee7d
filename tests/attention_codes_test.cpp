// Dot products with codes, in place and unpacked, are exact: the instruction set that this file is compiled for against
// page.h's own account of where a code lies.
#include <crumb/page.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "attention/cpu/codes.h"

namespace crumb::cpu {
namespace {

struct Case {
    int planes;
    std::vector<std::byte> keys, values, digits;
    std::vector<uint8_t> key_codes, value_codes;  // [64][planes]
    std::vector<int8_t> q;                        // [kDotRows][planes], in the order of score()
    std::vector<int8_t> q_natural;
    std::vector<uint8_t> weights;  // [kDotRows][64]
    std::vector<float> units;

    explicit Case(int planes) : planes(planes) {
        std::mt19937 random(planes);
        const size_t n = size_t(kPageTokens) * planes;
        keys.resize(n / 4), values.resize(n / 4), digits.resize(n), key_codes.resize(n), value_codes.resize(n);
        for (std::byte& x : keys) x = std::byte(random());
        for (std::byte& x : values) x = std::byte(random());
        crumb::unpack_keys(planes, keys.data(), key_codes);
        crumb::unpack_values(planes, values.data(), value_codes);
        for (int r = 0; r < kDotRows; r++) {
            for (int p = 0; p < planes; p++) q_natural.push_back(r == 0 ? 127 : int8_t(int(random() % 255) - 127));
            for (int i = 0; i < planes; i++) {
                q.push_back(q_natural[size_t(r) * planes + key_order_plane(i / 4, planes) + i % 4]);
            }
            for (int t = 0; t < kPageTokens; t++) weights.push_back(r == 0 ? 127 : uint8_t(random() % 128));
            units.push_back(float(1 << r));
        }
    }

    template <class Codes>
    void check_keys(const Codes& codes, int rows) const {
        for (const std::vector<int>& ends : {std::vector{planes}, {64, planes}, {64, 256, planes}}) {
            if (ends.size() > 1 && ends[ends.size() - 2] >= planes) continue;
            check_keys(codes, rows, ends);
        }
    }

    template <class Codes>
    void check_keys(const Codes& codes, int rows, const std::vector<int>& ends) const {
        const size_t parts = ends.size();
        std::vector<int32_t> dots(size_t(kDotRows) * parts * kPageTokens, -1);
        score_rows(rows, codes, {q.data(), size_t(planes), int(parts), ends.data()}, dots.data());
        for (size_t i = 0; i < rows * parts * kPageTokens; i++) {
            const size_t r = i / kPageTokens / parts, part = i / kPageTokens % parts, t = i % kPageTokens;
            int32_t want = 0;
            for (int p = part > 0 ? ends[part - 1] : 0; p < ends[part]; p++)
                want += q_natural[r * planes + p] * key_codes[t * planes + p];
            ASSERT_EQ(dots[i], want) << planes << " planes, row " << r << ", part " << part << ", token " << t;
        }
    }

    template <class Codes>
    void check_values(const Codes& codes, int rows) const {
        std::vector<float> out(size_t(kDotRows) * planes, 1.0f);
        weigh_rows(rows, codes, WeightRows{weights.data(), units.data(), out.data(), size_t(planes)});
        for (int r = 0; r < rows; r++) {
            for (int p = 0; p < planes; p++) {
                int32_t want = 0;
                for (int t = 0; t < kPageTokens; t++)
                    want += weights[size_t(r) * kPageTokens + t] * value_codes[size_t(t) * planes + p];
                ASSERT_EQ(out[size_t(r) * planes + p], 1.0f + units[r] * float(want))
                    << planes << " planes, row " << r << ", plane " << p;
            }
        }
    }
};

TEST(AttentionCodes, DotProductsAreExact) {
    for (const int planes : {32, 64, 96, 128, 160, 256, 320, 1024}) {
        Case c(planes);
        const Packed keys{c.keys.data(), planes, 0}, values{c.values.data(), planes, 0};
        for (int rows = 1; rows <= kDotRows; rows++) {
            c.check_keys(keys, rows);
            c.check_values(values, rows);
        }
        const Unpacked unpacked_keys = unpack_keys(keys, c.digits.data());
        for (int rows = 1; rows <= kDotRows; rows++) c.check_keys(unpacked_keys, rows);
        const Unpacked unpacked_values = unpack_values(values, c.digits.data());
        for (int rows = 1; rows <= kDotRows; rows++) c.check_values(unpacked_values, rows);
    }
}

}  // namespace
}  // namespace crumb::cpu
