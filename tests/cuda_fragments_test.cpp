// The operands that lanes load from a page, against the map of page.h and the layout of mma.m16n8k32; bank conflicts.
#include <crumb/page.h>
#include <crumb/recipe.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "attention/cuda/decode_format.h"
#include "cuda/emulator.h"

namespace crumb::cuda {

namespace {

using Code = std::pair<int, int>;  // token, plane

// Which code lies at (byte, shift) of the codes of a side.
std::map<std::pair<uint32_t, uint32_t>, Code> inverse(int planes, CodeAt (*at)(int, int, int)) {
    std::map<std::pair<uint32_t, uint32_t>, Code> codes;
    for (int t = 0; t < kPageTokens; t++) {
        for (int p = 0; p < planes; p++) {
            const CodeAt place = at(planes, t, p);
            codes[{place.byte, place.shift}] = {t, p};
        }
    }
    return codes;
}

TEST(Offsets, AreThoseOfThePage) {
    for (const SideInfo k : {SideInfo::scale_zero, SideInfo::gain16, SideInfo::gain8}) {
        for (const SideInfo v : {SideInfo::scale_zero, SideInfo::gain16, SideInfo::gain8}) {
            for (const bool mean : {false, true}) {
                const PageFormat f = {.k = {128, 96, k, mean}, .v = {64, 160, v, !mean}};
                const PageOffsets at = page_offsets(f);
                EXPECT_EQ(at.value_codes, f.value_codes());
                EXPECT_EQ(at.key_info, f.key_info());
                EXPECT_EQ(at.value_info, f.value_info());
                EXPECT_EQ(at.key_mean, f.key_mean());
                EXPECT_EQ(at.value_mean, f.value_mean());
                EXPECT_EQ(at.bytes, f.bytes());
            }
        }
    }
}

TEST(Offsets, OfGroupsToo) {
    for (const char* name : {"omni", "kivi32", "kivi128"}) {
        for (const int dim : {64, 128, 256}) {
            const PageFormat f = page_format(find_recipe(name), dim, dim);
            const PageOffsets at = page_offsets(f);
            EXPECT_EQ(at.value_codes, f.value_codes());
            EXPECT_EQ(at.key_info, f.key_info());
            EXPECT_EQ(at.value_info, f.value_info());
            EXPECT_EQ(at.bytes, f.bytes());
        }
    }
}

class Fragments : public testing::TestWithParam<int> {};

TEST_P(Fragments, KeysAreRowsOfTokens) {
    const int planes = GetParam();
    const auto codes = inverse(planes, key_code_at);
    std::set<Code> seen;
    const auto expect = [&](uint32_t byte, int f, int token, int plane) {
        const auto found = codes.find({byte, 2u * uint32_t(f)});
        ASSERT_NE(found, codes.end());
        EXPECT_EQ(found->second, Code(token, plane)) << planes << " planes";
        EXPECT_TRUE(seen.insert({token, plane}).second);
    };
    for (int half = 0; half < 2; half++) {
        for (int r = 0; r < 8; r++) {
            for (int q = 0; q < 4; q++) {
                for (int e = 0; e < 4; e++) {
                    const int token = 32 * half + 4 * r + e;
                    for (int b = 0; b < 4; b++) {
                        for (int g = 0; g < full_groups(planes); g++) {
                            for (int f = 0; f < 4; f++) {
                                expect(key_load(planes, half, g, r, q) + 4 * e + b, f, token, 64 * g + 16 * f + 4 * q + b);
                            }
                        }
                        if (!has_tail(planes)) continue;
                        const uint32_t at = key_tail_load(planes, half, r, q) + 4 * e + b;
                        const int base = 64 * full_groups(planes) + 4 * q + b;
                        expect(at, q >> 1, token, base);
                        expect(at, 2 + (q >> 1), token, base + 16);
                    }
                }
            }
        }
    }
    EXPECT_EQ(seen.size(), codes.size());
}

TEST_P(Fragments, ValuesAreRowsOfPlanes) {
    const int planes = GetParam();
    const auto codes = inverse(planes, value_code_at);
    std::set<Code> seen;
    const auto expect = [&](uint32_t byte, int f, int token, int plane) {
        const auto found = codes.find({byte, 2u * uint32_t(f)});
        ASSERT_NE(found, codes.end());
        EXPECT_EQ(found->second, Code(token, plane)) << planes << " planes";
        EXPECT_TRUE(seen.insert({token, plane}).second);
    };
    for (int half = 0; half < 2; half++) {
        for (int r = 0; r < 8; r++) {
            for (int q = 0; q < 4; q++) {
                for (int slot = 0; slot < 2; slot++) {
                    for (int i = 0; i < 8; i++) {
                        const int token = 32 * half + 4 * value_quad(q, slot) + i % 4;
                        for (int f = 0; f < 4; f++) {
                            for (int g = 0; g < full_groups(planes); g++) {
                                expect(value_load(planes, half, g, slot, r, q) + i, f, token,
                                       64 * g + 16 * f + 2 * r + i / 4);
                            }
                        }
                        if (!has_tail(planes)) continue;
                        for (int sixteen = 0; sixteen < 2; sixteen++) {
                            const int second = value_quad(q, slot) % 2;
                            expect(value_tail_load(planes, half, r, q) + i, 2 * second + sixteen, token,
                                   64 * full_groups(planes) + 16 * sixteen + 2 * r + i / 4);
                        }
                    }
                }
            }
        }
    }
    EXPECT_EQ(seen.size(), codes.size());
}

// Largest number of different words of one bank that lanes of one phase ask for: a phase of a load of n bytes is the
// 128 / n lanes whose data fill the 32 banks once.
template <class F>
int conflicts(int bytes, F address) {
    int worst = 0;
    const int lanes = 128 / bytes;
    for (int first = 0; first < 32; first += lanes) {
        std::map<uint32_t, std::set<uint32_t>> banks;
        for (int l = first; l < first + lanes; l++) {
            for (int w = 0; w < bytes / 4; w++) {
                const uint32_t word = address(l / 4, l % 4) / 4 + w;
                banks[word % 32].insert(word);
            }
        }
        for (const auto& bank : banks) worst = std::max(worst, int(bank.second.size()));
    }
    return worst;
}

TEST_P(Fragments, LoadsAreFreeOfBankConflicts) {
    const int planes = GetParam();
    for (int half = 0; half < 2; half++) {
        for (int g = 0; g < full_groups(planes); g++) {
            EXPECT_EQ(conflicts(16, [&](int r, int q) { return key_load(planes, half, g, r, q); }), 1);
            for (int slot = 0; slot < 2; slot++) {
                EXPECT_EQ(conflicts(8, [&](int r, int q) { return value_load(planes, half, g, slot, r, q); }), 1);
            }
        }
        if (!has_tail(planes)) continue;
        EXPECT_EQ(conflicts(16, [&](int r, int q) { return key_tail_load(planes, half, r, q); }), 1);
        EXPECT_EQ(conflicts(8, [&](int r, int q) { return value_tail_load(planes, half, r, q); }), 1);
    }
}

INSTANTIATE_TEST_SUITE_P(Planes, Fragments, testing::Values(32, 64, 96, 128, 160, 192, 256, 320, 512, 1024));

// A whole product of weights and a page of V: the operand that comes out of the K side fits the one that is loaded.
TEST_P(Fragments, WeightsMeetTheirTokens) {
    const int planes = std::min(GetParam(), 256);
    std::mt19937 random(5);
    std::vector<uint8_t> codes(size_t(kPageTokens) * planes);
    for (uint8_t& c : codes) c = random() & 3;
    std::vector<std::byte> page(16 * planes);
    pack_values(planes, codes, page.data());
    std::vector<uint32_t> weight(kPageTokens * 4);  // [token][query column]
    for (uint32_t& w : weight) w = random() & 0x7fff;
    std::vector<long> want(planes * 4), got(planes * 4);
    for (int p = 0; p < planes; p++) {
        for (int c = 0; c < 4; c++) {
            for (int t = 0; t < kPageTokens; t++) want[p * 4 + c] += long(weight[t * 4 + c]) * codes[t * planes + p];
        }
    }
    simt::emulate({}, [&](std::byte*) {
        const int r = simt::lane() / 4, q = simt::lane() % 4, groups = full_groups(planes);
        const auto words = [&](uint32_t at) { return *reinterpret_cast<const simt::Words2*>(page.data() + at); };
        std::vector<std::array<int, 4>> sums(planes / 16);
        for (int half = 0; half < 2; half++) {
            u32 x[4];
            for (int e = 0; e < 4; e++) x[e] = weight[(32 * half + 4 * r + e) * 4 + q] << 8 | (random() & 0xff);
            const Pair b = weight_operand(x, q);
            const auto add = [&](int tile, u32 a0, u32 a1, u32 a2, u32 a3) {
                int d[4] = {sums[tile][0], sums[tile][1], sums[tile][2], sums[tile][3]};
                simt::mma_u8u8(d, a0, a1, a2, a3, b.first, b.second);
                std::copy(d, d + 4, sums[tile].begin());
            };
            for (int g = 0; g < groups; g++) {
                const simt::Words2 w = words(value_load(planes, half, g, 0, r, q));
                const simt::Words2 v = words(value_load(planes, half, g, 1, r, q));
                for (int f = 0; f < 4; f++) {
                    add(4 * g + f, fields_to(w.x, f), fields_to(w.y, f), fields_to(v.x, f), fields_to(v.y, f));
                }
            }
            if (!has_tail(planes)) continue;
            const simt::Words2 w = words(value_tail_load(planes, half, r, q));
            for (int s = 0; s < 2; s++) {
                const Pair x0 = value_tail_fields(w.x, s, q), x1 = value_tail_fields(w.y, s, q);
                add(4 * groups + s, x0.first, x1.first, x0.second, x1.second);
            }
        }
        for (int tile = 0; tile < planes / 16; tile++) {
            const int f = tile % 4;
            const bool nested = tile < 4 * groups && f > 0;
            for (int i = 0; i < 2; i++) {
                long sum = 256l * sums[tile][2 * i] + sums[tile][2 * i + 1];
                if (nested) sum -= 256l * sums[tile - 1][2 * i] + sums[tile - 1][2 * i + 1];
                got[(16 * tile + 2 * r + i) * 4 + q] = sum >> (2 * f);
            }
        }
    });
    EXPECT_EQ(got, want);
}

}  // namespace

}  // namespace crumb::cuda
