// The cache as one would explain it to a friend: tokens with their rows, which of them are lost, and a page a block.
// Slow, without pools, extents or sharing. Tests run a Cache beside it and compare everything that attention can read.
#pragma once

#include <crumb/artefact.h>
#include <crumb/cache.h>
#include <crumb/error.h>

#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "planes_cases.h"

namespace crumb::test {

using Token = uint32_t;  // its K and V rows are a function of this number

enum class Side : uint32_t { k, v };

inline float element(Token token, int layer, Side side, int head, int channel) {
    uint32_t x =
        token * 2654435761u ^ uint32_t(layer * 8 + head) * 40503u ^ uint32_t(side) * 97u ^ uint32_t(channel) * 69069u;
    x = (x ^ (x >> 15)) * 2246822519u;
    x = (x ^ (x >> 13)) * 3266489917u;
    return float(int32_t(x ^ (x >> 16))) * 0x1p-30f;
}

inline std::vector<float> row(Token token, int layer, Side side, int head, int dim) {
    std::vector<float> x(dim);
    for (int i = 0; i < dim; i++) {
        x[i] = element(token, layer, side, head, i);
    }
    return x;
}

struct Scenario {
    std::string recipe = "had2";
    int sink = 64, recent = 256;
    int window = 0;
    SlidingForm form = SlidingForm::bf16;
    PrefillRule prefill = PrefillRule::position;
    int n_sequences = 3;
    int tokens = 700;
    int tokens_total = 0;  // 0: room for all sequences
    int step = 150;
    ReuseRule reuse = ReuseRule::exact;
    int spare_windows = 0;
    size_t host_memory = 0;  // more than 0: layers lie in the memory of a device, and so much of their pages in main memory
};

// Two coded layers of different shape, one that stores nothing, and a sliding-window layer if there is a window.
inline CacheConfig config_of(const Scenario& scenario) {
    CacheConfig config;
    config.recipe = find_recipe(scenario.recipe);
    config.layers = {
        {.n_head_kv = 2, .dim_k = 32, .dim_v = 32}, {.stores = false}, {.n_head_kv = 1, .dim_k = 64, .dim_v = 32}};
    if (scenario.window > 0) {
        config.layers.insert(config.layers.begin() + 1,
                             {.n_head_kv = 1, .dim_k = 32, .dim_v = 48, .window = scenario.window, .form = scenario.form});
    }
    // Formats of `planes` differ by layer and side.
    Artefact artefact;
    for (size_t i = 0; i < config.layers.size() && config.recipe.budgeted(); i++) {
        const CacheLayer& l = config.layers[i];
        artefact.layers[int(i)].k_planes = side_with(l.n_head_kv, l.dim_k, 0.1, 0.9 - 0.02 * double(i), i > 0);
        artefact.layers[int(i)].v_planes = side_with(l.n_head_kv, l.dim_v, 0.1, 0.99, i == 0);
    }
    set_formats(config, &artefact);
    set_tables(config, &artefact);
    config.sink = scenario.sink;
    config.recent = scenario.recent;
    config.prefill = scenario.prefill;
    config.n_sequences = scenario.n_sequences;
    config.tokens_per_sequence = scenario.tokens;
    config.tokens_total = scenario.tokens_total > 0 ? scenario.tokens_total : scenario.tokens * scenario.n_sequences;
    config.max_step_tokens = scenario.step;
    config.reuse = scenario.reuse;
    config.spare_windows = scenario.spare_windows;
    config.host_memory = scenario.host_memory;
    config.artefact_hash = "none";
    config.model_hash = "0123456789abcdef";
    return config;
}

struct StepToken {
    uint32_t sequence;
    Token token;
};

inline std::vector<Append> appends_of(const std::vector<StepToken>& tokens) {
    std::vector<Append> appends;
    for (const StepToken& t : tokens) {
        appends.push_back({t.sequence, uint32_t(appends.size()), true, int32_t(t.token)});
    }
    return appends;
}

// What one thread of an engine does between begin() and attention in a layer.
inline void store_part(Cache& cache, int layer, const std::vector<StepToken>& tokens, int thread, int n_threads) {
    const CacheLayer& l = cache.config().layers[layer];
    std::vector<float> k, v;
    for (const StepToken& t : tokens) {
        for (int head = 0; head < l.n_head_kv; head++) {
            const auto kk = row(t.token, layer, Side::k, head, l.dim_k),
                       vv = row(t.token, layer, Side::v, head, l.dim_v);
            k.insert(k.end(), kk.begin(), kk.end());
            v.insert(v.end(), vv.begin(), vv.end());
        }
    }
    cache.store(layer, {k.data(), size_t(l.n_head_kv * l.dim_k), size_t(l.dim_k)},
                {v.data(), size_t(l.n_head_kv * l.dim_v), size_t(l.dim_v)}, thread, n_threads);
}

inline void store_layer(Cache& cache, int layer, const std::vector<StepToken>& tokens, int n_threads = 1) {
    for (int thread = n_threads; thread-- > 0;) {
        store_part(cache, layer, tokens, thread, n_threads);
    }
}

inline bool step(Cache& cache, const std::vector<StepToken>& tokens, int n_threads = 1) {
    if (!cache.begin(appends_of(tokens))) {
        return false;
    }
    for (size_t layer = 0; layer < cache.config().layers.size(); layer++) {
        if (cache.config().layers[layer].stores) {
            store_layer(cache, int(layer), tokens, n_threads);
        }
    }
    return true;
}

inline std::vector<StepToken> run_of(uint32_t sequence, Token first, int count) {
    std::vector<StepToken> tokens;
    for (int i = 0; i < count; i++) {
        tokens.push_back({sequence, first + Token(i)});
    }
    return tokens;
}

// What the Error that `action` throws says; empty if it throws none.
inline std::string message_of(auto&& action) {
    try {
        action();
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

inline bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

using Bytes = std::vector<std::byte>;

inline Bytes save(const Cache& cache, uint32_t sequence, bool windows_only = false) {
    Bytes bytes;
    cache.save(
        sequence,
        [&](const void* data, size_t n) {
            const auto* first = static_cast<const std::byte*>(data);
            bytes.insert(bytes.end(), first, first + n);
        },
        windows_only);
    return bytes;
}

inline void restore(Cache& cache, uint32_t sequence, const Bytes& bytes, bool windows_only = false) {
    size_t at = 0;
    cache.restore(
        sequence,
        [&](void* data, size_t n) {
            if (n > bytes.size() - at) {
                throw std::runtime_error("end of the state");
            }
            std::memcpy(data, bytes.data() + at, n);
            at += n;
        },
        windows_only);
    if (at != bytes.size()) {
        throw std::runtime_error("the state is longer than what was read");
    }
}

// Pages of so many tokens, by layer and head. Not complete: kept only for the codes of lost tokens; to be encoded again.
struct ModelBlock {
    std::vector<std::vector<Bytes>> pages;
    bool complete = true;
    bool operator==(const ModelBlock&) const = default;
};

struct ModelSequence {
    std::vector<Token> tokens;
    std::vector<bool> lost;  // its BF16 row is gone; only codes are left
    std::map<int, ModelBlock> blocks;
    int window_first = 0;   // sliding-window layers hold tokens from here on
    int length_before = 0;  // at the start of the last step
    std::map<int, ModelBlock> blocks_before;

    int length() const { return int(tokens.size()); }
};

class Model {
  public:
    explicit Model(const CacheConfig& config) : config_(config), sequences(config.n_sequences) {
        for (const CacheLayer& l : config.layers) {
            if (l.windowed()) {
                window_ = std::max(window_, l.window);
            }
        }
    }

    // Blocks that no token from position `length` on can want as BF16, and that have their codes, are dropped.
    void trim(ModelSequence& s) const {
        const int edge = coded_edge(s.length(), config_.recent);
        const auto has_codes = [&](int b) {
            const auto page = s.blocks.find(64 * b / page_tokens());
            return page != s.blocks.end() && page->second.complete;
        };
        for (int b = sink_blocks(); 64 * (b + 1) <= edge && has_codes(b); b++) {
            std::fill_n(s.lost.begin() + 64 * b, 64, true);
        }
        constexpr int kSlack = 64;
        if (window_ > 0) {
            s.window_first = std::max(s.window_first, std::max(0, s.length() + 1 - window_ - kSlack) / 64 * 64);
        }
    }

    void begin() {
        for (ModelSequence& s : sequences) {
            trim(s);
            s.length_before = s.length();
            s.blocks_before = s.blocks;
        }
    }

    void append(uint32_t sequence, Token token) {
        sequences[sequence].tokens.push_back(token);
        sequences[sequence].lost.push_back(false);
    }

    // After all appends of a step.
    void encode_due() {
        for (ModelSequence& s : sequences) {
            const int edge = coded_edge(s.length() - 1, config_.recent);
            for (int b = config_.sink / page_tokens(); page_tokens() * b < edge; b++) {
                const auto old = s.blocks.find(b);
                if (old != s.blocks.end() && old->second.complete) {
                    continue;
                }
                s.blocks[b] = encode(s, b, old == s.blocks.end() ? nullptr : &old->second);
            }
        }
    }

    int lowest_crop(const ModelSequence& s) const { return s.window_first == 0 ? 0 : s.window_first + window_ - 1; }

    void crop(ModelSequence& s, int n) {
        if (n >= s.length()) {
            return;
        }
        const int old_edge = coded_edge(s.length(), config_.recent);
        if (n <= s.length_before) {
            s.blocks = s.blocks_before;
        }
        s.tokens.resize(n);
        s.lost.resize(n);
        const int rest = n / page_tokens();
        std::erase_if(s.blocks, [&](const auto& block) {
            return block.first > rest || (block.first == rest && !lost_in(s, rest));
        });
        if (s.blocks.contains(rest)) {
            s.blocks[rest].complete = false;
        }
        const int window_begin = std::max(coded_edge(n, config_.recent), config_.sink);
        aged += uint64_t(std::max(0, std::min(coded_end(s, n), old_edge) - window_begin));
        if (n == 0) {
            s.window_first = 0;
        }
        settle(s);
    }

    void settle(ModelSequence& s) const {
        s.length_before = s.length();
        s.blocks_before = s.blocks;
    }

    void fork(uint32_t from, uint32_t to, int n) {
        sequences[to] = sequences[from];
        settle(sequences[to]);
        crop(sequences[to], n);
    }

    // A sequence that begins with these tokens as if they had been computed just now; aged: without the rows of its window.
    void start(uint32_t sequence, const std::vector<Token>& tokens, bool aged) {
        ModelSequence& s = sequences[sequence];
        s = {};
        s.tokens = tokens;
        s.lost.resize(tokens.size());
        encode_due();
        if (aged) {
            for (int b = config_.sink / page_tokens(); b < s.length() / page_tokens(); b++) {
                if (!s.blocks.contains(b)) {
                    s.blocks[b] = encode(s, b, nullptr);
                }
            }
            for (int j = 64 * sink_blocks(); j < s.length(); j++) {
                s.lost[j] = true;
            }
            this->aged += uint64_t(s.length() - std::max(coded_edge(s.length(), config_.recent), config_.sink));
        }
        trim(s);
        settle(s);
    }

    // Whether the next token of the first n would find its window whole.
    bool whole_window(const ModelSequence& s, int n) const {
        for (int j = std::max(coded_edge(n, config_.recent), config_.sink); j < n; j++) {
            if (s.lost[j]) {
                return false;
            }
        }
        return true;
    }

    // Where codes end for a query whose rule sees `newest` as the last token.
    int coded_end(const ModelSequence& s, int newest) const {
        int end = coded_edge(newest, config_.recent);
        for (int j = end; j < s.length(); j++) {
            if (s.lost[j]) {
                end = j + 1;
            }
        }
        return end;
    }

    int sink_blocks() const { return (config_.sink + 63) / 64; }
    int window() const { return window_; }
    int page_tokens() const { return config_.recipe.page_tokens; }

    const CacheConfig& config_;
    std::vector<ModelSequence> sequences;
    uint64_t aged = 0;  // tokens that came back into the window of the next token, without their rows

  private:
    // Rows of a page up to the last lost one.
    int lost_in(const ModelSequence& s, int b) const {
        int n = 0;
        for (int j = page_tokens() * b; j < std::min(page_tokens() * (b + 1), s.length()); j++) {
            n = s.lost[j] ? j + 1 - page_tokens() * b : n;
        }
        return n;
    }

    // Lengths of a page's keys in all heads together.
    std::vector<float> layer_norms(const ModelSequence& s, int b, int layer) const {
        const CacheLayer& l = config_.layers[layer];
        std::vector<float> norms(page_tokens());
        for (int head = 0; head < l.n_head_kv && config_.recipe.coded(); head++) {
            std::vector<bf16> k;
            for (int j = page_tokens() * b; j < page_tokens() * (b + 1); j++) {
                for (float x : row(s.tokens[j], layer, Side::k, head, l.dim_k)) {
                    k.push_back(to_bf16(x));
                }
            }
            add_key_energy(config_.tables[layer][head].k, k, norms);
        }
        for (float& x : norms) {
            x = std::sqrt(x);
        }
        return norms;
    }

    ModelBlock encode(const ModelSequence& s, int b, const ModelBlock* kept) const {
        ModelBlock block;
        block.pages.resize(config_.layers.size());
        for (size_t layer = 0; layer < config_.layers.size(); layer++) {
            const CacheLayer& l = config_.layers[layer];
            if (!l.coded()) {
                continue;
            }
            const PageFormat format = config_.formats[layer];
            const std::vector<float> norms = layer_norms(s, b, int(layer));
            for (int head = 0; head < l.n_head_kv; head++) {
                std::vector<bf16> k, v;
                for (int j = page_tokens() * b; j < page_tokens() * (b + 1); j++) {
                    for (float x : row(s.tokens[j], int(layer), Side::k, head, l.dim_k)) {
                        k.push_back(to_bf16(x));
                    }
                    for (float x : row(s.tokens[j], int(layer), Side::v, head, l.dim_v)) {
                        v.push_back(to_bf16(x));
                    }
                }
                Bytes page(format.bytes());
                encode_page(config_.recipe, format, config_.tables[layer][head], k, v, page.data(), lost_in(s, b),
                            kept && lost_in(s, b) > 0 ? kept->pages[layer][head].data() : nullptr, norms.data());
                block.pages[layer].push_back(std::move(page));
            }
        }
        return block;
    }

    int window_ = 0;
};

// A page of which only the first `rows` tokens count, the others being zeros.
inline Bytes first_rows(const CacheConfig& config, int layer, int head, int rows, const std::byte* page) {
    const CacheLayer& l = config.layers[layer];
    const PageFormat format = config.formats[layer];
    if (rows == format.tokens) {
        return Bytes(page, page + format.bytes());
    }
    const std::vector<bf16> k(format.tokens * l.dim_k), v(format.tokens * l.dim_v);
    Bytes result(format.bytes());
    encode_page(config.recipe, format, config.tables[layer][head], k, v, result.data(), rows, page);
    return result;
}

// What the rows of a page of 8 bits say of tokens [first, last) of a sequence, all in one block, K then V.
inline std::vector<float> decoded_rows(const PageFormat& format, const HeadTables& tables, const std::byte* page, int first, int last) {
    std::vector<float> k(64 * format.k.dim), v(64 * format.v.dim);
    decode_keys(format, tables.k, page, k);
    decode_values(format, tables.v, page, v);
    std::vector<float> rows(k.begin() + first % 64 * format.k.dim, k.begin() + ((last - 1) % 64 + 1) * format.k.dim);
    rows.insert(rows.end(), v.begin() + first % 64 * format.v.dim, v.begin() + ((last - 1) % 64 + 1) * format.v.dim);
    return rows;
}

// The same of what is encoded here, a token at a time.
inline std::vector<float> rows_of_8_bits(const CacheConfig& config, const std::vector<Token>& tokens, int layer, int head, int first, int last) {
    const CacheLayer& l = config.layers[layer];
    const PageFormat format = page_format(find_recipe("q8:paper"), l.dim_k, l.dim_v);
    const HeadTables& tables = config.tables[layer][head];
    Bytes page(format.bytes());
    for (int j = first; j < last; j++) {
        std::vector<bf16> k, v;
        for (float x : row(tokens[j], layer, Side::k, head, l.dim_k)) {
            k.push_back(to_bf16(x));
        }
        for (float x : row(tokens[j], layer, Side::v, head, l.dim_v)) {
            v.push_back(to_bf16(x));
        }
        encode_rows(find_recipe("q8:paper"), format, tables, k, v, j % 64, page.data());
    }
    return decoded_rows(format, tables, page.data(), first, last);
}

// A query at `position` that sees tokens below `end`. Its rule counts tokens to `newest`: itself, or the first of its
// chunk.
struct Query {
    uint32_t sequence;
    int position, newest, end;
};

// What differs between what a query reads and what the model says, or nothing.
inline std::string difference(const Cache& cache, const Model& model, const Query& query) {
    const auto [sequence, position, newest, end] = query;
    const CacheConfig& config = cache.config();
    const ModelSequence& s = model.sequences[sequence];
    const int coded_end = model.coded_end(s, newest);
    for (size_t layer = 0; layer < config.layers.size(); layer++) {
        const CacheLayer& l = config.layers[layer];
        if (!l.stores) {
            continue;
        }
        const PageFormat exact = bf16_format(l.dim_k, l.dim_v);
        const SequenceView& view = cache.views(int(layer))[sequence];
        for (int j = l.window == 0 ? 0 : std::max(0, position + 1 - l.window); j < end; j++) {
            const auto where = [&, layer = layer](const char* what) {
                return fmt::format("sequence {} layer {} query {} token {} of {}: {}", query.sequence, layer,
                                   query.position, j, s.length(), what);
            };
            if (l.windowed() && l.has_codes()) {
                if (view.coded.ids[j / 64] == kNoBlock) {
                    return where("no block of 8 bits");
                }
                const int first = j, last = std::min(end, j / 64 * 64 + 64);
                for (int head = 0; head < l.n_head_kv; head++) {
                    const std::byte* page = view.coded.block(j / 64) + head * config.formats[layer].bytes();
                    if (decoded_rows(config.formats[layer], config.tables[layer][head], page, first, last) !=
                        rows_of_8_bits(config, s.tokens, int(layer), head, first, last)) {
                        return where("rows of 8 bits differ");
                    }
                }
                j = last - 1;
                continue;
            }
            const bool read_exact = l.windowed() || j < config.sink || j >= coded_end;
            const BlockTable& table = read_exact ? view.exact : view.coded;
            const int tokens = read_exact ? 64 : model.page_tokens();
            if (table.ids[j / tokens] == kNoBlock) {
                return where(read_exact ? "no exact block" : "no coded block");
            }
            for (int head = 0; head < l.n_head_kv; head++) {
                const std::byte* block = table.block(j / tokens);
                if (read_exact) {
                    const std::byte* page = block + head * exact.bytes();
                    const auto k = row(s.tokens[j], int(layer), Side::k, head, l.dim_k);
                    const auto v = row(s.tokens[j], int(layer), Side::v, head, l.dim_v);
                    for (int i = 0; i < l.dim_k; i++) {
                        if (key_at(exact, page, j % 64, i).bits != to_bf16(k[i]).bits) {
                            return where("exact key differs");
                        }
                    }
                    for (int i = 0; i < l.dim_v; i++) {
                        if (value_at(exact, page, j % 64, i).bits != to_bf16(v[i]).bits) {
                            return where("exact value differs");
                        }
                    }
                } else if (j % tokens == 0 || j == config.sink) {
                    const ModelBlock& expected = s.blocks.at(j / tokens);
                    const Bytes& page = expected.pages[layer][head];
                    const int rows = expected.complete ? tokens : std::min(tokens, coded_end - j / tokens * tokens);
                    if (first_rows(config, int(layer), head, rows, block + head * page.size()) !=
                        first_rows(config, int(layer), head, rows, page.data())) {
                        return where("page differs");
                    }
                }
            }
        }
    }
    return "";
}

}  // namespace crumb::test
