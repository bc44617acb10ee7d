// How far a distribution moved: the figures that llama-perplexity prints under --kl-divergence, with its names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace crumb {

struct Divergence {
    size_t positions = 0;
    double mean_kld = 0;        // nats a token, KL(base || quantised)
    double mean_kld_error = 0;  // standard error, positions taken as independent
    double max_kld = 0;
    double kld_999 = 0;         // percentiles
    double kld_99 = 0;
    double median_kld = 0;
    double ppl_base = 0;
    double ppl = 0;
    double same_top = 0;        // share of positions whose most likely token is the same, 0..1
};

// Collects positions; keeps one float a position.
class DivergenceSum {
public:
    // Logits of both models at one position and the token that follows in the text. Returns the position's divergence.
    // Throws Error if a logit is not finite: a broken model must not become a number in a table.
    double add(std::span<const float> base, std::span<const float> logits, int32_t next);
    void merge(const DivergenceSum& other);
    Divergence result() const;

private:
    std::vector<float> kld_;
    double sum_ = 0, sum_squares_ = 0, nll_base_ = 0, nll_ = 0;
    size_t same_top_ = 0;
};

}  // namespace crumb
