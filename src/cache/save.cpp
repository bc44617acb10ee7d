// One sequence as bytes.
//
//   magic, version of this layout, version of the page format
//   identity of configuration and model, as texts in a fixed order
//   extent (extent.h)                                                checksum
//   ids of the tokens, how many of them are clean (prefix.h)         checksum; not with the windows alone
//   a record a block: coded, then exact, then window blocks          its bytes in all layers, checksum
//
// Integers are little endian; a checksum is the XXH3-64 of all bytes before it. Which blocks follow is computed from
// the extent, so a state carries no tables and no sizes: what is read is bounded by this cache's own configuration,
// whatever the bytes say. What blocks still hold of tokens that were cropped away, or of other sequences, is not
// written.
#include <crumb/error.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <string>
#include <utility>

#include "cache/state.h"

namespace crumb {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr uint64_t kMagic = 0x514553424d555243;  // "CRUMBSEQ"
constexpr uint32_t kStateVersion = 2;
constexpr uint32_t kLongestText = 256;
constexpr int kMostLayers = 4096;

struct Property {
    std::string name, value;
};

// Sizes tell the pages of a model's layers apart.
std::string pages(const PageFormat& format) {
    return format.coded() ? fmt::format(", {} + {} planes, pages of {} bytes", format.k.planes, format.v.planes, format.bytes())
                          : "";
}

constexpr size_t kTextsBeforeLayers = 8;

// What must agree for a state to mean the same tokens here. The number of layers, then a text of each, come last.
std::vector<Property> identity(const CacheConfig& config, bool windows_only) {
    std::vector<Property> all{
        {"contents", windows_only ? "sliding windows" : "everything"},
        {"recipe", label(config.recipe)},
        {"artefact", config.artefact_hash},
        {"model", config.model_hash},
        {"--kv-prefill", config.prefill == PrefillRule::exact ? "exact" : "position"},
        {"--kv-sink", std::to_string(config.sink)},
        {"--kv-recent", std::to_string(config.recent)},
        {"number of layers", std::to_string(config.layers.size())},
    };
    CRUMB_ASSERT(all.size() == kTextsBeforeLayers && config.layers.size() <= kMostLayers);
    for (size_t i = 0; i < config.layers.size(); i++) {
        const CacheLayer& l = config.layers[i];
        all.push_back({fmt::format("layer {}", i), !l.stores ? "stores nothing"
                                                             : fmt::format("{} heads of {} + {}, window {}{}",
                                                                           l.n_head_kv, l.dim_k, l.dim_v, l.window,
                                                                           pages(config.formats[i]))});
    }
    return all;
}

class Checksum {
  public:
    Checksum() : state_(XXH3_createState()) { XXH3_64bits_reset(state_.get()); }
    void add(const void* data, size_t bytes) { XXH3_64bits_update(state_.get(), data, bytes); }
    uint64_t value() const { return XXH3_64bits_digest(state_.get()); }

  private:
    struct Free {
        void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
    };
    std::unique_ptr<XXH3_state_t, Free> state_;
};

class Writer {
  public:
    explicit Writer(const Cache::Write& write) : write_(write) {}
    void bytes(const void* data, size_t n) {
        write_(data, n);
        checksum_.add(data, n);
    }
    void number(auto x) { bytes(&x, sizeof x); }
    void text(std::string_view s) {
        number(uint32_t(s.size()));
        bytes(s.data(), s.size());
    }
    void checksum() { number(checksum_.value()); }

  private:
    const Cache::Write& write_;
    Checksum checksum_;
};

class Reader {
  public:
    explicit Reader(const Cache::Read& read) : read_(read) {}
    void bytes(void* data, size_t n) {
        read_(data, n);
        checksum_.add(data, n);
    }
    template <class T>
    T number() {
        T x{};
        bytes(&x, sizeof x);
        return x;
    }
    std::string text() {
        const auto size = number<uint32_t>();
        if (size > kLongestText) {
            fail("a saved sequence is damaged: a name of {} bytes in its header", size);
        }
        std::string s(size, '\0');
        bytes(s.data(), size);
        return s;
    }
    void checksum(std::string_view part) {
        const uint64_t expected = checksum_.value();
        if (number<uint64_t>() != expected) {
            fail("a saved sequence is damaged: wrong checksum of {}", part);
        }
    }

  private:
    const Cache::Read& read_;
    Checksum checksum_;
};

void write_header(Writer& out, const CacheConfig& config, bool windows_only, const Extent& e) {
    out.number(kMagic);
    out.number(kStateVersion);
    out.number(uint32_t(kPageFormatVersion));
    for (const Property& property : identity(config, windows_only)) {
        out.text(property.value);
    }
    for (const int32_t position : {e.length, e.coded_end, e.exact_begin, e.window_begin}) {
        out.number(position);
    }
    out.checksum();
}

// Values of identity(), of a cache of any number of layers.
std::vector<std::string> read_identity(Reader& in) {
    std::vector<std::string> values(kTextsBeforeLayers);
    for (std::string& value : values) {
        value = in.text();
    }
    int n_layers = -1;
    const std::string& digits = values.back();
    std::from_chars(digits.data(), digits.data() + digits.size(), n_layers);
    if (n_layers < 0 || n_layers > kMostLayers) {
        fail("a saved sequence is damaged: its header says '{}' layers", digits);
    }
    for (int i = 0; i < n_layers; i++) {
        values.push_back(in.text());
    }
    return values;
}

// Damage is called damage: but for magic and version nothing of a header is compared before its checksum is known to be right.
Extent read_header(Reader& in, const Cache::State& state, bool windows_only) {
    if (in.number<uint64_t>() != kMagic) {
        fail("this is not a saved sequence of crumb, or its first bytes are damaged");
    }
    const auto version = in.number<uint32_t>(), page = in.number<uint32_t>();
    if (version != kStateVersion || page != uint32_t(kPageFormatVersion)) {
        fail("the sequence was saved in format {}.{}, this build reads {}.{}: save it again with this build (or its "
             "first bytes are damaged)",
             version, page, kStateVersion, kPageFormatVersion);
    }
    const std::vector<std::string> found = read_identity(in);
    Extent e;
    for (int32_t* position : {&e.length, &e.coded_end, &e.exact_begin, &e.window_begin}) {
        *position = in.number<int32_t>();
    }
    in.checksum("the header");
    const std::vector<Property> here = identity(state.config, windows_only);
    for (size_t i = 0; i < here.size(); i++) {  // of layers only if there are as many
        if (found[i] != here[i].value) {
            fail("the sequence was saved with {} '{}', here it is '{}': start with the settings that it was saved with",
                 here[i].name, found[i], here[i].value);
        }
    }
    if (e.length > state.rules.longest) {
        fail("the saved sequence has {} tokens, a sequence here at most {}: use a larger context (-c)", e.length,
             state.rules.longest);
    }
    if (!state.rules.possible(e)) {
        fail("a saved sequence is damaged: no sequence has these positions");
    }
    return e;
}

// Salts mean something in one process only, so what was computed under one is nobody else's any more.
void write_tokens(Writer& out, const Prefix& prefix, int32_t length) {
    out.number(prefix.salt == uint64_t{0} ? std::min(prefix.clean, length) : 0);
    out.bytes(prefix.ids.data(), prefix.ids.size() * sizeof(int32_t));
    out.checksum();
}

Prefix read_tokens(Reader& in, int32_t length) {
    Prefix prefix;
    prefix.clean = in.number<int32_t>();
    if (prefix.clean < 0 || prefix.clean > length) {
        fail("a saved sequence is damaged: {} of its {} tokens are clean", prefix.clean, length);
    }
    prefix.ids.resize(length);
    in.bytes(prefix.ids.data(), prefix.ids.size() * sizeof(int32_t));
    in.checksum("the tokens");
    if (prefix.clean > 0) {
        prefix.salt = 0;
    }
    if (prefix.clean == length) {
        prefix.clean = kAllClean;
    }
    return prefix;
}

// The blocks of one table that a state holds, in order. What they say about tokens from `end` on is of no account.
struct Contents {
    Pool& pool;
    std::vector<uint32_t>& ids;
    int32_t end;
    int32_t tokens;  // of a block
    std::vector<int32_t> blocks;

    void add(BlockRange range) {
        for (int32_t b = range.begin; b < range.end; b++) {
            blocks.push_back(b);
        }
    }
};

std::vector<Contents> contents(Cache::State& state, Sequence& s, const Extent& e, bool windows_only) {
    Contents coded{state.coded, s.coded, std::max(e.coded_end, e.exact_begin), state.rules.page, {}};
    Contents exact{state.exact, s.exact, e.length, kPageTokens, {}};
    Contents window{state.window, s.window, e.length, kPageTokens, {}};
    if (!windows_only) {
        coded.add(state.rules.coded(e));
        exact.add(state.rules.sinks(e));
        exact.add(state.rules.exact(e));
    }
    window.add(state.rules.windows(e));
    return {std::move(coded), std::move(exact), std::move(window)};
}

// The part of a block that belongs to a layer, with zeros as the tokens from `rows` on.
std::vector<std::byte> first_rows(const Cache::State& state, const Pool& pool, int layer, uint32_t id, int rows) {
    const SlabShape& slab = pool.shape().slabs[layer];
    const PageFormat& format = slab.format;
    const std::vector<bf16> k(size_t(format.tokens * format.k.dim)), v(size_t(format.tokens * format.v.dim));
    std::vector<std::byte> whole(slab.stride());
    pool.read(layer, id, whole.data());
    std::vector<std::byte> block = whole;
    for (int head = 0; head < slab.n_head_kv; head++) {
        std::byte* page = block.data() + size_t(head) * format.bytes();
        if (format.coded() || &pool == &state.coded) {
            encode_page(recipe_of(state.config, state.config.layers[layer]), format, state.tables(layer, head), k, v, page, rows,
                        whole.data() + size_t(head) * format.bytes());
            continue;
        }
        for (int t = rows; t < kPageTokens; t++) {
            set_key(format, page, t, std::span(k).first(format.k.dim));
            set_value(format, page, t, std::span(v).first(format.v.dim));
        }
    }
    return block;
}

void write_block(Writer& out, const Cache::State& state, const Pool& pool, uint32_t id, int rows) {
    std::vector<std::byte> block;
    for (int layer = 0; layer < int(pool.shape().slabs.size()); layer++) {
        const size_t bytes = pool.shape().slabs[layer].stride();
        if (bytes == 0) {
            continue;
        }
        if (rows < pool.shape().slabs[layer].format.tokens) {
            out.bytes(first_rows(state, pool, layer, id, rows).data(), bytes);
        } else {
            block.resize(bytes);
            pool.read(layer, id, block.data());
            out.bytes(block.data(), bytes);
        }
    }
    out.checksum();
}

// Blocks on their way in. They land in free blocks, and on the heap when the sequence that they replace still has the
// room; what has landed is given back unless it is placed.
class Landing {
  public:
    explicit Landing(Contents contents) : contents_(std::move(contents)) {}
    ~Landing() {
        for (const uint32_t id : landed_) {
            contents_.pool.release(id);
        }
    }
    Landing(Landing&&) = default;

    size_t size() const { return contents_.blocks.size(); }

    void read(Reader& in) {
        Pool& pool = contents_.pool;
        landed_.reserve(size());
        for (size_t i = 0; i < size(); i++) {
            if (pool.available() > 0) {
                landed_.push_back(pool.take());
                for_each_part([&](int layer, size_t bytes) {
                    block_.resize(bytes);
                    in.bytes(block_.data(), bytes);
                    pool.write(layer, landed_.back(), block_.data());
                });
            } else {
                std::vector<std::byte>& block = waiting_.emplace_back(pool.shape().block_bytes());
                std::byte* at = block.data();
                for_each_part([&](int, size_t bytes) { in.bytes(std::exchange(at, at + bytes), bytes); });
            }
            in.checksum(fmt::format("{} block {}", pool.shape().name, contents_.blocks[i]));
        }
    }

    // The sequence holds nothing in these blocks any more.
    void place() {
        Pool& pool = contents_.pool;
        for (const std::vector<std::byte>& block : waiting_) {
            landed_.push_back(pool.take());
            const std::byte* at = block.data();
            for_each_part([&](int layer, size_t bytes) {
                pool.write(layer, landed_.back(), std::exchange(at, at + bytes));
            });
        }
        for (size_t i = 0; i < size(); i++) {
            contents_.ids[contents_.blocks[i]] = landed_[i];
        }
        landed_.clear();
    }

  private:
    void for_each_part(auto use) const {
        const std::vector<SlabShape>& slabs = contents_.pool.shape().slabs;
        for (int layer = 0; layer < int(slabs.size()); layer++) {
            if (slabs[layer].n_head_kv > 0) {
                use(layer, slabs[layer].stride());
            }
        }
    }

    Contents contents_;
    std::vector<uint32_t> landed_;
    std::vector<std::byte> block_;
    std::vector<std::vector<std::byte>> waiting_;
};

// Throws Error unless `n` blocks are there once the sequence has released the blocks of its table.
void require_room(const Pool& pool, size_t n, const std::vector<uint32_t>& ids) {
    const auto alone = [&](uint32_t id) { return id != kNoBlock && !pool.is_shared(id); };
    const size_t room = pool.available() + size_t(std::ranges::count_if(ids, alone));
    if (n > room) {
        fail(
            "the saved sequence needs {} {} blocks and {} are free: use a larger context (-c), or drop other sequences",
            n, pool.shape().name, room);
    }
}

}  // namespace

void Cache::save(uint32_t sequence, const Write& write, bool windows_only) const {
    State& state = *state_;
    Sequence& s = state.at(sequence);
    const Extent e = state.rules.trimmed(s.extent);
    Writer out(write);
    write_header(out, state.config, windows_only, e);
    if (!windows_only) {
        write_tokens(out, s.prefix, e.length);
    }
    for (const Contents& part : contents(state, s, e, windows_only)) {
        for (const int32_t b : part.blocks) {
            write_block(out, state, part.pool, part.ids[b], part.end - b * part.tokens);
        }
    }
}

std::vector<int32_t> Cache::saved_ids(const Read& read) const {
    Reader in(read);
    return read_tokens(in, read_header(in, *state_, false).length).ids;
}

void Cache::restore(uint32_t sequence, const Read& read, bool windows_only) {
    State& state = *state_;
    Sequence& s = state.at(sequence);
    Reader in(read);
    const Extent e = read_header(in, state, windows_only);
    if (windows_only && e.length > s.extent.length) {
        fail("the saved windows belong to {} tokens, but the sequence has only {}", e.length, s.extent.length);
    }
    Prefix prefix;
    if (!windows_only) {
        prefix = read_tokens(in, e.length);
    }
    std::vector<Landing> landings;
    for (Contents& part : contents(state, s, e, windows_only)) {
        require_room(part.pool, part.blocks.size(), part.ids);
        landings.emplace_back(std::move(part));
    }
    for (Landing& landing : landings) {
        landing.read(in);
    }

    // Nothing can fail from here on.
    if (windows_only) {
        state.crop(s, e.length);
        Extent without = s.extent;
        without.window_begin = int32_t(blocks_for(e.length)) * kPageTokens;
        state.reshape(s, without);
        s.extent.window_begin = e.window_begin;
    } else {
        state.crop(s, 0);
        s.extent = e;
        s.prefix = std::move(prefix);
    }
    for (Landing& landing : landings) {
        landing.place();
    }
    state.settle(s);
}

}  // namespace crumb
