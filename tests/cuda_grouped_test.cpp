// Kernels for formats whose parameters belong to groups (omni, kivi), thread by thread on the emulator, against attention in double
// precision: random codes and scales, and pages that the recipes make of all kinds of data.
#include <gtest/gtest.h>

#include "cuda/decode_cases.h"
#include "cuda/emulated_machine.h"

namespace crumb::cuda {

namespace {

// omni and kivi32, kivi128: K by groups of tokens with a gain a token or none, V by groups of channels.
constexpr PageFormat grouped(int dim, int tokens, bool gains) {
    return {.k = {.dim = dim, .planes = dim, .info = SideInfo::channels, .group = tokens, .token_gain = gains},
            .v = {.dim = dim, .planes = dim, .info = SideInfo::scale_zero, .group = dim > tokens ? tokens : 0},
            .tokens = tokens > 64 ? tokens : 64};
}

constexpr PageFormat kOmni = grouped(64, 32, true);
constexpr PageFormat kKivi128 = grouped(64, 128, false);

class CudaGrouped : public testing::Test {
  protected:
    EmulatedMachine machine;
};

TEST_F(CudaGrouped, WithAllGroupSizes) {
    const Kernels kernels[] = {emulated_kernels<kOmni, 1>(), emulated_kernels<kOmni, 2>(), emulated_kernels<kOmni, 3>()};
    ASSERT_EQ(kernels[0].format, page_format(find_recipe("omni"), 64, 64));
    Cases cases(machine, kernels);
    for (const int group : {1, 2, 4, 5, 8, 12, 16}) cases.ends(2 * group, 2, {410, 65}, 1, 1.0f, true);
    cases.ends(12, 2, {300, 66, 700}, 3, 1.0f, false);
    cases.ends(4, 1, {460, 8}, 8, 1.0f, false);
    cases.bounds();
    cases.softcap_and_sinks();
}

TEST_F(CudaGrouped, PagesOf128Tokens) {
    const Kernels kernels[] = {emulated_kernels<kKivi128, 1>(), emulated_kernels<kKivi128, 2>()};
    ASSERT_EQ(kernels[0].format, page_format(find_recipe("kivi128"), 64, 64));
    Cases cases(machine, kernels);
    for (const int group : {1, 4, 8}) cases.ends(2 * group, 2, {410, 65, 1, 190, 900}, 1, 1.0f, true);
    cases.ends(12, 2, {300, 66, 700}, 3, 1.0f, false);
    cases.bounds();
}

TEST_F(CudaGrouped, WideHeads) {
    const Kernels omni[] = {emulated_kernels<grouped(128, 32, true), 1>()};
    ASSERT_EQ(omni[0].format, page_format(find_recipe("omni"), 128, 128));
    Cases(machine, omni).ends(4, 1, {700, 257}, 1, 2.0f, true);
    const Kernels kivi[] = {emulated_kernels<grouped(256, 128, false), 1>()};
    ASSERT_EQ(kivi[0].format, page_format(find_recipe("kivi128"), 256, 256));
    Cases(machine, kivi).ends(4, 1, {500}, 1, 2.0f, true);
}

TEST_F(CudaGrouped, ChunksOfPrompts) {
    const Kernels omni[] = {emulated_kernels<kOmni, 1>()};
    Cases cases(machine, omni);
    cases.step.prefill_bytes = size_t(1) << 30;
    cases.chunks(4, 1, {{300, 40}}, 1.0f, true);
    cases.chunks(2, 2, {{330, 9}}, 3.0f, false);
    cases.bounds();
    cases.unseen();
    cases.data("omni:paper", {2.0f});
    const Kernels kivi[] = {emulated_kernels<kKivi128, 1>()};
    Cases pages_of_128(machine, kivi);
    pages_of_128.step.prefill_bytes = size_t(1) << 30;
    pages_of_128.chunks(4, 1, {{460, 70}}, 1.0f, true);
    const Kernels wide[] = {emulated_kernels<grouped(128, 32, true), 1>()};
    Cases wide_cases(machine, wide);
    wide_cases.chunks(4, 1, {{360, 34}}, 2.0f, true);
}

TEST_F(CudaGrouped, DataOfAllKinds) {
    const Kernels omni[] = {emulated_kernels<kOmni, 1>(), emulated_kernels<kOmni, 2>()};
    Cases(machine, omni).data("omni:paper");
    const Kernels kivi[] = {emulated_kernels<grouped(64, 32, false), 2>()};
    Cases(machine, kivi).data("kivi32");
    const Kernels wide[] = {emulated_kernels<kKivi128, 2>()};
    Cases(machine, wide).data("kivi128");
}

TEST_F(CudaGrouped, WhatIsNotFinite) {
    const Kernels kernels[] = {emulated_kernels<kOmni, 1>(), emulated_kernels<kOmni, 2>()};
    Cases cases(machine, kernels);
    cases.unseen();
    cases.odd_queries();
    cases.odd_pages();
    for (const float query : {0.0f, 1e-20f, 6.0f, 60.0f}) cases.ends(4, 2, {900}, 1, query, false);
    cases.step.blocks = 3;
    cases.same_bits({900, 3, 64, 65, 130, 1, 700, 257, 258, 40, 41, 320}, {1, 5});
}

}  // namespace

}  // namespace crumb::cuda
