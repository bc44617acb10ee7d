// In this order: exact tokens, gains of tokens or directions (stored as FP16, then divided by), then scale, zero and code
// by the rule of lanes/minmax.cpp or by the table of levels. An integer zero is -round(low / scale) scales below the
// middle of the code range. Exact tokens have codes but no say in ranges.
#include "recipe/group_encoder.h"

#include <crumb/error.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "recipe/balance.h"

namespace crumb {

namespace {

constexpr float kLargest = 65504.0f, kTiny = 0x1p-24f;  // of FP16

struct Affine {
    fp16 scale, zero;
};

Affine fit(const SideRecipe& recipe, float low, float high, int bits) {
    const float steps = float((1 << bits) - 1);
    low *= recipe.shrink, high *= recipe.shrink;
    const fp16 scale = to_fp16(std::max((high - low) / steps, kTiny));
    const float s = to_float(scale);
    if (recipe.integer_zero) {
        low = std::floor(low / s + 0.5f) * s;
    }
    return {scale, to_fp16(low + s * (0.5f * steps))};
}

// Where y lies among the levels: level n covers [n, n + 1).
float position(float y, Affine a, int bits) {
    return (y - to_float(a.zero)) / to_float(a.scale) + 0.5f * float(1 << bits);
}

uint8_t code_at(float position, int bits) {
    return uint8_t(std::clamp(position, 0.0f, float((1 << bits) - 1)));
}

class Encoder {
  public:
    Encoder(const SideRecipe& recipe, const PageSide& side, MappedRows rows, int keep, const std::byte* kept)
        : recipe_(recipe),
          side_(side),
          format_(side.tables.format),
          at_(info_layout(format_, side.tokens)),
          tokens_(size_t(side.tokens)),
          dim_(side.dim()),
          keep_(size_t(keep)),
          y_(std::move(rows.y)),
          saturated_(std::move(rows.saturated)),
          exact_(tokens_, 0),
          codes_(tokens_ * dim_),
          info_(at_.bytes) {
        if (keep > 0) {
            std::copy_n(kept + side.info, at_.bytes, info_.begin());
            read_codes(side, kept, codes_);
            before_.resize(tokens_ * dim_);
            read_directions(side, kept, before_);
        }
    }

    // Of the page's tokens with the smallest sum of |y|, those that are not kept already.
    void choose_outliers(std::vector<uint16_t>& chosen) {
        chosen.clear();
        std::vector<double> size(tokens_);
        for (size_t t = 0; t < tokens_; ++t) {
            for (size_t j = 0; j < dim_; ++j) {
                size[t] += std::fabs(y_[t * dim_ + j]);
            }
        }
        for (size_t o = 0; o < size_t(format_.outliers) && keep_ > 0; ++o) {
            const auto t = load_at<uint16_t>(info_.data() + at_.outlier_tokens, o);
            if (t < keep_) {
                chosen.push_back(t);
            }
        }
        std::vector<uint16_t> free(tokens_ - keep_);
        std::iota(free.begin(), free.end(), uint16_t(keep_));
        std::ranges::stable_sort(free, {}, [&](uint16_t t) { return size[t]; });
        // Kept tokens leave fewer places; where too few tokens are left, places repeat the last one.
        for (size_t i = 0; chosen.size() < size_t(format_.outliers); ++i) {
            chosen.push_back(i < free.size() ? free[i] : chosen.back());
        }
        std::ranges::sort(chosen);
    }

    void store_outliers(const std::vector<uint16_t>& chosen) {
        for (size_t o = 0; o < chosen.size(); ++o) {
            const size_t t = chosen[o];
            exact_[t] = 1;
            store_at(info_.data() + at_.outlier_tokens, o, chosen[o]);
            for (size_t j = 0; j < dim_; ++j) {
                const float x = t < keep_ ? before_[t * dim_ + j] : y_[t * dim_ + j];
                store_at(info_.data() + at_.outlier_rows, o * dim_ + j, to_fp16(x));
            }
        }
    }

    void divide_by_token_gains(const float* layer_norms) {
        if (!format_.token_gain) {
            return;
        }
        std::vector<double> gains(tokens_);
        if (recipe_.token_gain == TokenGain::layer_norm && layer_norms) {
            std::copy_n(layer_norms, tokens_, gains.begin());
        } else {
            for (size_t t = keep_; t < tokens_; ++t) {
                gains[t] = length(y_, t);
            }
        }
        if (recipe_.token_gain == TokenGain::balanced) {
            balanced_gains(gains);
        }
        for (size_t t = keep_; t < tokens_; ++t) {
            const fp16 gain = to_fp16(std::max(float(gains[t]), kTiny));
            saturated_[t] |= gains[t] > kLargest;
            store_at(info_.data() + at_.token_gain, t, gain);
            for (size_t j = 0; j < dim_; ++j) {
                y_[t * dim_ + j] /= to_float(gain);
            }
        }
    }

    void divide_by_channel_gains() {
        if (!format_.channel_gain) {
            return;
        }
        if (keep_ == 0) {
            std::vector<double> tokens(tokens_), directions(dim_);
            balance(std::vector<double>(y_.begin(), y_.end()), tokens, directions, BalanceFirst::directions);
            for (size_t j = 0; j < dim_; ++j) {
                store_at(info_.data() + at_.channel_gain, j, to_fp16(float(directions[j])));
            }
        }
        for (size_t n = 0; n < y_.size(); ++n) {
            y_[n] /= half_at(info_.data() + at_.channel_gain, n % dim_);
        }
    }

    void choose_boosted() {
        boosted_.assign(dim_, -1);
        std::vector<double> mean(dim_);
        for (size_t n = 0; n < y_.size() && keep_ == 0; ++n) {
            mean[n % dim_] += exact_[n / dim_] ? 0.0 : std::fabs(y_[n]);
        }
        std::vector<uint8_t> order(dim_);
        std::iota(order.begin(), order.end(), uint8_t(0));
        std::ranges::stable_sort(order, std::ranges::greater(), [&](uint8_t j) { return mean[j]; });
        order.resize(size_t(format_.boosted));
        std::ranges::sort(order);
        for (size_t b = 0; b < order.size(); ++b) {
            const uint8_t kept = std::min(load_at<uint8_t>(info_.data() + at_.boosted, b), uint8_t(dim_ - 1));
            const uint8_t j = keep_ > 0 ? kept : order[b];
            store_at(info_.data() + at_.boosted, b, j);
            boosted_[j] = int(b);
        }
    }

    void quantise_channels() {
        const size_t group = size_t(format_.group);
        for (size_t first = 0; first < tokens_; first += group) {
            for (size_t j = 0; j < dim_; ++j) {
                quantise_channel(first, first + group, j);
            }
        }
    }

    void quantise_tokens() {
        const size_t width = format_.group == 0 ? dim_ : size_t(format_.group);
        for (size_t first = 0, group = 0; first < dim_; first += width, ++group) {
            for (size_t t = keep_; t < tokens_; ++t) {
                const auto row = std::span(y_).subspan(t * dim_ + first, std::min(width, dim_ - first));
                const auto [low, high] = std::ranges::minmax(row);
                const Affine a = fit(recipe_, low, high, recipe_.bits);
                store(group * tokens_ + t, a);
                for (size_t i = 0; i < row.size(); ++i) {
                    codes_[t * dim_ + first + i] = code_at(position(row[i], a, recipe_.bits), recipe_.bits);
                }
            }
        }
    }

    // Levels lie around the rms of the token; a border between two levels is their middle.
    void quantise_levels() {
        const std::vector<float>& levels = side_.tables.levels;
        for (size_t t = keep_; t < tokens_; ++t) {
            const float rms = std::max(float(length(y_, t) / std::sqrt(double(dim_))), kTiny);
            double squares = 0;
            for (size_t j = 0; j < dim_; ++j) {
                const float u = y_[t * dim_ + j] / rms;
                size_t code = 0;
                while (code + 1 < levels.size() && u >= 0.5f * (levels[code] + levels[code + 1])) {
                    ++code;
                }
                codes_[t * dim_ + j] = uint8_t(code);
                squares += double(levels[code]) * levels[code];
            }
            const double gain =
                recipe_.quantiser == Quantiser::lloyd_norm ? rms / std::sqrt(squares / double(dim_)) : double(rms);
            saturated_[t] |= gain > kLargest;
            store_at(info_.data() + at_.scale, t, to_fp16(float(gain)));
        }
    }

    uint64_t finish(std::byte* page) {
        store_boosted_codes();
        for (size_t n = 0; n < codes_.size(); ++n) {
            codes_[n] &= boosted_.empty() || boosted_[n % dim_] < 0 ? 0xff : 3;
        }
        write_codes(side_, codes_, page);
        std::ranges::copy(info_, page + side_.info);
        return uint64_t(std::count_if(saturated_.begin() + keep_, saturated_.end(), [](uint8_t s) { return s != 0; }));
    }

  private:
    double length(std::span<const float> rows, size_t t) const {
        double squares = 0;
        for (size_t j = 0; j < dim_; ++j) {
            squares += double(rows[t * dim_ + j]) * rows[t * dim_ + j];
        }
        return std::sqrt(squares);
    }

    // `gains` come as lengths. Beside kept tokens, a token has the gain that kept ones have for their length.
    void balanced_gains(std::vector<double>& gains) const {
        if (keep_ == 0) {
            std::vector<double> directions(dim_);
            balance(std::vector<double>(y_.begin(), y_.end()), gains, directions, BalanceFirst::tokens);
            return;
        }
        double lengths = 0, kept = 0;
        for (size_t t = 0; t < keep_; ++t) {
            lengths += length(before_, t);
            kept += half_at(info_.data() + at_.token_gain, t);
        }
        for (size_t t = keep_; t < tokens_; ++t) {
            gains[t] *= kept / std::max(lengths, double(kTiny));
        }
    }

    void store(size_t place, Affine a) {
        store_at(info_.data() + at_.scale, place, a.scale);
        store_at(info_.data() + at_.zero, place, a.zero);
    }

    void quantise_channel(size_t first, size_t last, size_t j) {
        const int bits = boosted_[j] < 0 ? recipe_.bits : recipe_.bits + 2;
        const size_t place = first / size_t(format_.group) * dim_ + j;
        const bool taken_over = keep_ > first;
        Affine a;
        if (taken_over) {
            a = {load_at<fp16>(info_.data() + at_.scale, place), load_at<fp16>(info_.data() + at_.zero, place)};
        } else {
            float low = kLargest * float(dim_), high = -low;
            for (size_t t = first; t < last; ++t) {
                low = exact_[t] ? low : std::min(low, y_[t * dim_ + j]);
                high = exact_[t] ? high : std::max(high, y_[t * dim_ + j]);
            }
            a = fit(recipe_, low, high, bits);
            store(place, a);
        }
        for (size_t t = std::max(first, keep_); t < last; ++t) {
            const float p = position(y_[t * dim_ + j], a, bits);
            saturated_[t] |= taken_over && !exact_[t] && (p < 0.0f || p >= float(1 << bits));
            codes_[t * dim_ + j] = code_at(p, bits);
        }
    }

    void store_boosted_codes() {
        for (size_t j = 0; j < boosted_.size(); ++j) {
            if (boosted_[j] < 0) {
                continue;
            }
            std::byte* digits = info_.data() + at_.boosted_codes + size_t(boosted_[j]) * tokens_ / 4;
            for (size_t t = keep_; t < tokens_; ++t) {
                const int shift = 2 * int(t % 4);
                const unsigned others = unsigned(digits[t / 4]) & ~(3u << shift);
                digits[t / 4] = std::byte(others | unsigned(codes_[t * dim_ + j] >> 2) << shift);
            }
        }
    }

    const SideRecipe& recipe_;
    const PageSide& side_;
    const SideFormat& format_;
    const InfoLayout at_;
    const size_t tokens_, dim_, keep_;
    std::vector<float> y_;
    std::vector<uint8_t> saturated_;  // [tokens]
    std::vector<uint8_t> exact_;      // [tokens]
    std::vector<uint8_t> codes_;      // [tokens][D]
    std::vector<std::byte> info_;
    std::vector<float> before_;  // what the kept page reads as
    std::vector<int> boosted_;   // [D], which of the boosted directions it is, or -1
};

}  // namespace

uint64_t encode_groups(const SideRecipe& recipe, const PageSide& side, MappedRows rows, int keep, const std::byte* kept,
                       const float* layer_norms, bool keys, std::vector<uint16_t>& outliers, std::byte* page) {
    Encoder encoder(recipe, side, std::move(rows), keep, kept);
    if (keys) {
        encoder.choose_outliers(outliers);
    }
    encoder.store_outliers(outliers);
    encoder.divide_by_token_gains(layer_norms);
    encoder.divide_by_channel_gains();
    switch (recipe.quantiser) {
        case Quantiser::channels:
            encoder.choose_boosted();
            encoder.quantise_channels();
            break;
        case Quantiser::minmax:
            encoder.quantise_tokens();
            break;
        case Quantiser::lloyd:
        case Quantiser::lloyd_norm:
            encoder.quantise_levels();
            break;
        default:
            CRUMB_ASSERT(false);
    }
    return encoder.finish(page);
}

}  // namespace crumb
