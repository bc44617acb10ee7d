// Calibration: second moments of Q, K, V and the attention output while a model runs, and rotations and the bases of
// `planes` from them.
//
//   Moments moments;                        // for each text window: begin_sequence(), then the blocks of each layer
//   Artefact a = fit(moments, RotationMethod{}, provenance);
//   add_planes(a, moments, layers, {}, 1);  // or with metrics (metric.h)
//
// Memory is O(layers x heads x D^2) and a sample of kSamplePages pages, whatever the number of tokens.
// docs/design/artefact.md has the definitions.
#pragma once

#include <crumb/artefact.h>
#include <crumb/metric.h>
#include <crumb/page.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace crumb {

struct LayerShape {
    int n_head = 0;
    int n_head_kv = 0;
    int dim_k = 0;
    int dim_v = 0;
    bool operator==(const LayerShape&) const = default;
};

// Row of head h of token t: data + t * token_stride + h * head_stride floats.
struct HeadRows {
    const float* data = nullptr;
    size_t token_stride = 0;
    size_t head_stride = 0;
};

// Consecutive tokens of one sequence in one layer, as attention sees them: Q and K after norms and RoPE and before the
// softmax scale, V as it is cached, the output before W_O.
struct TokenBlock {
    int n_tokens = 0;
    HeadRows q, k, v, output;
};

// Means over tokens for one KV head, row major; those of Q and the output also over the query heads of its group.
struct HeadMoments {
    std::vector<double> key_mean;  // [D_k]        k
    std::vector<double> qq;        // [D_k][D_k]   q^T q
    std::vector<double> kk;        // [D_k][D_k]   k^T k
    std::vector<double> vv;        // [D_v][D_v]   v^T v
    std::vector<double> sst;       // [D_v][D_v]   w v^T v / mean w, w = k (q^T q) k^T: the surrogate of OSCAR's code
    std::vector<double> sst_true;  // [D_v][D_v]   o^T o, o = softmax(q K^T) V: what the surrogate stands for
};

inline constexpr int kFolds = 2;         // parts of the text: what was fitted on one is tried on the other
inline constexpr int kSamplePages = 32;  // most pages of a head that are kept as they are

// Means over whole pages (64 tokens, aligned at 0) of K or V of one KV head; m is the mean of a page.
struct PageMoments {
    uint64_t pages = 0;
    std::vector<double> mean;          // [D]     x
    std::vector<double> within;        // [D][D]  (x - m)^T (x - m)
    std::vector<double> between;       // [D][D]  m^T m; within + between is x^T x
    std::vector<double> least, most;   // [D]     range of m
};

// A page as the cache would see it: BF16 rows [64][D].
struct SamplePage {
    int fold = 0;
    std::vector<bf16> k, v;
};

// Sums over the pages of one KV head, and every n-th of them as it is, n doubled whenever there are too many. What
// comes out does not depend on how the rows came in.
class PageSums {
  public:
    PageSums(int dim_k, int dim_v);

    // What is left of a page that was not finished does not count.
    void begin_sequence() { filled_ = 0; }

    // The first n_tokens rows of a block, at `position` and after it. Rows of a page whose first row was not seen do not
    // count.
    void add(const HeadRows& k, const HeadRows& v, int head, int n_tokens, uint64_t position, int fold);

    // Of one fold, or of all (fold < 0).
    PageMoments key_moments(int fold) const { return moments(k_, fold); }
    PageMoments value_moments(int fold) const { return moments(v_, fold); }
    std::span<const SamplePage> sample() const { return sample_; }

  private:
    struct Sums {
        uint64_t pages = 0;
        std::vector<double> mean, within, between;  // matrices: what lies on and above the diagonal
        std::vector<double> least, most;
    };
    struct Side {
        int dim = 0;
        std::vector<double> rows;  // [64][D] of the page in hand
        std::array<Sums, kFolds> folds;
    };
    static Side side(int dim);
    static void finish(Side& side, int fold);
    static PageMoments moments(const Side& side, int fold);

    Side k_, v_;
    int filled_ = 0;  // rows of the page in hand
    std::vector<SamplePage> sample_;
    uint64_t pages_ = 0, stride_ = 1;
};

class Moments {
  public:
    // The first `skip` tokens of each sequence are left out: sinks stay exact in the cache, and their keys are outliers
    // that say nothing about the others. 0: the official code's choice. Threads change the time, never a bit.
    explicit Moments(int skip = 64, int n_threads = 1);

    // The blocks that follow are positions 0, 1, ... of a new sequence, which belongs to this part of the text.
    void begin_sequence(int fold = 0);

    // The weights of sst are taken from the queries seen so far, from now on, and all sums begin anew. Without this
    // call they are those of the queries up to the block in hand.
    void fix_weights();

    // Throws Error if a layer's shape is not that of its earlier blocks.
    void observe(int layer, const LayerShape& shape, const TokenBlock& block);

    // Throws Error, naming the layers, unless each of `layers` has seen the same number of tokens, and at least one.
    void require(std::span<const int> layers) const;

    // Layers seen so far, ascending.
    std::vector<int> layers() const;
    const LayerShape& shape(int layer) const;
    uint64_t tokens(int layer) const;  // without those that were skipped
    HeadMoments head(int layer, int head) const;
    const PageSums& pages(int layer, int head) const;

  private:
    // Sums; matrices hold what lies on and above the diagonal.
    struct Head {
        std::vector<double> k, qq, kk, vv, wvv, oo;
        double w = 0;
        std::vector<double> fixed;  // mean of q^T q that fix_weights() left, or empty
    };
    struct Layer {
        LayerShape shape;
        std::vector<Head> heads;
        std::vector<PageSums> pages;  // by head
        uint64_t tokens = 0;
        uint64_t sequence = 0;  // which begin_sequence() `position` belongs to
        uint64_t position = 0;
    };
    static Head empty_head(const LayerShape& shape);
    static void add(const LayerShape& shape, Head& head, int index, uint64_t tokens_before, const TokenBlock& block);
    const Layer& find(int layer) const;

    std::map<int, Layer> layers_;
    int skip_, n_threads_;
    uint64_t sequence_ = 0;
    int fold_ = 0;
};

// Whose eigenvectors a rotation is made of. For K: qqt (the paper), ktk. For V: sst (the paper's code), sst_true, vtv.
enum class Target : uint8_t { qqt, ktk, sst, sst_true, vtv };

// How a rotation is put together, left to right: R eigenvectors in ascending order of eigenvalue, H hadamard(), P
// bit_reversal().
enum class Composition : uint8_t { r_h_pbr, r_h, h_pbr, h, r, pbr };

struct RotationMethod {
    Target k = Target::qqt;
    Target v = Target::sst_true;
    Composition composition = Composition::r_h_pbr;
    bool per_head = false;  // one rotation per KV head; else one per layer, from the mean of its heads' moments
};

std::string_view name(Target target);
std::string_view name(Composition composition);
std::string describe(const RotationMethod& method);  // what Provenance::method says

// Throw Error that lists the names when there is none of this name: K's targets are qqt and ktk, V's sst, sst_true and vtv.
Target find_key_target(std::string_view name);
Target find_value_target(std::string_view name);
Composition find_composition(std::string_view name);

// perm[j] = d - 1 - br(j), br the reversal of log2(d) bits; d - 1 - j where d is no power of two. (X P)[:, j] =
// X[:, perm[j]].
std::vector<int> bit_reversal(int d);

// d x d, row major, from a symmetric d x d second moment (its upper triangle). Deterministic: the largest component of
// each eigenvector is positive.
std::vector<float> rotation(std::span<const double> moment, int d, Composition composition);

// Key means and rotations of all layers; fills in created_by. Throws Error if a moment is not finite or a target does
// not suit its side.
Artefact fit(const Moments& moments, const RotationMethod& method, Provenance provenance);

// Adds the bases of `planes` for these layers. `metrics`: one, or several over disjoint parts of the text, which say how
// much of the metric is noise; none: errors count by their square, relative to the energy of K or V of the layer. What
// cannot be computed is chosen by trial, by layer and side, on sampled pages of the fold that was not fitted: page means
// or not, K centred or not, how far the metric is drawn towards the identity. Threads change the time, never a bit.
// Throws Error if a layer was not seen, has less than a page, or has another shape in a metric.
void add_planes(Artefact& artefact, const Moments& moments, std::span<const int> layers, std::span<const Metric> metrics,
                int n_threads);

}  // namespace crumb
