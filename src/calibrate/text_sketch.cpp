#include <crumb/error.h>
#include <crumb/text_sketch.h>
#include <xxhash.h>

#include <charconv>
#include <iterator>

namespace crumb {

namespace {

constexpr size_t kDigits = 16;

template <class Visit>
void sampled_runs(std::span<const int32_t> tokens, Visit visit) {
    for (size_t i = 0; i + TextSketch::kRun <= tokens.size(); ++i) {
        const uint64_t hash = XXH3_64bits(&tokens[i], TextSketch::kRun * sizeof(int32_t));
        if (hash % TextSketch::kSampling == 0) {
            visit(hash);
        }
    }
}

}  // namespace

void TextSketch::add(std::span<const int32_t> tokens) {
    sampled_runs(tokens, [&](uint64_t hash) {
        hashes_.insert(hash);
        if (hashes_.size() > kMost) {
            hashes_.erase(std::prev(hashes_.end()));
        }
    });
}

std::optional<double> TextSketch::share(std::span<const int32_t> tokens) const {
    const uint64_t largest = hashes_.size() == kMost ? *hashes_.rbegin() : UINT64_MAX;
    size_t sampled = 0, known = 0;
    sampled_runs(tokens, [&](uint64_t hash) {
        if (hash > largest) {
            return;
        }
        ++sampled;
        known += hashes_.contains(hash);
    });
    return sampled ? std::optional(double(known) / double(sampled)) : std::nullopt;
}

std::string TextSketch::hex() const {
    std::string text;
    for (const uint64_t hash : hashes_) {
        text += fmt::format("{:016x}", hash);
    }
    return text;
}

TextSketch TextSketch::parse(std::string_view hex) {
    TextSketch sketch;
    for (size_t at = 0; at < hex.size(); at += kDigits) {
        const std::string_view digits = hex.substr(at, kDigits);
        uint64_t hash = 0;
        const auto [end, error] = std::from_chars(digits.begin(), digits.end(), hash, 16);
        if (digits.size() != kDigits || error != std::errc{} || end != digits.end()) {
            fail("a text sketch has '{}' where {} hexadecimal digits are expected", digits, kDigits);
        }
        sketch.hashes_.insert(hash);
    }
    return sketch;
}

}  // namespace crumb
