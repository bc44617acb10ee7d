// The source of attention over chunks, thread by thread on the emulator, against attention in double precision.
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
constexpr PageFormat kWide = format(128, 192, 128, SideInfo::gain16, false);

class CudaPrefill : public testing::Test {
  protected:
    Cases cases_of(std::span<const Kernels> kernels) {
        Cases cases(machine, kernels);
        cases.step.prefill_bytes = size_t(1) << 30;
        return cases;
    }
    EmulatedMachine machine;
};

TEST_F(CudaPrefill, ChunksOfPrompts) {
    const Kernels kernels[] = {emulated_kernels<kScaleZero, 1>()};
    Cases cases = cases_of(kernels);
    cases.chunks(4, 1, {{300, 40}}, 1.0f, true);
    cases.chunks(2, 2, {{130, 130}, {330, 9}}, 3.0f, false);
    cases.chunks(12, 1, {{410, 21}}, 1.0f, true);
}

TEST_F(CudaPrefill, OddPlanesByteGainsAndPageMeans) {
    const Kernels kernels[] = {emulated_kernels<kTails, 1>()};
    Cases cases = cases_of(kernels);
    cases.chunks(2, 1, {{420, 70}}, 1.0f, true);
}

TEST_F(CudaPrefill, AnyPlanes) {
    const Kernels compiled = emulated_kernels<kAny, 1>();
    for (const auto& [k, v] : {std::pair(32, 96), {64, 128}, {96, 32}, {128, 64}}) {
        PageFormat f = format(64, k, v, SideInfo::gain8, true);
        f.v.mean = k < v;
        const Kernels kernels[] = {fitted(compiled, f)};
        Cases cases = cases_of(kernels);
        cases.chunks(2, 1, {{330, 30}}, 1.0f, true);
    }
}

TEST_F(CudaPrefill, MorePlanesOfKeysThanOfValues) {
    const Kernels kernels[] = {emulated_kernels<kWide, 1>()};
    Cases cases = cases_of(kernels);
    cases.chunks(4, 1, {{360, 34}}, 2.0f, true);
}

TEST_F(CudaPrefill, BoundsOfRows) {
    const Kernels kernels[] = {emulated_kernels<kScaleZero, 1>()};
    Cases cases = cases_of(kernels);
    cases.bounds();
    cases.softcap_and_sinks(20);
}

TEST_F(CudaPrefill, WhatIsNotFinite) {
    const Kernels kernels[] = {emulated_kernels<kScaleZero, 1>()};
    Cases cases = cases_of(kernels);
    cases.unseen();
    cases.odd_queries();
    cases.odd_pages();
}

}  // namespace

}  // namespace crumb::cuda
