// The byte map pinned by numbers worked out by hand, and everything else that fixes a byte of a page.
#include <crumb/error.h>
#include <crumb/page.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

using namespace crumb;

namespace {

struct Pinned {
    int planes, token, plane;
    uint32_t byte, shift;
};

// Token = 32 h + 16 s + 4 c + e, plane = 64 L + 16 f + 4 q + b; in the tail 64 L + 8 f + 4 q + b.
constexpr Pinned kKeys[] = {
    {32, 0, 0, 0, 0},        {32, 0, 8, 0, 2},  // f 1
    {32, 0, 4, 64, 0},                          // q 1
    {32, 50, 29, 457, 6},                       // h 1 s 1 c 0 e 2, f 3 q 1 b 1: block 7, dword 2
    {32, 63, 31, 511, 6},                       // block 7, dword 15
    {64, 20, 45, 497, 4},                       // s 1 c 1, f 2 q 3 b 1: block 7, dword 4 (1 ^ 2)
    {64, 63, 63, 991, 6},                       // block 15, dword 4 (3 ^ 2) + 3
    {96, 9, 10, 134, 0},                        // c 2 e 1, q 2 b 2: block 2, dword 4 (2 ^ 2) + 1
    {96, 9, 70, 1126, 0},                       // the tail: q 1 b 2: block 16 + 1, dword 9
    {96, 63, 95, 1535, 6},                      // block 16 + 7, dword 15
    {128, 37, 91, 1719, 2},                     // h 1 c 1 e 1, L 1 f 1 q 2 b 3: block 26, dword 4 (1 ^ 2) + 1
    {128, 63, 127, 2015, 6},                    // block 31, dword 7
    {256, 33, 200, 3748, 0},                    // h 1 e 1, L 3 q 2: block 58, dword 4 (0 ^ 2) + 1
};

// Token = 4 u + b, plane = 64 j + 16 f + 4 c + e; in the tail token = 8 u + 4 parity + b, field = 2 parity + f.
constexpr Pinned kValues[] = {
    {32, 0, 0, 0, 0},        {32, 0, 16, 0, 2},  // f 1
    {32, 4, 0, 0, 4},                            // parity 1
    {32, 50, 29, 406, 2},                        // u 6 parity 0 b 2, f 1 c 3 e 1: block 6, dword 4 (3 ^ 2) + 1
    {32, 54, 29, 406, 6},                        // the same with parity 1
    {64, 26, 45, 406, 4},                        // u 6 b 2, f 2 c 3 e 1: block 6, dword 4 (3 ^ 2) + 1
    {64, 63, 63, 991, 6},                        // u 15: block 15, dword 7
    {96, 9, 10, 137, 0},                         // u 2 b 1, c 2 e 2: block 2, dword 4 (2 ^ 2) + 2
    {96, 9, 70, 1113, 0},                        // the tail: u 1 b 1, c 1 e 2: block 16 + 1, dword 6
    {96, 13, 90, 1129, 6},                       // u 1 parity 1 b 1, f 1 c 2 e 2: block 17, dword 10
    {128, 37, 91, 1389, 2},                      // u 9 b 1, j 1 f 1 c 2 e 3: block 21, dword 11
    {128, 63, 127, 2015, 6},                     // block 31, dword 7
    {256, 33, 200, 2849, 0},                     // u 8 b 1, j 3 c 2: block 44, dword 8
};

void expect_bijection(int planes, CodeAt (*map)(int, int, int)) {
    std::vector<bool> seen(64 * size_t(planes));
    for (int token = 0; token < kPageTokens; ++token) {
        for (int plane = 0; plane < planes; ++plane) {
            const CodeAt at = map(planes, token, plane);
            ASSERT_EQ(at.shift % 2, 0u);
            ASSERT_LT(at.shift, 8u);
            const size_t place = at.byte * 4 + at.shift / 2;
            ASSERT_LT(place, seen.size());
            ASSERT_FALSE(seen[place]) << planes << " planes: token " << token << " plane " << plane;
            seen[place] = true;
        }
    }
}

std::vector<uint8_t> random_codes(int planes) {
    std::mt19937 random(planes);
    std::vector<uint8_t> codes(size_t(kPageTokens) * planes);
    for (uint8_t& code : codes) {
        code = random() % 4;
    }
    return codes;
}

PageFormat coded(int dim, int planes, SideInfo info, bool mean) {
    const SideFormat side = {.dim = dim, .planes = planes, .info = info, .mean = mean};
    return {.k = side, .v = side};
}

std::string error_of(const PageFormat& format) {
    try {
        check(format);
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

}  // namespace

TEST(PageMap, PinnedKeys) {
    for (const Pinned& p : kKeys) {
        const CodeAt at = key_code_at(p.planes, p.token, p.plane);
        EXPECT_EQ(at, (CodeAt{p.byte, p.shift})) << p.planes << " planes: token " << p.token << " plane " << p.plane
                                                 << " at " << at.byte << ", " << at.shift;
    }
}

TEST(PageMap, PinnedValues) {
    for (const Pinned& p : kValues) {
        const CodeAt at = value_code_at(p.planes, p.token, p.plane);
        EXPECT_EQ(at, (CodeAt{p.byte, p.shift})) << p.planes << " planes: token " << p.token << " plane " << p.plane
                                                 << " at " << at.byte << ", " << at.shift;
    }
}

TEST(PageMap, EveryPlaceOnce) {
    for (int planes = kPlaneStep; planes <= 1024; planes += kPlaneStep) {
        expect_bijection(planes, key_code_at);
        expect_bijection(planes, value_code_at);
    }
}

TEST(PageMap, PackPutsCodesWhereTheMapSays) {
    for (int planes = kPlaneStep; planes <= 1024; planes += kPlaneStep) {
        const std::vector<uint8_t> codes = random_codes(planes);
        std::vector<std::byte> keys(size_t(planes) * 16, std::byte{0xff}), values = keys;
        pack_keys(planes, codes, keys.data());
        pack_values(planes, codes, values.data());
        for (int token = 0; token < kPageTokens; ++token) {
            for (int plane = 0; plane < planes; ++plane) {
                const int code = codes[size_t(token) * planes + plane];
                const CodeAt k = key_code_at(planes, token, plane), v = value_code_at(planes, token, plane);
                ASSERT_EQ(int(keys[k.byte]) >> k.shift & 3, code);
                ASSERT_EQ(int(values[v.byte]) >> v.shift & 3, code);
            }
        }
        std::vector<uint8_t> back(codes.size());
        unpack_keys(planes, keys.data(), back);
        ASSERT_EQ(codes, back);
        unpack_values(planes, values.data(), back);
        ASSERT_EQ(codes, back);
    }
}

// One vector load is one operand of a dot product: the four bytes of a dword are four neighbours.
TEST(PageMap, DwordsAreFourNeighbours) {
    for (int planes : {32, 64, 96, 128}) {
        for (int token = 0; token < kPageTokens; ++token) {
            for (int plane = 0; plane < planes; ++plane) {
                const CodeAt k = key_code_at(planes, token, plane), k0 = key_code_at(planes, token, plane / 4 * 4);
                ASSERT_EQ(k, (CodeAt{k0.byte + plane % 4, k0.shift}));
                const CodeAt v = value_code_at(planes, token, plane), v0 = value_code_at(planes, token / 4 * 4, plane);
                ASSERT_EQ(v, (CodeAt{v0.byte + token % 4, v0.shift}));
            }
        }
    }
}

TEST(PageFormat, RecordsAsInTheHeader) {
    const PageFormat plain = coded(128, 128, SideInfo::scale_zero, false);
    EXPECT_EQ(plain.value_codes(), 2048u);
    EXPECT_EQ(plain.key_info(), 4096u);
    EXPECT_EQ(plain.value_info(), 4352u);
    EXPECT_EQ(plain.bytes(), 4608u);
    EXPECT_DOUBLE_EQ(plain.bits_per_element(), 2.25);

    const PageFormat gains = coded(128, 128, SideInfo::gain8, false);
    EXPECT_EQ(gains.bytes(), 4224u);
    EXPECT_DOUBLE_EQ(gains.bits_per_element(), 2.0625);

    const PageFormat means = coded(128, 128, SideInfo::gain8, true);
    EXPECT_EQ(means.key_mean(), 4224u);
    EXPECT_EQ(means.value_mean(), 4352u);
    EXPECT_EQ(means.bytes(), 4480u);
    EXPECT_DOUBLE_EQ(means.bits_per_element(), 2.1875);

    EXPECT_EQ(coded(64, 96, SideInfo::gain16, false).bytes(), 2u * (16 * 96 + 128));
}

TEST(PageFormat, SidesMayDiffer) {
    const PageFormat format = {.k = {.dim = 192, .planes = 384, .info = SideInfo::gain8, .mean = true},
                               .v = {.dim = 128, .planes = 64, .info = SideInfo::scale_zero}};
    check(format);
    EXPECT_EQ(format.value_codes(), 6144u);
    EXPECT_EQ(format.key_info(), 7168u);
    EXPECT_EQ(format.value_info(), 7232u);
    EXPECT_EQ(format.key_mean(), 7488u);
    EXPECT_EQ(format.bytes(), 7680u);
}

// Family C, by hand. K: 128 tokens, 64 channels in groups of 128 tokens, a gain a token, 16 channels with two more bits,
// 3 exact tokens. V: groups of 32 channels and a gain a channel.
TEST(PageFormat, RecordsOfFamilyC) {
    const SideFormat k = {.dim = 64,
                          .planes = 64,
                          .info = SideInfo::channels,
                          .group = 128,
                          .token_gain = true,
                          .boosted = 16,
                          .outliers = 3};
    const SideFormat v = {
        .dim = 64, .planes = 64, .info = SideInfo::scale_zero, .group = 32, .channel_gain = true, .outliers = 3};
    const PageFormat format = {.k = k, .v = v, .tokens = 128};
    check(format);
    EXPECT_FALSE(format.planar());

    const InfoLayout key = info_layout(k, 128);
    EXPECT_EQ(key.scale, 0u);                 // FP16 [1][64]
    EXPECT_EQ(key.zero, 128u);                // the same
    EXPECT_EQ(key.token_gain, 256u);          // FP16 [128]
    EXPECT_EQ(key.channel_gain, 512u);        // none
    EXPECT_EQ(key.outlier_rows, 512u);        // FP16 [3][64]
    EXPECT_EQ(key.outlier_tokens, 896u);      // uint16 [3]
    EXPECT_EQ(key.boosted_codes, 902u);       // [16][32]
    EXPECT_EQ(key.boosted, 1414u);            // uint8 [16]
    EXPECT_EQ(key.bytes, 1430u);

    const InfoLayout value = info_layout(v, 128);
    EXPECT_EQ(value.zero, 512u);              // FP16 [2 groups][128]
    EXPECT_EQ(value.token_gain, 1024u);       // none
    EXPECT_EQ(value.channel_gain, 1024u);     // FP16 [64]
    EXPECT_EQ(value.outlier_rows, 1152u);
    EXPECT_EQ(value.outlier_tokens, 1536u);
    EXPECT_EQ(value.bytes, 1542u);

    EXPECT_EQ(format.value_codes(), 2048u);   // two areas of 64 tokens
    EXPECT_EQ(format.key_info(), 4096u);
    EXPECT_EQ(format.value_info(), 4096u + 1430u);
    EXPECT_EQ(format.bytes(), 4096u + 1430u + 1542u);
    EXPECT_DOUBLE_EQ(format.bits_per_element(), 8.0 * 7068 / (128 * 128));
}

TEST(PageFormat, PartsThatDoNotGoTogether) {
    const SideFormat channels = {.dim = 64, .planes = 64, .info = SideInfo::channels, .group = 32};
    const SideFormat token = {.dim = 64, .planes = 64, .info = SideInfo::scale_zero};
    const auto error = [](SideFormat k, SideFormat v, int tokens, auto change) {
        PageFormat format = {.k = k, .v = v, .tokens = tokens};
        change(format);
        return error_of(format);
    };
    const auto nothing = [](PageFormat&) {};
    EXPECT_EQ(error(channels, token, 64, nothing), "");
    EXPECT_EQ(error(channels, token, 128, nothing), "");
    EXPECT_NE(error(token, token, 128, nothing).find("128"), std::string::npos);
    EXPECT_NE(error(channels, token, 192, nothing).find("192"), std::string::npos);
    EXPECT_NE(error(channels, token, 64, [](PageFormat& f) { f.k.group = 128; }).find("groups of 128"), std::string::npos);
    EXPECT_NE(error(channels, token, 64, [](PageFormat& f) { f.k.group = 0; }), "");
    EXPECT_NE(error(channels, token, 64, [](PageFormat& f) { f.v.mean = true; }).find("page means"), std::string::npos);
    EXPECT_NE(error(channels, token, 64, [](PageFormat& f) { f.v.info = SideInfo::gain8; }), "");
    EXPECT_NE(error(channels, token, 64, [](PageFormat& f) { f.v.lookup = true; }).find("levels"), std::string::npos);
    EXPECT_NE(error(channels, token, 64, [](PageFormat& f) { f.v.token_gain = true; }), "");
    EXPECT_NE(error(channels, token, 64, [](PageFormat& f) { f.k.channel_gain = true; }), "");
    EXPECT_NE(error(channels, token, 64, [](PageFormat& f) { f.v.boosted = 8; }).find("8 of 64"), std::string::npos);
    EXPECT_NE(error(channels, token, 64, [](PageFormat& f) { f.k.boosted = 65; }), "");
    EXPECT_NE(error(channels, token, 64, [](PageFormat& f) { f.k.outliers = 3; }).find("same tokens"), std::string::npos);
    EXPECT_NE(error(channels, token, 64, [](PageFormat& f) { f.k.outliers = f.v.outliers = 65; }), "");
    EXPECT_NE(error(bf16_format(64, 64).k, bf16_format(64, 64).v, 64, [](PageFormat& f) { f.k.outliers = 1; }), "");
}

TEST(PageFormat, Bf16) {
    const PageFormat format = bf16_format(80, 64);
    check(format);
    EXPECT_FALSE(format.coded());
    EXPECT_EQ(format.value_codes(), 64u * 80 * 2);
    EXPECT_EQ(format.bytes(), 64u * (80 + 64) * 2);
    EXPECT_DOUBLE_EQ(format.bits_per_element(), 16.0);
}

TEST(PageFormat, Bf16RowsKeysByChannelValuesByToken) {
    const PageFormat format = bf16_format(80, 64);
    std::vector<std::byte> page(format.bytes());
    for (int t = 0; t < kPageTokens; ++t) {
        std::vector<bf16> k(80), v(64);
        for (int i = 0; i < 80; ++i) {
            k[i].bits = uint16_t(256 * t + i);
        }
        for (int i = 0; i < 64; ++i) {
            v[i].bits = uint16_t(256 * t + 128 + i);
        }
        set_key(format, page.data(), t, k);
        set_value(format, page.data(), t, v);
    }
    for (int t = 0; t < kPageTokens; ++t) {
        for (int i = 0; i < 80; ++i) {
            ASSERT_EQ(key_at(format, page.data(), t, i).bits, 256 * t + i);
        }
        for (int i = 0; i < 64; ++i) {
            ASSERT_EQ(value_at(format, page.data(), t, i).bits, 256 * t + 128 + i);
        }
    }
    const auto* words = reinterpret_cast<const uint16_t*>(page.data());
    EXPECT_EQ(words[3 * 64 + 5], 256 * 5 + 3);                  // K [channel 3][token 5]
    EXPECT_EQ(words[80 * 64 + 5 * 64 + 3], 256 * 5 + 128 + 3);  // V [token 5][channel 3]
}

TEST(PageFormat, PlanesArePaddedToSteps) {
    EXPECT_EQ(padded_planes(64, 1), 64);
    EXPECT_EQ(padded_planes(80, 1), 96);
    EXPECT_EQ(padded_planes(80, 2), 160);
    EXPECT_EQ(padded_planes(48, 3), 160);
    EXPECT_EQ(padded_planes(1, 1), 32);
}

TEST(PageFormat, ErrorsNameTheValues) {
    EXPECT_NE(error_of(coded(100, 128, SideInfo::gain8, false)).find("K heads of 100 channels"), std::string::npos);
    EXPECT_NE(error_of(coded(512, 512, SideInfo::gain8, false)).find("512"), std::string::npos);
    EXPECT_NE(error_of(coded(16, 32, SideInfo::gain8, false)).find("32 to 256"), std::string::npos);
    EXPECT_NE(error_of(coded(128, 48, SideInfo::gain8, false)).find("48 planes"), std::string::npos);
    EXPECT_NE(error_of(coded(64, 288, SideInfo::gain8, false)).find("up to 256"), std::string::npos);
    EXPECT_NE(error_of(coded(64, -32, SideInfo::gain8, false)), "");
    EXPECT_NE(error_of(coded(64, 64, SideInfo::none, false)), "");
    EXPECT_NE(error_of(coded(64, 0, SideInfo::gain8, false)), "");
    EXPECT_NE(error_of(coded(64, 0, SideInfo::none, true)), "");
    const PageFormat mixed = {.k = {.dim = 64, .planes = 64, .info = SideInfo::gain8}, .v = {.dim = 64}};
    EXPECT_NE(error_of(mixed).find("both sides"), std::string::npos);
    for (int dim = 32; dim <= 256; dim += 16) {
        EXPECT_EQ(error_of(bf16_format(dim, dim)), "");
        EXPECT_EQ(error_of(coded(dim, padded_planes(dim, 1), SideInfo::scale_zero, true)), "");
    }
}

TEST(Gain8, ReadsAsAPowerOfTwo) {
    for (int code = 0; code < 256; ++code) {
        EXPECT_EQ(gain8_value(uint8_t(code)), float(std::exp2((code - 128) / 16.0))) << code;
    }
}

TEST(Gain8, NearestInTheLogarithm) {
    for (int code = 0; code < 256; ++code) {
        EXPECT_EQ(to_gain8(gain8_value(uint8_t(code))).code, code);
    }
    for (int code = 0; code < 255; ++code) {
        const double border = std::exp2((code - 127.5) / 16.0);
        EXPECT_EQ(to_gain8(float(border * 0.999999)).code, code);
        EXPECT_EQ(to_gain8(float(border * 1.000001)).code, code + 1);
    }
}

TEST(Gain8, SaturatesAndSaysSo) {
    for (float gain : {0.0f, -1.0f, 1e-42f, 1e-30f, 0.0038f, NAN}) {
        EXPECT_EQ(to_gain8(gain).code, 0) << gain;
        EXPECT_TRUE(to_gain8(gain).saturated) << gain;
    }
    for (float gain : {251.0f, 1e30f, INFINITY}) {
        EXPECT_EQ(to_gain8(gain).code, 255) << gain;
        EXPECT_TRUE(to_gain8(gain).saturated) << gain;
    }
    for (float gain : {gain8_value(0), 1.0f, gain8_value(255)}) {
        EXPECT_FALSE(to_gain8(gain).saturated) << gain;
    }
}
