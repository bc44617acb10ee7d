// Who works on what: threads draw tasks from a counter until there are none. A task is a tile and a KV head, or one
// range of these where whole tiles would leave threads without work; whoever finishes the last range of a tile and head
// merges them in ascending order. Both ways run the same functions on the same ranges in the same order, so they give
// the same bits.
#include <crumb/attention.h>
#include <crumb/error.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "attention/alibi.h"
#include "attention/cpu/kernel.h"
#include "attention/cpu/unpack_map.h"

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
    const size_t width = std::max({format.k.planes, format.k.dim, format.v.planes, format.v.dim});
    size_t used = 0;
    const auto take = [&](float*& array, size_t floats) {
        array = arena ? arena->data() + used * 16 : nullptr;
        used += lines(floats);
        CRUMB_ASSERT(!arena || used <= arena->size());
    };
    take(scratch.q, n * format.k.dim);
    take(scratch.q_codes, n * format.k.planes);
    take(scratch.q_mean, n);
    take(scratch.q_ones, n);
    take(scratch.weights, n * kPageTokens);
    take(scratch.page, width * kPageTokens);
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

// Of pages with so many planes.
struct Maps {
    int planes_k = 0, planes_v = 0;
    UnpackMap k, v;
};

const float* data_or_null(const std::vector<float>& values) { return values.empty() ? nullptr : values.data(); }

Side coded_side(const SideFormat& format, const SideTables& tables, const UnpackMap& map, size_t codes, size_t info,
                size_t mean) {
    return {.dim = format.dim,
            .planes = format.planes,
            .info = format.info,
            .page_mean = format.mean,
            .codes = codes,
            .scales = info,
            .mean_codes = mean,
            .decode = tables.decode.data(),
            .ones = data_or_null(tables.ones),
            .mean = data_or_null(tables.mean),
            .mean_step = data_or_null(tables.mean_step),
            .gains = gains().data(),
            .gain_reference = tables.gain_reference,
            .unpack_at = map.at.data(),
            .swapped = map.swapped.data()};
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

struct AttentionWork::State {
    std::vector<Arena> threads;
    Arena partials;                               // of split tiles: [tile][KV head][range][query vector]
    std::vector<std::atomic<uint32_t>> finished;  // ranges, [tile][KV head]; 0 again after the merge
    std::atomic<uint32_t> next = 0;               // task
    std::atomic<int> left = 0;                    // threads that found no more work
    std::vector<Maps> maps;

    const Maps* find(const PageFormat& format) const {
        for (const Maps& m : maps) {
            if (m.planes_k == format.k.planes && m.planes_v == format.v.planes) {
                return &m;
            }
        }
        return nullptr;
    }
};

AttentionWork::AttentionWork() : state_(std::make_unique<State>()) {}
AttentionWork::~AttentionWork() = default;

void AttentionWork::prepare(const AttentionPlan& plan, int n_head, int n_head_kv, const PageFormat& format,
                            int max_threads) {
    CRUMB_ASSERT(max_threads > 0 && n_head_kv > 0 && n_head % n_head_kv == 0);
    CRUMB_ASSERT(std::max(format.k.dim, format.v.dim) <= kMaxDim);
    State& s = *state_;
    size_t rows = 0;
    for (const AttentionTile& tile : plan.tiles()) {
        rows = std::max<size_t>(rows, tile.n_rows);
    }
    s.threads.resize(std::max(s.threads.size(), size_t(max_threads)));
    Scratch layout;
    for (Arena& arena : s.threads) {
        arena.grow(place(layout, nullptr, rows * (n_head / n_head_kv), format));
    }
    if (splits(plan, n_head, n_head_kv, format, max_threads)) {
        s.partials.grow(lines(plan.n_partials() * n_head * partial_stride(format)));
    }
    if (format.coded() && !s.find(format)) {
        s.maps.push_back(
            {format.k.planes, format.v.planes, key_unpack_map(format.k.planes), value_unpack_map(format.v.planes)});
    }
    // All 0 already, unless an engine gave the last step up between two threads.
    s.finished = std::vector<std::atomic<uint32_t>>(std::max(s.finished.size(), plan.tiles().size() * n_head_kv));
    s.next = 0;
    s.left = 0;
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
        const Item item = make_item(tile, head);
        kernel_.queries(item, scratch_);
        kernel_.clear(item, scratch_.total);
        for (uint32_t r = 0; r < tile.n_ranges; r++) {
            range(item, tile, r, scratch_.range);
            kernel_.merge(item, scratch_.total, scratch_.range);
        }
        kernel_.finish(item, scratch_.total);
    }

    void part(const AttentionTile& tile, uint32_t tile_index, int head, uint32_t r) {
        const Item item = make_item(tile, head);
        kernel_.queries(item, scratch_);
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
            const Maps* maps = work_.find(format);
            CRUMB_ASSERT(maps);
            item.coded.k =
                coded_side(format.k, tables.k, maps->k, format.key_codes(), format.key_info(), format.key_mean());
            item.coded.v =
                coded_side(format.v, tables.v, maps->v, format.value_codes(), format.value_info(), format.value_mean());
        }
        place(scratch_, &memory_, item.n, format);
        return item;
    }

    void range(const Item& item, const AttentionTile& tile, uint32_t r, float* partials) const {
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
};

}  // namespace

void attend(Isa isa, const AttentionLayer& layer, const AttentionPlan& plan, std::span<const SequenceView> sequences,
            const AttentionIo& io, AttentionWork& work, int thread, int n_threads) {
    AttentionWork::State& s = work.state();
    CRUMB_ASSERT(0 <= thread && thread < n_threads && size_t(n_threads) <= s.threads.size());
    CRUMB_ASSERT(!layer.format.coded() || layer.tables.size() == size_t(layer.n_head_kv));
    Worker worker(kernel_of(isa), layer, plan, sequences, io, s, thread);
    const auto tiles = plan.tiles();
    const uint32_t heads = layer.n_head_kv;
    const bool split = splits(plan, layer.n_head, layer.n_head_kv, layer.format, n_threads);
    const uint32_t n_tasks = (split ? plan.n_tasks() : uint32_t(tiles.size())) * heads;
    // The last tiles of a sequence see the most tokens: they go first.
    for (uint32_t i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < n_tasks;) {
        const uint32_t task = n_tasks - 1 - i, head = task % heads;
        if (!split) {
            worker.whole(tiles[task / heads], int(head));
            continue;
        }
        const uint32_t range = task / heads;
        const auto after = std::upper_bound(tiles.begin(), tiles.end(), range,
                                            [](uint32_t r, const AttentionTile& tile) { return r < tile.first_task; });
        const uint32_t index = uint32_t(after - tiles.begin()) - 1;
        worker.part(tiles[index], index, int(head), range - tiles[index].first_task);
    }
    if (s.left.fetch_add(1, std::memory_order_acq_rel) + 1 == n_threads) {
        s.left.store(0, std::memory_order_relaxed);
        s.next.store(0, std::memory_order_relaxed);
    }
}

}  // namespace crumb
