// The encoder on a device against encode_page(), byte by byte, for any machine.
#pragma once

#include <gtest/gtest.h>

#include "cuda/device_attend.h"
#include "encoder_cases.h"
#include "recipe/cuda/encode_args.h"

namespace crumb::cuda {

// Parameters of groups.
inline constexpr const char* kGroupedRecipes[] = {"omni", "omni:paper", "kivi32"};

using EncodeLaunch = void (*)(const EncodeArgs& args, const EncodeJob* jobs, int n_jobs, Stream stream);

inline EncodeTables put_encode_tables(Machine& machine, const SideTables& t) {
    const auto put = [&](const auto& x) { return x.empty() ? nullptr : machine.put(x); };
    return {put(t.mean), put(t.encode), put(t.sigma), put(t.step), put(t.mean_step), put(t.digits), put(t.direction), put(t.digit),
            t.gain_reference};
}

// Encodes blocks of both heads of a layer, by the device and by the CPU, some of them over an older page.
inline void expect_same_pages(Machine& machine, EncodeLaunch launch, const Recipe& recipe, int dim_k, int dim_v,
                              std::span<const Rows> kinds) {
    const EncoderCase own = encoder_case(recipe, dim_k, dim_v);
    const PageFormat exact = bf16_format(dim_k, dim_v);
    const int n_blocks = int(kinds.size()), n_heads = 2;
    std::vector<std::byte> records(size_t(n_blocks) * n_heads * exact.bytes());
    std::vector<std::byte> pages(size_t(n_blocks) * n_heads * own.format.bytes());
    for (size_t i = 0; i < pages.size(); i++) pages[i] = std::byte(i * 37);
    std::vector<std::byte> want = pages;
    EncodeCounts counts;
    std::vector<EncodeJob> jobs;
    for (int b = 0; b < n_blocks; b++) {
        const int keep = b % 3 == 1 ? 5 + b : 0;
        jobs.push_back({u32(b), u32(n_blocks - 1 - b), keep, u32(n_blocks - 1 - b)});
        for (int h = 0; h < n_heads; h++) {
            const std::vector<bf16> k = rows_of(kinds[b], dim_k, 10 * b + h), v = rows_of(kinds[b], dim_v, 10 * b + h + 5);
            std::byte* record = &records[(size_t(b) * n_heads + h) * exact.bytes()];
            for (int t = 0; t < kPageTokens; t++) {
                set_key(exact, record, t, std::span(k).subspan(size_t(t) * dim_k, dim_k));
                set_value(exact, record, t, std::span(v).subspan(size_t(t) * dim_v, dim_v));
            }
            std::byte* page = &want[(size_t(n_blocks - 1 - b) * n_heads + h) * own.format.bytes()];
            counts += encode_page(recipe, own.format, own.tables, k, v, page, keep, keep > 0 ? page : nullptr);
        }
    }
    const EncodeTables k_tables = put_encode_tables(machine, own.tables.k), v_tables = put_encode_tables(machine, own.tables.v);
    std::byte* const device_pages = machine.put(pages);
    EncodeCountsDevice* const device_counts = machine.put(std::vector<EncodeCountsDevice>{{0, 0}});
    EncodeArgs args = {};
    args.k = encode_side(recipe.k, own.format, true, machine.put(std::vector<EncodeTables>(n_heads, k_tables)));
    args.v = encode_side(recipe.v, own.format, false, machine.put(std::vector<EncodeTables>(n_heads, v_tables)));
    args.n_head_kv = n_heads;
    args.exact = reinterpret_cast<const u8*>(machine.put(records));
    args.exact_bytes = exact.bytes(), args.exact_stride = n_heads * exact.bytes();
    args.coded = reinterpret_cast<u8*>(device_pages);
    args.coded_bytes = own.format.bytes(), args.coded_stride = n_heads * own.format.bytes();
    args.counts = device_counts;
    launch(args, machine.put(jobs), n_blocks, nullptr);
    std::vector<std::byte> got(pages.size());
    machine.download(got.data(), device_pages, got.size());
    for (int b = 0; b < n_blocks; b++) {
        const size_t at = size_t(n_blocks - 1 - b) * n_heads * own.format.bytes(), bytes = n_heads * own.format.bytes();
        EXPECT_EQ(std::memcmp(&got[at], &want[at], bytes), 0) << recipe.name << ", " << dim_k << ": " << name_of(kinds[b]);
    }
    EncodeCountsDevice counted;
    machine.download(&counted, device_counts, sizeof counted);
    EXPECT_EQ(counted.nonfinite, counts.nonfinite) << recipe.name;
    EXPECT_EQ(counted.saturated, counts.saturated) << recipe.name;
}

}  // namespace crumb::cuda
