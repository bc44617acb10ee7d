// A layer with sequences whose pages are made at will, queries for it, and its attention by kernel and by reference.
#pragma once

#include <crumb/attention.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "attention/alibi.h"

namespace crumb::test {

using Random = std::mt19937;

inline float normal(Random& random) { return std::normal_distribution<float>()(random); }

inline std::vector<float> normals(Random& random, size_t n, float scale = 1.0f) {
    std::vector<float> values(n);
    for (float& x : values) x = scale * normal(random);
    return values;
}

// Element of K or V.
using Data = std::function<float(Random&, int token, int channel)>;

inline float plain(Random& random, int, int) { return normal(random); }

// Tables of a side by hand: a random B whose rows have the length of a rotation's times a step, and everything else
// that a side may have.
inline SideTables random_tables(const SideFormat& format, Random& random, bool mean) {
    SideTables tables;
    tables.format = format;
    if (!format.coded()) return tables;
    tables.decode = normals(random, size_t(format.planes) * format.dim, 1.0f / std::sqrt(float(format.planes)));
    if (mean) tables.mean = normals(random, format.dim, 2.0f);
    if (format.info == SideInfo::scale_zero) tables.ones = normals(random, format.dim, 0.3f);
    if (format.mean) tables.mean_step.assign(format.dim, 0.01f);
    tables.gain_reference = 0.7f;
    return tables;
}

// Scales, zeros and gains of groups.
inline void fill_groups(const SideFormat& side, int tokens, Random& random, std::byte* info) {
    const InfoLayout at = info_layout(side, tokens);
    const auto put = [&](size_t from, size_t to, auto value) {
        for (; from < to; from += 2) {
            const fp16 x = to_fp16(value());
            std::memcpy(info + from, &x, 2);
        }
    };
    put(at.scale, at.zero, [&] { return std::exp(0.5f * normal(random)); });
    put(at.zero, at.token_gain, [&] { return normal(random); });
    put(at.token_gain, at.bytes, [&] { return std::exp(0.5f * normal(random)); });
}

// A page of random codes with plausible side information.
inline void fill_codes(const PageFormat& format, Random& random, std::byte* page) {
    for (size_t i = 0; i < format.bytes(); i++) page[i] = std::byte(random());
    const auto info = [&](const SideFormat& side, size_t at) {
        if (!format.planar()) return fill_groups(side, format.tokens, random, page + at);
        for (int t = 0; t < kPageTokens; t++) {
            const fp16 scale = to_fp16(std::exp(0.5f * normal(random))), zero = to_fp16(normal(random));
            if (side.info == SideInfo::gain8) page[at + t] = std::byte(128 + int(8 * normal(random)));
            if (side.info == SideInfo::gain8) continue;
            std::memcpy(page + at + 2 * t, &scale, 2);
            if (side.info == SideInfo::scale_zero) std::memcpy(page + at + 2 * (kPageTokens + t), &zero, 2);
        }
    };
    info(format.k, format.key_info());
    info(format.v, format.value_info());
}

struct Shape {
    int n_head = 4;
    int n_head_kv = 2;
    int dim_k = 64;
    int dim_v = 64;
};

class World {
  public:
    AttentionLayer layer;
    std::vector<HeadTables> tables;
    AttentionMaps maps;
    Random random{1};
    bool grouped_kernels = false;  // formats with groups are read by kernels in place: below
    bool bf16_products = false;  // queries, K, V and weights are rounded to BF16 before they meet, of exact tokens too

    // Pages of random codes.
    World(Shape shape, PageFormat format, bool means = false) : shape_(shape) {
        for (int h = 0; h < shape.n_head_kv; h++) {
            tables.push_back({random_tables(format.k, random, means), random_tables(format.v, random, means)});
            if (format.planar()) continue;
            for (SideTables* side : {&tables.back().k, &tables.back().v}) {  // plane p codes direction p
                for (int p = 0; p < side->format.planes; p++) side->direction.push_back(uint16_t(p));
                side->digit.assign(side->format.planes, 0), side->digits.assign(side->format.dim, 1);
            }
        }
        set_layer(format);
        fill_page_ = [this](int, int, std::byte* page) { fill_codes(layer.format, random, page); };
        if (!format.coded()) fill_page_ = [this](int, int, std::byte* page) { fill_rows(page, plain, plain, 0); };
    }

    // Pages that a recipe makes of data.
    World(Shape shape, const Recipe& recipe, Data k, Data v, bool key_mean = false) : shape_(shape) {
        Recipe plain_recipe = recipe;
        plain_recipe.k.centre = Centre::none;
        tables = layer_tables(plain_recipe, 0, shape.n_head_kv, page_format(plain_recipe, shape.dim_k, shape.dim_v), nullptr);
        set_layer(page_format(recipe, shape.dim_k, shape.dim_v));
        for (HeadTables& head : tables) {
            if (!key_mean) continue;
            for (int c = 0; c < shape.dim_k; c++) head.k.mean.push_back(k(random, 0, c));
        }
        data_k_ = k;
        data_v_ = v;
        fill_page_ = [this, plain_recipe](int head, int page_index, std::byte* page) {
            std::vector<bf16> keys, values;
            rows_of(data_k_, shape_.dim_k, page_index, layer.format.tokens, keys);
            rows_of(data_v_, shape_.dim_v, page_index, layer.format.tokens, values);
            std::vector<float> norms(layer.format.tokens);
            add_key_energy(tables[head].k, keys, norms);
            for (float& x : norms) x = 1.5f * std::sqrt(x);
            encode_page(plain_recipe, layer.format, tables[head], keys, values, page, 0, nullptr, norms.data());
        };
    }

    // Queries of 15 bits, or of 8 bits by as many parts as `parts` and the planes of K allow.
    void set_queries(int bits, int parts) {
        maps.query_bits = bits;
        for (AttentionMaps::Head& head : maps.heads) {
            head.parts.clear();
            for (int i = 1; i < parts && 64 * i < layer.format.k.planes; i++) head.parts.push_back(64 * i);
            head.parts.push_back(layer.format.k.planes);
        }
    }

    void set_data(Data k, Data v) { data_k_ = std::move(k), data_v_ = std::move(v); }

    uint32_t add_sequence(int tokens) {
        sequences_.push_back(Sequence{});
        Sequence& s = sequences_.back();
        s.n_blocks = (tokens + kPageTokens - 1) / kPageTokens;
        const size_t coded = layer.format.bytes(), exact = exact_format().bytes();
        s.page_tokens = layer.format.tokens;
        s.n_pages = (tokens + s.page_tokens - 1) / s.page_tokens;
        s.coded.resize(s.n_pages * shape_.n_head_kv * coded);
        s.exact.resize(s.n_blocks * shape_.n_head_kv * exact);
        s.coded_sizes.resize(size_t(s.n_pages) * shape_.n_head_kv * s.page_tokens);
        s.exact_sizes.resize(size_t(s.n_blocks) * shape_.n_head_kv * kPageTokens);
        s.coded_keys.resize(s.coded_sizes.size() * shape_.dim_k);
        s.exact_keys.resize(s.exact_sizes.size() * shape_.dim_k);
        for (int b = 0; b < s.n_blocks; b++) {
            for (int h = 0; h < shape_.n_head_kv; h++) {
                const size_t page = s.place(b) * shape_.n_head_kv + h, token = size_t(h * s.n_blocks + b) * kPageTokens;
                if (b < s.n_pages) {
                    const size_t coded_page = s.place_of_page(b) * shape_.n_head_kv + h;
                    fill_page_(h, b, &s.coded[coded_page * coded]);
                    const size_t first = size_t(h * s.n_pages + b) * s.page_tokens;
                    measure(layer.format, h, &s.coded[coded_page * coded], &s.coded_sizes[first],
                            &s.coded_keys[first * shape_.dim_k]);
                }
                fill_rows(&s.exact[page * exact], data_k_, data_v_, b);
                measure(exact_format(), h, &s.exact[page * exact], &s.exact_sizes[token],
                        &s.exact_keys[token * shape_.dim_k]);
            }
        }
        return uint32_t(sequences_.size() - 1);
    }

    // Changes one exact value or key of every head.
    void set_exact_value(uint32_t sequence, int token, int channel, float value) {
        set_exact(sequence, token, channel, value, false);
    }
    void set_exact_key(uint32_t sequence, int token, int channel, float value) {
        set_exact(sequence, token, channel, value, true);
    }

    void make_queries(int tokens, float scale = 1.0f) { q = normals(random, size_t(tokens) * q_stride(), scale); }
    float* query(int token, int head) { return q.data() + token * q_stride() + size_t(head) * shape_.dim_k; }

    struct Result {
        std::vector<float> out;
        std::vector<float> budget;  // [token][head], by reference() only
    };

    // Blocks that no row needs are absent from the tables.
    Result run(Isa isa, const std::vector<QueryRow>& rows, int sink, int n_threads = 1,
               AttentionWork* work = nullptr) const {
        AttentionWork own;
        AttentionWork& shared = work ? *work : own;
        const AttentionPlan plan(rows, sink);
        const Views views = views_of(rows, sink);
        Result result{std::vector<float>(n_tokens() * out_stride(), kUnwritten), {}};
        if (!work) shared.prepare(plan, shape_.n_head, shape_.n_head_kv, layer.format, n_threads);
        std::vector<std::thread> threads;
        for (int t = 0; t < n_threads; t++) {
            threads.emplace_back(
                [&, t] { attend(isa, with_tables(), plan, views.views, io(result.out), shared, t, n_threads); });
        }
        for (std::thread& thread : threads) thread.join();
        return result;
    }

    // The same by another backend: attend(layer, rows, sink, views, io).
    template <class Attend>
    Result run_by(Attend attend, const std::vector<QueryRow>& rows, int sink) const {
        const Views views = views_of(rows, sink);
        Result result{std::vector<float>(n_tokens() * out_stride(), kUnwritten), {}};
        attend(with_tables(), rows, sink, views.views, io(result.out));
        return result;
    }

    // The budget of an output is six standard deviations of what its roundings do to it, with V the largest element of
    // the values that it sees:
    //   float sums       1e-5 V, and for logits 16 roundings of |q| |k|, which reach the output twice
    //   logits of codes  the map's BF16 entries, of |q| |k|, and half a unit of the int8 (15-bit) query, of a plane's part; these
    //                    differ from token to token, so they reach the output by the root of the sum of squared weights
    //   weights          half a 127th of a page's largest a token, times the largest centred value of a code
    //   BF16 map of the values
    //   exact tokens     queries and weights as two BF16 parts, 2^-17 (amx; the other levels have all 24 bits)
    // With grouped_kernels, for formats whose parameters belong to groups:
    //   logits of codes  FP16 query and its products with scales, 2^-11 of |q| |k|, and 2^-18 of the query and the token's gain where scales
    //                    are small
    //   weights          as above
    // With bf16_products: a BF16 query and key instead, and BF16 weights and values.
    Result reference(const std::vector<QueryRow>& rows, int sink) const {
        const AttentionPlan plan(rows, sink);
        const Views views = views_of(rows, sink);
        Result result{std::vector<float>(n_tokens() * out_stride(), kUnwritten),
                      std::vector<float>(n_tokens() * shape_.n_head)};
        attend_reference(with_tables(), plan, views.views, io(result.out));
        for (const QueryRow& row : rows) {
            for (int h = 0; h < shape_.n_head; h++) {
                result.budget[row.token * shape_.n_head + h] = float(budget(row, sink, h));
            }
        }
        return result;
    }

    void expect_near(const Result& got, const Result& want, const std::string& what) const {
        double worst = 0;
        size_t at = 0;
        for (size_t i = 0; i < want.out.size(); i++) {
            const size_t token = i / out_stride(), head = i % out_stride() / shape_.dim_v;
            const double budget = want.budget[token * shape_.n_head + head];
            double error = std::abs(double(got.out[i]) - want.out[i]) / budget;
            if (got.out[i] == want.out[i] || (std::isnan(got.out[i]) && std::isnan(want.out[i]))) error = 0;
            if (error > worst || std::isnan(error)) worst = std::isnan(error) ? INFINITY : error, at = i;
        }
        EXPECT_LE(worst, 1.0) << what << ": element " << at << " is " << got.out[at] << ", not " << want.out[at];
        worst_ = std::max(worst_, worst);
    }

    double worst() const { return worst_; }
    size_t n_tokens() const { return q.size() / q_stride(); }
    size_t q_stride() const { return size_t(shape_.n_head) * shape_.dim_k; }
    size_t out_stride() const { return size_t(shape_.n_head) * shape_.dim_v; }
    static constexpr float kUnwritten = 12345.0f;

    std::vector<float> q;

  private:
    // How large the terms of a token's dot products are: the length of the key, the largest element of the value. Parts
    // (codes, zero, mean) count one by one, since they are what is added up. Of codes also the scales, and the largest
    // element of a value at scale 1.
    struct Size {
        double key = 0, value = 0;
        double scale_k = 0, scale_v = 0, unit_v = 0;
    };

    struct Sequence {
        int n_blocks = 0, n_pages = 0, page_tokens = kPageTokens;  // exact blocks, coded pages
        std::vector<std::byte> coded, exact;
        std::vector<Size> coded_sizes, exact_sizes;                  // [head][token]
        std::vector<float> coded_keys, exact_keys;                   // [head][token][dim_k]
        int place(int block) const { return n_blocks - 1 - block; }  // the pool's order is not the sequence's
        int place_of_page(int page) const { return n_pages - 1 - page; }
    };

    struct Views {
        std::vector<std::vector<uint32_t>> ids;
        std::vector<SequenceView> views;
    };

    PageFormat exact_format() const { return bf16_format(shape_.dim_k, shape_.dim_v); }

    void set_layer(const PageFormat& format) {
        maps = attention_maps(tables);
        layer.n_head = shape_.n_head;
        layer.n_head_kv = shape_.n_head_kv;
        layer.format = format;
        layer.scale = 1.0f / std::sqrt(float(shape_.dim_k));
    }

    AttentionLayer with_tables() const {
        AttentionLayer with = layer;
        if (layer.format.coded()) with.tables = tables, with.maps = &maps;
        return with;
    }

    AttentionIo io(std::vector<float>& out) const {
        return {q.data(), q_stride(), size_t(shape_.dim_k), out.data(), out_stride()};
    }

    void rows_of(const Data& data, int dim, int page, int tokens, std::vector<bf16>& rows) {
        rows.resize(size_t(tokens) * dim);
        for (int t = 0; t < tokens; t++) {
            for (int c = 0; c < dim; c++) rows[t * dim + c] = to_bf16(data(random, page * tokens + t, c));
        }
    }

    void fill_rows(std::byte* page, const Data& k, const Data& v, int block) {
        std::vector<bf16> keys, values;
        rows_of(k, shape_.dim_k, block, kPageTokens, keys);
        rows_of(v, shape_.dim_v, block, kPageTokens, values);
        for (int t = 0; t < kPageTokens; t++) {
            set_key(exact_format(), page, t, std::span(keys).subspan(t * shape_.dim_k, shape_.dim_k));
            set_value(exact_format(), page, t, std::span(values).subspan(t * shape_.dim_v, shape_.dim_v));
        }
    }

    void set_exact(uint32_t sequence, int token, int channel, float x, bool key) {
        Sequence& s = sequences_[sequence];
        const PageFormat format = exact_format();
        for (int h = 0; h < shape_.n_head_kv; h++) {
            std::byte* page = s.exact.data() + (s.place(token / kPageTokens) * shape_.n_head_kv + h) * format.bytes();
            const int t = token % kPageTokens, dim = key ? format.k.dim : format.v.dim;
            std::vector<bf16> row(dim);
            for (int c = 0; c < dim; c++) row[c] = key ? key_at(format, page, t, c) : value_at(format, page, t, c);
            row[channel] = to_bf16(x);
            key ? set_key(format, page, t, row) : set_value(format, page, t, row);
        }
    }

    static bool is_coded(const QueryRow& row, int sink, int j) { return j >= sink && j < row.coded_end; }

    Views views_of(const std::vector<QueryRow>& rows, int sink) const {
        Views views;
        for (const Sequence& s : sequences_) {
            for (int kind = 0; kind < 2; kind++) views.ids.emplace_back(s.n_blocks, kNoBlock);
        }
        for (const QueryRow& row : rows) {
            const Sequence& s = sequences_[row.sequence];
            for (int j = row.begin; j < row.end; j++) {
                const bool coded = is_coded(row, sink, j);
                const int block = j / (coded ? s.page_tokens : kPageTokens);
                views.ids[2 * row.sequence + !coded][block] = uint32_t(coded ? s.place_of_page(block) : s.place(block));
            }
        }
        for (size_t i = 0; i < sequences_.size(); i++) {
            const Sequence& s = sequences_[i];
            const size_t heads = shape_.n_head_kv;
            views.views.push_back({{s.coded.data(), heads * layer.format.bytes(), views.ids[2 * i]},
                                   {s.exact.data(), heads * exact_format().bytes(), views.ids[2 * i + 1]}});
        }
        return views;
    }

    void measure(const PageFormat& format, int head, const std::byte* page, Size* sizes, float* keys) const {
        std::vector<float> k(size_t(format.tokens) * shape_.dim_k), v(size_t(format.tokens) * shape_.dim_v);
        decode_keys(format, tables[head].k, page, k);
        decode_values(format, tables[head].v, page, v);
        std::copy(k.begin(), k.end(), keys);
        if (format.coded() && !format.planar()) return measure_groups(format, head, page, k, v, sizes);
        const auto page_mean = [&](const SideFormat& side, const SideTables& t, size_t at, int c) {
            return side.mean ? double(int8_t(page[at + c])) * t.mean_step[c] : 0.0;
        };
        for (int t = 0; t < format.tokens; t++) {
            TokenInfo info_k{}, info_v{};
            if (format.coded() && format.planar()) {
                info_k = key_info_at(format, tables[head].k, page, t);
                info_v = value_info_at(format, tables[head].v, page, t);
            }
            sizes[t].scale_k = info_k.scale, sizes[t].scale_v = info_v.scale;
            double length = 0;
            for (int c = 0; c < shape_.dim_k; c++) {
                const Parts x = parts(format, tables[head].k, info_k.zero, k[t * shape_.dim_k + c], c,
                                      page_mean(format.k, tables[head].k, format.key_mean(), c));
                length += x.sum * x.sum;
            }
            sizes[t].key = std::sqrt(length);
            for (int c = 0; c < shape_.dim_v; c++) {
                const Parts x = parts(format, tables[head].v, info_v.zero, v[t * shape_.dim_v + c], c,
                                      page_mean(format.v, tables[head].v, format.value_mean(), c));
                sizes[t].value = std::max(sizes[t].value, x.sum);
                if (info_v.scale > 0) sizes[t].unit_v = std::max(sizes[t].unit_v, x.codes / info_v.scale);
            }
        }
    }

    // The same page without zeros says what codes are.
    void measure_groups(const PageFormat& format, int head, const std::byte* page, const std::vector<float>& k, const std::vector<float>& v,
                        Size* sizes) const {
        std::vector<std::byte> bare(page, page + format.bytes());
        const InfoLayout at_k = info_layout(format.k, format.tokens), at_v = info_layout(format.v, format.tokens);
        const auto clear = [&](size_t info, const InfoLayout& at) {
            std::memset(&bare[info + at.zero], 0, at.token_gain - at.zero);
        };
        clear(format.key_info(), at_k), clear(format.value_info(), at_v);
        std::vector<float> codes_k(k.size()), codes_v(v.size());
        decode_keys(format, tables[head].k, bare.data(), codes_k);
        decode_values(format, tables[head].v, bare.data(), codes_v);
        const auto half = [&](size_t at) {
            fp16 x;
            std::memcpy(&x, page + at, 2);
            return double(to_float(x));
        };
        const size_t groups = (at_v.zero - at_v.scale) / 2 / size_t(format.tokens);
        for (int t = 0; t < format.tokens; t++) {
            Size& size = sizes[t];
            double length = 0, codes = 0;
            for (int c = 0; c < shape_.dim_k; c++) {
                const size_t i = size_t(t) * shape_.dim_k + c;
                const double mean = tables[head].k.mean.empty() ? 0 : tables[head].k.mean[c];
                length += std::pow(std::abs(codes_k[i] - mean) + std::abs(k[i] - codes_k[i]) + std::abs(mean), 2);
            }
            size.key = std::sqrt(length);
            size.scale_k = format.k.token_gain ? half(format.key_info() + at_k.token_gain + 2 * size_t(t)) : 1;
            for (size_t g = 0; g < groups; g++) {
                size.scale_v = std::max(size.scale_v, half(format.value_info() + at_v.scale + 2 * (g * size_t(format.tokens) + size_t(t))));
            }
            for (int c = 0; c < shape_.dim_v; c++) {
                const size_t i = size_t(t) * shape_.dim_v + c;
                const double mean = tables[head].v.mean.empty() ? 0 : tables[head].v.mean[c];
                codes = std::max(codes, std::abs(codes_v[i] - mean));
                size.value = std::max(size.value, std::abs(codes_v[i] - mean) + std::abs(v[i] - codes_v[i]) + std::abs(mean));
            }
            if (size.scale_v > 0) size.unit_v = codes / size.scale_v;
        }
    }

    struct Parts {
        double codes, sum;
    };
    static Parts parts(const PageFormat& format, const SideTables& tables, double zero, double x, int c,
                       double page_mean) {
        const double mean = format.coded() && !tables.mean.empty() ? tables.mean[c] : 0;
        const double ones = format.coded() && !tables.ones.empty() ? zero * tables.ones[c] : 0;
        const double codes = std::abs(x - mean - ones - page_mean);
        return {codes, codes + std::abs(mean) + std::abs(ones) + std::abs(page_mean)};
    }

    // The root of the sum over planes of squared units of the query, of 8 bits by parts of its planes, or of 10 or 15 bits.
    double query_units(const float* x, int kv_head) const {
        const SideTables& k = tables[kv_head].k;
        const std::vector<int> all = {k.format.planes}, &ends = maps.query_bits == 8 ? maps.heads[kv_head].parts : all;
        double squares = 0;
        int first = 0;
        for (const int end : ends) {
            double most = 0;
            for (int p = first; p < end; p++) {
                double sum = 0;
                for (int c = 0; c < shape_.dim_k; c++) sum += double(x[c]) * k.decode[size_t(p) * shape_.dim_k + c];
                most = std::max(most, std::abs(sum));
            }
            squares += (end - first) * std::pow(most / (maps.query_bits > 10 ? 127 * 128 : maps.query_bits > 8 ? 509 : 127), 2);
            first = end;
        }
        return std::sqrt(squares);
    }

    double budget(const QueryRow& row, int sink, int head) const {
        const int kv_head = head / (shape_.n_head / shape_.n_head_kv);
        const HeadTables& t = tables[kv_head];
        const Sequence& s = sequences_[row.sequence];
        const float* x = q.data() + row.token * q_stride() + size_t(head) * shape_.dim_k;
        double length = 0;
        for (int c = 0; c < shape_.dim_k; c++) length += double(x[c]) * x[c];
        length = std::sqrt(length) * layer.scale;
        const bool planar = layer.format.coded() && layer.format.planar();
        const bool coded_layer = planar || (layer.format.coded() && grouped_kernels);  // the decoded path is all floats
        const double units = planar ? query_units(x, kv_head) * layer.scale : 0;
        const double slope = layer.alibi_max_bias > 0 ? alibi_slope(layer.alibi_max_bias, layer.n_head, head) : 0.0;
        const double half = 1 / std::sqrt(12.0), bf16_error = 0x1p-9 / std::sqrt(3.0),
                     pair_error = 0x1p-17 / std::sqrt(3.0);  // standard deviations

        std::vector<double> logits, errors, steps;
        std::vector<bool> is_exact;
        double value = 0, key = 0, scale_v = 0;
        for (int j = row.begin; j < row.end; j++) {
            const bool coded = is_coded(row, sink, j);
            const size_t tokens = coded ? size_t(s.n_pages) * s.page_tokens : size_t(s.n_blocks) * kPageTokens;
            const size_t at = size_t(kv_head) * tokens + j;
            const Size& size = coded ? s.coded_sizes[at] : s.exact_sizes[at];
            const float* k = (coded ? s.coded_keys : s.exact_keys).data() + at * shape_.dim_k;
            double logit = 0, squares = 0;
            for (int c = 0; c < shape_.dim_k; c++) {
                const double term = double(x[c]) * k[c] * layer.scale;
                logit += term, squares += term * term;
            }
            if (layer.softcap > 0) logit = layer.softcap * std::tanh(logit / layer.softcap);
            logits.push_back(logit - slope * std::abs(row.position - j));
            const bool codes = coded && coded_layer;
            const double rounded = planar ? units : std::sqrt(double(layer.format.k.planes)) * 0x1p-18 * length;
            const double digits = 1.5 * half * rounded * size.scale_k;
            errors.push_back(bf16_products ? 2 * bf16_error * std::sqrt(squares)
                             : codes       ? std::hypot(digits, (planar ? 1.0 : 0.25) * bf16_error * length * size.key)
                             : coded       ? 0
                                           : pair_error * std::sqrt(squares));
            is_exact.push_back(!coded);
            steps.push_back(codes && !bf16_products ? size.scale_v * size.unit_v : 0);
            value = std::max(value, size.value), key = std::max(key, size.key);
            scale_v = std::max(scale_v, size.scale_v);
        }
        if (logits.empty()) return 0;
        double top = *std::max_element(logits.begin(), logits.end()), sum = 0;
        if (layer.sinks) top = std::max(top, double(layer.sinks[head]));
        if (layer.sinks) sum = std::exp(layer.sinks[head] - top);
        for (const double logit : logits) sum += std::exp(logit - top);

        double logit_error = 0, weight_error = 0, most = 0, step = 0;
        for (size_t i = 0; i < logits.size(); i++) {
            const double p = std::exp(logits[i] - top) / sum;
            logit_error += std::pow(p * errors[i], 2);
            if (bf16_products) weight_error += 2 * std::pow(p * value * bf16_error, 2);
            if (is_exact[i]) weight_error += std::pow(p * value * pair_error, 2);
            if (const double scale = scale_of(row, kv_head, i); steps[i] > 0) {
                most = std::max(most, p * scale);
                step = std::max(step, steps[i] / scale);
            }
            if ((row.begin + int(i)) % kPageTokens == kPageTokens - 1 || i + 1 == logits.size()) {
                weight_error += kPageTokens * std::pow(most / 127 * half * step, 2);
                most = step = 0;
            }
        }
        double map = 0;
        for (int c = 0; coded_layer && c < shape_.dim_v; c++) {
            double squares = 0;
            for (int p = 0; p < layer.format.v.planes; p++) {
                squares += std::pow(t.v.decode[size_t(p) * shape_.dim_v + c], 2);
            }
            map = std::max(map, 1.5 * scale_v * std::sqrt(squares));
        }
        const double random = std::hypot(2 * value * std::sqrt(logit_error), std::sqrt(weight_error), bf16_error * map);
        // BF16 tiles of groups are made in quarters of FP16, which end at 2^-24.
        const double least = bf16_products && layer.format.coded() && !planar ? 0x1p-20 : 0;
        return std::min(value * (1e-5 + 2 * 16 * 0x1p-24 * length * key) + 6 * random, 2 * value) + least;
    }

    double scale_of(const QueryRow& row, int kv_head, size_t i) const {
        const Sequence& s = sequences_[row.sequence];
        return s.coded_sizes[size_t(kv_head) * s.n_pages * s.page_tokens + row.begin + i].scale_v;
    }

    Shape shape_;
    Data data_k_ = plain, data_v_ = plain;
    std::function<void(int head, int block, std::byte* page)> fill_page_;
    std::vector<Sequence> sequences_;
    mutable double worst_ = 0;
};

// Rows for the `n` last tokens of a sequence of `length`, by the position rule.
inline void add_rows(std::vector<QueryRow>& rows, uint32_t sequence, int length, int n, int recent = 256,
                     int window = 0) {
    for (int t = length - n; t < length; t++) {
        const int begin = window > 0 ? std::max(0, t + 1 - window) : 0;
        const int coded_end = kPageTokens * (std::max(0, t + 1 - recent) / kPageTokens);
        rows.push_back({sequence, uint32_t(rows.size()), t, begin, coded_end, t + 1});
    }
}

inline std::vector<Isa> supported_isas() {
    std::vector<Isa> isas;
    for (const Isa isa : kIsas) {
        if (supported(isa)) isas.push_back(isa);
    }
    return isas;
}

}  // namespace crumb::test
