// The decode kernels' source, thread by thread on the emulator, against attention in double precision.
#include <gtest/gtest.h>

#include "cuda/decode_cases.h"
#include "cuda/emulated_machine.h"

namespace crumb::cuda {

namespace {

constexpr PageFormat format(int dim, int planes_k, int planes_v, SideInfo info, bool mean) {
    return {.k = {dim, planes_k, info, mean}, .v = {dim, planes_v, info, mean}};
}

constexpr PageFormat kScaleZero = format(64, 64, 64, SideInfo::scale_zero, false);
constexpr PageFormat kTails = format(64, 96, 32, SideInfo::gain8, true);
constexpr KernelFormat kAny = {{64, 128, SideInfo::gain8, true}, {64, 128, SideInfo::gain8, true}, true};
constexpr KernelFormat kAnyMore = {{64, 192, SideInfo::gain8, true}, {64, 192, SideInfo::gain8, true}, true};
constexpr KernelFormat kAnyWide = {{256, 256, SideInfo::gain8, true}, {256, 256, SideInfo::gain8, true}, true};
constexpr KernelFormat kAnyWideMore = {{256, 384, SideInfo::gain8, true}, {256, 384, SideInfo::gain8, true}, true};
constexpr KernelFormat kAnyWideMost = {{256, 512, SideInfo::gain8, true}, {256, 512, SideInfo::gain8, true}, true};
constexpr PageFormat kWide = format(128, 192, 128, SideInfo::gain16, false);

class CudaDecode : public testing::Test {
  protected:
    EmulatedMachine machine;
};

TEST_F(CudaDecode, ScaleAndZeroWithAllGroupSizes) {
    const Kernels kernels[] = {emulated_kernels<kScaleZero, 1>(), emulated_kernels<kScaleZero, 2>(),
                               emulated_kernels<kScaleZero, 3>()};
    Cases cases(machine, kernels);
    for (const int group : {1, 2, 4, 5, 8, 12, 16}) {
        cases.ends(2 * group, 2, {410, 65}, 1, 1.0f, true);
    }
    cases.ends(12, 2, {300, 66, 700}, 3, 1.0f, false);
    cases.ends(4, 1, {460, 8}, 8, 1.0f, false);
}

TEST_F(CudaDecode, OddPlanesByteGainsAndPageMeans) {
    const Kernels kernels[] = {emulated_kernels<kTails, 1>()};
    Cases cases(machine, kernels);
    cases.ends(4, 2, {410, 65, 1, 190}, 1, 1.0f, true);
    cases.ends(2, 2, {500}, 2, 8.0f, false);
    cases.step.blocks = 30;  // fewer segments than multiprocessors: the maps' other shape
    cases.ends(4, 2, {700}, 1, 1.0f, true);
    cases.step.blocks = 3;
    cases.same_bits({1000, 30}, {2});
    cases.bounds();
}

// One kernel, all counts of planes; page means on either side, on one or on none.
TEST_F(CudaDecode, AnyPlanes) {
    const Kernels compiled[] = {emulated_kernels<kAny, 1>(), emulated_kernels<kAny, 2>()};
    for (const int k : {32, 64, 96, 128}) {
        for (const int v : {32, 64, 96, 128}) {
            PageFormat f = format(64, k, v, SideInfo::gain8, true);
            f.k.mean = k != 96 || v == 96, f.v.mean = v % 64 == 0 && k != v;
            ASSERT_TRUE(compiled[0].compiled.takes(f));
            const Kernels kernels[] = {fitted(compiled[0], f), fitted(compiled[1], f)};
            Cases cases(machine, kernels);
            cases.ends(4, 2, {410, 65}, 1, 1.0f, true);
            if (k == 96) { cases.ends(12, 2, {300}, 1, 2.0f, true); }
            if (k + v == 160) {
                cases.step.blocks = 30;
                cases.ends(4, 2, {700}, 1, 1.0f, true);
            }
        }
    }
    const Kernels more = emulated_kernels<kAnyMore, 1>();
    for (const auto& [k, v] : {std::pair(192, 160), {160, 192}, {32, 64}}) {
        const Kernels kernels[] = {fitted(more, format(64, k, v, SideInfo::gain8, true))};
        Cases(machine, kernels).ends(4, 2, {410, 65}, 1, 1.0f, true);
    }
    EXPECT_FALSE(compiled[0].compiled.takes(format(64, 160, 32, SideInfo::gain8, true)));
    EXPECT_FALSE(compiled[0].compiled.takes(format(64, 64, 32, SideInfo::gain16, true)));
}

// Heads of 256 channels: counts on either side of the head size, odd ones, means on both sides, one or none; 1, 4 and 8 heads a KV head.
TEST_F(CudaDecode, AnyPlanesOfWideHeads) {
    const auto check = [&](std::span<const Kernels> compiled, int k, int v, bool mean_k, bool mean_v) {
        PageFormat f = format(256, k, v, SideInfo::gain8, true);
        f.k.mean = mean_k, f.v.mean = mean_v;
        ASSERT_TRUE(compiled[0].compiled.takes(f));
        std::vector<Kernels> kernels;
        for (const Kernels& one : compiled) { kernels.push_back(fitted(one, f)); }
        Cases cases(machine, kernels);
        cases.ends(4, 1, {410, 65, 3}, 1, 1.0f, true);
        cases.ends(1, 1, {300}, 1, 2.0f, true);
        cases.ends(8, 1, {190, 260}, 1, 1.0f, true);
    };
    const Kernels wide[] = {emulated_kernels<kAnyWide, 1>(), emulated_kernels<kAnyWide, 2>()};
    check(wide, 256, 256, true, true);
    check(wide, 96, 224, true, false);
    check(wide, 224, 32, false, true);
    const Kernels more[] = {emulated_kernels<kAnyWideMore, 1>(), emulated_kernels<kAnyWideMore, 2>()};
    check(more, 384, 160, false, false);
    check(more, 288, 384, true, true);
    check(more, 32, 352, false, true);
    const Kernels most[] = {emulated_kernels<kAnyWideMost, 1>()};
    check(most, 352, 416, true, false);
    check(most, 512, 480, true, true);
    check(most, 32, 512, false, true);
    EXPECT_FALSE(wide[0].compiled.takes(format(256, 288, 256, SideInfo::gain8, true)));
    EXPECT_FALSE(most[0].compiled.takes(format(256, 544, 256, SideInfo::gain8, true)));
    EXPECT_FALSE(more[0].compiled.takes(format(256, 256, 416, SideInfo::gain8, true)));
}

TEST_F(CudaDecode, MorePlanesOfKeysThanOfValues) {
    const Kernels kernels[] = {emulated_kernels<kWide, 1>()};
    Cases cases(machine, kernels);
    cases.ends(4, 1, {700, 257}, 1, 2.0f, true);
}

TEST_F(CudaDecode, BoundsOfRows) {
    const Kernels kernels[] = {emulated_kernels<kScaleZero, 1>(), emulated_kernels<kScaleZero, 3>()};
    Cases cases(machine, kernels);
    cases.bounds();
    cases.softcap_and_sinks();
}

TEST_F(CudaDecode, WhatIsNotFinite) {
    const Kernels kernels[] = {emulated_kernels<kScaleZero, 1>(), emulated_kernels<kScaleZero, 2>()};
    Cases cases(machine, kernels);
    cases.unseen();
    cases.odd_queries();
    cases.odd_pages();
}

TEST_F(CudaDecode, RaggedBatchesOnAnyNumberOfBlocks) {
    const Kernels kernels[] = {emulated_kernels<kScaleZero, 1>()};
    Cases cases(machine, kernels);
    cases.same_bits({900, 3, 64, 65, 130, 1, 700, 257, 258, 40, 41, 320}, {1, 5});
    cases.same_bits({20000}, {2});  // more than 256 pages: accumulators make room
}

// Logits from flat to peaky, rising along the sequence, with values whose scales lie decades apart.
TEST_F(CudaDecode, DataThatHurts) {
    const Kernels kernels[] = {emulated_kernels<kScaleZero, 1>()};
    Cases cases(machine, kernels);
    for (const float query : {0.0f, 1e-20f, 0.1f, 6.0f, 60.0f}) cases.ends(4, 2, {1500}, 1, query, false);
}

}  // namespace

}  // namespace crumb::cuda
