// Who works on what. A task is a tile and a KV head, or one range of these where whole tiles would leave threads
// without work. A thread begins with its share of neighbouring tasks, and then takes what others have left of theirs.
// Whoever finishes the last range of a tile and head merges them in ascending order. Both ways run the same functions
// on the same ranges in the same order, so they give the same bits.
#include <crumb/attention.h>
#include <crumb/error.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "attention/alibi.h"
#include "attention/cpu/kernel.h"
#include "attention/decoded.h"

namespace crumb {

namespace {

using namespace cpu;

constexpr double kLargestTask = 1.0 / 3;                // of a thread's share of the work
constexpr size_t kMostPartials = 64 * 1024 * 1024 / 4;  // floats: many threads and many rows are not worth more memory

size_t partial_stride(const PageFormat& format) { return size_t(format.v.planes) + format.v.dim + kPartialScalars; }

// Whether tiles are split into ranges.
bool splits(const AttentionPlan& plan, int n_head, int n_head_kv, const PageFormat& format, int n_threads) {
    return n_threads > 1 && plan.largest_share() / n_head_kv * n_threads > kLargestTask &&
           size_t(plan.n_partials()) * n_head * partial_stride(format) <= kMostPartials;
}

struct alignas(64) Line {
    float x[16];
};

size_t lines(size_t floats) { return (floats + 15) / 16; }

// Memory that grows, in cache lines.
class Arena {
  public:
    void grow(size_t n) { lines_.resize(std::max(lines_.size(), n)); }
    float* data() { return lines_.data()->x; }
    size_t size() const { return lines_.size(); }

  private:
    std::vector<Line> lines_;
};

// Lays out the arrays for n query vectors. Returns how many lines they take, and takes none if `arena` is null.
size_t place(Scratch& scratch, Arena* arena, size_t n, const PageFormat& format) {
    const size_t rows = std::max(format.k.dim, format.v.dim) * sizeof(float),
                 digits = format.k.planes + format.v.planes;
    size_t used = 0;
    const auto take = [&](auto*& array, size_t count) {
        array = arena ? reinterpret_cast<std::remove_reference_t<decltype(array)>>(arena->data() + used * 16) : nullptr;
        used += lines((count * sizeof *array + sizeof(float) - 1) / sizeof(float));
        CRUMB_ASSERT(!arena || used <= arena->size());
    };
    take(scratch.q, n * format.k.dim);
    take(scratch.q_codes, n * format.k.planes);
    take(scratch.q_bytes, n * 2 * format.k.planes);
    take(scratch.q_unit, n * kMostQueryParts);
    take(scratch.q_offset, n);
    take(scratch.q_mean, n);
    take(scratch.q_ones, n);
    take(scratch.weights, n * kPageTokens);
    take(scratch.page, std::max(rows, digits) * kPageTokens / sizeof(float));
    take(scratch.page_sums, n * kMeanBlocks);
    take(scratch.page_means, size_t(format.v.dim) * kMeanBlocks);
    take(scratch.total, n * partial_stride(format));
    take(scratch.range, n * partial_stride(format));
    return used;
}

const std::array<float, 256>& gains() {
    static const std::array<float, 256> table = [] {
        std::array<float, 256> values;
        for (int code = 0; code < 256; code++) {
            values[code] = gain8_value(uint8_t(code));
        }
        return values;
    }();
    return table;
}

const float* data_or_null(const std::vector<float>& values) { return values.empty() ? nullptr : values.data(); }

Side coded_side(const SideFormat& format, const SideTables& tables, const std::vector<bf16>& map, size_t codes,
                size_t info, size_t mean) {
    return {.dim = format.dim,
            .planes = format.planes,
            .info = format.info,
            .page_mean = format.mean,
            .codes = codes,
            .scales = info,
            .mean_codes = mean,
            .map = map.empty() ? nullptr : &map.data()->bits,
            .ones = data_or_null(tables.ones),
            .mean = data_or_null(tables.mean),
            .mean_step = data_or_null(tables.mean_step),
            .gains = gains().data(),
            .gain_reference = tables.gain_reference};
}

Pages pages_of(const BlockTable& table, const PageFormat& format, int head) {
    return {.base = table.base + head * format.bytes(),
            .stride = table.stride,
            .bytes = format.bytes(),
            .ids = table.ids.data(),
            .n_ids = table.ids.size(),
            .k = {.dim = format.k.dim, .codes = format.key_codes()},
            .v = {.dim = format.v.dim, .codes = format.value_codes()}};
}

}  // namespace

// Tasks that one thread begins with; others help when they have none of their own.
struct alignas(64) Share {
    std::atomic<uint32_t> next = 0;
};

struct AttentionWork::State {
    std::vector<Arena> threads;
    std::vector<Share> shares;                    // [threads]
    Arena partials;                               // of split tiles: [tile][KV head][range][query vector]
    std::vector<std::atomic<uint32_t>> finished;  // ranges, [tile][KV head]; 0 again after the merge
    std::atomic<int> left = 0;                    // threads that found no more work
    std::atomic<uint32_t> decoded = 0;            // task of attend_decoded()
};

AttentionWork::AttentionWork() : state_(std::make_unique<State>()) {}
AttentionWork::~AttentionWork() = default;

void AttentionWork::prepare(const AttentionPlan& plan, int n_head, int n_head_kv, const PageFormat& format,
                            int max_threads) {
    CRUMB_ASSERT(max_threads > 0 && n_head_kv > 0 && n_head % n_head_kv == 0);
    CRUMB_ASSERT(std::max(format.k.dim, format.v.dim) <= kMaxDim && format.k.planes <= kMaxPlanes);
    State& s = *state_;
    size_t rows = 0;
    for (const AttentionTile& tile : plan.tiles()) {
        rows = std::max<size_t>(rows, tile.n_rows);
    }
    s.threads.resize(std::max(s.threads.size(), size_t(max_threads)));
    s.decoded = 0;  // of layers with decode_pages too
    if (!format.planar()) {
        s.left = 0;
        return;
    }
    Scratch layout;
    for (Arena& arena : s.threads) {
        arena.grow(place(layout, nullptr, rows * (n_head / n_head_kv), format));
    }
    if (splits(plan, n_head, n_head_kv, format, max_threads)) {
        s.partials.grow(lines(plan.n_partials() * n_head * partial_stride(format)));
    }
    // All 0 already, unless an engine gave the last step up between two threads.
    s.finished = std::vector<std::atomic<uint32_t>>(std::max(s.finished.size(), plan.tiles().size() * n_head_kv));
    s.shares = std::vector<Share>(s.threads.size());
    s.left = 0;
}

size_t AttentionWork::bytes() const {
    size_t bytes = state_->partials.size() * sizeof(Line) + state_->shares.size() * sizeof(Share) +
                   state_->finished.size() * sizeof(state_->finished[0]);
    for (const Arena& arena : state_->threads) {
        bytes += arena.size() * sizeof(Line);
    }
    return bytes;
}

namespace {

// A layer of a step, seen by one thread.
class Worker {
  public:
    Worker(const Kernel& kernel, const AttentionLayer& layer, const AttentionPlan& plan,
           std::span<const SequenceView> sequences, const AttentionIo& io, AttentionWork::State& work, int thread)
        : kernel_(kernel),
          layer_(layer),
          plan_(plan),
          sequences_(sequences),
          io_(io),
          work_(work),
          memory_(work.threads[thread]),
          group_(layer.n_head / layer.n_head_kv) {
        if (layer.alibi_max_bias > 0) {
            for (int h = 0; h < layer.n_head; h++) {
                slopes_.push_back(float(alibi_slope(layer.alibi_max_bias, layer.n_head, h)));
            }
        }
    }

    void whole(const AttentionTile& tile, int head) {
        Item& item = prepared(tile, head);
        kernel_.clear(item, scratch_.total);
        for (uint32_t r = 0; r < tile.n_ranges; r++) {
            range(item, tile, r, scratch_.range);
            kernel_.merge(item, scratch_.total, scratch_.range);
        }
        kernel_.finish(item, scratch_.total);
    }

    void part(const AttentionTile& tile, uint32_t tile_index, int head, uint32_t r) {
        Item& item = prepared(tile, head);
        range(item, tile, r, partials(item, tile, head, r));
        std::atomic<uint32_t>& finished = work_.finished[tile_index * layer_.n_head_kv + head];
        if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 < tile.n_ranges) {
            return;
        }
        finished.store(0, std::memory_order_relaxed);
        kernel_.clear(item, scratch_.total);
        for (uint32_t i = 0; i < tile.n_ranges; i++) {
            kernel_.merge(item, scratch_.total, partials(item, tile, head, i));
        }
        kernel_.finish(item, scratch_.total);
    }

  private:
    // Queries are mapped and rounded once for neighbouring ranges.
    Item& prepared(const AttentionTile& tile, int head) {
        if (tile_ != &tile || head_ != head) {
            item_ = make_item(tile, head);
            kernel_.queries(item_, scratch_);
            tile_ = &tile;
            head_ = head;
        }
        return item_;
    }

    Item make_item(const AttentionTile& tile, int head) {
        const QueryRow* rows = plan_.rows().data() + tile.first_row;
        const SequenceView& sequence = sequences_[rows->sequence];
        const PageFormat& format = layer_.format;
        const int first_head = head * group_;
        Item item{.rows = rows,
                  .n_rows = int(tile.n_rows),
                  .n_heads = group_,
                  .sink = plan_.sink(),
                  .scale = layer_.scale,
                  .softcap = layer_.softcap,
                  .slopes = slopes_.empty() ? nullptr : slopes_.data() + first_head,
                  .sinks = layer_.sinks ? layer_.sinks + first_head : nullptr,
                  .q = io_.q + first_head * io_.head_stride,
                  .token_stride = io_.token_stride,
                  .head_stride = io_.head_stride,
                  .out = io_.out + size_t(first_head) * format.v.dim,
                  .out_stride = io_.out_stride,
                  .coded = pages_of(sequence.coded, format, head),
                  .exact = pages_of(sequence.exact, bf16_format(format.k.dim, format.v.dim), head),
                  .n = int(tile.n_rows) * group_,
                  .partial_stride = partial_stride(format)};
        if (format.coded()) {
            const HeadTables& tables = layer_.tables[head];
            const AttentionMaps::Head& maps = layer_.maps->heads[head];
            item.q_rows = layer_.maps->query_bits > 8 ? 2 : 1;
            if (item.q_rows == 1) {
                CRUMB_ASSERT(maps.parts.size() <= size_t(kMostQueryParts));
                item.n_parts = int(maps.parts.size());
                std::copy(maps.parts.begin(), maps.parts.end(), item.part_ends);
            } else {
                item.part_ends[0] = format.k.planes;
            }
            item.coded.k =
                coded_side(format.k, tables.k, maps.k, format.key_codes(), format.key_info(), format.key_mean());
            item.coded.v =
                coded_side(format.v, tables.v, maps.v, format.value_codes(), format.value_info(), format.value_mean());
        }
        place(scratch_, &memory_, item.n, format);
        return item;
    }

    void range(Item& item, const AttentionTile& tile, uint32_t r, float* partials) const {
        if (layer_.format.coded()) {  // the map of the outputs, and that of the queries of the head that comes next
            const bool is_last = r + 1 == tile.n_ranges;
            const auto& maps = layer_.maps->heads;
            const size_t next = size_t(head_ > 0 ? head_ : layer_.n_head_kv) - 1;
            item.ahead[0] = is_last ? Span{maps[head_].v.data(), maps[head_].v.size() * sizeof(bf16)} : Span{};
            item.ahead[1] = is_last ? Span{maps[next].k.data(), maps[next].k.size() * sizeof(bf16)} : Span{};
        }
        const uint32_t first = (tile.first_block / tile.range_blocks + r) * tile.range_blocks;
        kernel_.range(item, scratch_, int(std::max(first, tile.first_block)),
                      int(std::min(first + tile.range_blocks, tile.end_block)), partials);
    }

    float* partials(const Item& item, const AttentionTile& tile, int head, uint32_t r) {
        const size_t tiles_before = size_t(tile.first_partial) * layer_.n_head;
        const size_t before = tiles_before + (size_t(head) * tile.n_ranges + r) * item.n;
        CRUMB_ASSERT(lines((before + item.n) * item.partial_stride) <= work_.partials.size());
        return work_.partials.data() + before * item.partial_stride;
    }

    const Kernel& kernel_;
    const AttentionLayer& layer_;
    const AttentionPlan& plan_;
    std::span<const SequenceView> sequences_;
    const AttentionIo& io_;
    AttentionWork::State& work_;
    Arena& memory_;
    int group_;
    std::vector<float> slopes_;
    Scratch scratch_;
    Item item_;
    const AttentionTile* tile_ = nullptr;
    int head_ = 0;
};

}  // namespace

void attend(Isa isa, const AttentionLayer& layer, const AttentionPlan& plan, std::span<const SequenceView> sequences,
            const AttentionIo& io, AttentionWork& work, int thread, int n_threads) {
    AttentionWork::State& s = work.state();
    CRUMB_ASSERT(0 <= thread && thread < n_threads && size_t(n_threads) <= s.threads.size());
    CRUMB_ASSERT(!layer.format.coded() || layer.tables.size() == size_t(layer.n_head_kv));
    if (!layer.format.planar() || (layer.decode_pages && layer.format.coded())) {
        attend_decoded(layer, plan, sequences, io, s.decoded, n_threads);
        if (s.left.fetch_add(1, std::memory_order_acq_rel) + 1 == n_threads) {
            s.left.store(0, std::memory_order_relaxed);
            s.decoded.store(0, std::memory_order_relaxed);
        }
        return;
    }
    CRUMB_ASSERT(!layer.format.coded() || (layer.maps && layer.maps->heads.size() == size_t(layer.n_head_kv)));
    Worker worker(kernel_of(isa), layer, plan, sequences, io, s, thread);
    const auto tiles = plan.tiles();
    const uint32_t heads = layer.n_head_kv;
    const bool split = splits(plan, layer.n_head, layer.n_head_kv, layer.format, n_threads);
    const uint64_t n_tasks = uint64_t(split ? plan.n_tasks() : uint32_t(tiles.size())) * heads;

    // Of a tile all ranges of a head are neighbours. The last tiles of a sequence see the most tokens: they go first.
    const auto work_on = [&](uint32_t task) {
        if (!split) {
            worker.whole(tiles[task / heads], int(task % heads));
            return;
        }
        const auto after =
            std::upper_bound(tiles.begin(), tiles.end(), task / heads,
                             [](uint32_t range, const AttentionTile& tile) { return range < tile.first_task; });
        const AttentionTile& tile = *std::prev(after);
        const uint32_t in_tile = task - tile.first_task * heads;
        worker.part(tile, uint32_t(std::prev(after) - tiles.begin()), int(in_tile / tile.n_ranges),
                    in_tile % tile.n_ranges);
    };
    for (int i = 0; i < n_threads; i++) {
        const int owner = (thread + i) % n_threads;
        const uint32_t first = uint32_t(n_tasks * owner / n_threads),
                       last = uint32_t(n_tasks * (owner + 1) / n_threads);
        for (uint32_t k; (k = s.shares[owner].next.fetch_add(1, std::memory_order_relaxed)) < last - first;) {
            work_on(last - 1 - k);
        }
    }
    if (s.left.fetch_add(1, std::memory_order_acq_rel) + 1 == n_threads) {
        s.left.store(0, std::memory_order_relaxed);
        for (Share& share : s.shares) {
            share.next.store(0, std::memory_order_relaxed);
        }
    }
}

}  // namespace crumb
