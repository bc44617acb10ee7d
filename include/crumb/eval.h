// How far a distribution moved: the figures that llama-perplexity prints under --kl-divergence, with its names, each with
// an error.
//
// Errors come from a bootstrap over blocks of kBlockPositions consecutive positions: 500 times as many blocks as there
// are are drawn with replacement, each figure is computed anew, and its error is the deviation of the 500. Blocks, because
// what one token's codes do wrong is seen by many positions after it, so that positions are not independent; a bootstrap,
// because percentiles and ratios have no formula over blocks. The draw is fixed: the same blocks give the same error.
// All recipes of a table read the same tokens, so differences between them are surer than their errors say.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace crumb {

inline constexpr size_t kBlockPositions = 256;

struct Figure {
    double value = 0;
    double error = 0;  // NaN where there are not two blocks to tell it from
};

struct Divergence {
    size_t positions = 0;
    size_t blocks = 0;
    Figure mean_kld;  // nats a token, KL(base || quantised)
    Figure kld_90;    // percentiles
    Figure kld_99;
    Figure kld_999;
    double median_kld = 0;
    double max_kld = 0;
    double ppl_base = 0;
    double ppl = 0;
    Figure ppl_ratio;  // PPL(Q) / PPL(base)
    Figure same_top;   // share of positions whose most likely token is the same, 0..1
};

struct Block {
    std::vector<float> kld;  // by position
    double sum_kld = 0;
    double nll_base = 0;  // sums, nats
    double nll = 0;
    size_t same_top = 0;
    bool operator==(const Block&) const = default;
};

// Collects positions of one or more windows of text; keeps one float a position.
class DivergenceSum {
public:
    DivergenceSum() = default;
    explicit DivergenceSum(std::vector<Block> blocks) : blocks_(std::move(blocks)) {}

    // Logits of both models at the window's next position and the token that follows in the text. Returns the position's
    // divergence. Throws Error if a logit is not finite: a broken model must not become a number in a table.
    double add(std::span<const float> base, std::span<const float> logits, int32_t next);
    void merge(const DivergenceSum& other);  // of another window: its blocks stay its own
    Divergence result() const;

    const std::vector<Block>& blocks() const { return blocks_; }

private:
    std::vector<Block> blocks_;
    bool open_ = false;  // the last block may grow
};

// Indices of the points that no other point beats: another with at most its rate and at most its loss, and less of one.
// Ascending rate; of equal points the first.
struct RateLoss {
    double rate = 0;
    double loss = 0;
};
std::vector<size_t> pareto_front(std::span<const RateLoss> points);

}  // namespace crumb
