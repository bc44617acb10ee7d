// A small sketch of a token stream that tells later whether another stream repeats parts of it: of all runs of 16 tokens,
// those whose XXH3-64 is divisible by 64. What two texts share, wherever it lies in them, has the same sampled runs in
// both. 32,768 tokens of calibration leave about 512 hashes, 8 KB of hex in an artefact's provenance; of more than a
// million tokens the smallest 16,384 hashes are kept, and only runs below the largest of them are looked up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>

namespace crumb {

class TextSketch {
  public:
    static constexpr size_t kRun = 16;
    static constexpr uint64_t kSampling = 64;
    static constexpr size_t kMost = 16384;

    // Runs do not reach across calls.
    void add(std::span<const int32_t> tokens);

    bool empty() const { return hashes_.empty(); }

    // The share of sampled runs of `tokens` that this sketch holds, 0..1; nullopt if none is sampled (a short text).
    std::optional<double> share(std::span<const int32_t> tokens) const;

    // Hashes in ascending order, 16 hexadecimal digits each, and back. parse() throws Error for anything else.
    std::string hex() const;
    static TextSketch parse(std::string_view hex);

    bool operator==(const TextSketch&) const = default;

  private:
    std::set<uint64_t> hashes_;
};

}  // namespace crumb
