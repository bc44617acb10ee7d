// From hidden states to the loss and back, in slices: the logits of a few hundred positions at a time, and on the way
// back a few thousand rows of the head's weights, dequantised and transposed. So neither n x vocabulary logits nor a
// second copy of the head in F32 exists (2.1 GB with a vocabulary of 128k and 4096 channels).
//
// The loss is the sum of -log p(y) over positions, y drawn from p itself: the mean of g^T g is then the Fisher
// information, which is what a KL divergence is to second order. Each position has random numbers of its own, so that a
// draw depends on nothing but the seed, the position and p.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "gradient_compute.h"

namespace crumb::llama {

class Head {
  public:
    // Throws Error unless `logits` is one product of weights with `hidden`, scaled and biased at most.
    Head(ggml_tensor* logits, ggml_tensor* hidden, int n_threads);

    // Writes the loss's gradient with respect to `hidden`, which has data, to `gradient` of the same shape. Positions
    // before `first` have no loss. Returns the loss.
    double run(Compute& compute, uint64_t seed, int first, ggml_tensor* gradient, const std::function<void()>& progress);

    int slices(int first) const;  // how often progress() will be called

    size_t kept_bytes() const { return kept_->bytes(); }

  private:
    ggml_tensor* forward(ggml_context* context, int position, int n) const;
    ggml_tensor* back(ggml_context* context, ggml_tensor* to_logits) const;

    ggml_tensor *hidden_, *weight_ = nullptr;
    std::vector<ggml_tensor*> steps_;  // from the product to the logits: SCALE, ADD
    int n_threads_, positions_;
    ggml_context_ptr context_;
    ggml_tensor* logits_ = nullptr;  // [n_vocab, positions_], then their gradient
    std::unique_ptr<Kept> kept_;
};

// Turns logits into the gradient of -log p(y), y drawn with a random number of `seed`; returns -log p(y).
double draw(float* logits, int n_vocab, uint64_t seed);

// Random number `index` of a seed, good as a seed itself: SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable
// pseudorandom number generators").
uint64_t mixed(uint64_t seed, uint64_t index);

}  // namespace crumb::llama
