// The fuzzers' properties over a fixed corpus and fixed mutations of it, for compilers without libFuzzer.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <vector>

#include "../fuzz/state.h"
#include "../fuzz/targets.h"
#include "base/whole_file.h"

namespace crumb {
namespace {

namespace fs = std::filesystem;

constexpr int kMutations = 300;
const fs::path kProject = CRUMB_SOURCE;

// Cut, changed in a few bytes, or with a piece of itself moved: what changes lengths, tags and order.
std::vector<std::byte> mutated(std::vector<std::byte> bytes, std::mt19937& random) {
    const auto below = [&](size_t n) { return n == 0 ? 0 : random() % n; };
    switch (below(3)) {
        case 0:
            bytes.resize(below(bytes.size()));
            break;
        case 1:
            for (size_t i = below(4) + 1; i-- > 0 && !bytes.empty();) {
                bytes[below(bytes.size())] = std::byte(random());
            }
            break;
        case 2:
            std::rotate(bytes.begin(), bytes.begin() + std::ptrdiff_t(below(bytes.size())), bytes.end());
            break;
    }
    return bytes;
}

using Seeds = std::vector<std::vector<std::byte>>;

Seeds files_of(const fs::path& folder) {
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(folder)) {
        files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    Seeds seeds;
    for (const auto& file : files) {
        seeds.push_back(read_whole_file(file, "a corpus file", 1 << 20));
    }
    return seeds;
}

void run(const Seeds& seeds, void (*target)(std::span<const std::byte>)) {
    ASSERT_FALSE(seeds.empty());
    std::mt19937 random(1);
    for (const auto& bytes : seeds) {
        target(bytes);
        for (int i = 0; i < kMutations; ++i) {
            target(mutated(bytes, random));
        }
    }
}

TEST(FuzzCorpus, Artefacts) { run(files_of(kProject / "fuzz" / "corpus" / "artefact"), fuzz::artefact); }
TEST(FuzzCorpus, Pickles) { run(files_of(kProject / "fuzz" / "corpus" / "rotation_file"), fuzz::rotation_file); }
TEST(FuzzCorpus, RotationFiles) { run(files_of(kProject / "tests" / "data"), fuzz::rotation_file); }

// States of the corpus and short ones, as they are and with their checksums put right.
TEST(FuzzCorpus, States) {
    Seeds seeds = files_of(kProject / "fuzz" / "corpus" / "state");
    for (const int tokens : {1, 130}) {
        Cache cache(fuzz::state_config());
        fuzz::grow(cache, 0, tokens);
        for (const char kind : {'S', 'C'}) {
            seeds.push_back(fuzz::save(cache, 0));
            seeds.back().insert(seeds.back().begin(), std::byte(kind));
        }
    }
    run(seeds, fuzz::state);
}

// A file of another build (GCC 12, x86-64, 270 tokens): it is read, and the same tokens are the same bytes here, codes and all.
TEST(FuzzCorpus, AStateOfAnotherBuildIsWhatThisOneWrites) {
    auto bytes = read_whole_file(kProject / "fuzz" / "corpus" / "state" / "270_as_it_is.state", "a saved state", 1 << 20);
    ASSERT_EQ(bytes.at(0), std::byte('S'));
    bytes.erase(bytes.begin());
    Cache cache(fuzz::state_config());
    fuzz::restore(cache, 0, bytes, false);
    ASSERT_EQ(fuzz::save(cache, 0), bytes);
    fuzz::grow(cache, 1, cache.length(0));
    EXPECT_EQ(fuzz::save(cache, 1) == bytes, true);
}

}  // namespace
}  // namespace crumb
